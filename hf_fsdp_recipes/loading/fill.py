"""Fills a sharded model. Either rank 0 reads a weight and sends each rank its rows (dim 0), or each rank reads its own rows."""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.utils import logging

from hf_fsdp_recipes import distributed
from hf_fsdp_recipes.errors import LoadError, describe
from hf_fsdp_recipes.loading import bnb_4bit
from hf_fsdp_recipes.loading.checkpoint import Checkpoint, Entry
from hf_fsdp_recipes.upstream.torch_internals import WRAPPERS_AND_ADAPTERS

NUM_READERS = 4  # rank 0's reading threads; a disk is faster if it gets several requests at once
READ_AHEAD_BYTES = (
    1024**3
)  # maximum bytes that rank 0 reads ahead; a single larger weight is still read
NUM_IN_FLIGHT = 2  # maximum number of weights that are sent at the same time
PAGE_BYTES = 4096

Tensors = dict[str, list[torch.Tensor]]
Weights = dict[str, torch.Tensor]


def name_in_base_model(name: str) -> str:
    """Return a tensor's name without the parts that PEFT, activation checkpointing and torch.compile add."""
    return WRAPPERS_AND_ADAPTERS.sub("", name).removeprefix("base_model.model.")


def allocate(model: torch.nn.Module, device: torch.device) -> Tensors:
    """Allocate memory for a model's meta parameters. Return them and the buffers by their names in the base model.

    A name has several tensors if PEFT has copied the weight (`modules_to_save`). A tied weight has several names.
    """
    targets: Tensors = {
        name_in_base_model(name): [buffer] for name, buffer in model.named_buffers()
    }
    allocated = set()
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if parameter.is_meta:
            real = torch.nn.Parameter(
                torch.empty_like(parameter, device=device), parameter.requires_grad
            )
            torch.utils.swap_tensors(parameter, real)
            allocated.add(parameter)
        if parameter in allocated:
            targets.setdefault(name_in_base_model(name), []).append(parameter)
    return targets


class Layout:
    """Tells which rows (dim 0) of a weight each rank holds."""

    def __init__(self, target: torch.Tensor) -> None:
        self.local = target.detach()
        self.ranks: list[
            int
        ] = []  # of the first replica, in row order; empty if every rank holds all rows
        if isinstance(target, DTensor):
            *replicated, sharded = target.placements
            mesh = target.device_mesh
            if (
                sharded != Shard(0)
                or set(replicated) - {Replicate()}
                or mesh.size() != dist.get_world_size()
            ):
                raise LoadError(
                    f"{target.placements} is not supported. Use full or hybrid sharding, without other parallelism."
                )
            self.local, self._num_rows = target.to_local().detach(), target.shape[0]
            self.ranks = mesh.mesh.view(-1, mesh.shape[-1])[0].tolist()
            self.number = mesh.get_coordinate()[-1]  # this rank's position in its replica

    def rows(self, number: int) -> slice:
        """Return the rows that `fully_shard` gives to the rank at position `number` in a replica."""
        chunk = -(-self._num_rows // len(self.ranks))
        return slice(min(chunk * number, self._num_rows), min(chunk * (number + 1), self._num_rows))


class Transfer:
    """Copies one weight from rank 0 into the shards of the first replica. `finish` waits for the copy. Collective."""

    def __init__(
        self,
        full: torch.Tensor | None,
        target: torch.Tensor,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        layout = Layout(target)
        self._local, self._received, transfers = layout.local, full, []
        if not layout.ranks:
            self._received = (
                torch.empty(target.shape, dtype=dtype, device=device) if full is None else full
            )
            dist.broadcast(self._received, 0)
        elif full is not None:
            parts = [(full[layout.rows(number)], rank) for number, rank in enumerate(layout.ranks)]
            transfers = [
                dist.P2POp(dist.isend, part, rank) for part, rank in parts[1:] if len(part)
            ]
            self._received = parts[0][0]
        elif dist.get_rank() in layout.ranks and len(self._local):
            is_same = (self._local.dtype, self._local.device) == (dtype, device)
            self._received = (
                self._local
                if is_same
                else torch.empty(self._local.shape, dtype=dtype, device=device)
            )
            transfers = [dist.P2POp(dist.irecv, self._received, 0)]
        self._is_sender, self._full = (
            full is not None,
            full,
        )  # the full tensor must stay alive while it is sent
        self._works = dist.batch_isend_irecv(transfers) if transfers else []
        if self._is_sender:
            self._local.copy_(self._received)  # while the other ranks receive their rows

    def finish(self) -> None:
        """Wait until this rank's shard is filled and its sends are complete. Not a collective."""
        for work in self._works:
            work.wait()
        if not self._is_sender and self._received is not None and self._received is not self._local:
            self._local.copy_(self._received)


def read_ahead(reader: "Reader", entries: Sequence[Entry]) -> Iterator[Weights]:
    """Yield the weights of each entry in turn. Meanwhile, threads read the next entries."""
    with ThreadPoolExecutor(NUM_READERS, "weights-reading") as pool:
        pending: deque[tuple[int, Future[Weights]]] = deque()
        for entry in entries:
            size = sum(
                reader.targets[name][0].nbytes for name in entry.names if name in reader.targets
            )
            pending.append((size, pool.submit(reader.read, entry)))
            while len(pending) > NUM_READERS or (
                len(pending) > 1 and sum(n for n, _ in pending) > READ_AHEAD_BYTES
            ):
                yield pending.popleft()[1].result()
        while pending:
            yield pending.popleft()[1].result()


class Reader:
    """Reads weights on rank 0. After an error, it returns uninitialized memory, because other ranks still wait for data."""

    def __init__(
        self, model: torch.nn.Module, checkpoint: Checkpoint, targets: Tensors, device: torch.device
    ) -> None:
        self.error: Exception | None = None
        self.layers, self.targets = bnb_4bit.find_layers(model), targets
        self._model, self._checkpoint, self._device = model, checkpoint, device

    def dtype_of(self, entry: Entry, name: str) -> torch.dtype:
        """Return the dtype in which a weight is sent."""
        is_changed = entry.dtype is None or name in self.layers
        return self.targets[name][0].dtype if is_changed else entry.dtype

    def read(self, entry: Entry) -> Weights:
        """Return an entry's weights on the device as {name: tensor}. Weights that the model lacks are left out."""
        try:
            if self.error is None:
                return self._read(entry)
        except Exception as caught:
            self.error = LoadError(f"{entry.names[0]}: {describe(caught)}")
        shapes = {name: self.targets[name][0].shape for name in entry.names if name in self.targets}
        return {
            name: torch.empty(shape, dtype=self.dtype_of(entry, name), device=self._device)
            for name, shape in shapes.items()
        }

    @torch.no_grad()  # grad mode is per thread
    def _read(self, entry: Entry) -> Weights:
        weights = {}
        for name, value in self._checkpoint.read(entry, self._model).items():
            if name in self.targets:  # otherwise the weight's module was replaced
                if name in self.layers:
                    value = self.layers[name].quantize(value.to(self._device))
                if value.shape != self.targets[name][0].shape:
                    raise LoadError(
                        f"{name} is {list(value.shape)}, not {list(self.targets[name][0].shape)}"
                    )
                dtype = self.dtype_of(entry, name)
                if self._device.type == "cpu" and value.is_contiguous() and value.dtype == dtype:
                    value.view(-1).view(torch.uint8)[
                        ::PAGE_BYTES
                    ].sum()  # this thread reads every page from disk
                weights[name] = value.to(self._device, dtype).contiguous()
        return weights


@torch.no_grad()
def fill_from_rank0(
    model: torch.nn.Module,
    checkpoint: Checkpoint,
    entries: Sequence[Entry],
    targets: Tensors,
    device: torch.device,
) -> None:
    """Fill the tensors. Only rank 0 reads the files. It sends every rank its rows. Collective.

    After an error, rank 0 keeps sending, because the other ranks still wait for data. It then sends uninitialized memory.
    At the end, all ranks raise the error.
    """
    if entries and distributed.world_size() > 1 and not distributed.can_send(device.type):
        raise LoadError(
            f"gloo cannot send weights between {device.type} devices. Set another ddp_backend."
        )
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
    reader = Reader(model, checkpoint, targets, device)
    distributed.open_default_group(device)
    weights = read_ahead(reader, entries) if distributed.is_main() else None
    in_flight: deque[Transfer] = deque()
    for entry in logging.tqdm(entries, desc="Loading weights", disable=not distributed.is_main()):
        values = next(weights) if weights else {}
        for name in entry.names:
            for target in targets.get(name, ()):
                in_flight.append(
                    Transfer(values.get(name), target, reader.dtype_of(entry, name), device)
                )
                if len(in_flight) > NUM_IN_FLIGHT:
                    in_flight.popleft().finish()
    for transfer in in_flight:
        transfer.finish()
    distributed.raise_agreed(reader.error)
    for layer in reader.layers.values():
        layer.broadcast_scales(device)


@torch.no_grad()
def fill_directly(checkpoint: Checkpoint, entries: Sequence[Entry], targets: Tensors) -> None:
    """Fill the tensors from entries that need no conversion. Each rank reads its own rows. Collective."""
    with distributed.agreed():
        for entry in entries:
            for target in targets.get(entry.names[0], ()):
                layout = Layout(target)
                if layout.local.numel():
                    layout.local.copy_(
                        checkpoint.read_rows(
                            entry, layout.rows(layout.number) if layout.ranks else ...
                        )
                    )


@torch.no_grad()
def copy_to_replicas(targets: Tensors) -> None:
    """Under hybrid sharding, copy the shards of the first replica to the other replicas. Collective."""
    for target in dict.fromkeys(target for tensors in targets.values() for target in tensors):
        if isinstance(target, DTensor) and target.device_mesh.ndim > 1:
            dist.broadcast(target.to_local(), group=target.device_mesh.get_group(0), group_src=0)
