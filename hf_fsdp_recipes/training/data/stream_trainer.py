"""Runs SFTTrainer on a stream: each rank reads its own rows, and a resumed run continues at the row where it stopped.

With Accelerate's data loader, every rank would read and prepare all rows, and Trainer would resume by reading the earlier rows
again. Here the stream is split before it is read, and checkpoints contain each rank's position.
"""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import TrainOutput, get_last_checkpoint

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import CheckpointError
from hf_fsdp_recipes.training.data.filtering import RowCounts, print_counts
from hf_fsdp_recipes.training.data.streaming import RowStream
from hf_fsdp_recipes.training.device_metrics import DeviceMetricsTrainer

Batch = dict[str, torch.Tensor]


class StreamTrainer(DeviceMetricsTrainer):
    """An SFTTrainer whose `train_dataset` is this rank's RowStream."""

    def __init__(self, *, train_dataset: RowStream, **kwargs: Any) -> None:
        block = train_dataset.first_block()
        assert block is not None  # an endless stream always has a block
        # SFTTrainer accepts only classes of `datasets`, and checks the first row. So it first gets a dataset with that row only.
        super().__init__(train_dataset=Dataset.from_list(block.rows[:1]).to_iterable_dataset(), **kwargs)
        self.train_dataset = train_dataset

    def get_train_dataloader(self) -> torch.utils.data.DataLoader:
        """Return batches of this rank's rows. Bypasses Accelerate, which would split the rows between ranks again."""
        return torch.utils.data.DataLoader(
            self.train_dataset,
            batch_size=self._train_batch_size,
            collate_fn=self.data_collator,
            pin_memory=self.args.dataloader_pin_memory,
            generator=torch.Generator(),  # the default generator would change the random state that checkpoints restore
        )

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """Train, or resume from a checkpoint if given, then print how many rows were kept, truncated and dropped.

        Collective: every rank must call this.
        """
        if resume_from_checkpoint:
            is_last = resume_from_checkpoint is True
            path = get_last_checkpoint(self.args.output_dir) if is_last else resume_from_checkpoint
            with distributed.sync_errors():
                # Without `ignore_data_skip`, Trainer would read and discard all batches before the checkpoint's step.
                self.args.ignore_data_skip = path is not None and restore_position(self.train_dataset, Path(str(path)))
        result = super().train(resume_from_checkpoint, *args, **kwargs)
        counts = distributed.gather_objects(self.train_dataset.counts)
        print_counts({"stream, all ranks": sum(counts, RowCounts())}, self.args.max_length)
        return result

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device
    ) -> tuple[list[Batch], torch.Tensor | int | None]:
        """Return the batches of a step; if any rank cannot read its rows, raise the error on all ranks.

        Collective: every rank must call this. It costs one small all-reduce in host memory.
        """
        batches, error = [], None
        try:
            batches = list(islice(epoch_iterator, num_batches))
        except Exception as caught:
            error = caught
        has_failed = torch.tensor([error is not None], dtype=torch.int32)
        if distributed.is_distributed():
            torch.distributed.all_reduce(has_failed, group=distributed.host_group())
        if has_failed.item():
            distributed.raise_together(error)
        return super().get_batch_samples(iter(batches), num_batches, device)


class PositionCallback(TrainerCallback):
    """Records the stream's position after each step.

    When a checkpoint is written, the stream may already be ahead, because the next step's batches are read first.
    """

    def __init__(self, stream: RowStream) -> None:
        self._stream = stream
        self._position: dict[str, object] = {}

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Record the position, and set `state.epoch` to the share of all steps done so far, including those before a resume."""
        self._position = self._stream.state_dict()
        state.epoch = state.global_step / state.max_steps

    def checkpoint_files(self) -> dict[str, str]:
        """Return the file that stores this rank's position in a checkpoint, as {file name: text}."""
        position = {"world_size": distributed.world_size()} | self._position
        return {_position_file(distributed.rank()): json.dumps(position)}


def _position_file(rank: int) -> str:
    return f"stream_{rank}.json"


def restore_position(stream: RowStream, checkpoint: Path) -> bool:
    """Move the stream to the checkpoint's position; return False if the checkpoint has none. Not a collective.

    If the number of ranks has changed, each rank skips an equal share of the rows read so far. If the datasets have
    changed, the stream starts at its first row.
    """
    if not (checkpoint / _position_file(0)).is_file():
        distributed.print_main(
            f"resume: {checkpoint} has no stream position; the rows before that step are read again and skipped"
        )
        return False
    first = _read_position(checkpoint, 0)
    saved_names = [source["name"] for source in first["start"]["sources"]]
    saved_world_size, world_size = first["world_size"], distributed.world_size()
    names = [source.name for source in stream.sources]
    if saved_names != names:
        distributed.print_main(
            f"resume: the stream read {', '.join(saved_names)} and now reads {', '.join(names)}; starting at its first row"
        )
    elif saved_world_size == world_size:
        stream.load_state_dict(_read_position(checkpoint, distributed.rank()))
        num_read = sum(source["num_read"] for source in first["start"]["sources"])
        settings = stream.settings | first.get("settings", {})
        changed = [
            f"{name} {settings[name]} -> {new}" for name, new in stream.settings.items() if settings[name] != new
        ]
        if changed:
            distributed.print_main(
                f"resume: {', '.join(changed)}, so each rank's last block is prepared and trained again; rank 0's starts after row "
                f"{num_read:,}"
            )
        else:
            distributed.print_main(
                f"resume: rank 0's stream continues with sequence {first['offset'] + 1:,} of the block after row {num_read:,}"
            )
    else:
        positions = [_read_position(checkpoint, rank)["start"]["sources"] for rank in range(saved_world_size)]
        read = [sum(source["num_read"] for source in sources) for sources in zip(*positions, strict=True)]
        stream.skip([count // world_size for count in read])
        distributed.print_main(
            f"resume: the stream was split over {saved_world_size} ranks and is now split over {world_size}; each rank skips its "
            f"share of the {sum(read):,} rows read. Each rank's last block repeats; if ranks read complete files, some rows "
            f"repeat and some are skipped in this pass"
        )
    return True


def _read_position(checkpoint: Path, rank: int) -> Any:
    try:
        return json.loads((checkpoint / _position_file(rank)).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{checkpoint / _position_file(rank)} cannot be read: {error}. Use another checkpoint."
        ) from error
