"""Uploads checkpoints and exports to object storage while training continues, and downloads a checkpoint to resume from.

A mirror is a URL that fsspec opens, such as s3://bucket/run, or a path. Each rank uploads a part of the files. Rank 0 uploads the
manifest once all ranks are done, so a checkpoint in the mirror is complete or absent. Credentials and endpoints are fsspec's own.
"""

import contextlib
import functools
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import torch.distributed as dist

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.checkpointing import layout
from hf_fsdp_recipes.checkpointing.run_identity import EXPORTS
from hf_fsdp_recipes.errors import CheckpointError, RecipeError, SaveError, summarize

Value = TypeVar("Value")
logger = logging.getLogger(__name__)

RETRY_SECONDS = (1.0, 4.0, 16.0)
UNFINISHED = "upload.json"  # in a checkpoint whose upload has not finished; holds the run's id


class Storage:
    """The directory at a URL. Errors name the URL; failed operations are retried."""

    def __init__(self, url: str) -> None:
        import fsspec

        self.url = url.rstrip("/")
        self.is_local = fsspec.utils.get_protocol(self.url) in ("file", "local")
        try:
            self.fs, self.root = fsspec.core.url_to_fs(self.url, **({"auto_mkdir": True} if self.is_local else {}))
        except (ImportError, ValueError) as error:  # fsspec's message names the missing package
            raise CheckpointError(
                f"{url} cannot be opened: {summarize(error)}. For s3, run pip install 'hf-fsdp-recipes[mirror]'."
            ) from error

    def attempt(self, method: str, *arguments: Any, tries: int = 1 + len(RETRY_SECONDS)) -> Any:
        """Call a method of the file system; return None if what it reads does not exist."""
        for number in range(tries):
            try:
                return getattr(self.fs, method)(*arguments)
            except Exception as error:  # each file system raises its own
                if isinstance(error, FileNotFoundError) and method in ("cat_file", "ls"):
                    return None
                if number + 1 == tries:
                    raise CheckpointError(f"{self.url}: {summarize(error, 'sentence')}") from error
                time.sleep(RETRY_SECONDS[number])

    def read_json(self, name: str) -> dict[str, Any]:
        """Return a file's content, or nothing if it does not exist or was not fully written."""
        try:
            content = json.loads(self.attempt("cat_file", f"{self.root}/{name}") or "{}")
        except ValueError:
            return {}
        return content if isinstance(content, dict) else {}

    def remove(self, checkpoint: layout.Checkpoint) -> None:
        """Delete a checkpoint. It is incomplete first, so that an interruption leaves nothing to resume from."""
        directory = f"{self.root}/{checkpoint.path}"
        if checkpoint.is_complete:
            self.attempt("mv", f"{directory}/{layout.MANIFEST}", f"{directory}/{UNFINISHED}")
            self.fs.invalidate_cache()
        self.attempt("rm", directory, True)

    def list_checkpoints(self) -> list[layout.Checkpoint]:
        """Return all checkpoints by step; their paths are names."""
        self.fs.invalidate_cache()
        found = []
        for path in self.attempt("ls", self.root, False) or ():
            name = PurePosixPath(path).name
            if layout.is_checkpoint_name(name):
                manifest = self.read_json(f"{name}/{layout.MANIFEST}")
                fault = None if "files" in manifest else "its upload did not finish"
                run = (manifest or self.read_json(f"{name}/{UNFINISHED}")).get("run")
                found.append(layout.Checkpoint(Path(name), int(name.partition("-")[2]), fault, run))
        return sorted(found, key=lambda checkpoint: checkpoint.step)


def check_mirror(url: str, output_dir: str | os.PathLike[str], is_fsdp: bool = True) -> None:
    """Check that every rank can write to a mirror. Collective: every rank must call this.

    Raises:
        CheckpointError: it cannot be opened or written, or is the output directory, or this is not an FSDP run.
    """
    if not is_fsdp:
        raise CheckpointError(
            "checkpoint_mirror is set, but only FSDP checkpoints are mirrored. Launch with an FSDP template, or unset it."
        )
    with distributed.sync_errors(distributed.patient_group()):
        storage = Storage(url)
        if storage.is_local and Path(storage.root).resolve() == Path(output_dir).resolve():
            raise CheckpointError(f"checkpoint_mirror is output_dir, {output_dir}. Choose another place for it.")
        probe = f"{storage.root}/.write-test-{distributed.rank()}"
        try:
            storage.attempt("pipe_file", probe, b"test", tries=1)
            storage.attempt("rm_file", probe, tries=1)
        except CheckpointError as error:
            raise CheckpointError(
                f"checkpoint_mirror cannot be written: {error}. Check the address, the credentials and their permissions."
            ) from error


def claim_mirror(url: str, run: str | None, step: int) -> None:
    """Refuse a mirror with another run's checkpoints; rename the manifests of steps that the run will repeat. Rank 0 only.

    Raises:
        CheckpointError: the mirror holds another run's checkpoint or export.
    """
    storage = Storage(url)
    complete = [checkpoint for checkpoint in storage.list_checkpoints() if checkpoint.is_complete]
    others = [checkpoint.path.name for checkpoint in complete if checkpoint.run != run]
    if step == 0 and not complete:
        others = [name for name in EXPORTS if storage.attempt("exists", f"{storage.root}/{name}")]
    if others:
        raise CheckpointError(
            f"{url} holds {others[0]} of another run. Resume that run with resume_from_checkpoint={url}/auto, or choose "
            f"another checkpoint_mirror."
        )
    for checkpoint in complete:
        if checkpoint.step > step:
            manifest = f"{storage.root}/{checkpoint.path}/{layout.MANIFEST}"
            storage.attempt("mv", manifest, f"{manifest}.set-aside")
            logger.warning("%s/%s is set aside: %s got the suffix .set-aside", url, checkpoint.path, layout.MANIFEST)


class Mirror:
    """Uploads what `add` names, one directory at a time, from a thread of each rank.

    Every rank has one and adds the same directories in the same order. If uploads are slower than saves, only the newest
    checkpoint is uploaded.

    Args:
        url: where to upload to.
        run: the run's id, used on rank 0. Only this run's checkpoints are deleted.
        keep: number of complete checkpoints to keep, or None for all.
        best: returns the path of a checkpoint to keep in any case.
    """

    def __init__(self, url: str, run: str | None, keep: int | None, best: Callable[[], str | None]) -> None:
        self._storage, self._run, self._keep, self._best = Storage(url), run, keep, best
        self._group = (
            dist.new_group(backend="gloo", timeout=distributed.UNLIMITED) if distributed.is_distributed() else None
        )
        self._changed = threading.Condition()
        self._added: list[tuple[Path, str]] = []  # directories with the name of their manifests
        self._num_done = 0
        self._current = 0  # number of directories that had been added when the current upload was chosen
        self._failures: dict[str, CheckpointError | None] = {}  # of the last upload of each kind
        self._has_skipped = False
        threading.Thread(target=self._upload_added, name="checkpoint-mirror", daemon=True).start()

    def add(self, directory: Path, manifest: str = layout.MANIFEST) -> None:
        """Start uploading a complete checkpoint or export. Not a collective; an export waits for earlier uploads."""
        with self._changed:
            if manifest != layout.MANIFEST:
                self._changed.wait_for(self._is_idle)
            self._added.append((directory, manifest))
            self._changed.notify_all()

    def wait(self) -> SaveError | None:
        """Wait for the last upload; return why the last checkpoint or export was not uploaded. Collective."""
        with self._changed:
            self._changed.wait_for(self._is_idle)
        failures = distributed.gather_objects([str(error) for error in self._failures.values() if error])
        return next((SaveError(texts[0]) for texts in failures if texts), None)

    @property
    def sources(self) -> list[str]:
        """The directories that are being or will be uploaded; they must not be deleted meanwhile."""
        with self._changed:
            numbers = [] if self._is_idle() else [self._current, len(self._added)]
            return [str(self._added[number - 1][0]) for number in numbers]

    def _is_idle(self) -> bool:
        return self._num_done == len(self._added)

    def _upload_added(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._is_idle())
                self._current = len(self._added)
                if self._current > self._num_done + 1:
                    self._report_skipped()
            manifest = self._added[self._current - 1][1]
            try:
                # Rank 0 chooses. Another rank may have added fewer so far.
                number = distributed.broadcast_object(self._current, self._group)
                with self._changed:
                    self._changed.wait_for(lambda: len(self._added) >= number)
                    self._current = number
                directory, manifest = self._added[number - 1]
                self._failures[manifest] = self._upload_guarded(directory, manifest)
            except Exception as error:  # a rank has exited
                self._failures[manifest] = CheckpointError(
                    f"the upload to {self._storage.url} stopped: {summarize(error)}."
                )
            with self._changed:
                self._num_done = self._current
                self._changed.notify_all()

    def _report_skipped(self) -> None:
        if distributed.is_main() and not self._has_skipped:
            self._has_skipped = True
            logger.warning(
                "uploads to %s are slower than saves, so only the newest checkpoint is uploaded", self._storage.url
            )

    def _upload_guarded(self, directory: Path, manifest: str) -> CheckpointError | None:
        try:
            self._upload(directory, manifest)
        except RecipeError as error:  # the same on every rank
            failure = CheckpointError(
                f"{directory} was not uploaded: {error}. It is complete on this machine. Check the network and the "
                f"credentials; resuming the run from it uploads it."
            )
            distributed.warn_main(str(failure))
            return failure
        return None

    def _upload(self, directory: Path, manifest: str) -> None:
        files = distributed.run_on_main(functools.partial(self._start, directory, manifest), self._group)
        own = None
        with contextlib.suppress(OSError):
            own = layout.checksum(directory / manifest)
        found = distributed.gather_objects(own, self._group)
        uploaders = [
            rank for rank, value in enumerate(found) if value == found[0]
        ]  # others do not see rank 0's directory
        with distributed.sync_errors(self._group):
            if distributed.rank() in uploaders:
                for name in files[uploaders.index(distributed.rank()) :: len(uploaders)]:
                    self._put(directory, name)
        if files:
            distributed.run_on_main(functools.partial(self._complete, directory, manifest), self._group)

    def _start(self, directory: Path, manifest: str) -> list[str]:
        """Return the files to upload, the largest first; none if the mirror has the directory already. Rank 0 only."""
        there = self._storage.read_json(f"{directory.name}/{manifest}")
        if there == json.loads((directory / manifest).read_text()):
            return []
        if there and manifest == layout.MANIFEST and there.get("run") != self._run:
            raise CheckpointError(f"{self._storage.url} holds {directory.name} of another run")
        target = f"{self._storage.root}/{directory.name}"
        self._storage.attempt("pipe_file", f"{target}/{UNFINISHED}", json.dumps({"run": self._run}).encode())
        if there:
            self._storage.attempt("rm_file", f"{target}/{manifest}")
        names = [name for name in layout.files_in(directory) if name != manifest]
        return sorted(names, key=lambda name: -(directory / name).stat().st_size)

    def _put(self, directory: Path, name: str) -> None:
        self._storage.attempt("put_file", str(directory / name), f"{self._storage.root}/{directory.name}/{name}")

    def _complete(self, directory: Path, manifest: str) -> None:
        """Upload the manifest, and delete old checkpoints. Rank 0 only."""
        self._put(directory, manifest)
        print(f"mirrored: {directory.name} to {self._storage.url}", flush=True)
        try:
            self._storage.attempt("rm_file", f"{self._storage.root}/{directory.name}/{UNFINISHED}")
            own = [checkpoint for checkpoint in self._storage.list_checkpoints() if checkpoint.run == self._run]
            newest = max((checkpoint.step for checkpoint in own if checkpoint.is_complete), default=0)
            best = [Path(path).name for path in [self._best()] if path]
            old = layout.find_old(own, self._keep, best) if self._keep else []
            old += [checkpoint for checkpoint in own if not checkpoint.is_complete and checkpoint.step < newest]
            for checkpoint in old:
                self._storage.remove(checkpoint)
        except CheckpointError as error:
            logger.warning("old checkpoints were not deleted: %s", error)


def fetch_checkpoint(url: str, output_dir: str | os.PathLike[str], newest: Path | None = None) -> Path | None:
    """Download a checkpoint from a mirror into a run's output directory, and return its path there.

    Each node downloads it, or only rank 0 if they share the directory. Ranks wait for each other without a timeout.
    Collective: every rank must call this, after the process group has started.

    Args:
        url: of a checkpoint, or of a mirror with or without /auto for its newest complete checkpoint.
        output_dir: the run's output directory.
        newest: the newest complete checkpoint there, if any. Returned unless the mirror has a later one of the same run.

    Returns:
        The checkpoint in `output_dir`, or `newest` if the mirror has no complete one.

    Raises:
        CheckpointError: the named checkpoint is not complete, or its files do not match its manifest.
    """
    chosen = distributed.run_on_main(lambda: _choose(url, newest), distributed.patient_group())
    return newest if chosen is None else distributed.main_first(lambda: _download(*chosen, Path(output_dir)))


def _choose(url: str, newest: Path | None) -> tuple[str, dict[str, Any]] | None:
    """Return the URL and manifest of the checkpoint to download, if any."""
    url = url.rstrip("/").removesuffix("/auto")
    storage = Storage(url)
    if layout.is_checkpoint_name(PurePosixPath(url).name):
        manifest = storage.read_json(layout.MANIFEST)
        if "files" not in manifest:
            raise CheckpointError(
                f"{url} is not a complete checkpoint. Pass one, or use auto for the newest complete one."
            )
        return url, manifest
    complete = [checkpoint for checkpoint in storage.list_checkpoints() if checkpoint.is_complete]
    if newest is not None:
        own = layout.read_manifest(newest)
        complete = [c for c in complete if c.run == own.get("run") and c.step > int(own.get("step", -1))]
    if not complete:
        return None
    name = complete[-1].path.name
    return f"{url}/{name}", storage.read_json(f"{name}/{layout.MANIFEST}")


def _download(url: str, manifest: dict[str, Any], output_dir: Path) -> Path:
    """Download one checkpoint unless it is there, verify it and give it its final name. One rank of a node at a time."""
    step, files = int(manifest["step"]), manifest["files"]
    final = layout.directory_for(output_dir, step)
    output_dir.mkdir(parents=True, exist_ok=True)
    os.listdir(output_dir)  # so that NFS looks for what another node has written
    if layout.read_manifest(final) == manifest and layout.validate(final, verify=distributed.is_main()) is None:
        return final
    if any(PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts for name in files):
        raise CheckpointError(f"{url}/{layout.MANIFEST} lists files outside the checkpoint. Use another checkpoint.")
    print(f"download: {url} to {final}", flush=True)
    storage, incomplete = Storage(url), layout.start(output_dir, step)
    storage.attempt("get", [f"{storage.root}/{name}" for name in files], [str(incomplete / name) for name in files])
    found = layout.manifest_entries(incomplete, files)
    changed = [name for name in files if found[name] != files[name]]
    if changed:
        raise CheckpointError(f"{url}/{changed[0]} has changed: its size or checksum differs. Use another checkpoint.")
    facts = {name: value for name, value in manifest.items() if name not in ("format", "files")}
    layout.commit(incomplete, final, files, facts)
    return final
