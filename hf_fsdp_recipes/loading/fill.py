"""Fills a sharded model with the rows (dim 0) that rank 0 sends or that each rank reads itself."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.utils import swap_tensors
from transformers.utils import logging

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import LoadError, describe
from hf_fsdp_recipes.loading.bnb_4bit import Layers
from hf_fsdp_recipes.loading.checkpoint import Checkpoint, Entry, Weights
from hf_fsdp_recipes.weights.rows import FSDP_PLACEMENTS, divide, local_part, start_to_scatter

NUM_READERS = 4  # rank 0's reading threads; a disk is faster if it gets several requests at once
READ_AHEAD_BYTES = 1024**3  # maximum of what rank 0 reads ahead; a larger weight is still read
NUM_IN_FLIGHT = 2  # maximum number of weights that are sent at the same time
PAGE_BYTES = 4096

Tensors = dict[str, list[Tensor]]


def allocate(model: Module, names: dict[str, list[str]], device: torch.device) -> Tensors:
    """Allocate memory for a model's meta parameters.

    Return them by their names in the loaded model. A name has several parameters if the weight has
    been copied, for example by PEFT. `names` is {name in `model`: names in the loaded model}. Raise
    a LoadError if a parameter is sharded, but not by FSDP2 over all ranks.
    """
    targets: Tensors = {}
    allocated = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.is_meta:
            if isinstance(parameter, DTensor) and (
                parameter.placements not in FSDP_PLACEMENTS
                or parameter.device_mesh.size() != dist.get_world_size()
            ):
                raise LoadError(
                    f"{parameter.placements} is not supported. Use full or hybrid sharding, "
                    "without other parallelism."
                )
            real = Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
            swap_tensors(parameter, real)
            allocated.add(parameter)
        if parameter in allocated:
            for loaded in names.get(name, [name]):
                targets.setdefault(loaded, []).append(parameter)
    return {name: list(dict.fromkeys(parameters)) for name, parameters in targets.items()}


@dataclass
class Reader:
    """Reads weights on rank 0. After an error, it returns none."""

    checkpoint: Checkpoint
    layers: Layers
    targets: Tensors
    device: torch.device
    error: Exception | None = None

    def names_of(self, entry: Entry) -> list[str]:
        """Return the names of an entry's weights, without those whose modules were replaced."""
        return [name for name in entry.names if name in self.targets]

    def dtype_of(self, entry: Entry, name: str) -> torch.dtype:
        """Return the dtype in which a weight is sent."""
        if entry.dtype is None or name in self.layers:
            return self.targets[name][0].dtype
        return entry.dtype

    @torch.no_grad()  # grad mode is per thread
    def read(self, entry: Entry) -> Weights:
        """Return an entry's weights on the device as {name: tensor}, or nothing after an error."""
        try:
            if not self.error:
                values = self.checkpoint.read(entry)
                return {
                    name: self._prepare(entry, name, values[name]) for name in self.names_of(entry)
                }
        except Exception as error:
            self.error = LoadError(f"{entry.name}: {describe(error)}")
        return {}

    def _prepare(
        self,
        entry: Entry,
        name: str,
        value: Tensor,
    ) -> Tensor:
        """Return a weight as it is sent: on the device, quantized if its layer is."""
        if name in self.layers:
            value = self.layers[name].quantize(value.to(self.device))
        expected = self.targets[name][0].shape
        if value.shape != expected:
            raise LoadError(f"{name} is {list(value.shape)}, not {list(expected)}")
        sent = value.to(self.device, self.dtype_of(entry, name)).contiguous()
        if sent is value:
            # Otherwise the main thread would read the memory-mapped pages from disk.
            sent.view(-1).view(torch.uint8)[::PAGE_BYTES].sum()
        return sent


def read_ahead(reader: Reader, entries: Sequence[Entry]) -> Iterator[Weights]:
    """Yield the weights of each entry in turn. Meanwhile, threads read the next entries."""
    pending = []
    with ThreadPoolExecutor(NUM_READERS, "weights-reading") as pool:
        for entry in entries:
            size = sum(reader.targets[name][0].nbytes for name in reader.names_of(entry))
            pending.append((size, pool.submit(reader.read, entry)))
            while len(pending) > NUM_READERS or (
                len(pending) > 1 and sum(size for size, _ in pending) > READ_AHEAD_BYTES
            ):
                yield pending.pop(0)[1].result()
        while pending:
            yield pending.pop(0)[1].result()


@torch.no_grad()
def fill_from_rank0(reader: Reader, entries: Sequence[Entry]) -> None:
    """Fill the reader's targets. Only rank 0 reads the files. It sends every rank its rows.

    After an error, rank 0 keeps sending, because the other ranks still wait for data. It then sends
    uninitialized memory. At the end, all ranks raise the error. Collective.
    """
    device = reader.device
    if entries and distributed.world_size() > 1 and not distributed.can_send(device.type):
        raise LoadError(
            f"gloo cannot send weights between {device.type} devices. Set another ddp_backend."
        )
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
    distributed.open_default_group(device)
    is_main = distributed.is_main()
    weights = read_ahead(reader, entries)  # only rank 0 starts it
    in_flight = []
    for entry in logging.tqdm(entries, desc="Loading weights", disable=not is_main):
        values = next(weights) if is_main else {}
        for name in reader.names_of(entry):
            dtype = reader.dtype_of(entry, name)
            for target in reader.targets[name]:
                in_flight.append(start_to_scatter(values.get(name), target, dtype, device))
                if len(in_flight) > NUM_IN_FLIGHT:
                    in_flight.pop(0)()
    for finish in in_flight:
        finish()
    with distributed.agreed():
        if reader.error:
            raise reader.error
    for layer in reader.layers.values():
        layer.broadcast_scales(device)


@torch.no_grad()
def fill_directly(
    checkpoint: Checkpoint,
    entries: Sequence[Entry],
    targets: Tensors,
) -> None:
    """Fill tensors that need no conversion. Each rank reads its own rows. Collective."""
    with distributed.agreed():
        for entry in entries:
            for target in targets.get(entry.name, ()):
                shard = local_part(target)
                rows = checkpoint.slice_of(entry.key)[...]  # mapped: only what is copied is read
                if isinstance(target, DTensor):
                    mesh = target.device_mesh
                    own_rank = mesh.get_local_rank(mesh.ndim - 1)
                    rows = divide(rows, range(mesh.shape[-1])).get(own_rank, shard)
                shard.copy_(rows.to(entry.dtype))


@torch.no_grad()
def copy_to_replicas(targets: Tensors) -> None:
    """Under hybrid sharding, copy the shards of the first replica to the others. Collective."""
    for tensors in targets.values():
        for target in tensors:
            if isinstance(target, DTensor) and target.device_mesh.ndim > 1:
                dist.broadcast(
                    target.to_local(), group=target.device_mesh.get_group(0), group_src=0
                )
