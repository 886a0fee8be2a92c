"""Random damage to a checkpoint or an export is detected or harmless; damaged files never load with other values.

`make test` runs a fast profile; the slow tests run 1,000 examples each.
"""

import os
import pickle
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hf_fsdp_recipes import export_checkpoint, export_model, latest_checkpoint, load_model
from hf_fsdp_recipes.checkpointing import dcp_reader, layout
from hf_fsdp_recipes.checkpointing.verification import check_named
from hf_fsdp_recipes.errors import CheckpointError, ExportError, LoadError
from hf_fsdp_recipes.export.load_export import load_export
from tests.checkpointing.payload import Payload
from tests.ranks.harness import run_ranks

pytestmark = pytest.mark.ranks  # the fixture trains on two ranks
SLOW = [pytest.mark.slow, pytest.mark.timeout(1800)]
FEW = pytest.param(10, id="fast")  # examples of the slower checks
PROFILES = [pytest.param(25, id="fast"), pytest.param(1000, id="slow", marks=SLOW)]
MARK = "ran"  # created by a payload that runs
NEW_NAMES = [
    "notes.txt",
    ".hidden",
    "manifest.json.bak",
    "pytorch_model_fsdp_0/__2_0.distcp",
    "rng_state_2.pth",
    "model.bin",
    "model.safetensors.index.json",
    "adapter_config.json",
]


@dataclass(frozen=True)
class Mutation:
    """One change to a directory. `place` and `other` choose files, `at` a position in a file; all are fractions."""

    kind: str
    place: float
    other: float
    at: float
    value: int

    def apply(self, directory: Path) -> str:
        """Change the directory; return what was done."""
        names = sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
        name, other = (names[int(fraction * len(names))] for fraction in (self.place, self.other))
        file, second = directory / name, directory / other
        content = file.read_bytes()
        position = int(self.at * len(content))
        if self.kind == "flip" and content:
            changed = bytearray(content)
            changed[position] ^= self.value
            file.write_bytes(changed)
        elif self.kind == "truncate":
            file.write_bytes(content[:position])
        elif self.kind == "extend":
            file.write_bytes(content + bytes([self.value]))
        elif self.kind == "remove":
            file.unlink()
        elif self.kind == "swap":
            file.write_bytes(second.read_bytes())
            second.write_bytes(content)
        elif self.kind in ("rename", "add"):
            new = directory / NEW_NAMES[self.value % len(NEW_NAMES)]
            new.parent.mkdir(exist_ok=True)
            new.write_bytes(content)
            if self.kind == "rename":
                file.unlink()
        elif self.kind == "payload":
            file.write_bytes(pickle.dumps(Payload(directory.parent / MARK)))
        elif self.kind in ("link", "dangling link", "directory"):
            file.unlink()
            if self.kind == "directory":
                file.mkdir()
            else:
                file.symlink_to(second if self.kind == "link" else directory / "nowhere")
        return f"{self.kind} {name}"


KINDS = [
    *("flip", "truncate", "extend", "remove", "swap", "rename", "add", "payload"),
    *("link", "dangling link", "directory"),
]
fractions = st.floats(0, 1, exclude_max=True)
mutations = st.builds(Mutation, st.sampled_from(KINDS), fractions, fractions, fractions, st.integers(1, 255))


def check_many(num_examples, check):
    """Check a property on random mutations, which are the same in every run."""
    run = settings(
        max_examples=num_examples, deadline=None, database=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )(given(mutations)(check))  # fmt: skip
    for kind in KINDS:  # each kind at least once, also in the fast profile
        run = example(Mutation(kind, 0.4, 0.6, 0.5, 1))(run)
    run()


def loaded_from(checkpoint):
    """Return everything that a resumed run reads from a checkpoint: tensors, and the bytes of the small files."""
    found = {}
    if (checkpoint / "optimizer.pt").exists():  # Trainer's own checkpoint
        names = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth")
        return {name: (checkpoint / name).read_bytes() for name in (*names, "trainer_state.json", "train_params.yaml")}
    for part in ("pytorch_model_fsdp_0", "optimizer_0"):
        for name, tensor in dcp_reader.read_index(checkpoint / part).items():
            found[part, name] = tensor.read(0, torch.Size(tensor.shape).numel()).reshape(tensor.shape)
    names = ("rng_state_0.pth", "rng_state_1.pth", "scheduler.pt", "trainer_state.json", "train_params.yaml")
    return found | {("file", name): (checkpoint / name).read_bytes() for name in names}


def is_same(one, other):
    if one.keys() != other.keys():
        return False
    return all(
        torch.equal(value, other[key]) if isinstance(value, torch.Tensor) else value == other[key]
        for key, value in one.items()
    )


def is_accepted(checkpoint):
    """Return whether a checkpoint can be resumed from if the user names it."""
    try:
        check_named(checkpoint)
    except CheckpointError:
        return False
    return True


def fresh_copy(source, target):
    shutil.rmtree(target.parent, ignore_errors=True)
    shutil.copytree(source, target)
    return target


@pytest.fixture(scope="module")
def run_without_fsdp(tiny_model, text_file, tmp_path_factory):
    """An output directory with Trainer's own checkpoint-2, completed with a manifest."""
    from tests.checkpointing.test_without_fsdp_ranks import ENVIRONMENT, _refused

    output = tmp_path_factory.mktemp("without-fsdp")
    run_ranks(_refused, 1, tiny_model("llama"), text_file, output, environment=ENVIRONMENT)
    return output


@pytest.mark.parametrize("kind", ["run", "run_without_fsdp"])
@pytest.mark.parametrize("num_examples", PROFILES)
def test_mutated_checkpoint_is_detected_or_the_same(request, tmp_path, num_examples, kind):
    run = request.getfixturevalue(kind)
    original = loaded_from(run / "checkpoint-2")
    outcomes = {"detected": 0, "the same": 0}

    def check(mutation):
        checkpoint = fresh_copy(run / "checkpoint-2", tmp_path / "copy" / "checkpoint-2")
        done = mutation.apply(checkpoint)
        is_complete = layout.validate(checkpoint, verify=True) is None
        assert (latest_checkpoint(checkpoint.parent) is not None) == is_complete, done
        # `auto` skips a checkpoint without a manifest, but the user may name it; then its content must be unchanged.
        assert is_accepted(checkpoint) == (is_complete or not (checkpoint / layout.MANIFEST).is_file()), done
        if is_accepted(checkpoint):
            assert is_same(loaded_from(checkpoint), original), done
        outcomes["the same" if is_complete else "detected"] += 1
        assert not (checkpoint.parent / MARK).exists(), done

    check_many(num_examples, check)
    print(f"\n{sum(outcomes.values())} mutations of a checkpoint ({kind}): {outcomes}")
    assert all(outcomes.values())


@pytest.mark.parametrize("num_examples", PROFILES)
def test_mutated_checkpoint_is_exported_as_it_was_or_not_at_all(run, tiny_model, tmp_path, num_examples):
    expected = export_checkpoint(run / "checkpoint-2", tmp_path / "expected", base_model=tiny_model("llama"))
    weights = (expected / "model.safetensors").read_bytes()
    outcomes = {"refused": 0, "the same": 0}

    def check(mutation):
        checkpoint = fresh_copy(run / "checkpoint-2", tmp_path / "copy" / "checkpoint-2")
        done = mutation.apply(checkpoint)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        try:
            export_checkpoint(checkpoint, tmp_path / "out")
        except ExportError as error:
            assert "Traceback" not in str(error), done
            outcomes["refused"] += 1
        else:
            assert (tmp_path / "out" / "model.safetensors").read_bytes() == weights, done
            outcomes["the same"] += 1
        assert not (checkpoint.parent / MARK).exists(), done

    check_many(num_examples, check)
    print(f"\n{sum(outcomes.values())} mutations, exported: {outcomes}")
    assert all(outcomes.values())


def tensors_of(model):
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("load", [load_export, load_model])
@pytest.mark.parametrize("num_examples", PROFILES)
def test_mutated_export_is_refused_or_loaded_as_it_was(run, tmp_path, num_examples, load):
    outcomes = {"refused": 0, "loaded": 0}
    expected = tensors_of(load_export(run / "export"))
    names = set(os.listdir(run / "export"))

    def check(mutation):
        export = fresh_copy(run / "export", tmp_path / "copy" / "export")
        done = mutation.apply(export)
        try:
            model = load(export)
        except (ExportError, LoadError) as error:
            assert "Traceback" not in str(error), done
            outcomes["refused"] += 1
        else:
            assert is_same(tensors_of(model), expected), done
            outcomes["loaded"] += 1
        assert not (export.parent / MARK).exists(), done

    assert {"config.json", "model.safetensors"} <= names
    check_many(num_examples, check)
    print(f"\n{sum(outcomes.values())} mutations of an export ({load.__name__}): {outcomes}")
    assert all(outcomes.values())


@pytest.fixture(scope="module")
def adapter_and_base(tiny_model, tmp_path_factory):
    """Return a directory with two exports: `adapter`, and `base`, which the adapter records as its base model."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = tmp_path_factory.mktemp("adapter") / "exports"
    source = tiny_model("llama")
    tokenizer = AutoTokenizer.from_pretrained(source)
    base = export_model(AutoModelForCausalLM.from_pretrained(source), directory / "base", tokenizer=tokenizer)
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    torch.manual_seed(0)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora)
    export_model(model, directory / "adapter", tokenizer=tokenizer)
    return directory


def merged_from(adapter, output):
    """Merge an exported adapter into its base model; return the bytes of weights, config and tokenizer."""
    shutil.rmtree(output, ignore_errors=True)
    export_checkpoint(adapter, output, merge_adapter=True)
    return {name: (output / name).read_bytes() for name in ("model.safetensors", "config.json", "tokenizer.json")}


def loaded_with_adapter(adapter, output):
    return tensors_of(load_export(adapter))


def loaded_on_base(adapter, output):
    """Pass the adapter's directory to `load_model`, which loads the adapter's base model."""
    return tensors_of(load_model(adapter))


@pytest.mark.parametrize("read", [merged_from, loaded_with_adapter, loaded_on_base])
@pytest.mark.parametrize("num_examples", [FEW, PROFILES[1]])
def test_mutated_adapter_or_base_model_is_refused_or_the_same(adapter_and_base, tmp_path, num_examples, read):
    pristine = shutil.copytree(adapter_and_base, tmp_path / "pristine")
    expected = read(adapter_and_base / "adapter", tmp_path / "out")
    outcomes = {"refused": 0, "the same": 0}

    def check(mutation):
        fresh_copy(pristine, adapter_and_base)
        done = mutation.apply(adapter_and_base / ("base" if mutation.other < 0.7 else "adapter"))
        try:
            found = read(adapter_and_base / "adapter", tmp_path / "out")
        except (ExportError, LoadError) as error:
            assert "Traceback" not in str(error), done
            outcomes["refused"] += 1
        else:
            assert is_same(found, expected), done
            outcomes["the same"] += 1
        assert not (adapter_and_base / MARK).exists(), done

    check_many(num_examples, check)
    fresh_copy(pristine, adapter_and_base)
    print(f"\n{sum(outcomes.values())} mutations of an adapter or its base model ({read.__name__}): {outcomes}")
    assert all(outcomes.values())
