"""Streams rows during training: each rank reads its own part in blocks and can resume at any row.

A block of `shuffle_buffer_size` rows is prepared like a full dataset and shuffled. A saved position consists of the start of a
block and an offset in the block, so a resumed run rereads only one block.
"""

import atexit
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, concatenate_datasets, disable_progress_bars
from datasets import IterableDataset as HubIterableDataset
from datasets.distributed import split_dataset_by_node
from torch.utils.data import IterableDataset
from transformers import PreTrainedTokenizerBase

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import DataError, summarize
from hf_fsdp_recipes.training.arguments import Arguments
from hf_fsdp_recipes.training.data.data_files import explain_errors
from hf_fsdp_recipes.training.data.dataset_parts import DatasetPart, load_parts
from hf_fsdp_recipes.training.data.filtering import RowCounts, RowStatus, check_any_kept
from hf_fsdp_recipes.training.data.image_rows import has_images
from hf_fsdp_recipes.training.data.preparation import Preparation, TrainingRows, packs_evaluation
from hf_fsdp_recipes.training.data.row_formats import Row

DEFAULT_BLOCK_ROWS = 1000  # rows per block if they are not shuffled; TRL packs as many at a time


class StreamSource:
    """This rank's rows of one dataset, read once or endlessly.

    A rank gets complete files if `num_ranks` divides the number of files, otherwise every `num_ranks`-th row. Source: datasets
    5.2, split_dataset_by_node.
    """

    def __init__(
        self, name: str, rows: HubIterableDataset, fraction: float | None, rank: int, num_ranks: int,
        is_endless: bool = True,
    ) -> None:  # fmt: skip
        self.name, self.fraction, self.is_endless = name, fraction, is_endless
        self.part_name = f"{name} (rank {rank}'s part)" if num_ranks > 1 else name
        self.features = rows.features
        self.num_read = 0
        self._rows = split_dataset_by_node(rows, rank, num_ranks)
        self._start_pass(0, None)

    def _start_pass(self, num_passes: int, state: dict[str, object] | None) -> None:
        """Start a pass over the rows, at the first row or at the position in `state`, a state dict of `datasets`."""
        self.num_passes = num_passes
        self._rows.set_epoch(num_passes)  # changes the order of the files
        self._rows.load_state_dict(state)
        self._iterator: Iterator[Row] = iter(self._rows)
        # Keep the start state: until the first row is read, `datasets` still reports the state of the previous iteration.
        self._start_state, self._has_read = state, False

    def read(self, count: int, across_passes: bool = False) -> list[Row]:
        """Return the next `count` rows. At the end of a pass, return fewer, unless `across_passes` continues with the next pass.

        Raises a DataError if an endless source has no rows.
        """
        found: list[Row] = []
        num_empty = 0  # passes without a row, one after the other
        while len(found) < count and num_empty < (2 if self.is_endless else 1):
            wanted = count - len(found)
            with explain_errors(self.name):
                rows = list(islice(self._iterator, wanted))
            self._has_read = True
            self.num_read += len(rows)
            found += rows
            num_empty = 0 if rows else num_empty + 1
            if len(rows) < wanted:
                self._start_pass(self.num_passes + 1, None)
            if found and not across_passes:
                break
        if found or count == 0 or not self.is_endless:
            return found
        raise DataError(
            f"{self.name} has no rows for rank {distributed.rank()}; every rank needs a part of the stream. Use fewer ranks."
        )

    def skip(self, count: int) -> None:
        """Read `count` rows and discard them."""
        while count > 0:
            count -= len(self.read(min(count, DEFAULT_BLOCK_ROWS)))

    def state_dict(self) -> dict[str, object]:
        """Return the position of the next row as a JSON-serializable dict."""
        state = self._rows.state_dict() if self._has_read else self._start_state
        return {"name": self.name, "num_passes": self.num_passes, "num_read": self.num_read, "state": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a position from `state_dict`, which must have been saved with the same number of ranks."""
        self.num_read = state["num_read"]
        self._start_pass(state["num_passes"], state["state"])


@dataclass
class Block:
    """A block of prepared rows, and the stream position where it starts.

    `counts` covers all rows read for the block, including dropped ones.
    """

    rows: list[Row]
    start: dict[str, object]
    counts: RowCounts


class RowStream(IterableDataset):
    """A stream of training rows from one source, or from several endless sources mixed by their fractions.

    While training uses one block, a thread reads the next one. `shuffle_rows` is the number of rows to read and shuffle
    together; 0 keeps the rows in order.
    """

    def __init__(
        self, sources: list[StreamSource], preparation: Preparation, packing: bool, seed: int, shuffle_rows: int
    ) -> None:
        self.sources = sources
        self._preparation, self._packing, self._seed = preparation, packing, seed
        self._block_rows, self._shuffles = shuffle_rows or DEFAULT_BLOCK_ROWS, shuffle_rows > 0
        self._is_endless = sources[0].is_endless
        # What a block's rows depend on, besides its position in the sources.
        self.settings: dict[str, object] = {
            "shuffle_buffer_size": shuffle_rows,
            "seed": seed,
            "max_length": preparation.training.max_length,
            "packing": preparation.training.packing_strategy if packing else False,
            "fractions": [source.fraction for source in sources],
            "shuffle_dataset": preparation.training.shuffle_dataset,
            "truncation_mode": preparation.training.truncation_mode,
            "add_special_tokens": preparation.recipe.add_special_tokens,
            "append_concat_token": preparation.recipe.append_concat_token,
        }
        self._reset(0, 0)

    def _reset(self, num_blocks: int, offset: int) -> None:
        self._num_blocks, self._offset = num_blocks, offset
        self._block: Block | None = None  # the block in use
        self._next_block: Future[Block | None] | None = None
        self.counts = RowCounts()  # of all rows read so far

    def __iter__(self) -> Iterator[Row]:
        """Yield rows from the current position. A second iteration continues where the first one stopped."""
        with ThreadPoolExecutor(1, thread_name_prefix="row-stream") as pool:
            block = self.first_block()
            while block is not None:
                self._next_block = self._next_block or pool.submit(self._read_block)
                while self._offset < len(block.rows):
                    self._offset += 1
                    yield block.rows[self._offset - 1]
                block, self._next_block = self._next_block.result(), None
                if block is not None:
                    self.counts += block.counts
                    self._block, self._offset = block, 0

    def first_block(self) -> Block | None:
        """Return the block at the current position; read and prepare it on the first call."""
        if self._block is None:
            self._block = self._read_block()
            self.counts += RowCounts() if self._block is None else self._block.counts
        return self._block

    def _read_block(self) -> Block | None:
        """Read and prepare blocks until one has rows to train on; return None at the end of a finite stream.

        Raises a DataError if two passes of an endless stream, or one of a finite stream, have no row to train on, or if the
        chat template rejects the first thousand rows.
        """
        first_pass, counts, seen = self._num_passes(), RowCounts(), self.counts
        while self._is_endless or self._num_passes() == 0:
            start: dict[str, object] = {
                "num_blocks": self._num_blocks,
                "sources": [source.state_dict() for source in self.sources],
            }
            rng = np.random.default_rng([self._seed, self._num_blocks])
            # A mixture keeps its fractions even if a block has more rows of a source than the source's pass has left.
            drawn = [
                source.read(count, across_passes=len(self.sources) > 1)
                for source, count in zip(self.sources, self._draw(rng), strict=True)
            ]
            rows, counts_of_block = self._prepare(drawn)
            self._num_blocks += 1
            counts, seen = counts + counts_of_block, seen + counts_of_block
            if len(rows):
                order = rng.permutation(len(rows)) if self._shuffles else range(len(rows))
                return Block([rows[int(i)] for i in order], start, counts)
            is_rejected = counts.by_status[RowStatus.REJECTED] >= DEFAULT_BLOCK_ROWS and not seen.num_kept
            if self._num_passes() >= first_pass + 2 or is_rejected:
                break
        check_any_kept(
            counts if self._is_endless else seen, self.sources[0].name, self._preparation.max_length(self._packing)
        )
        return None

    def _num_passes(self) -> int:
        return min(source.num_passes for source in self.sources)

    def _draw(self, rng: np.random.Generator) -> list[int]:
        """Draw how many rows of each source a block has, in proportion to the sources' fractions."""
        if len(self.sources) == 1:
            return [self._block_rows]
        fractions = np.array([source.fraction for source in self.sources], dtype=float)
        return rng.multinomial(self._block_rows, fractions / fractions.sum()).tolist()

    def _prepare(self, read: list[list[Row]]) -> tuple[Dataset | list[Row], RowCounts]:
        disable_progress_bars()  # `datasets` would show several bars for every block
        counts, parts = RowCounts(), []
        for source, rows in zip(self.sources, read, strict=True):
            if rows:
                raw = Dataset.from_list(rows, features=source.features)
                first = source.num_read - len(rows) + 1
                tokenized, counts_of_source = self._preparation.tokenize(raw, source.part_name, self._packing, first)
                counts += counts_of_source
                parts += [tokenized] if len(tokenized) else []
        if not parts:
            return [], counts
        return self._preparation.pack(concatenate_datasets(parts), "stream", self._packing), counts

    def state_dict(self) -> dict[str, object]:
        """Return the position of the next row as a JSON-serializable dict."""
        block = self.first_block()
        return {"start": block.start if block else None, "offset": self._offset, "settings": self.settings}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a position from `state_dict`, which must have been saved with the same number of ranks.

        If the settings have changed, continue at the start of the block, because its rows have changed.
        """
        for source, position in zip(self.sources, state["start"]["sources"], strict=True):
            source.load_state_dict(position)
        is_same = self.settings | state.get("settings", {}) == self.settings
        self._reset(state["start"]["num_blocks"], state["offset"] if is_same else 0)

    def skip(self, num_rows: list[int]) -> None:
        """Skip the given number of rows of each source, from its first row, without preparing them."""
        for source, count in zip(self.sources, num_rows, strict=True):
            # The first block may have been read already.
            source.load_state_dict({"num_read": 0, "num_passes": 0, "state": None})
            source.skip(count)
        self._reset(0, 0)


def open_streams(arguments: Arguments, tokenizer: PreTrainedTokenizerBase, evaluation_dir: Path) -> TrainingRows:
    """Open this rank's part of the training stream, read its first block, and prepare the evaluation rows.

    The first rank that finds no `evaluation_dir`, on each node or on a shared disk, writes the evaluation rows there and deletes
    them when it exits. Every rank calls this, but it is not a collective.
    """
    training = arguments.training
    preparation, parts = Preparation(arguments, tokenizer), load_parts(arguments)
    if any(has_images(part.train) for part in parts):
        setting = "streaming" if arguments.mixture.datasets else "dataset_streaming"
        raise DataError(f"rows with images cannot be streamed. Set {setting}: false, or remove the image column.")
    rank, num_ranks = distributed.rank(), distributed.world_size()
    sources = [StreamSource(part.name, part.train, part.fraction, rank, num_ranks) for part in parts]
    train = RowStream(sources, preparation, training.packing, training.seed, arguments.recipe.shuffle_buffer_size)
    train.first_block()
    held_out = [part for part in parts if part.evaluation is not None]
    if not held_out:
        return TrainingRows(train)
    if not evaluation_dir.exists():
        _write_evaluation(held_out, preparation, packs_evaluation(arguments), evaluation_dir)
    files = sorted(evaluation_dir.rglob("*.arrow"))
    return TrainingRows(train, concatenate_datasets([Dataset.from_file(str(file)) for file in files]))


def _write_evaluation(parts: list[DatasetPart], preparation: Preparation, packing: bool, directory: Path) -> None:
    def rows() -> Iterator[Row]:
        for part in parts:
            source = StreamSource(part.name, part.evaluation, None, 0, 1, is_endless=False)
            yield from RowStream([source], preparation, packing, 0, 0)

    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    try:
        Dataset.from_generator(rows, cache_dir=str(directory))
    except Exception as error:
        shutil.rmtree(directory, ignore_errors=True)
        if isinstance(error.__cause__, DataError):
            raise error.__cause__ from error
        raise DataError(
            f"the evaluation rows cannot be written to {directory}: {summarize(error.__cause__ or error, 'line')}. Free disk "
            f"space, or set TMPDIR to another directory."
        ) from error
