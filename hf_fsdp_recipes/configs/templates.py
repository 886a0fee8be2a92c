"""Renders Accelerate FSDP configs as commented YAML: the shipped templates and every other combination of options.

Imports neither torch nor Accelerate, so that `hf-fsdp config list|show|render` starts fast.

Source of the interconnect advice: the strategy section of Prime Intellect's "Run Torch FSDP" tutorial.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

from hf_fsdp_recipes.errors import TemplateError

Strategy = Literal["full_shard", "shard_grad_op", "hybrid_shard", "hybrid_shard_zero2", "no_shard"]
# Comments on when to choose a config. `hf-fsdp config list` prints the first line of each.
STRATEGIES: dict[Strategy, tuple[str, ...]] = {
    "full_shard": (
        "Shards parameters, gradients and optimizer state across all ranks: least memory, most communication.",
        "Start here on one node with NVSwitch (SXM machines), or on several nodes with InfiniBand. On slower links",
        "communication limits throughput; see hybrid_shard.",
    ),
    "shard_grad_op": (
        "Shards gradients and optimizer state; parameters stay gathered from forward to backward.",
        "Saves one of full_shard's two all-gathers per step, at the cost of a full copy of the parameters on each GPU.",
        "For models that fit, on GPUs with NVLink, NVSwitch or PCIe 5.0.",
    ),
    "hybrid_shard": (
        "full_shard within each node, replicas across nodes: only gradients cross the network, once per step.",
        "For several nodes without InfiniBand (100 Gb/s Ethernet, for example), or for models below about 7B parameters.",
    ),
    "hybrid_shard_zero2": (
        "shard_grad_op within each node, replicas across nodes: faster than hybrid_shard, but needs more memory.",
        "For models whose parameters fit on each GPU in full.",
    ),
    "no_shard": (
        "Replicates the model on every rank and averages gradients, like DDP: least communication, most memory.",
        "For models below about 1B parameters, or as a baseline. FSDP1 only.",
    ),
}
VARIANTS = {
    "fsdp1": ("FSDP1, for Gaudi and for setups that already use it. Prefer FSDP2 otherwise.",),
    "offload": (
        "CPU offload: parameters, gradients and optimizer state live in host memory; the optimizer step runs on the CPU.",
        "For runs that do not fit otherwise. It frees most of the shard's memory between steps, but lowers the peak by",
        "less. Steps get slower.",
    ),
    "size_wrap": (
        "Size-based wrapping: FSDP units by parameter count instead of one per layer.",
        "For models that declare no layer class, or for fewer, larger all-gathers at the cost of memory.",
    ),
    "gaudi": (
        "Gaudi: hpu_backend compiles the model in eager mode (export PT_HPU_LAZY_MODE=0).",
        "Requires Intel's PyTorch build (habana_frameworks). Not tested on Gaudi hardware.",
    ),
    "cpu": (
        "full_shard on CPU ranks over gloo: for tests, and to try a recipe on a laptop before renting a GPU.",
        "With `accelerate launch` on a machine with a GPU, also set ACCELERATE_USE_CPU=true, because Accelerate ignores",
        "`use_cpu: true` in FSDP configs. `hf-fsdp` commands set it.",
    ),
}
DEFAULT_MIN_NUM_PARAMS = 100_000_000
# Not a valid host name, so a launch without --main_process_ip fails instead of waiting for node 0.
MAIN_PROCESS_IP = "pass --main_process_ip"


@dataclass(frozen=True)
class Template:
    """One Accelerate FSDP config."""

    version: int = 2  # FSDP version; no_shard needs 1
    strategy: Strategy = "full_shard"
    is_offloaded: bool = False  # keeps parameters, gradients and optimizer state in host memory
    min_num_params: int | None = None  # parameter count that an FSDP unit must exceed; None to wrap by layer
    wrap_class: str | None = None  # comma-separated layer classes to wrap; None for the class that the model declares
    on_cpu: bool = False
    on_gaudi: bool = False
    num_machines: int = 1  # nodes
    num_processes: int = 8  # ranks on all nodes

    @property
    def name(self) -> str:
        """The name that `find_template` accepts, and the stem of the file if it is shipped."""
        if self.on_cpu:
            return "fsdp2_cpu"
        prefix = [] if self.strategy == "no_shard" else [f"fsdp{self.version}"]
        return "_".join([*prefix, self.strategy, *self._variants])

    @property
    def notes(self) -> list[tuple[str, ...]]:
        """Comments on when to choose this config, each a tuple of lines; the most specific is last."""
        if self.on_cpu:
            return [VARIANTS["cpu"]]
        is_old = self.version == 1 and self.strategy != "no_shard"
        names = ["fsdp1"] * is_old + self._variants
        return [STRATEGIES[self.strategy], *(VARIANTS[name] for name in names)]

    @property
    def _variants(self) -> list[str]:
        flags = {"offload": self.is_offloaded, "size_wrap": self.min_num_params is not None, "gaudi": self.on_gaudi}
        return [variant for variant, is_on in flags.items() if is_on]

    @property
    def is_hybrid(self) -> bool:
        """Whether the model is sharded within nodes and replicated across them."""
        return self.strategy.startswith("hybrid")


SHIPPED = (
    *(f"fsdp2_{strategy}" for strategy in STRATEGIES if strategy != "no_shard"),
    "fsdp2_full_shard_offload",
    "fsdp2_full_shard_size_wrap",
    "fsdp2_full_shard_offload_size_wrap",
    "fsdp2_cpu",
    "no_shard",
    "fsdp1_full_shard",
    "fsdp1_full_shard_gaudi",
)


@cache
def all_templates() -> list[Template]:
    """Return a template for each combination of options with 8 ranks per node (hybrid: two nodes), and for CPU and Gaudi."""
    templates = [
        Template(version, strategy, offload, min_num_params, num_machines=nodes, num_processes=8 * nodes)
        for version in (2, 1)
        for strategy, nodes in zip(STRATEGIES, (1, 1, 2, 2, 1), strict=True)
        for offload in (False, True)
        for min_num_params in (None, DEFAULT_MIN_NUM_PARAMS)
        if (version, strategy) != (2, "no_shard")
    ]
    return [*templates, Template(on_cpu=True, num_processes=2), Template(version=1, on_gaudi=True)]


def shipped_templates() -> list[Template]:
    """Return the templates that have a file in accelerate_configs/, the most generally useful first."""
    return [find_template(name) for name in SHIPPED]


def find_template(name: str) -> Template:
    """Return the template with this name, even if it has no file, like fsdp1_full_shard_offload.

    Raises a TemplateError if there is no such template.
    """
    for template in all_templates():
        if template.name == name.removesuffix(".yaml"):
            return template
    raise TemplateError(f"There is no template {name!r}. `hf-fsdp config list` shows the templates.")


def render(template: Template, file: str | None = None) -> str:
    """Return a template as commented YAML; raise a TemplateError if nodes and ranks do not match or settings conflict.

    The first lines show the command that starts a run with `file` or, if that is None, with the template's name.
    """
    _check(template)
    lines = [f"# {line}".rstrip() for line in _header(template, file or template.name)] + [""]
    for path, value, comment in _entries(template):
        *parents, key = path.split("/")
        text = "  " * len(parents) + f"{key}: {value}".rstrip()
        lines.append(f"{text:<58} # {comment}" if comment else text)
    return "\n".join(lines) + "\n"


def _check(template: Template) -> None:
    ranks, nodes = template.num_processes, template.num_machines
    if template.version == 2 and template.strategy == "no_shard":
        raise TemplateError("no_shard needs FSDP1. Drop --fsdp-version 2, or train with plain DDP.")
    if nodes < 1 or ranks < 1 or ranks % nodes:
        raise TemplateError(
            f"num_processes is {ranks} and num_machines is {nodes}, but every node needs the same number of ranks. "
            f"Set num_processes to the number of nodes times the GPUs per node."
        )
    if template.is_hybrid and nodes < 2:
        on_one_node = "shard_grad_op" if template.strategy == "hybrid_shard_zero2" else "full_shard"
        raise TemplateError(f"{template.strategy} keeps one replica per node. On a single node, use {on_one_node}.")
    if template.wrap_class and template.min_num_params is not None:
        raise TemplateError(f"Size-based wrapping ignores the wrap class {template.wrap_class}. Choose one of the two.")


def _header(template: Template, file: str) -> Iterator[str]:
    launch = f"hf-fsdp sft --accelerate_config {file} --config RECIPE"
    if template.num_machines > 1:
        yield "On every node, with its own MACHINE_RANK (launch.slurm does this):"
        yield f"  {launch} --machine_rank $MACHINE_RANK \\"
        yield "    --main_process_ip $MASTER_ADDR --main_process_port 29500"
    else:
        yield launch
    yield ""
    for note in template.notes:
        yield from note
    yield ""
    yield "Generated by `hf-fsdp config render`; its --help lists the options for other combinations."


def _entries(template: Template) -> Iterator[tuple[str, object, str]]:
    """Yield (key, value, comment) for each line of the config; a nested key is written as section/key."""
    nodes, ranks = template.num_machines, template.num_processes
    yield "compute_environment", "LOCAL_MACHINE", ""
    yield "distributed_type", "FSDP", "accelerate launch starts the ranks and enables FSDP in each"
    if template.on_cpu:
        yield "use_cpu", "true", "gloo ranks; hf_fsdp_recipes enables FSDP for them"
        yield "mixed_precision", "'no'", "CPUs run fp32 faster than they emulate bf16"
    else:
        yield "mixed_precision", "bf16", "fp32 master weights, bf16 compute; no loss scaling needed"
    yield "num_machines", nodes, "nodes; override with --num_machines" if nodes > 1 else ""
    if nodes > 1:
        yield "main_process_ip", MAIN_PROCESS_IP, "address of node 0, from the command line"
    yield "num_processes", ranks, "total ranks on all nodes; override with --num_processes"
    yield "main_training_function", "main", ""
    if template.on_gaudi:
        yield "dynamo_config", "", "torch.compile, which Gaudi needs to be fast"
        yield "dynamo_config/dynamo_backend", "HPU_BACKEND", "Gaudi's graph compiler"
    yield "fsdp_config", "", ""
    for key, value, comment in _fsdp_entries(template):
        yield f"fsdp_config/fsdp_{key}", value, comment
    if template.is_hybrid and template.version == 2:
        yield "parallelism_config", "", ""
        yield "parallelism_config/parallelism_config_dp_replicate_size", nodes, "replicas: one per node"
        yield "parallelism_config/parallelism_config_dp_shard_size", ranks // nodes, "ranks per replica: all of a node"


def _fsdp_entries(template: Template) -> Iterator[tuple[str, object, str]]:
    if template.version == 2:
        yield "version", 2, "per-parameter sharding; Accelerate's default is 1"
        if template.strategy in ("shard_grad_op", "hybrid_shard_zero2"):
            yield "reshard_after_forward", "false", "parameters stay gathered until backward"
        else:
            yield "reshard_after_forward", "true", ""
    else:
        yield "version", 1, ""
        yield "sharding_strategy", template.strategy.upper(), ""
        yield "backward_prefetch", "BACKWARD_PRE", "gathers the next unit while the current one computes"
    if template.min_num_params is not None:
        yield "auto_wrap_policy", "SIZE_BASED_WRAP", "FSDP units by parameter count"
        yield "min_num_params", template.min_num_params, "a unit has more parameters than this"
    else:
        comment = "one FSDP unit per decoder layer, by the class the model declares"
        yield "auto_wrap_policy", "TRANSFORMER_BASED_WRAP", comment
        if template.wrap_class:
            classes = template.wrap_class.replace(" ", "")  # Accelerate splits at commas only
            yield "transformer_layer_cls_to_wrap", classes, "overrides the class the model declares"
    if template.is_offloaded:
        yield "offload_params", "true", "parameters and the optimizer step on the CPU"
    comment = "each rank saves its shard; FULL_STATE_DICT gathers everything on rank 0"
    yield "state_dict_type", "SHARDED_STATE_DICT", comment
    yield "cpu_ram_efficient_loading", "false", "load_model loads shards instead; transformers >= 5 ignores this key"
    if template.version == 1:
        yield "sync_module_states", "false", "load_model distributes the weights itself, also on CPU"
        yield "use_orig_params", "true", ""
