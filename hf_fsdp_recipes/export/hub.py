"""Pushes checkpoints and exports to the Hub from a separate process, while training goes on.

huggingface_hub skips files that are already uploaded, so an interrupted push continues where it stopped. A repository is
private unless `hub_private_repo` is false. A failed push does not end the run; it logs a warning with the command to retry.
This module writes to `<output_dir>/.hub` only.
"""

import logging
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from hf_fsdp_recipes.checkpointing.layout import is_checkpoint_name
from hf_fsdp_recipes.errors import RecipeError, summarize
from hf_fsdp_recipes.export.from_checkpoint import export_checkpoint

if TYPE_CHECKING:
    from transformers import TrainingArguments

logger = logging.getLogger(__name__)
# Variables that the launcher sets for each rank. They are removed for the push process, which is not a rank.
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
# Files in the repository that are deleted unless they are pushed again: left-over weights of an earlier push would be loaded.
WEIGHT_FILES = [
    f"{name}{part}"
    for name in ("model", "adapter_model")
    for part in (".safetensors", "-*-of-*.safetensors", ".safetensors.index.json")
] + ["adapter_config.json"]
RANK_PREFIXES = ("ACCELERATE_", "FSDP_", "TORCHELASTIC_", "PARALLELISM_CONFIG_")


@dataclass(frozen=True)
class HubTarget:
    """Where and what to push, as set by Trainer's own arguments."""

    repo_id: str  # `hub_model_id`, or the output directory's name
    # `hub_strategy`: all values push the export when the run ends. All but `end` also push checkpoints, converted to models.
    # `checkpoint` and `all_checkpoints` also push the checkpoint itself, as `last-checkpoint` or under its own name.
    strategy: str = "every_save"
    is_private: bool = True  # unless `hub_private_repo` is false
    token: str | None = None  # `hub_token`; None uses HF_TOKEN or the token of `hf auth login`


def read_target(training: "TrainingArguments", needs_access: bool = True) -> HubTarget | None:
    """Return the target that Trainer's arguments describe; raise a RecipeError for an invalid repository id.

    Returns None if `push_to_hub` is off. With `needs_access`, also raises a RecipeError if there is no token or if
    HF_HUB_OFFLINE is set.
    """
    if not training.push_to_hub:
        return None
    from huggingface_hub import constants, get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    repo_id = training.hub_model_id or Path(str(training.output_dir)).name
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise RecipeError(f"hub_model_id is {training.hub_model_id}: {error} Set it to user/name.") from error
    if needs_access and constants.HF_HUB_OFFLINE:
        raise RecipeError("push_to_hub is on, but HF_HUB_OFFLINE is set. Unset one of them.")
    if needs_access and not (training.hub_token or get_token()):
        raise RecipeError(
            "push_to_hub is on, but there is no Hub token with write access. Run hf auth login, set HF_TOKEN, or set "
            "push_to_hub: false."
        )
    return HubTarget(
        repo_id,
        str(getattr(training.hub_strategy, "value", training.hub_strategy)),
        training.hub_private_repo is not False,
        training.hub_token,
    )


class Pusher:
    """Pushes a run's checkpoints and export, one at a time. Rank 0 only; no collectives."""

    def __init__(self, target: HubTarget, output_dir: str | os.PathLike[str]) -> None:
        self.target = target
        self._folder = Path(output_dir).resolve() / ".hub"
        self._process: subprocess.Popen[str] | None = None
        self._output: IO[str] | None = None  # a file, because a full pipe would block the process
        self._source: Path | None = None
        self._last_checkpoint: Path | None = None

    @property
    def source(self) -> Path | None:
        """The checkpoint or export that is being pushed; it must not be deleted meanwhile."""
        return self._source if self._process is not None and self._process.poll() is None else None

    def push_checkpoint(self, checkpoint: Path) -> None:
        """Start to push a complete checkpoint, unless it was passed before, another push is running or the strategy is `end`."""
        is_new, self._last_checkpoint = checkpoint != self._last_checkpoint, checkpoint
        if not is_new or self.target.strategy == "end" or self.source is not None:
            return
        self._report()
        self._start(checkpoint)

    def push_export(self, export: Path) -> bool:
        """Push the final export and wait for it. Returns whether it succeeded."""
        if self._process is not None:
            self._process.wait()
            self._report()
        self._start(export)
        assert self._process is not None
        self._process.wait()
        is_pushed = self._report()
        shutil.rmtree(self._folder, ignore_errors=True)
        return is_pushed

    def _start(self, source: Path) -> None:
        visibility = "private" if self.target.is_private else "public"
        command = [sys.executable, "-m", "hf_fsdp_recipes.export.hub", str(source), str(self._folder)]
        command += [self.target.repo_id, self.target.strategy, visibility]
        environment = {
            key: value
            for key, value in os.environ.items()
            if key not in RANK_VARIABLES and not key.startswith(RANK_PREFIXES)
        }
        environment["CUDA_VISIBLE_DEVICES"] = ""  # training needs the GPUs' memory
        if self.target.token:
            environment["HF_TOKEN"] = self.target.token
        self._source = source
        self._output = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - `_report` closes it
        self._process = subprocess.Popen(
            command, env=environment, stdout=self._output, stderr=subprocess.STDOUT, text=True
        )

    def _report(self) -> bool:
        if self._process is None:
            return True
        assert self._output is not None and self._source is not None
        with self._output as output:
            output.seek(0)
            lines = [line for line in output.read().splitlines() if line.strip()] or ["no output"]
        is_pushed = self._process.returncode == 0
        if is_pushed:
            print(lines[-1], flush=True)
        else:
            repo, source = self.target.repo_id, str(self._source)
            retry = f"hf upload {repo} {source}"
            if is_checkpoint_name(self._source.name):  # its files are no model
                retry = f"hf-fsdp export {source} {source}-model && hf upload {repo} {source}-model"
            logger.warning("push to %s failed (%s). The files are intact. To retry: %s", repo, lines[-1], retry)
        self._process = None
        return is_pushed


def upload(source: Path, repo: str, strategy: str, is_private: bool, folder: Path) -> str:
    """Upload an export, or a checkpoint converted to a model; return the URL.

    With the strategies `checkpoint` and `all_checkpoints`, also upload the checkpoint itself.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    repo = api.create_repo(repo, private=is_private, exist_ok=True).repo_id
    if not is_checkpoint_name(source.name):
        return _upload_model(repo, source, "End of training")
    message = f"Training in progress, {source.name.replace('-', ' ')}"
    if strategy in ("checkpoint", "all_checkpoints"):
        name = "last-checkpoint" if strategy == "checkpoint" else source.name
        api.upload_folder(repo_id=repo, folder_path=source, path_in_repo=name, commit_message=message)
    model = export_checkpoint(source, folder / "model")
    return _upload_model(repo, model, message)


def _upload_model(repo: str, model: Path, message: str) -> str:
    from huggingface_hub import HfApi

    return str(
        HfApi().upload_folder(repo_id=repo, folder_path=model, commit_message=message, delete_patterns=WEIGHT_FILES)
    )


def main() -> None:
    """Push one directory. The last line of stdout reports the URL, or the reason why the push failed."""
    source, folder, repo, strategy, visibility = sys.argv[1:]
    os.nice(10)  # training comes first
    try:
        url = upload(Path(source), repo, strategy, visibility == "private", Path(folder))
    except Exception as error:  # huggingface_hub raises many types
        print(f"{type(error).__name__}: {summarize(error, 'line')}")
        sys.exit(1)
    print(f"pushed: {Path(source).name} to {url}")


if __name__ == "__main__":
    main()
