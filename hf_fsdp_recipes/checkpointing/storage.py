"""A run's directory in object storage, or in any other file system that fsspec opens."""

import json
import time
from pathlib import Path, PurePosixPath
from typing import Any

from hf_fsdp_recipes.checkpointing import layout
from hf_fsdp_recipes.errors import CheckpointError, summarize

RETRY_SECONDS = (1.0, 4.0, 16.0)
UNFINISHED = "upload.json"  # marks a checkpoint whose upload has not finished; the file holds the run's id


class Storage:
    """The directory at a URL. Failed operations are retried."""

    def __init__(self, url: str) -> None:
        import fsspec

        self.url = url.rstrip("/")
        self.is_local = fsspec.utils.get_protocol(self.url) in ("file", "local")
        try:
            self.fs, self.root = fsspec.core.url_to_fs(self.url, **({"auto_mkdir": True} if self.is_local else {}))
        except (ImportError, ValueError) as error:  # fsspec's message names the missing package
            raise CheckpointError(
                f"{url} cannot be opened: {summarize(error)}. For s3, run pip install s3fs."
            ) from error

    def attempt(self, method: str, *arguments: Any, retry: bool = True, **keywords: Any) -> Any:
        """Call a method of the file system; return its result, or None if the file or directory to read does not exist."""
        for delay_seconds in [*(RETRY_SECONDS if retry else ()), None]:
            try:
                return getattr(self.fs, method)(*arguments, **keywords)
            except Exception as error:  # each file system raises its own exception types
                if isinstance(error, FileNotFoundError) and method in ("cat_file", "ls"):
                    return None
                if delay_seconds is None:
                    raise CheckpointError(summarize(error, "sentence")) from error
                time.sleep(delay_seconds)

    def read_json(self, name: str) -> dict[str, Any]:
        """Return a JSON file's content, or an empty dict if it does not exist or was not fully written."""
        try:
            content = json.loads(self.attempt("cat_file", f"{self.root}/{name}") or "{}")
        except ValueError:
            return {}
        return content if isinstance(content, dict) else {}

    def rename_manifest(self, checkpoint: layout.Checkpoint, name: str) -> None:
        """Make a checkpoint incomplete without deleting its files: rename its manifest to `name`."""
        directory = f"{self.root}/{checkpoint.path}"
        self.attempt("mv", f"{directory}/{layout.MANIFEST}", f"{directory}/{name}")

    def remove(self, checkpoint: layout.Checkpoint) -> None:
        """Delete a checkpoint. It is made incomplete first, so that no run resumes from it if the deletion is interrupted."""
        if checkpoint.is_complete:
            self.rename_manifest(checkpoint, UNFINISHED)
        self.fs.invalidate_cache()
        self.attempt("rm", f"{self.root}/{checkpoint.path}", True)

    def list_checkpoints(self) -> list[layout.Checkpoint]:
        """Return all checkpoints, sorted by step; their paths are relative to the URL's directory."""
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
