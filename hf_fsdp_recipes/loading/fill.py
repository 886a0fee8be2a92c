"""Fills a sharded model with the rows (dim 0) that rank 0 sends or that each rank reads itself."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import Module, Parameter
from torch.utils import swap_tensors
from transformers import PreTrainedModel
from transformers.utils import logging

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import LoadError, describe
from hf_fsdp_recipes.loading.bnb_4bit import Layers
from hf_fsdp_recipes.loading.checkpoint import Checkpoint, Entry, Weights
from hf_fsdp_recipes.training.sharded_optimizer import local_part
from hf_fsdp_recipes.upstream.torch_internals import WRAPPERS_AND_ADAPTERS

NUM_READERS = 4  # rank 0's reading threads; a disk is faster if it gets several requests at once
READ_AHEAD_BYTES = 1024**3  # maximum of what rank 0 reads ahead; a larger weight is still read
NUM_IN_FLIGHT = 2  # maximum number of weights that are sent at the same time
PAGE_BYTES = 4096
FSDP_PLACEMENTS = ((Shard(0),), (Replicate(), Shard(0)))  # full and hybrid sharding

Tensors = dict[str, list[Tensor]]


def name_in_base_model(name: str) -> str:
    """Return a tensor's name without what PEFT, activation checkpointing and torch.compile add."""
    return WRAPPERS_AND_ADAPTERS.sub("", name).removeprefix("base_model.model.")


def allocate(model: Module, device: torch.device) -> Tensors:
    """Allocate memory for a model's meta parameters.

    Return them and the buffers by their names in the base model. A name has several tensors if PEFT
    has copied the weight (`modules_to_save`). A tied weight has several names. Raise a LoadError if
    a parameter is sharded, but not by FSDP2 over all ranks.
    """
    targets = {name_in_base_model(name): [buffer] for name, buffer in model.named_buffers()}
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
            targets.setdefault(name_in_base_model(name), []).append(parameter)
    return targets


def start_transfer(
    full: Tensor | None,
    target: Tensor,
    dtype: torch.dtype,
    device: torch.device,
) -> Callable[[], object]:
    """Start to copy one weight from rank 0 into the shards of the first replica. Collective.

    `full` is the weight on rank 0 and None on the other ranks. `dtype` and `device` are its own. If
    it is None on rank 0 too, uninitialized memory is sent. Returns a function that waits until this
    rank's shard is filled and its sends are complete.
    """
    shard = local_part(target)
    if full is None and (distributed.is_main() or not isinstance(target, DTensor)):
        full = torch.empty(target.shape, dtype=dtype, device=device)
    if not isinstance(target, DTensor):  # all ranks get all rows
        dist.broadcast(full, 0)  # type: ignore[arg-type]  # never None here
        return partial(shard.copy_, full)
    mesh = target.device_mesh
    ranks = mesh.mesh.flatten()[: mesh.shape[-1]].tolist()  # the first replica, rank 0 first
    operations = []
    # A rank without rows, or of another replica, which gets its rows at the end, does nothing.
    rows = shard
    if full is not None:
        rows, *others = full.chunk(len(ranks))  # divided as by `fully_shard`
        operations = [
            dist.P2POp(dist.isend, part, rank)
            for rank, part in zip(ranks[1:], others, strict=False)  # the last ones may have no rows
            if len(part)
        ]
    elif dist.get_rank() in ranks and len(shard):
        if shard.dtype != dtype or shard.device != device:
            rows = torch.empty(shard.shape, dtype=dtype, device=device)
        operations = [dist.P2POp(dist.irecv, rows, 0)]
    works = dist.batch_isend_irecv(operations) if operations else []

    def finish() -> None:  # on rank 0, it keeps the weight alive while that is sent
        for work in works:
            work.wait()
        shard.copy_(rows)  # does nothing if they were received in place

    return finish


@dataclass
class Reader:
    """Reads weights on rank 0. After an error, it returns none."""

    model: PreTrainedModel
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
                values = self.checkpoint.read(entry, self.model)
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
                in_flight.append(start_transfer(values.get(name), target, dtype, device))
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
                if shard.numel():  # the last ranks may have no rows
                    if isinstance(target, DTensor):
                        mesh = target.device_mesh
                        rows = rows.chunk(mesh.shape[-1])[mesh.get_local_rank(mesh.ndim - 1)]
                    shard.copy_(rows)


@torch.no_grad()
def copy_to_replicas(targets: Tensors) -> None:
    """Under hybrid sharding, copy the shards of the first replica to the others. Collective."""
    for tensors in targets.values():
        for target in tensors:
            if isinstance(target, DTensor) and target.device_mesh.ndim > 1:
                dist.broadcast(
                    target.to_local(), group=target.device_mesh.get_group(0), group_src=0
                )
