"""Runs a recipe with bad input on ranks, and checks that every rank refuses it, with one clear message.

Rank 0 prints an error that the ranks share. Each rank prints any other error, unless its launcher ends the rank first. There is
no launcher here, so every rank prints, and the messages must be the same.

A refusal changes nothing: the folder that holds `output_dir` has the same files afterwards. Three changes are allowed, because
they hold no data: a missing `output_dir` may become an empty directory, an existing one may get a lock file, and access times
may change.
"""

import ctypes
import hashlib
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_fsdp_recipes.checkpointing.lock import LOCK_FILE
from hf_fsdp_recipes.environment import is_true

from tests.ranks.harness import run_ranks
from tests.recipes.launching import run_recipe

NUM_RANKS = 2
LIMIT_SECONDS = 15.0  # on an idle machine
HANG_SECONDS = 120.0
MAX_SENTENCES = 3  # two of ours, and one that quotes upstream
MAX_CHARACTERS = 600  # without the paths of the test
ERROR_LINE = re.compile(r"^([A-Z]\w*Error): (.+)$")
LOSS = re.compile(r"\{'loss'|'train_runtime'")  # Trainer's log
VERBS = (
    "Accept Add Allow Call Change Check Choose Convert Copy Correct Delete Download Drop Export Fix Free Give "
    "Install Keep Leave List Load Lower Make Move Name Pass Prepare Put Quote Raise Reduce Remove Rename Repair Replace "
    "Resume Retrain Run Save Select Set Split Start Store Tokenize Train Turn Unset Use Write"
)
# A message says what to do with a verb at the start of a sentence or clause, or with a list of the possible values.
CURE = re.compile(
    rf"(?:^|[.?;:,'\")\]] +|\bor |\band |\bwith )(?:{'|'.join(VERBS.split())})\b|\bone of\b|\bIt has\b", re.IGNORECASE
)


@dataclass(frozen=True)
class Refusal:
    """How one rank ended.

    Attributes:
        status: its exit status; 0 means that the run succeeded.
        seconds: from the start to the end of the script, without the time that ranks waited for a core of a busy machine.
        output: its stdout and stderr.
    """

    status: Any
    seconds: float
    output: str

    @property
    def errors(self) -> list[str]:
        return [line for line in self.output.splitlines() if ERROR_LINE.match(line)]


def run_recipe_captured(
    argv: Sequence[str], folder: Path, prepare: Callable[[], None] | None = None
) -> tuple[Any, float, float, float]:
    """Run recipes/sft.py as one rank, after `prepare`, with its output in `folder`/rank<n>.txt.

    Returns:
        The exit status; the seconds that passed, that the rank used a core, and that it waited for a core.
    """
    from huggingface_hub import constants

    from hf_fsdp_recipes import distributed

    distributed.EXIT_WAIT_SECONDS = 1.0  # there is no launcher to wait for
    constants.HF_HUB_OFFLINE = is_true(os.environ.get("HF_HUB_OFFLINE"))  # read before this process was forked
    os.chdir(folder)
    descriptor = os.open(folder / f"rank{os.environ['RANK']}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    respect_permissions()
    if prepare is not None:
        prepare()
    started, used, waited, status = time.monotonic(), time.process_time(), seconds_waited_for_a_core(), 0
    try:
        run_recipe(argv)
    except SystemExit as error:
        status = error.code or 0
    except BaseException:
        traceback.print_exc()
        status = "uncaught exception"
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    waited = seconds_waited_for_a_core() - waited
    return status, time.monotonic() - started, time.process_time() - used, waited


def seconds_waited_for_a_core() -> float:
    """Return how many seconds this process waited for a core that others used; 0 if the system does not report it."""
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def respect_permissions() -> None:
    """Make this process obey file permissions even as root."""
    if os.geteuid() != 0:
        return
    library = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable, low and high words
    if library.capget(header, sets) == 0:
        sets[0] &= ~0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        library.capset(header, sets)


def run(
    argv: Sequence[str], folder: Path, environment: dict[str, str], prepare: Callable[[], None] | None = None
) -> list[Refusal]:
    """Run the recipe on the ranks and return one refusal per rank. A hang fails the test with the ranks' output so far."""
    try:
        results = run_ranks(
            run_recipe_captured, NUM_RANKS, argv, folder, prepare, environment=environment, timeout_seconds=HANG_SECONDS
        )
    except BaseException as error:
        printed = "\n".join(f"--- {file.name}\n{file.read_text()[-2000:]}" for file in sorted(folder.glob("rank*.txt")))
        raise AssertionError(f"hang or crash: {error}\n{printed}") from None
    outputs = [(folder / f"rank{rank}.txt").read_text(errors="replace") for rank in range(NUM_RANKS)]
    # A rank also waits while another rank waits for a core.
    waited_seconds = sum(waited for _, _, _, waited in results)
    return [
        Refusal(status, max(used, seconds - waited_seconds), text)
        for (status, seconds, used, _), text in zip(results, outputs, strict=True)
    ]


def find_faults(refusals: Sequence[Refusal], says: Sequence[str], paths: Sequence[Path]) -> list[str]:
    """Return everything that is wrong with how the ranks refused an input.

    Args:
        refusals: one per rank.
        says: patterns for the message, in any case: the offending value, and what to do if that needs an unusual word.
        paths: directories of the test, which do not count towards the length of the message.
    """
    if all(one.status == 0 for one in refusals):
        return ["the run succeeded"]
    faults = [f"rank {r} ended with status {one.status}" for r, one in enumerate(refusals) if one.status != 1]
    faults += [f"rank {r} printed a traceback" for r, one in enumerate(refusals) if "Traceback" in one.output]
    if any(LOSS.search(one.output) for one in refusals):
        faults.append("trained before it failed")
    slowest = max(one.seconds for one in refusals)
    if slowest > LIMIT_SECONDS:
        faults.append(f"took {slowest:.0f} s")
    found = [one.errors for one in refusals]
    counts = [len(errors) for errors in found]
    if counts[0] != 1 or max(counts) > 1:
        return [*faults, f"{counts} error lines instead of one per rank, or one from rank 0"]
    if len({error for errors in found for error in errors}) > 1:
        faults.append("the ranks' messages differ")
    for rank, one in enumerate(refusals):
        if found[rank] and one.output.rstrip().splitlines()[-1] != found[rank][0]:
            faults.append(f"rank {rank} printed more after its message")
    return faults + _message_faults(found[0][0], says, paths)


def _message_faults(line: str, says: Sequence[str], paths: Sequence[Path]) -> list[str]:
    match = ERROR_LINE.match(line)
    assert match
    message = match.group(2)
    faults = [f"does not say {words!r}" for words in says if not re.search(words, message, re.IGNORECASE)]
    if not CURE.search(message):
        faults.append("does not say what to do")
    for path in paths:
        message = message.replace(str(path), "")
    num_sentences = len(re.findall(r"[.!?](?= |$)", message))
    if num_sentences > MAX_SENTENCES:
        faults.append(f"has {num_sentences} sentences")
    if len(message) > MAX_CHARACTERS:
        faults.append(f"has {len(message)} characters")
    return faults


def describe_tree(folder: Path) -> dict[str, str]:
    """Return the kind and content of everything in a folder, by relative path. Follows no links."""
    return {str(path.relative_to(folder)): _describe(path) for path in sorted(folder.rglob("*"))}


def _describe(path: Path) -> str:
    if path.is_symlink():
        return f"link to {os.readlink(path)}"
    if path.is_dir():
        return "directory"
    return f"file {hashlib.sha256(path.read_bytes()).hexdigest()}"


def find_changes(before: dict[str, str], after: dict[str, str], output_dir: str) -> list[str]:
    """Return what a refused run changed on disk, except for the changes that are allowed (see the module)."""
    allowed = {f"{output_dir}/{LOCK_FILE}"}
    if not any(path.startswith(f"{output_dir}/") for path in after):
        allowed.add(output_dir)  # an empty directory
    kinds = {
        "created": [path for path in after if path not in before and path not in allowed],
        "removed": [path for path in before if path not in after],
        "changed": [path for path in before if path in after and after[path] != before[path] and path not in allowed],
    }
    return [f"{kind} {', '.join(paths[:3])} ({len(paths)} in all)" for kind, paths in kinds.items() if paths]
