"""Downloads a checkpoint to resume from. The source is a mirror: the copy of a run's checkpoints that mirror.py uploads.

If all ranks see the same output directory, each downloads some of the files, and together they complete the checkpoint there.
Otherwise each node downloads only what its ranks read: all small files, and the blocks of `.distcp` files that hold its ranks'
chunks. DCP's reader requests these blocks just before it reads them. The blocks are written to sparse files in
`.checkpoint-<step>.download`, so no tool mistakes them for a complete checkpoint.
"""

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.checkpointing import direct_io, layout
from hf_fsdp_recipes.checkpointing.storage import Storage
from hf_fsdp_recipes.checkpointing.verification import verified
from hf_fsdp_recipes.errors import CheckpointError, summarize
from hf_fsdp_recipes.patches import registry
from hf_fsdp_recipes.patches.torch import Chunks, register_read_hook

NUM_REQUESTS = 8  # concurrent requests of each rank; each request is for one block
_partial: dict[Path, "_Download"] = {}  # {directory: the partial download to it}


def fetch_checkpoint(url: str, output_dir: str | os.PathLike[str], newest: Path | None = None) -> Path | None:
    """Download a checkpoint from a mirror into a run's output directory, and return its path there.

    If all ranks see the same directory, each downloads a part of the checkpoint. Otherwise each node downloads only
    the small files now. The tensor data that its ranks need is downloaded later, when Trainer or Accelerate loads the
    returned directory. Such a partial directory is deleted after Trainer's first step. Ranks wait for each other without a
    timeout.

    Collective: every rank must call this, after the process group has started.

    Args:
        url: URL of a checkpoint, or of a mirror (with or without /auto). A mirror stands for its newest complete checkpoint.
        output_dir: the run's output directory.
        newest: the newest complete checkpoint in `output_dir`, if any. If `url` is that of a mirror, a checkpoint is
            downloaded only if it belongs to the same run as `newest` and has a later step.

    Returns:
        The downloaded checkpoint in `output_dir`, or `newest` if there is nothing to download.

    Raises:
        CheckpointError: the checkpoint at `url` is not complete or cannot be downloaded, its manifest names files outside it, its
            files do not match the manifest, or the output directory cannot be written. Loading the returned directory can raise
            this too.
    """
    group = distributed.patient_group()
    chosen = distributed.run_on_main(lambda: _choose(url, newest), group)
    if chosen is None:
        return newest
    (url, manifest), output_dir = chosen, Path(output_dir)
    step, files = int(manifest["step"]), manifest["files"]
    final, directory = layout.directory_for(output_dir, step), layout.download_directory_for(output_dir, step)
    with distributed.sync_errors(group):
        storage = Storage(url)
    sharers = _find_sharers(output_dir)
    download, own = _Download(storage, files, directory, sharers), sharers.index(distributed.rank())
    with download.errors():
        is_there = layout.read_manifest(final) == manifest and not layout.validate(final, True, own, len(sharers))
    if all(distributed.gather_objects(is_there, group)):
        return final
    by_size = sorted(files, key=lambda name: (-files[name]["bytes"], name))
    small = [name for name in by_size if "blocks" not in files[name]]
    is_whole = len(small) == len(files) or len(sharers) == distributed.world_size()
    distributed.print_main(
        f"download: {url} to {output_dir}{'' if is_whole else ' (on each node, only what its ranks need)'}"
    )
    with download.errors():
        if own == 0:
            layout.remove_interrupted(output_dir, "download")
            for name in files:
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
    with download.errors():
        download.fetch_files((by_size if is_whole else small)[download.part])
    with download.errors():
        if own == 0 and is_whole:
            facts = {name: value for name, value in manifest.items() if name not in ("format", "files")}
            layout.commit(directory, final, files, facts)
        elif own == 0:
            (directory / layout.MANIFEST).write_text(json.dumps(manifest))
    if is_whole:
        return final
    registry.apply("checkpointing")
    register_read_hook(_fetch_chunks)
    _partial[directory.resolve()] = download
    verified.add(directory.resolve())  # it counts as verified, because each block is verified when it is downloaded
    return directory


def delete_partial() -> None:
    """Delete partial downloads after a resume. Collective: every rank must call this, once it has read its part."""
    if _partial:
        distributed.barrier()
        for directory in _partial:
            shutil.rmtree(directory, ignore_errors=True)  # several ranks may delete it at the same time
        _partial.clear()


@dataclass
class _Download:
    """Downloads all or part of a mirror's checkpoint to `directory`.

    `sharers` are the ranks that see this directory. Each of them downloads some of the files or blocks.
    """

    storage: Storage
    files: dict[str, layout.ManifestEntry]  # the manifest's entries
    directory: Path
    sharers: list[int]
    fetched: set[tuple[str, int]] = field(default_factory=set)  # (file, block number)

    @property
    def part(self) -> slice:
        """The slice of a list of files or blocks that this rank must download; the other sharers download the rest."""
        return slice(self.sharers.index(distributed.rank()), None, len(self.sharers))

    def fetch_files(self, names: list[str]) -> None:
        """Download files in full and verify their checksums."""
        if names:
            sources, targets = ([f"{root}/{name}" for name in names] for root in (self.storage.root, self.directory))
            self.storage.attempt("get", sources, targets)
        for name in names:
            if layout.checksum(self.directory / name) != self.files[name]["xxh3"]:
                raise CheckpointError(f"{name} has changed: its checksum differs from the manifest's")

    def fetch_block(self, name: str, number: int) -> None:
        """Download one block of a file and verify its checksum."""
        start = number * direct_io.CHECKSUM_BLOCK_BYTES
        end = min(start + direct_io.CHECKSUM_BLOCK_BYTES, self.files[name]["bytes"])
        content = self.storage.attempt("cat_file", f"{self.storage.root}/{name}", start=start, end=end) or b""
        if xxhash.xxh3_64_hexdigest(content) != self.files[name]["blocks"][number]:
            raise CheckpointError(f"{name} is missing, or its checksum differs from the manifest's")
        with os.fdopen(os.open(self.directory / name, os.O_WRONLY | os.O_CREAT, 0o666), "wb") as stream:
            stream.seek(start)
            stream.write(content)

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """If the `with` body fails on any rank, raise its error on all ranks. They wait without a timeout. Collective."""
        with distributed.sync_errors(distributed.patient_group()):
            try:
                yield
            except OSError as error:
                raise CheckpointError(
                    f"{self.directory} cannot be written: {error.strerror}. Check permissions and free space."
                ) from error
            except CheckpointError as error:
                raise CheckpointError(
                    f"{self.storage.url} cannot be resumed from: {summarize(error)}. Start again, or use another checkpoint."
                ) from error


def _fetch_chunks(directory: Path, chunks: Chunks) -> None:
    """Download the blocks that the ranks are about to read; ranks that share a directory download each block only once.

    DCP's reader calls this before it reads. Collective.
    """
    download = _partial.get(directory.parent.resolve())
    if download is None:
        return
    needed, size = set(), direct_io.CHECKSUM_BLOCK_BYTES
    for file, offset, length in chunks:
        if "blocks" in download.files.get(name := f"{directory.name}/{file}", ()):
            needed |= {(name, number) for number in range(offset // size, -(-(offset + length) // size))}
    of_ranks = distributed.gather_objects(needed - download.fetched, distributed.patient_group())
    new = sorted(set().union(*(of_ranks[rank] for rank in download.sharers)))
    with download.errors(), ThreadPoolExecutor(NUM_REQUESTS) as pool:
        list(pool.map(lambda block: download.fetch_block(*block), new[download.part]))
    download.fetched.update(new)


def _choose(url: str, newest: Path | None) -> tuple[str, dict[str, Any]] | None:
    """Return the URL and manifest of the checkpoint to download, or None if the mirror has none that is newer than `newest`."""
    url = url.rstrip("/").removesuffix("/auto")
    storage = Storage(url)
    if layout.is_checkpoint_name(PurePosixPath(url).name):
        manifest = storage.read_json(layout.MANIFEST)
        if "files" not in manifest:
            raise CheckpointError(
                f"{url} is not a complete checkpoint. Pass one, or use auto for the newest complete one."
            )
    else:
        complete = [checkpoint for checkpoint in storage.list_checkpoints() if checkpoint.is_complete]
        if newest is not None:
            own = layout.read_manifest(newest)
            complete = [c for c in complete if c.run == own.get("run") and c.step > int(own.get("step", -1))]
        if not complete:
            return None
        name = complete[-1].path.name
        url, manifest = f"{url}/{name}", storage.read_json(f"{name}/{layout.MANIFEST}")
    if any(PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts for name in manifest["files"]):
        raise CheckpointError(f"{url}/{layout.MANIFEST} lists files outside the checkpoint. Use another checkpoint.")
    return url, manifest


def _find_sharers(output_dir: Path) -> list[int]:
    """Return the ranks that see the same output directory as this rank, including this rank. Collective.

    If this rank does not see rank 0's directory, only the ranks of its node are assumed to see the same one.
    """
    group = distributed.patient_group()
    # The name is random because NFS clients cache failed lookups: a fixed name that was missing before could still appear
    # missing for some seconds.
    probe = output_dir / f".probe-{distributed.broadcast_object(uuid.uuid4().hex, group)}"
    with distributed.sync_errors(group):
        output_dir.mkdir(parents=True, exist_ok=True)
    distributed.run_on_main(probe.touch, group)
    list(output_dir.iterdir())  # makes NFS look for files that another node has written
    places = distributed.gather_objects("" if probe.exists() else distributed.node_id(), group)
    distributed.run_on_main(probe.unlink, group)
    return [rank for rank, place in enumerate(places) if place == places[distributed.rank()]]
