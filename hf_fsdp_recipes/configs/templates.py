"""The family of Accelerate FSDP configs: one source for the committed files, and a check for anybody's file.

Each template is a `Template` value; `render` writes it as YAML with a reason beside every key that is not
Accelerate's default. Imports neither torch nor Accelerate, so that the command line answers at once;
starts nothing.

Source of the interconnect advice: the strategy section of Prime Intellect's "Run Torch FSDP" tutorial.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hf_fsdp_recipes.errors import TemplateError

STRATEGIES = ("full_shard", "shard_grad_op", "hybrid_shard", "hybrid_shard_zero2")
VARIANTS = ("", "offload", "size_wrap")

_CHOOSE = {
    "full_shard": (
        "Parameters, gradients and optimizer state are all cut over the ranks: the least memory, the most",
        "communication. Choose it first on one node with NVSWITCH (SXM machines) or between nodes with InfiniBand;",
        "without them the wire sets the pace, see hybrid_shard.",
    ),
    "shard_grad_op": (
        "Gradients and optimizer state are cut; parameters stay whole from forward to backward: one all-gather a step",
        "less than full_shard for one copy of the parameters more. Choose it where the model fits and the GPUs have",
        "NVLINK, NVSWITCH or PCIe 5.0.",
    ),
    "hybrid_shard": (
        "full_shard inside a node, plain copies between nodes: only gradients cross the slow wire, once a step. Choose it",
        "on several nodes without InfiniBand (100 Gb/s Ethernet, say) or for models below about 7B parameters.",
    ),
    "hybrid_shard_zero2": (
        "shard_grad_op inside a node, plain copies between nodes: the fastest of the hybrid pair and the hungrier.",
        "Choose it over hybrid_shard where a whole copy of the parameters still fits on every GPU.",
    ),
    "no_shard": (
        "Every rank holds everything and only gradients are averaged, like DDP: the least communication, the most memory.",
        "Choose it for models below about 1B parameters, or to compare the others with.",
    ),
}
_VARIANT_NOTES = {
    "": (),
    "offload": (
        "Offload: parameters, gradients and the optimizer step live on the CPU between uses. Choose it when the run does",
        "not fit otherwise: valley memory falls by most of the shard, the peak by less, and steps get slower.",
    ),
    "size_wrap": (
        "Size wrap: units by parameter count instead of by layer class. Choose it for models that name no layer class,",
        "or to trade fewer, larger all-gathers for memory.",
    ),
    "gaudi": (
        "Gaudi: the model is compiled by the hpu_backend in eager mode (export PT_HPU_LAZY_MODE=0). Needs Intel's torch build",
        "(habana_frameworks). Never launched on Gaudi by this project.",
    ),
}


@dataclass(frozen=True)
class Template:
    """One Accelerate config of the family.

    Attributes:
        version: 1 or 2, FSDP's.
        strategy: full_shard, shard_grad_op, hybrid_shard, hybrid_shard_zero2 or no_shard (version 1 only).
        variant: "", "offload", "size_wrap" or "gaudi".
        on_cpu: for CPU ranks.
        num_machines, num_processes: nodes, and ranks over all of them.
        wrap_class: layer class to wrap, comma-separated if several; None takes what the model declares.
        min_num_params: parameters a unit must exceed, for size_wrap.
    """

    version: int
    strategy: str
    variant: str = ""
    on_cpu: bool = False
    num_machines: int = 1
    num_processes: int = 8
    wrap_class: str | None = None
    min_num_params: int = 100_000_000

    @property
    def name(self) -> str:
        """The file's name without its ending."""
        if self.on_cpu:
            return "fsdp2_cpu"
        if self.strategy == "no_shard":
            return "no_shard"
        return "_".join(part for part in (f"fsdp{self.version}", self.strategy, self.variant) if part)

    @property
    def is_hybrid(self) -> bool:
        """Whether the model is copied between nodes and cut inside them."""
        return self.strategy.startswith("hybrid")


def all_templates() -> list[Template]:
    """Return the shipped family, sorted by name."""
    templates = [
        Template(version, strategy, variant, num_machines=1 + hybrid, num_processes=8 * (1 + hybrid))
        for version in (1, 2)
        for strategy in STRATEGIES
        for hybrid in [strategy.startswith("hybrid")]
        for variant in VARIANTS
    ]
    templates += [
        Template(1, "full_shard", "gaudi"),
        Template(1, "no_shard"),
        Template(2, "full_shard", on_cpu=True, num_processes=2),
    ]
    return sorted(templates, key=lambda template: template.name)


def find_template(name: str) -> Template:
    """Return the template of a name.

    Raises:
        TemplateError: there is none of that name.
    """
    for template in all_templates():
        if template.name == name.removesuffix(".yaml"):
            return template
    known = ", ".join(template.name for template in all_templates())
    raise TemplateError(f"{name!r} is no template. Rule: one of {known}.")


def template_directory() -> Path:
    """Return the directory of the committed files, in a checkout or in an installed wheel."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "accelerate_configs"
    return inside if inside.is_dir() else package.parent / "accelerate_configs"


def first_sentence(template: Template) -> str:
    """Say in one line what the template is for."""
    if template.on_cpu:
        return "full_shard on CPU ranks over gloo: rehearse on a laptop, run the tests, try the whole path for nothing."
    note = {"offload": " Parameters on the CPU.", "size_wrap": " Units by size.", "gaudi": " For Gaudi."}.get(
        template.variant, ""
    )
    return " ".join(_CHOOSE[template.strategy]).split(". ")[0].split(": ")[0] + "." + note


def render(template: Template) -> str:
    """Write a template as commented YAML.

    Raises:
        TemplateError: node and rank counts that cannot be, or a strategy that this FSDP version lacks.
    """
    _check_counts(template)
    lines = [*_header(template), ""]
    for key, value, reason in _entries(template):
        indent = "  " * (key.count("/"))
        text = f"{indent}{key.rsplit('/', 1)[-1]}:" + (f" {value}" if value != "" else "")
        lines.append(f"{text:<58} # {reason}" if reason else text)
    return "\n".join(lines) + "\n"


def _check_counts(template: Template) -> None:
    if template.version == 2 and template.strategy == "no_shard":
        raise TemplateError("no_shard is a strategy of FSDP1; with FSDP2 take plain data parallelism.")
    if template.num_machines < 1 or template.num_processes < 1 or template.num_processes % template.num_machines:
        raise TemplateError(
            f"{template.num_processes} ranks do not divide over {template.num_machines} nodes. Rule: num_processes counts "
            f"the ranks of all nodes and every node has as many. Remedy: num_processes = nodes x GPUs per node."
        )
    if template.is_hybrid and template.num_machines < 2:
        raise TemplateError(
            f"{template.strategy} on {template.num_machines} node. Rule: it copies the model between nodes. Remedy: take "
            f"{template.strategy.replace('hybrid_shard_zero2', 'shard_grad_op').replace('hybrid_shard', 'full_shard')}."
        )


def _header(template: Template) -> list[str]:
    file = f"accelerate_configs/{template.name}.yaml"
    lines = []
    if template.num_machines > 1:
        lines += [
            "On every node, with its own MACHINE_RANK (recipes/launch.slurm does this):",
            f"  accelerate launch --config_file {file} --machine_rank $MACHINE_RANK \\",
            "    --main_process_ip $MASTER_ADDR --main_process_port 29500 recipes/sft.py --config recipes/X.yaml",
        ]
    else:
        lines += [f"accelerate launch --config_file {file} recipes/sft.py --config recipes/X.yaml"]
    lines.append("")
    if template.on_cpu:
        lines += [
            "Full sharding on CPU ranks over gloo. Choose it to rehearse on a laptop, in tests, and to see the whole path",
            "before renting a GPU. On a machine that has a GPU, set ACCELERATE_USE_CPU=true as well (Accelerate does not",
            "pass use_cpu on to FSDP ranks).",
        ]
    else:
        lines += [*_CHOOSE[template.strategy], *_VARIANT_NOTES[template.variant]]
    lines += ["", "Generated by `hf-fsdp config render`; change hf_fsdp_recipes/configs/templates.py, not this file."]
    return [f"# {line}".rstrip() for line in lines]


def _entries(template: Template) -> Iterator[tuple[str, str, str]]:
    """Yield (path, value, reason); a reason stands wherever the value is not Accelerate's default."""
    yield "compute_environment", "LOCAL_MACHINE", ""
    yield "distributed_type", "FSDP", "starts the ranks through torchrun and turns FSDP on in each"
    if template.on_cpu:
        yield "use_cpu", "true", "gloo ranks; hf_fsdp_recipes turns FSDP on for them"
        yield "mixed_precision", "'no'", "CPUs compute in fp32 faster than they emulate bf16"
    else:
        yield "mixed_precision", "bf16", "fp32 master weights, bf16 compute and communication; no loss scaling needed"
    yield (
        "num_machines",
        str(template.num_machines),
        "nodes; override with --num_machines" if template.num_machines > 1 else "",
    )
    yield "num_processes", str(template.num_processes), "ranks over all nodes; override with --num_processes"
    yield "main_training_function", "main", ""
    if template.variant == "gaudi":
        yield "dynamo_config", "", "torch.compile, which Gaudi needs to be fast"
        yield "dynamo_config/dynamo_backend", "HPU_BACKEND", "Gaudi's graph compiler"
    yield "fsdp_config", "", ""
    for key, value, reason in _fsdp_entries(template):
        yield f"fsdp_config/{key}", value, reason
    if template.is_hybrid and template.version == 2:
        yield "parallelism_config", "", ""
        per_node = template.num_processes // template.num_machines
        yield (
            "parallelism_config/parallelism_config_dp_replicate_size",
            str(template.num_machines),
            "copies: one a node",
        )
        yield (
            "parallelism_config/parallelism_config_dp_shard_size",
            str(per_node),
            "ranks that share a copy: one node's",
        )


def _fsdp_entries(template: Template) -> Iterator[tuple[str, str, str]]:
    keeps_parameters = template.strategy in ("shard_grad_op", "hybrid_shard_zero2")
    if template.version == 2:
        yield "fsdp_version", "2", "per-parameter sharding; Accelerate's default is still 1"
        value = "false" if keeps_parameters else "true"
        yield "fsdp_reshard_after_forward", value, "parameters stay whole until backward" if keeps_parameters else ""
    else:
        yield "fsdp_version", "1", ""
        reason = "" if template.strategy == "full_shard" else "what this template is for"
        yield "fsdp_sharding_strategy", template.strategy.upper(), reason
        yield "fsdp_backward_prefetch", "BACKWARD_PRE", "gathers the next unit while this one computes"
    if template.variant == "size_wrap":
        yield "fsdp_auto_wrap_policy", "SIZE_BASED_WRAP", "units by parameter count"
        yield "fsdp_min_num_params", str(template.min_num_params), ""
    else:
        yield (
            "fsdp_auto_wrap_policy",
            "TRANSFORMER_BASED_WRAP",
            "one unit a decoder layer, the class the model declares",
        )
        if template.wrap_class:
            yield "fsdp_transformer_layer_cls_to_wrap", template.wrap_class, "overrides what the model declares"
    if template.variant == "offload":
        yield "fsdp_offload_params", "true", "parameters and the optimizer step on the CPU"
    yield (
        "fsdp_state_dict_type",
        "SHARDED_STATE_DICT",
        "every rank saves its part; FULL_STATE_DICT gathers all on rank 0",
    )
    yield "fsdp_cpu_ram_efficient_loading", "false", "load_model does it; transformers >= 5 loads everywhere regardless"
    if template.version == 1:
        yield "fsdp_sync_module_states", "false", "load_model broadcasts rank 0's values itself, also on CPU"
        yield "fsdp_use_orig_params", "true", ""
