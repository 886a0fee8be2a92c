"""Rows that are read while training: every rank its own part, prepared block by block, resumable to the row.

A block is `shuffle_buffer_size` rows as they were read. It is prepared as a whole dataset would be (`preparation`),
shuffled, and used up before the next one, so a position is "so many rows into the block that starts here", and going
on from it costs reading one block again. Does not know of Trainer; `stream_trainer` does.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import DataError
from hf_fsdp_recipes.training.data import filtering
from hf_fsdp_recipes.training.data.filtering import Tally
from hf_fsdp_recipes.training.data.read_files import Part, load_parts
from hf_fsdp_recipes.training.data.tokenize import COLUMNS, Preparation, TrainingRows

DEFAULT_BLOCK_ROWS = 1000  # where nothing is shuffled; TRL packs as many rows at a time


class Source:
    """One dataset's rows for this rank, pass after pass.

    Args:
        rows: a `datasets.IterableDataset` of all ranks' rows.
        num_ranks: how many ranks share them; whole files go to a rank where their number divides, otherwise every
            `num_ranks`-th row. Source: datasets 5.2, split_dataset_by_node.
    """

    def __init__(self, name: str, rows: Any, fraction: float | None, rank: int, num_ranks: int) -> None:
        from datasets.distributed import split_dataset_by_node

        self.name, self.fraction = name, fraction
        self.features = rows.features
        self.num_read = 0
        self._rows = split_dataset_by_node(rows, rank, num_ranks)
        self._begin(0, None)

    def _begin(self, num_passes: int, state: dict[str, Any] | None) -> None:
        """Start a pass, at its first row or at a state of `datasets`."""
        self.num_passes = num_passes
        self._rows.set_epoch(num_passes)  # another order of the files
        self._rows.load_state_dict(state)
        self._iterator: Iterator[dict[str, Any]] = iter(self._rows)
        # Until its first row is read, `datasets` answers with the state of the iteration before.
        self._begun_from, self._has_read = state, False

    def take(self, count: int) -> list[dict[str, Any]]:
        """Read up to `count` rows; fewer at the end of a pass.

        Raises:
            DataError: a whole pass without a row.
        """
        if count == 0:
            return []
        for _ in range(2):
            found = list(islice(self._iterator, count))
            self.num_read, self._has_read = self.num_read + len(found), True
            if len(found) < count:
                self._begin(self.num_passes + 1, None)
            if found:
                return found
        raise DataError(
            f"{self.name} has no rows for rank {distributed.rank()}; every rank needs a part of the stream. Use fewer ranks."
        )

    def skip(self, count: int) -> None:
        """Read so many rows and forget them."""
        while count > 0:
            count -= len(self.take(min(count, DEFAULT_BLOCK_ROWS)))

    def position(self) -> dict[str, Any]:
        """Return where the next row is, ready for JSON."""
        facts = {"name": self.name, "num_passes": self.num_passes, "num_read": self.num_read}
        return facts | {"state": self._rows.state_dict() if self._has_read else self._begun_from}

    def go_to(self, position: dict[str, Any]) -> None:
        """Continue where `position` was taken, on the same number of ranks."""
        self.num_read = position["num_read"]
        self._begin(position["num_passes"], position["state"])


@dataclass
class Block:
    """Prepared rows and the position at which they were read."""

    rows: list[dict[str, Any]]
    start: dict[str, Any]
    tally: Tally = field(default_factory=Tally)


class RowStream(IterableDataset):
    """Training rows without end, of one or several sources by their fractions.

    Iterating reads ahead by one block, in a thread. Mixed sources never end a mixture: each starts anew by itself.

    Args:
        shuffle_rows: rows that are shuffled together; 0 keeps their order.
        is_endless: False stops after one pass of the only source.
    """

    def __init__(
        self, sources: list[Source], preparation: Preparation, packing: bool, seed: int, shuffle_rows: int,
        is_endless: bool = True,
    ) -> None:  # fmt: skip
        self.sources = sources
        self.tally = Tally()  # of what was read so far
        self._preparation, self._packing = preparation, packing
        self._seed, self._shuffles = seed, shuffle_rows > 0
        self._block_rows = shuffle_rows or DEFAULT_BLOCK_ROWS
        self._is_endless = is_endless
        self._num_blocks = 0
        self._block: Block | None = None  # the one that is being used up
        self._offset = 0
        self._coming: Future[Block | None] | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield rows from the position on; iterating again goes on from there."""
        with ThreadPoolExecutor(1, thread_name_prefix="row-stream") as pool:
            block = self.first_block()
            while block is not None:
                self._coming = self._coming or pool.submit(self._read_block)
                while self._offset < len(block.rows):
                    self._offset += 1
                    yield block.rows[self._offset - 1]
                block, self._coming = self._coming.result(), None
                if block is not None:
                    self.tally += block.tally
                    self._block, self._offset = block, 0

    def first_block(self) -> Block | None:
        """Return the block at the position, reading it where that has not happened yet.

        Raises:
            DataError: nothing of a whole pass can be trained on.
        """
        if self._block is None:
            self._block = self._read_block()
            self.tally += Tally() if self._block is None else self._block.tally
        return self._block

    def _read_block(self) -> Block | None:
        """Read and prepare blocks until one holds rows that can be trained on; None at the end of a finite stream."""
        begun, tally = self._passes(), Tally()
        while self._is_endless or self._passes() == 0:
            start = {"num_blocks": self._num_blocks, "sources": [source.position() for source in self.sources]}
            rng = np.random.default_rng([self._seed, self._num_blocks])
            rows, found = self._prepare([source.take(count) for source, count in self._draw(rng)])
            self._num_blocks += 1
            tally += found
            if rows is not None and len(rows):
                order = rng.permutation(len(rows)) if self._shuffles else range(len(rows))
                return Block([rows[int(i)] for i in order], start, tally)
            if self._passes() >= begun + 2:
                break
        if self._is_endless:
            filtering.check_kept(tally, self.sources[0].name, self._preparation.max_length(self._packing))
        return None

    def _passes(self) -> int:
        return min(source.num_passes for source in self.sources)

    def _draw(self, rng: Any) -> list[tuple[Source, int]]:
        """Return how many rows of a block come from which source."""
        if len(self.sources) == 1:
            return [(self.sources[0], self._block_rows)]
        fractions = np.array([source.fraction for source in self.sources], dtype=float)
        counts = rng.multinomial(self._block_rows, fractions / fractions.sum())
        return list(zip(self.sources, map(int, counts), strict=True))

    def _prepare(self, read: list[list[dict[str, Any]]]) -> tuple[Any, Tally]:
        from datasets import Dataset, concatenate_datasets, disable_progress_bars

        disable_progress_bars()  # one a block and step would be all that is seen
        tally, parts = Tally(), []
        for source, rows in zip(self.sources, read, strict=True):
            if rows:
                raw = Dataset.from_list(rows, features=source.features)
                tokenized, found = self._preparation.tokenize(raw, source.name, self._packing)
                tally += found
                parts += [tokenized] if len(tokenized) else []
        if not parts:
            return None, tally
        finished = self._preparation.finish(concatenate_datasets(parts), "stream", self._packing)
        return finished.select_columns([name for name in COLUMNS if name in finished.column_names]), tally

    def state_dict(self) -> dict[str, Any]:
        """Return where the next row is, ready for JSON."""
        block = self.first_block()
        return {"start": block.start if block else None, "offset": self._offset}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken, on the same number of ranks."""
        for source, position in zip(self.sources, state["start"]["sources"], strict=True):
            source.go_to(position)
        self._forget(state["start"]["num_blocks"], state["offset"])

    def skip(self, num_read: list[int]) -> None:
        """Start anew, behind so many rows of each source."""
        for source, count in zip(self.sources, num_read, strict=True):
            source.skip(count)
        self._forget(0, 0)

    def _forget(self, num_blocks: int, offset: int) -> None:
        self._num_blocks, self._offset = num_blocks, offset
        self._block, self._coming, self.tally = None, None, Tally()


def open_streams(arguments: Any, tokenizer: Any) -> TrainingRows:
    """Open this rank's part of what a run streams, and read the first block of it. Every rank; no collective.

    Raises:
        DataError: nothing to read, or nothing of a whole pass that can be trained on.
    """
    training, recipe = arguments.training, arguments.recipe
    preparation, parts = Preparation(arguments, tokenizer), load_parts(arguments)
    sources = [
        Source(part.name, part.train, part.fraction, distributed.rank(), distributed.world_size()) for part in parts
    ]
    train = RowStream(sources, preparation, training.packing, training.seed, recipe.shuffle_buffer_size)
    train.first_block()
    return TrainingRows(train, _open_evaluation(parts, preparation, training))


def _open_evaluation(parts: list[Part], preparation: Preparation, training: Any) -> Any:
    """Return one pass over the evaluation rows as a `datasets.IterableDataset`, which Accelerate splits over ranks."""
    from datasets import IterableDataset as HubIterable
    from datasets import concatenate_datasets

    packing = training.packing if training.eval_packing is None else training.eval_packing
    streams = [
        HubIterable.from_generator(_one_pass, gen_kwargs={"part": part, "preparation": preparation, "packing": packing})
        for part in parts
        if part.evaluation is not None
    ]
    return concatenate_datasets(streams) if streams else None


def _one_pass(part: Part, preparation: Preparation, packing: bool) -> Iterator[dict[str, Any]]:
    source = Source(part.name, part.evaluation, None, 0, 1)
    yield from RowStream([source], preparation, packing, 0, 0, is_endless=False)
