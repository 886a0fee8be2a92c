"""Uploads checkpoints and exports to object storage while training continues; download.py downloads checkpoints.

A mirror is a path or a URL that fsspec opens, such as s3://bucket/run. Each rank uploads a part of the files. Rank 0 uploads
the manifest once all ranks are done, so a checkpoint with a manifest is complete. Set credentials and endpoints as fsspec's
documentation describes.
"""

import contextlib
import functools
import json
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.checkpointing import layout
from hf_fsdp_recipes.checkpointing.run_identity import EXPORTS
from hf_fsdp_recipes.checkpointing.storage import UNFINISHED, Storage
from hf_fsdp_recipes.errors import CheckpointError, SaveError, summarize

logger = logging.getLogger(__name__)


class Mirror:
    """Uploads the directories passed to `add`, one at a time, from a thread on each rank.

    Create a Mirror on every rank, and call its methods in the same order on every rank. If uploads are slower than saves,
    only the newest of the waiting checkpoints is uploaded. Without a URL, the methods do nothing.
    """

    def __init__(self, url: str | None) -> None:
        self._url = url
        self._storage: Storage
        self._run: str | None = None
        self._keep: int | None = None
        self._best: Callable[[], str | None]
        self._group: dist.ProcessGroup | None = None
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._added: list[tuple[Path, str]] = []  # (directory, name of its manifest)
        # Positions in `_added`, counted from 1: the last directory that is finished or skipped, and the current upload.
        self._num_done = self._current = 0
        # For checkpoints together, and for each export's directory: why the last upload failed, or None if it succeeded.
        self._failures: dict[str, str | None] = {}
        self._has_skipped = False

    def check(self, output_dir: str | os.PathLike[str], is_fsdp: bool = True) -> None:
        """Raise a CheckpointError if a rank cannot write to the mirror, or the run has a mirror but no FSDP. Collective."""
        if self._url is None:
            return
        if not is_fsdp:
            raise CheckpointError(
                "checkpoint_mirror needs FSDP, because Trainer's own checkpoints are not uploaded. Launch with an FSDP "
                "template, or unset checkpoint_mirror."
            )
        with distributed.sync_errors(distributed.patient_group()):
            self._storage = Storage(self._url)
            if self._storage.is_local and Path(self._storage.root).resolve() == Path(output_dir).resolve():
                raise CheckpointError(f"checkpoint_mirror and output_dir are both {output_dir}. Change one of them.")
            probe = f"{self._storage.root}/.write-test-{distributed.rank()}"
            try:
                self._storage.attempt("pipe_file", probe, b"test", retry=False)
                self._storage.attempt("rm_file", probe, retry=False)
            except CheckpointError as error:
                raise CheckpointError(
                    f"checkpoint_mirror {self._url} cannot be written: {error}. Check the address and the credentials."
                ) from error

    def claim(self, run: str | None, step: int, *, is_starting: bool = True) -> None:
        """Raise a CheckpointError if the mirror holds another run's checkpoints or export. Rank 0 only.

        If training starts now, also mark checkpoints of later steps as incomplete, because the run will repeat these steps.
        """
        if self._url is None:
            return
        self._run, storage = run, self._storage
        complete = [checkpoint for checkpoint in storage.list_checkpoints() if checkpoint.is_complete]
        others = [checkpoint.path.name for checkpoint in complete if checkpoint.run != run]
        if step == 0 and not complete:
            others = [name for name in EXPORTS if storage.attempt("exists", f"{storage.root}/{name}")]
        if others:
            resume = (
                f"Resume that run with resume_from_checkpoint={self._url}/auto, or choose" if complete else "Choose"
            )
            raise CheckpointError(f"{self._url} holds {others[0]} of another run. {resume} another checkpoint_mirror.")
        for checkpoint in complete if is_starting else ():
            if checkpoint.step > step:
                storage.rename_manifest(checkpoint, f"{layout.MANIFEST}.set-aside")
                logger.warning(
                    "%s/%s can no longer be resumed from, because the run repeats its step", self._url, checkpoint.path
                )

    def start(self, output_dir: str, step: int, keep: int | None, best: Callable[[], str | None]) -> None:
        """Start the upload thread, and upload the checkpoint that the run resumes from if it is not in the mirror. Collective.

        `keep` is the number of complete checkpoints to keep in the mirror, or None for all. The checkpoint whose path
        `best()` returns is always kept.
        """
        self._keep, self._best = keep if keep and keep > 0 else None, best
        if self._url is None or self._thread is not None:  # train() may be called again
            return
        self._group = distributed.patient_group("checkpoint-mirror")
        self._thread = threading.Thread(target=self._upload_added, name="checkpoint-mirror", daemon=True)
        self._thread.start()
        resumed = layout.directory_for(output_dir, step)
        if distributed.run_on_main(lambda: layout.validate(resumed) is None):
            self.add(resumed)

    def add(self, directory: Path, manifest: str = layout.MANIFEST) -> None:
        """Start uploading a complete checkpoint or export. For an export, first wait for earlier uploads. Not a collective."""
        if self._url is None:
            return
        with self._changed:
            if manifest != layout.MANIFEST:
                self._changed.wait_for(self._is_idle)
            self._added.append((directory, manifest))
            self._changed.notify_all()

    def wait(self) -> SaveError | None:
        """Wait for all uploads. Return an error if the last upload of a checkpoint or of an export failed. Collective."""
        if self._url is None:
            return None
        with self._changed:
            self._changed.wait_for(self._is_idle)
        failures = distributed.gather_objects(next(filter(None, self._failures.values()), None))
        return next((SaveError(failure) for failure in failures if failure), None)

    @property
    def sources(self) -> list[str]:
        """The directories that are being uploaded or wait for their upload. They must not be deleted."""
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
            directory, manifest = self._added[-1]
            try:
                # All ranks upload the newest directory of rank 0. Other ranks may have added fewer or more directories so far.
                number = distributed.broadcast_object(self._current, self._group)
                with self._changed:
                    while len(self._added) < number:
                        self._changed.wait()
                    self._current = number
                directory, manifest = self._added[number - 1]
                if number > self._num_done + 1 and not self._has_skipped:
                    self._has_skipped = True
                    distributed.warn_main(
                        f"uploads to {self._url} are slower than saves; older checkpoints are skipped"
                    )
                self._upload(directory, manifest)
                self._failures[_failure_key(directory, manifest)] = None
            except Exception as error:  # the upload failed on every rank, or another rank has exited
                failure = (
                    f"{directory} was not uploaded to {self._url}: {summarize(error)}. It is complete on this machine. Check the "
                    f"network and the credentials, then start the same command again to upload it."
                )
                self._failures[_failure_key(directory, manifest)] = failure
                distributed.warn_main(failure)
            with self._changed:
                self._num_done = self._current
                self._changed.notify_all()

    def _upload(self, directory: Path, manifest: str) -> None:
        files = distributed.run_on_main(functools.partial(self._start, directory, manifest), self._group)
        own = None
        with contextlib.suppress(OSError):
            own = layout.checksum(directory / manifest)
        found = distributed.gather_objects(own, self._group)
        # Only the ranks that can see rank 0's directory take part in the upload.
        uploaders = [rank for rank, value in enumerate(found) if value == found[0]]
        with distributed.sync_errors(self._group):
            if distributed.rank() in uploaders:
                for name in files[uploaders.index(distributed.rank()) :: len(uploaders)]:
                    self._put(directory, name)
        if files:
            distributed.run_on_main(functools.partial(self._complete, directory, manifest), self._group)

    def _start(self, directory: Path, manifest: str) -> list[str]:
        """Mark an upload as started in the mirror, and return the files to upload, the largest first. Rank 0 only.

        Returns an empty list if the mirror already holds the complete directory.
        """
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
        """Upload the manifest, and delete old checkpoints from the mirror. Rank 0 only."""
        self._put(directory, manifest)
        print(f"mirrored: {directory.name} to {self._storage.url}", flush=True)
        try:
            self._storage.attempt("rm_file", f"{self._storage.root}/{directory.name}/{UNFINISHED}")
            own = [one for one in self._storage.list_checkpoints() if one.run == self._run]
            newest = max((one.step for one in own if one.is_complete), default=0)
            # The best checkpoint may not be uploaded yet, so also keep the one that was best when `directory` was saved.
            saved_best = layout.read_json(directory / layout.STATE_FILE).get("best_model_checkpoint")
            best = [Path(path).name for path in (self._best(), saved_best) if path]
            old = layout.find_old(own, self._keep, best) if self._keep else []
            old += [one for one in own if not one.is_complete and one.step < newest and one.run]
            for checkpoint in old:
                self._storage.remove(checkpoint)
        except CheckpointError as error:
            logger.warning("old checkpoints were not deleted: %s", error)


def _failure_key(directory: Path, manifest: str) -> str:
    """Return the key of a directory's failure: a later checkpoint makes up for an earlier one, but no export for another."""
    return manifest if manifest == layout.MANIFEST else str(directory)
