"""The installed versions have the private names that this package uses; they do what it needs."""

import dataclasses
import functools
import inspect
import pkgutil
import sys
from argparse import Namespace
from importlib.metadata import version

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin, PartialState
from accelerate.state import AcceleratorState
from packaging.version import Version
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.tensor import DTensor, Shard
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer

from hf_fsdp_recipes import ShardedCheckpointCallback
from hf_fsdp_recipes.errors import PatchError
from hf_fsdp_recipes.upstream import (
    accelerate_internals,
    patches,
    torch_internals,
    transformers_internals,
)
from hf_fsdp_recipes.upstream.versions import TESTED

SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip
has_planner = pytest.mark.skipif(
    Version(version("trl")) < Version("1.16"), reason="hf-fsdp plan needs TRL 1.16"
)


@pytest.fixture
def llama():
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))


@pytest.fixture
def experts():
    sizes = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "head_dim": 8}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **sizes))


@pytest.fixture
def sharded():
    """Return a DTensor of a process group with one rank."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    yield DTensor.from_local(torch.zeros(4), mesh, [Shard(0)])
    torch.distributed.destroy_process_group()


def parameters_of(function):
    return list(inspect.signature(function).parameters)


# What is set: it does what it should, and after a rename upstream, there is one error.


def rename(monkeypatch, owner, function):
    """Replace an upstream function with one that reads another name."""
    original = getattr(owner, function.__name__)
    function.__module__ = original.__module__
    file = original.__code__.co_filename
    function.__code__ = function.__code__.replace(co_filename=file)
    monkeypatch.setattr(owner, function.__name__, function)


def check_error(error, package, name):
    for text in (name, version(package), f"{TESTED[package]} is tested", "work"):
        assert text in str(error.value)


def test_a_dtensor_gets_another_local_tensor(sharded):
    local = torch.ones(4)
    torch_internals.set_local_tensor(sharded, local)
    with torch.no_grad():
        assert sharded.to_local() is local


def test_a_renamed_local_tensor_is_an_error(monkeypatch, sharded):
    class Renamed:
        __module__ = DTensor.__module__

    renamed = Renamed()
    with pytest.raises(PatchError) as error:
        torch_internals.set_local_tensor(renamed, torch.ones(4))
    check_error(error, "torch", "_local_tensor")
    assert vars(renamed) == {}


def test_each_folder_has_its_own_plan():
    def plan(folder):
        planner = torch_internals.make_save_planner(folder)
        planner.set_up_planner({"weight": torch.zeros(2)}, is_coordinator=True)
        found = planner.create_local_plan()
        planner.finish_plan(found)
        return found

    assert plan("a folder").usable
    assert not plan("a folder").usable  # so it is not sent
    assert plan("another folder").usable


@pytest.mark.parametrize(
    ("kind", "name"), [(DefaultSavePlanner, "_cached_plans_key"), (FileSystemWriter, "fs")]
)
def test_a_renamed_attribute_of_saving_is_an_error_before_training(monkeypatch, kind, name):
    class Renamed(kind):
        __module__ = kind.__module__

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            del vars(self)[name]

    monkeypatch.setattr(Trainer, "_inner_training_loop", Trainer._inner_training_loop)
    monkeypatch.setattr(torch_internals, kind.__name__, Renamed)
    with pytest.raises(PatchError) as error:
        ShardedCheckpointCallback()
    check_error(error, "torch", name)


def test_only_classes_that_a_model_has_become_units(llama):
    llama._no_split_modules = ["LlamaDecoderLayer", "LlamaVisionLayer"]
    transformers_internals.keep_present_units(llama)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap"
    )
    plugin.set_auto_wrap_policy(llama)
    assert set(plugin.transformer_cls_names_to_wrap) == {"LlamaDecoderLayer"}


def test_renamed_units_are_an_error(monkeypatch, llama):
    def set_auto_wrap_policy(self, model):
        return getattr(model, "_fsdp_units", None)

    rename(monkeypatch, FullyShardedDataParallelPlugin, set_auto_wrap_policy)
    llama._no_split_modules = before = ["LlamaVisionLayer"]
    with pytest.raises(PatchError) as error:
        transformers_internals.keep_present_units(llama)
    check_error(error, "accelerate", "_no_split_modules")
    assert llama._no_split_modules is before


def test_conversions_decide_how_files_are_written(experts):
    state = experts.state_dict()
    revert = transformers_internals.revert_weight_conversion
    assert revert(experts, state).keys() != state.keys()  # one tensor for each expert
    transformers_internals.set_conversions(experts, None)
    assert getattr(experts, transformers_internals.CONVERSIONS, None) is None
    transformers_internals.set_conversions(experts, [])
    assert revert(experts, state).keys() == state.keys()


def test_renamed_conversions_are_an_error(monkeypatch, llama):
    def revert_weight_conversion(model, state_dict):
        return getattr(model, "_conversions_of_files", state_dict)

    rename(monkeypatch, transformers_internals, revert_weight_conversion)
    with pytest.raises(PatchError) as error:
        transformers_internals.set_conversions(llama, [])
    check_error(error, "transformers", "_weight_conversions")
    assert not hasattr(llama, "_weight_conversions")


@pytest.mark.parametrize("wrap", [functools.wraps, lambda original: lambda wrapper: wrapper])
def test_a_function_that_another_package_has_wrapped_is_not_an_error(monkeypatch, experts, wrap):
    original = transformers_internals.revert_weight_conversion

    @wrap(original)
    def timed(*args):
        return original(*args)

    monkeypatch.setattr(transformers_internals, "revert_weight_conversion", timed)
    transformers_internals.set_conversions(experts, [])
    assert getattr(experts, transformers_internals.CONVERSIONS) == []


# What is read or called.


def test_torch_makes_placeholders():
    class Loud(torch.nn.Parameter):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            return torch_internals.run_on_plain_tensors(function, types, args, kwargs or {})

    parameter = torch_internals.make_parameter(Loud, torch.ones(2), False)
    assert type(parameter) is Loud
    assert type(parameter + 1) is torch.Tensor


def test_torch_adds_known_parts_to_names():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    wrapped = torch.compile(torch.nn.Sequential(checkpoint_wrapper(torch.nn.Linear(2, 2))))
    names = [name for name, _ in wrapped.named_parameters()]
    assert all(name.startswith(torch_internals.COMPILED) for name in names)
    found = [torch_internals.checkpoint_name(wrapped, name) for name in names]
    assert found == ["0.weight", "0.bias"]


def test_metadata_files_name_existing_classes():
    for module, names in torch_internals.PICKLED_IN_METADATA.items():
        if module != "pathlib._local" or sys.version_info >= (3, 13):
            assert all(pkgutil.resolve_name(f"{module}:{name}") for name in names)
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    fields = {field.name for field in dataclasses.fields(_StorageInfo)}
    assert {"relative_path", "offset", "length", "transform_descriptors"} <= fields


def test_a_checkpoint_is_written_through_a_file_system(tmp_path):
    writer = FileSystemWriter(tmp_path)
    assert parameters_of(writer.fs.create_stream) == ["path", "mode"]


def test_meta_views_share_their_storage():
    tensor = torch.empty(4, device="meta")
    first, view, other = (
        torch_internals.StorageWeakRef(value.untyped_storage())
        for value in (tensor, tensor[1:], torch.empty(4, device="meta"))
    )
    assert first == view != other


def test_a_model_has_its_private_methods(llama):
    build = transformers_internals.get_builder(LlamaForCausalLM)
    assert build(llama.config, dtype=torch.bfloat16).dtype == torch.bfloat16
    llama._keep_in_fp32_modules_strict = {"norm"}
    plan = transformers_internals.plan_dtypes(llama, torch.bfloat16)
    assert plan == {"norm": torch.float32}
    assert transformers_internals.names_not_saved(llama) == set()
    assert getattr(llama.config, transformers_internals.ATTENTION)
    value = transformers_internals.new_value(llama, "lm_head.weight")
    assert value.shape == (32, 16) and 0 < value.std() < 0.1


def test_a_model_has_what_is_read_with_a_default(llama):
    assert llama.all_tied_weights_keys == {"lm_head.weight": "model.embed_tokens.weight"}
    assert llama.config.name_or_path == ""


def test_a_trainer_has_its_private_methods():
    assert parameters_of(getattr(Trainer, transformers_internals.GET_OUTPUT_DIR)) == [
        "self",
        "trial",
    ]
    assert len(parameters_of(getattr(Trainer, transformers_internals.PUSH_CHECKPOINT))) == 2
    used = inspect.getsource(Trainer._save_checkpoint)
    assert transformers_internals.GET_OUTPUT_DIR in used
    assert transformers_internals.PUSH_CHECKPOINT in inspect.getsource(Trainer)


def test_conversions_have_what_loading_needs(experts):
    conversions = transformers_internals.get_model_conversion_mapping(experts, None, None)
    kinds = (transformers_internals.WeightConverter, transformers_internals.WeightRenaming)
    converters = [one for one in conversions if isinstance(one, kinds[0])]
    assert converters and all(isinstance(one, kinds) for one in conversions)
    for name in ("source_patterns", "target_patterns", "was_used", "add_tensor", "convert"):
        assert hasattr(converters[0], name)
    assert {"source_key", "base_model_prefix", "meta_state_dict"} <= set(
        parameters_of(transformers_internals.rename_source_key)
    )
    assert sorted(["10", "9"], key=transformers_internals.dot_natural_key) == ["9", "10"]


def test_transformers_has_the_other_functions(llama):
    with transformers_internals.local_torch_dtype(torch.bfloat16):
        assert torch.empty(1).dtype == torch.bfloat16
    with transformers_internals.no_init_weights():
        LlamaForCausalLM(llama.config)
    with torch.device("meta"), transformers_internals.meta_device_safe_creation_ops():
        assert torch.linspace(0, 1, 3)[1].item() == 0.5
    assert transformers_internals.str_to_torch_dtype["BF16"] == torch.bfloat16
    kept = transformers_internals.remove_tied_weights_from_state_dict(llama.state_dict(), llama)
    assert "lm_head.weight" not in kept
    parameters = parameters_of(transformers_internals.custom_object_save)
    assert parameters[:3] == ["obj", "folder", "config"]
    config = transformers_internals.AutoQuantizationConfig.from_dict(
        {"quant_method": "mxfp4", "dequantize": True}
    )
    quantizer = transformers_internals.AutoHfQuantizer.from_config(config, pre_quantized=True)
    assert quantizer.pre_quantized and quantizer.quantization_config.dequantize


def test_the_launcher_can_be_called(tmp_path):
    parser = accelerate_internals.launch_command_parser()
    script = str(tmp_path / "train.py")
    (tmp_path / "config.yaml").write_text("distributed_type: FSDP\nnum_processes: 2\n")
    config = ["--config_file", str(tmp_path / "config.yaml"), "--main_process_port", "0"]
    arguments, *_ = accelerate_internals.validate_launch_command(
        parser.parse_args([*config, "--fsdp_version", "2", script, "--x"])
    )
    assert isinstance(arguments, Namespace) and arguments.training_script_args == ["--x"]
    environment = accelerate_internals.prepare_multi_gpu_env(arguments)
    assert environment["ACCELERATE_USE_FSDP"] == "true"
    assert environment["FSDP_VERSION"] == "2"
    assert parameters_of(accelerate_internals.launch_command) == ["args"]
    assert "fsdp_config" in accelerate_internals.ClusterConfig.__dataclass_fields__
    assert isinstance(accelerate_internals.is_initialized(), bool)


def test_accelerates_state_is_shared():
    for kind in (AcceleratorState, PartialState):
        assert hasattr(kind._shared_state, "get")
    assert parameters_of(PartialState._reset_state) == []
    assert "_mixed_precision" in inspect.getsource(AcceleratorState.__init__)


def test_bitsandbytes_has_what_4_bit_weights_and_optimizers_need():
    from bitsandbytes.nn import Linear4bit
    from bitsandbytes.optim.optimizer import Optimizer2State, Optimizer8bit

    assert hasattr(Linear4bit(2, 2), "support_avx512bf16_for_cpu")
    for method in (Optimizer2State.init_state, Optimizer2State.update_step):
        assert parameters_of(method) == ["self", "group", "p", "gindex", "pindex"]
    assert parameters_of(Optimizer8bit.prefetch_state) == ["self", "p"]
    assert parameters_of(Optimizer8bit.get_state_buffer) == ["self", "p", "dtype"]
    assert "is_paged" in inspect.getsource(Optimizer8bit.to_gpu)


def test_peft_has_what_merging_and_wrapping_need():
    from peft.tuners.lora.layer import ParamWrapper
    from peft.utils.other import AuxiliaryTrainingWrapper

    assert patches.find_loader(torch.nn.Linear(2, 2)) is None
    assert ParamWrapper.__name__ == "ParamWrapper"
    assert parameters_of(AuxiliaryTrainingWrapper.unload_and_optionally_merge_module) == [
        "self",
        "merge",
        "safe_merge",
        "adapter_names",
    ]


@has_planner
def test_the_planner_finds_what_it_replaces():
    from hf_fsdp_recipes.upstream import planner_internals as names

    assert parameters_of(names.ModTracker.register_user_hooks)
    assert "register_user_hooks" in inspect.getsource(names.MemTracker)
    assert {"PARAM", "BUFFER", "OTH", "ACT", "TEMP"} <= set(names.MemoryKind.__members__)
    assert len(parameters_of(getattr(names.masking_utils, names.NEEDS_NO_MASK))) == 6
    assert len(parameters_of(names.masking_utils.find_packed_sequence_indices)) == 1
    assert parameters_of(getattr(names.moe, names.MULTIPLY_GROUPS)) == ["input", "weight", "offs"]
    assert all(callable(getattr(names.chunked_logprob, name)) for name in names.TILES)
    assert "outputs" in parameters_of(names.add_fused_lm_head)
    for function in (names.fsdp2_apply_ac, names.fsdp2_prepare_model):
        assert parameters_of(function) == ["accelerator", "model"]
