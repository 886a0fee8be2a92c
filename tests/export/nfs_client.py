"""Records what ranks do to the files of an export, and replays it on simulated NFS clients.

A simulated client follows Linux: a write to a page that is up to date in its cache is widened to the full page (`fs/nfs/write.c`,
`nfs_update_folio`), pages are written back at any time and in any order, and other clients' writes are noticed only when a file
is opened. The simulation is pessimistic: Linux may notice other clients' writes earlier.
"""

import io
import itertools
import os
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

PAGE_BYTES = 4096
READ_AHEAD_PAGES = 256  # 1 MiB; Linux reads ahead 128 KiB to 15 MiB, depending on version and settings


class Operation(NamedTuple):
    """A rank's operation on a file (open, truncate, write through the cache, direct write, read, close), or a barrier."""

    kind: str
    file: str = ""
    start: int = 0
    num_bytes: int = 0
    content: bytes = b""

    @property
    def pages(self) -> list[tuple[str, int]]:
        end = self.start + self.num_bytes
        return [(self.file, page) for page in range(self.start // PAGE_BYTES, -(-end // PAGE_BYTES))]


def is_weights(path: Any) -> bool:
    return str(path).endswith(".safetensors")


def record(patch: Callable[[Any, str, Any], None] = setattr, is_dry: bool = False) -> list[Operation]:
    """Record this process's operations on safetensors files, and its barriers.

    Args:
        patch: replaces an attribute; use monkeypatch.setattr in a process that continues after the test.
        is_dry: touch no file, and keep no content.

    Returns:
        A list that grows with each operation.
    """
    import safetensors

    from hf_fsdp_recipes import distributed

    operations: list[Operation] = []
    opened: dict[int, tuple[str, int]] = {}
    real = {name: getattr(os, name) for name in ("open", "ftruncate", "pwrite", "fsync", "close")}
    numbers = itertools.count(10**6)
    agree = distributed.raise_together

    def open_file(path: Any, flags: int, *arguments: Any, **keywords: Any) -> int:
        dry = is_dry and is_weights(path)
        descriptor = next(numbers) if dry else real["open"](path, flags, *arguments, **keywords)
        if is_weights(path):
            opened[descriptor] = Path(path).name, flags
            operations.append(Operation("open", Path(path).name))
        return descriptor

    def ftruncate(descriptor: int, num_bytes: int) -> None:
        if descriptor in opened:
            operations.append(Operation("truncate", opened[descriptor][0], num_bytes=num_bytes))
        if not (is_dry and descriptor in opened):
            real["ftruncate"](descriptor, num_bytes)

    def pwrite(descriptor: int, content: Any, offset: int) -> int:
        num_bytes = len(content) if is_dry else real["pwrite"](descriptor, content, offset)
        if descriptor in opened:
            file, flags = opened[descriptor]
            kept = b"" if is_dry else bytes(content[:num_bytes])
            operations.append(Operation("direct" if flags & os.O_DIRECT else "write", file, offset, num_bytes, kept))
        return num_bytes

    def fsync(descriptor: int) -> None:
        if not (is_dry and descriptor in opened):
            real["fsync"](descriptor)

    def close(descriptor: int) -> None:
        file, flags = opened.pop(descriptor, ("", 0))
        if file and flags & os.O_WRONLY:
            operations.append(Operation("close", file))
        if not (is_dry and file):
            real["close"](descriptor)

    def reading(function: Callable[..., Any]) -> Callable[..., Any]:
        def read(path: Any, *arguments: Any, **keywords: Any) -> Any:
            if isinstance(path, (str, Path)) and is_weights(path):
                file = Path(path)
                operations.append(Operation("open", file.name))
                operations.append(Operation("read", file.name, num_bytes=file.stat().st_size))
            return function(path, *arguments, **keywords)

        return read

    def raise_together(*arguments: Any, **keywords: Any) -> None:
        operations.append(Operation("barrier"))
        agree(*arguments, **keywords)

    for name, function in (
        ("open", open_file),
        ("ftruncate", ftruncate),
        ("pwrite", pwrite),
        ("fsync", fsync),
        ("close", close),
    ):
        patch(os, name, function)
    patch(io, "open", reading(io.open))
    patch(safetensors, "safe_open", reading(safetensors.safe_open))
    patch(distributed, "raise_together", raise_together)
    return operations


def phases(operations: Sequence[Operation]) -> list[list[Operation]]:
    """Split a rank's operations at the barriers."""
    split: list[list[Operation]] = [[]]
    for operation in operations:
        if operation.kind == "barrier":
            split.append([])
        else:
            split[-1].append(operation)
    return split


def check_pages(operations: Sequence[Sequence[Operation]], nodes: Sequence[int]) -> None:
    """Check that each page is written on one node, and that nothing is read before all ranks have closed.

    Args:
        operations: one list per rank, in rank order.
        nodes: the node of each rank.
    """
    writers: dict[tuple[str, int], int] = {}
    first_read, last_close = 10**9, -1
    for node, own in zip(nodes, operations, strict=True):
        for number, phase in enumerate(phases(own)):
            for operation in phase:
                if operation.kind in ("write", "direct"):
                    for page in operation.pages:
                        assert writers.setdefault(page, node) == node, f"page {page} is written on two nodes"
                if operation.kind in ("write", "direct", "close"):
                    last_close = max(last_close, number)
                if operation.kind == "read":
                    first_read = min(first_read, number)
    assert writers
    assert first_read > last_close, "a file is read while a rank may still write"


class Server:
    """The files, each with a version number that changes with every write."""

    def __init__(self) -> None:
        self.files: dict[str, bytearray] = defaultdict(bytearray)
        self.changes: dict[str, int] = defaultdict(int)

    def write(self, file: str, start: int, content: bytes) -> None:
        self.files[file][start : start + len(content)] = content
        self.changes[file] += 1


@dataclass
class Page:
    content: bytearray
    is_up_to_date: bool = False
    dirty: tuple[int, int] | None = None


class Client:
    """The page cache of one node."""

    def __init__(self, server: Server, chance: random.Random) -> None:
        self._server = server
        self._chance = chance
        self._seen: dict[str, int] = {}
        self.pages: dict[tuple[str, int], Page] = {}

    def run(self, operation: Operation) -> None:
        """Repeat the operations of a rank of this node."""
        getattr(self, f"_{operation.kind}")(operation)

    def _open(self, operation: Operation) -> None:
        if self._seen.get(operation.file) != self._server.changes[operation.file]:
            self._close(operation)
            for key in [key for key in self.pages if key[0] == operation.file]:
                del self.pages[key]
            self._seen[operation.file] = self._server.changes[operation.file]

    def _truncate(self, operation: Operation) -> None:
        self._server.files[operation.file] = bytearray(operation.num_bytes)

    def _parts(self, operation: Operation) -> Iterator[tuple[tuple[str, int], Page, int, int]]:
        """Yield the pages that an operation touches, and the range in each."""
        end = operation.start + operation.num_bytes
        for key in operation.pages:
            base = key[1] * PAGE_BYTES
            size = min(PAGE_BYTES, len(self._server.files[operation.file]) - base)
            page = self.pages.setdefault(key, Page(bytearray(size)))
            yield key, page, max(0, operation.start - base), min(size, end - base)

    def _write(self, operation: Operation) -> None:
        at = 0
        for key, page, low, high in self._parts(operation):
            if page.dirty is not None and not page.is_up_to_date and (low > page.dirty[1] or high < page.dirty[0]):
                self.write_back(key)
            page.content[low:high] = operation.content[at : at + high - low]
            at += high - low
            before = page.dirty or (low, high)
            page.dirty = min(low, before[0]), max(high, before[1])
            if page.is_up_to_date:
                page.dirty = 0, len(page.content)  # widened to the full page
            page.is_up_to_date = page.dirty == (0, len(page.content))

    def _direct(self, operation: Operation) -> None:
        for key in operation.pages:
            self.write_back(key)
            self.pages.pop(key, None)
        self._server.write(operation.file, operation.start, operation.content)

    def _read(self, operation: Operation) -> None:
        size = len(self._server.files[operation.file])
        ahead = min(size - operation.start, operation.num_bytes + READ_AHEAD_PAGES * PAGE_BYTES)
        for key, page, _, _ in self._parts(operation._replace(num_bytes=ahead)):
            if not page.is_up_to_date:
                self.write_back(key)
                base = key[1] * PAGE_BYTES
                page.content[:] = self._server.files[key[0]][base : base + len(page.content)]
                page.is_up_to_date = True

    def _close(self, operation: Operation) -> None:
        dirty = [key for key, page in self.pages.items() if key[0] == operation.file and page.dirty]
        self._chance.shuffle(dirty)
        for key in dirty:
            self.write_back(key)

    def write_back(self, key: tuple[str, int]) -> None:
        """Write the dirty part of a page to the server."""
        page = self.pages.get(key)
        if page is None or page.dirty is None:
            return
        low, high = page.dirty
        is_only_writer = self._seen.get(key[0]) == self._server.changes[key[0]]
        self._server.write(key[0], key[1] * PAGE_BYTES + low, page.content[low:high])
        page.dirty = None
        if is_only_writer:
            self._seen[key[0]] = self._server.changes[key[0]]


def replay(operations: Sequence[Sequence[Operation]], nodes: Sequence[int], seed: int) -> dict[str, bytes]:
    """Replay the ranks' operations, in a random order between the barriers, with a client for each node.

    Returns:
        The files on the server.
    """
    chance, server = random.Random(seed), Server()
    clients = {node: Client(server, chance) for node in sorted(set(nodes))}
    split = list(zip(*map(phases, operations), strict=True))
    while all(operation.kind in ("open", "read") for own in split[-1] for operation in own):
        split.pop()  # the reads after the last write change no file
    for phase in split:
        queues = [(clients[node], list(reversed(own))) for node, own in zip(nodes, phase, strict=True) if own]
        while queues:
            client, queue = chance.choice(queues)
            client.run(queue.pop())
            if chance.random() < 0.1 and client.pages:
                client.write_back(chance.choice(list(client.pages)))
            queues = [item for item in queues if item[1]]
    return {file: bytes(content) for file, content in server.files.items()}
