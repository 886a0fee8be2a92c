"""SFTTrainer on a stream: every rank reads its own rows, and a resumed run goes on at the row where it stopped.

Accelerate would have every rank read and prepare all rows and keep its share, and Trainer would find a position by
reading everything before it again. Here the stream is split before it is read, and its position is in the checkpoint.
"""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import SFTTrainer

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.training.data.filtering import Tally
from hf_fsdp_recipes.training.data.streaming import RowStream
from hf_fsdp_recipes.training.data.tokenize import print_tallies


class StreamTrainer(SFTTrainer):
    """SFTTrainer whose `train_dataset` is this rank's RowStream."""

    def __init__(self, *, train_dataset: RowStream, **arguments: Any) -> None:
        from datasets import Dataset

        block = train_dataset.first_block()
        assert block is not None  # endless, or an error before
        # SFTTrainer looks at the type and the first row of what it gets; RowStream is not a `datasets` class.
        stand_in = Dataset.from_list(block.rows[:1]).to_iterable_dataset()
        super().__init__(train_dataset=stand_in, **arguments)
        self.train_dataset = train_dataset

    def get_train_dataloader(self) -> Any:
        """Return batches of this rank's own rows. Accelerate must not see them: it would split them again."""
        return torch.utils.data.DataLoader(
            self.train_dataset,
            batch_size=self._train_batch_size,
            collate_fn=self.data_collator,
            pin_memory=self.args.dataloader_pin_memory,
            generator=torch.Generator(),  # or iterating would draw from the random state that a checkpoint restores
        )

    def train(self, resume_from_checkpoint: str | bool | None = None, *arguments: Any, **keywords: Any) -> Any:
        """Train; from a checkpoint, go on at the row where it stopped. Collective: every rank must call this."""
        if resume_from_checkpoint:
            self._find_position(resume_from_checkpoint)
        result = super().train(resume_from_checkpoint, *arguments, **keywords)
        tallies = distributed.gather_objects(self.train_dataset.tally)
        print_tallies({"stream, all ranks": sum(tallies, Tally())}, self.args.max_length)
        return result

    def _find_position(self, checkpoint: str | bool) -> None:
        from transformers.trainer_utils import get_last_checkpoint

        path = get_last_checkpoint(self.args.output_dir) if checkpoint is True else checkpoint
        with distributed.sync_errors():
            # Trainer would skip batches by reading them.
            self.args.ignore_data_skip = path is not None and restore_position(self.train_dataset, Path(str(path)))


class PositionCallback(TrainerCallback):
    """Keeps the stream's position of the last step, which is older than the stream when a checkpoint is written."""

    def __init__(self, stream: RowStream) -> None:
        self._stream = stream
        self._position: dict[str, Any] = {}

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Note the position; a resumed run's epoch is that of its step, not of its part after the resume."""
        self._position = self._stream.state_dict()
        state.epoch = state.global_step / state.max_steps

    def checkpoint_files(self) -> dict[str, str]:
        """Return this rank's file of a checkpoint: name and text."""
        facts = {"world_size": distributed.world_size()} | self._position
        return {_position_file(distributed.rank()): json.dumps(facts)}


def _position_file(rank: int) -> str:
    return f"stream_{rank}.json"


def restore_position(stream: RowStream, checkpoint: Path) -> bool:
    """Put the stream where the checkpoint's run stopped; False where the checkpoint holds no position.

    Every rank calls this; no collective. On another number of ranks the rows are dealt anew, and each rank skips its
    share of what all ranks had read.
    """
    first = checkpoint / _position_file(0)
    if not first.is_file():
        distributed.print_main(f"resume: {checkpoint} holds no position of a stream; it is read again up to there")
        return False
    saved = json.loads(first.read_text())
    found = [source["name"] for source in saved["start"]["sources"]]
    wanted = [source.name for source in stream.sources]
    if found != wanted:
        distributed.print_main(
            f"resume: the stream was {', '.join(found)} and is {', '.join(wanted)}; it starts at its first row"
        )
    elif saved["world_size"] == distributed.world_size():
        own = (
            saved
            if distributed.is_main()
            else json.loads((checkpoint / _position_file(distributed.rank())).read_text())
        )
        stream.load_state_dict(own)
        num_read = sum(source["num_read"] for source in saved["start"]["sources"])
        distributed.print_main(
            f"resume: the stream goes on, on rank 0 with sequence {saved['offset'] + 1:,} of those after row {num_read:,}"
        )
    else:
        _deal_anew(stream, checkpoint, saved["world_size"])
    return True


def _deal_anew(stream: RowStream, checkpoint: Path, num_ranks: int) -> None:
    read = [0] * len(stream.sources)
    for rank in range(num_ranks):
        saved = json.loads((checkpoint / _position_file(rank)).read_text())
        read = [count + source["num_read"] for count, source in zip(read, saved["start"]["sources"], strict=True)]
    stream.skip([count // distributed.world_size() for count in read])
    distributed.print_main(
        f"resume: the stream was split over {num_ranks} ranks and is now split over {distributed.world_size()}: each skips its "
        f"share of "
        f"the {sum(read):,} rows read; the last buffer of each comes again, and where ranks read "
        f"whole files, some rows come twice and some not in this pass"
    )
