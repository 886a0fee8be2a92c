"""Writes an export to a temporary directory and renames it when it is complete."""

import contextlib
import itertools
import shutil
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import torch
import torch.distributed as dist

from hf_fsdp_recipes import distributed, parameter_names
from hf_fsdp_recipes.device_copies import Download
from hf_fsdp_recipes.errors import ExportError, summarize
from hf_fsdp_recipes.export import borders, export_directory, verify_files
from hf_fsdp_recipes.export.export_plan import ExportPlan, ShardExport
from hf_fsdp_recipes.export.tensor_files import FilePlan, FileWriter, create_files, plan_files
from hf_fsdp_recipes.loading.export_marker import check_together
from hf_fsdp_recipes.loading.verify import is_finite
from hf_fsdp_recipes.loading.weight_mapping import TensorRange
from hf_fsdp_recipes.metrics import progress

CHUNK_BYTES = 8 * 1024 * 1024  # while a rank writes, it needs two chunks of memory beyond its shard
ALIGNMENT = 8  # bytes, the size of the largest dtype
PROGRESS_TITLE = "export weights"
Method = Literal["auto", "direct", "gather"]
Chunk = tuple[str, int, torch.Tensor]  # (name of the stored tensor, offset in elements, values)


def check_arguments(method: str = "auto", **arguments: object) -> None:
    """Raise an ExportError on every rank if an argument differs between ranks or `method` is invalid. Collective."""
    own = {name: repr(value) for name, value in arguments.items()} | {"method": repr(method)}
    of_rank_0 = distributed.broadcast_object(own)
    with distributed.sync_errors():
        for name, value in of_rank_0.items():
            if own[name] != value:
                raise ExportError(
                    f"{name} is {value} on rank 0 and {own[name]} on rank {distributed.rank()}. Pass the same value on every rank."
                )
        if method not in get_args(Method):
            raise ExportError(f"method is {method!r}. Use {', '.join(get_args(Method))}.")


def write_export(
    output_dir: Path,
    describe: Callable[[], ExportPlan],
    max_shard_size: int | str,
    method: Method,
    prepare: Callable[[], None],
    source: Path | None = None,
    use_free_name: bool = False,
) -> Path:
    """Write an export under a temporary name, verify it, rename it, and return its directory.

    Collective: every rank must call this, after `check_arguments`. `describe` returns this rank's plan; it may fail on some
    ranks but must not call collectives. `prepare` is called on every rank between planning and writing, and may call
    collectives. `source` is the directory that is exported, if there is one. An ExportError is raised on every rank, and leaves
    `output_dir` unchanged.
    """
    with contextlib.ExitStack() as stack:
        with distributed.sync_errors(), _failed_write(output_dir):
            if distributed.is_main():
                export_directory.check_target(output_dir, max_shard_size, source=source, use_free_name=use_free_name)
            final = output_dir.resolve()
            if distributed.is_main():
                stack.enter_context(export_directory.lock(final))
                export_directory.start(final)
        try:
            _write_files(final, describe, max_shard_size, method, prepare)

            @_failed_write(final)
            def complete() -> Path:
                directory = export_directory.replace(final, use_free_name)
                return output_dir if directory == final else directory

            return distributed.run_on_main(complete)
        except BaseException:
            if distributed.is_main():
                shutil.rmtree(export_directory.incomplete_directory_for(final), ignore_errors=True)
            raise


def _write_files(
    final: Path,
    describe: Callable[[], ExportPlan],
    max_shard_size: int | str,
    method: Method,
    prepare: Callable[[], None],
) -> None:
    """Write and verify all files in the temporary directory. Collective."""
    temporary = export_directory.incomplete_directory_for(final)
    method, has_several_caches = _choose_method(temporary, method)
    with distributed.sync_errors():
        export = describe()
        files = plan_files(_in_saved_order(export), export_directory.parse_shard_size(max_shard_size), export.pattern)
        if distributed.is_main():
            with _failed_write(final):
                create_files(files, temporary)
    if export.base_directory is not None:
        check_together(export.base_directory, is_read_by_all=True, error_class=ExportError)
    prepare()
    with ThreadPoolExecutor(max_workers=1) as executor:  # writes the small files in the background
        assets = executor.submit(_write_assets, export, files, temporary) if distributed.is_main() else None
        writer = FileWriter(files, temporary, keeps_borders=has_several_caches)
        non_finite = _write_weights(export.shards, writer, temporary, method)
        gathered = distributed.gather_on_main((writer.checksums, non_finite))
        # Read the files only now that all ranks have closed them.
        with distributed.sync_errors(distributed.patient_group()), _failed_write(final):
            borders.check_borders(temporary, writer.borders)
            if assets is not None:
                assets.result()
                verify_files.check_headers(temporary, files)
                if export.is_adapter:
                    verify_files.check_adapter_rows(temporary, files)
                export_directory.write_marker(temporary, [files.header_checksums(), *(own for own, _ in gathered)])
    verify_files.warn_non_finite(counts for _, counts in gathered)


@contextlib.contextmanager
def _failed_write(directory: Path) -> Iterator[None]:
    """Turn a file system error into an ExportError with a one-line message."""
    try:
        yield
    except OSError as error:
        cause = error.strerror or summarize(error, "line")
        raise ExportError(f"{directory} could not be written: {cause}. Checkpoints are intact.") from error


def _choose_method(directory: Path, method: Method) -> tuple[Literal["direct", "gather"], bool]:
    """Return the method to use, and whether the ranks write through several page caches. Collective.

    To find out, rank 0 creates a file, and every rank looks for it.
    """
    if method == "gather" or distributed.world_size() == 1:
        return "gather", False

    @_failed_write(directory)
    def create() -> str:
        # The name is random because NFS clients cache failed lookups: a fixed name that was missing before could still
        # appear missing for some seconds.
        name = f".probe-{uuid.uuid4().hex}"
        (directory / name).touch()
        return name

    probe = directory / distributed.run_on_main(create)
    seen = None
    # Listing the parent refreshes an NFS client that still has a deleted directory of this name in its cache.
    with contextlib.suppress(OSError):
        list(directory.parent.iterdir())
    with contextlib.suppress(OSError):
        seen = distributed.node_id(), probe.stat().st_dev  # two mounts on one node have two caches
    gathered = distributed.gather_on_main(seen)

    @_failed_write(directory)
    def compare() -> tuple[bool, bool]:
        probe.unlink()
        return None not in gathered, len(set(gathered)) > 1

    is_shared, has_several_caches = distributed.run_on_main(compare)
    if is_shared:
        return "direct", has_several_caches
    if method == "direct":
        problem = f"method is 'direct', but some ranks do not see rank 0's {directory.parent}."
        distributed.raise_together(ExportError(f"{problem} Use 'auto', or a shared directory."))
    return "gather", False


def _in_saved_order(export: ExportPlan) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    """List the tensors in the order in which `save_pretrained` assigns them to files."""
    from transformers.core_model_loading import revert_weight_conversion

    entries = {part.tensor: (part.tensor, part.shape, shard.dtype) for shard in export.shards for part in shard.parts}
    if export.model is None:
        return list(entries.values())
    meta = {
        parameter_names.in_base_model(shard.name): torch.empty(shard.shape, device="meta") for shard in export.shards
    }
    order = [name for name in revert_weight_conversion(export.model, meta) if name in entries]
    return [entries.pop(name) for name in order] + list(entries.values())


def _write_weights(shards: list[ShardExport], writer: FileWriter, directory: Path, method: str) -> dict[str, int]:
    """Write all shards and close the files; return each tensor's number of non-finite values. Collective."""
    non_finite: dict[str, int] = {}
    if method == "gather" and distributed.world_size() > 1:
        _write_gathered(shards, writer, directory, non_finite)
        return non_finite
    with distributed.sync_errors(distributed.patient_group()), _failed_write(directory):
        _write_own(shards, writer, non_finite)
        if not writer.keeps_borders:
            writer.close()
    if writer.keeps_borders:
        error = borders.write_on_main(writer.borders, writer.write_bytes)
        with distributed.sync_errors(distributed.patient_group()), _failed_write(directory):
            if error is not None:
                raise error
            writer.close()
    return non_finite


def _write_own(shards: list[ShardExport], writer: FileWriter, non_finite: dict[str, int]) -> None:
    """Write this rank's shards. The progress bar counts rank 0's bytes; the other ranks write about as many. Not a collective."""
    with progress.bar(sum(shard.count * shard.dtype.itemsize for shard in shards), PROGRESS_TITLE) as bar:
        for name, first, values in _read_ahead(_all_chunks(shards, non_finite)):
            writer.write(name, first, values)
            bar.update(values.nbytes)


def _read_ahead(chunks: Iterator[Chunk]) -> Iterator[Chunk]:
    """Yield each chunk while a thread prepares the next one."""

    def produce() -> Chunk | None:
        with torch.no_grad():  # grad mode is per thread
            return next(chunks, None)

    with ThreadPoolExecutor(max_workers=1) as producer:
        upcoming = producer.submit(produce)
        while (chunk := upcoming.result()) is not None:
            upcoming = producer.submit(produce)
            yield chunk


def _all_chunks(shards: list[ShardExport], non_finite: dict[str, int]) -> Iterator[Chunk]:
    download = Download(CHUNK_BYTES)
    return (chunk for shard in shards for chunk in _chunks(shard, non_finite, download))


def _chunks(shard: ShardExport, non_finite: dict[str, int], download: Download) -> Iterator[Chunk]:
    """Yield a shard's values in chunks, ready to be written. The second chunk after a chunk may overwrite it."""
    for part, at, count in _pieces(shard, shard.first, shard.count):
        values = download.to_host(shard.read(at - shard.first, count), shard.dtype)
        if not is_finite(values):
            non_finite[part.tensor] = non_finite.get(part.tensor, 0) + int((~torch.isfinite(values)).sum())
        yield part.tensor, at - part.start, values


def _pieces(shard: ShardExport, first: int, count: int) -> Iterator[tuple[TensorRange, int, int]]:
    """Split a range of a parameter into chunks: (stored tensor, offset into the parameter, number of elements)."""
    step = max(1, CHUNK_BYTES // max(shard.dtype.itemsize, shard.held_dtype.itemsize))
    for part in shard.parts:
        start, stop = max(first, part.start), min(first + count, part.start + part.num_elements)
        for at in range(start, stop, step):
            yield part, at, min(step, stop - at)


def _write_gathered(shards: list[ShardExport], writer: FileWriter, directory: Path, non_finite: dict[str, int]) -> None:
    """Send all shards to rank 0, which writes one chunk while it receives the next. Collective."""
    ranges = distributed.gather_on_main([(shard.first, shard.count) for shard in shards])
    error = (
        _write_received(shards, ranges, writer, non_finite)
        if distributed.is_main()
        else _send_chunks(shards, non_finite)
    )
    with distributed.sync_errors(distributed.patient_group()), _failed_write(directory):
        if error is not None:
            raise error
        writer.close()


def _send_chunks(shards: list[ShardExport], non_finite: dict[str, int]) -> Exception | None:
    """Send this rank's chunks to rank 0; return the error, if any.

    After an error, send arbitrary bytes instead of the values, because rank 0 still waits for all messages.
    """
    chunks, error = _all_chunks(shards, non_finite), None
    sending: deque[dist.Work | None] = deque()
    buffers = torch.zeros((2, CHUNK_BYTES), dtype=torch.uint8)
    for number, message in enumerate(_messages(shards, [(shard.first, shard.count) for shard in shards])):
        if len(sending) == 2:
            _wait(sending.popleft())
        buffer = buffers[number % 2]
        for piece in message:
            try:
                if error is None:
                    piece.find(buffer).copy_(next(chunks)[2])
            except Exception as caught:
                error = caught
        sending.append(dist.isend(buffer[: message[-1].end], dst=0, group=distributed.patient_group()))
    for request in sending:
        _wait(request)
    return error


def _write_received(
    shards: list[ShardExport], ranges: list[list[tuple[int, int]]], writer: FileWriter, non_finite: dict[str, int]
) -> Exception | None:
    """Write rank 0's chunks, then the chunks received from each of the other ranks; return the first error."""
    own = _read_ahead(_all_chunks(shards, non_finite))
    received = _receive_chunks(shards, ranges)
    num_bytes = sum(torch.Size(shard.shape).numel() * shard.dtype.itemsize for shard in shards)
    try:
        with progress.bar(num_bytes, PROGRESS_TITLE) as bar:
            for chunk in itertools.chain(own, received):
                writer.write(*chunk)
                bar.update(chunk[2].nbytes)
    except Exception as error:
        deque(received, maxlen=0)  # receive the rest, because the other ranks send everything
        return error
    return None


def _receive_chunks(shards: list[ShardExport], ranges: list[list[tuple[int, int]]]) -> Iterator[Chunk]:
    """Yield the chunks of all ranks but 0. While the caller writes the chunks of one message, receive the next message."""
    buffers = torch.empty((2, CHUNK_BYTES), dtype=torch.uint8)
    messages = ((rank, message) for rank in range(1, len(ranges)) for message in _messages(shards, ranges[rank]))
    pending: tuple[dist.Work | None, list[Chunk]] | None = None
    for number, (sender, message) in enumerate(messages):
        buffer = buffers[number % 2]
        request = dist.irecv(buffer[: message[-1].end], src=sender, group=distributed.patient_group())
        if pending is not None:
            _wait(pending[0])
            yield from pending[1]
        pending = request, [(piece.tensor, piece.first, piece.find(buffer)) for piece in message]
    if pending is not None:
        _wait(pending[0])
        yield from pending[1]


@dataclass(frozen=True)
class _Piece:
    """A chunk in a message: `count` elements of a stored tensor from `first` on, at byte `start` of the message."""

    tensor: str
    first: int
    count: int
    dtype: torch.dtype
    start: int

    @property
    def end(self) -> int:
        return self.start + self.count * self.dtype.itemsize

    def find(self, message: torch.Tensor) -> torch.Tensor:
        """Return this chunk's values in a message."""
        return message[self.start : self.end].view(self.dtype)


def _messages(shards: list[ShardExport], ranges: list[tuple[int, int]]) -> Iterator[list[_Piece]]:
    """Pack one rank's chunks into messages of at most CHUNK_BYTES, because most chunks are much smaller if there are many ranks."""
    message: list[_Piece] = []
    for shard, (first, count) in zip(shards, ranges, strict=True):
        for part, at, length in _pieces(shard, first, count):
            start = -(-message[-1].end // ALIGNMENT) * ALIGNMENT if message else 0
            piece = _Piece(part.tensor, at - part.start, length, shard.dtype, start)
            if piece.end > CHUNK_BYTES:
                yield message
                message, piece = [], replace(piece, start=0)
            message.append(piece)
    if message:
        yield message


def _wait(request: dist.Work | None) -> None:
    if request is not None:
        request.wait()


def _write_assets(export: ExportPlan, files: FilePlan, directory: Path) -> None:
    """Write the index, configs and tokenizer, and check the planned names and shapes against the config. Rank 0 only."""
    index = files.index()
    if index is not None:
        (directory / f"{export.pattern.format(suffix='')}.index.json").write_text(index)
    export.write_assets(directory, files)
    if not export.is_adapter:
        verify_files.check_config(directory, files)
