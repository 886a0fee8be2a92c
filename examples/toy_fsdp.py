"""FSDP and DDP on a toy model, with PyTorch alone: what each rank holds, and that both train alike.

    torchrun --nproc-per-node 2 examples/toy_fsdp.py            # FSDP: each rank holds its shard
    torchrun --nproc-per-node 2 examples/toy_fsdp.py --ddp      # DDP: each rank holds everything

Runs on the machine's accelerators, or on CPU ranks if there are none. On Gaudi, install Intel's build of PyTorch and export
PT_HPU_LAZY_MODE=0 first; only the backend and the device differ. To see what torch does, export
TORCH_CPP_LOG_LEVEL=INFO TORCH_DISTRIBUTED_DEBUG=DETAIL TORCH_SHOW_CPP_STACKTRACES=1.
"""

import argparse
import contextlib
import os
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

WIDTH = 256
NUM_LAYERS = 4


def main() -> None:
    """Train with the options from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ddp", action="store_true", help="replicate the model instead of sharding it")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()

    device = start()
    # `train` drops the DDP model when it returns. A model that outlives the process group can hang in DDP's C++ code.
    train(options.ddp, options.steps, device)
    dist.destroy_process_group()


def train(ddp: bool, num_steps: int, device: torch.device) -> None:
    """Train the toy model on random rows and print the loss and memory."""
    torch.manual_seed(0)  # the same model on every rank
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS))).to(device)
    if ddp:
        model = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for layer in model:
            fully_shard(layer, mesh=mesh)  # a unit per layer: gathered before it computes, freed afterwards
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    torch.manual_seed(dist.get_rank())  # different rows on every rank
    rows = torch.rand(8, WIDTH, device=device)
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = (model(rows) - rows).square().mean()
        loss.backward()  # averages the gradients over the ranks
        optimizer.step()
    report("DDP" if ddp else "FSDP", model, optimizer, loss)


def start() -> torch.device:
    """Start the process group with the backend of this rank's device, and return the device."""
    with contextlib.suppress(ImportError):
        import habana_frameworks.torch.distributed.hccl  # noqa: F401, registers Gaudi's backend
    if not torch.accelerator.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    kind = torch.accelerator.current_accelerator().type
    device = torch.device(kind, int(os.environ["LOCAL_RANK"]))
    torch.accelerator.set_device_index(device.index)
    dist.init_process_group(dist.get_default_backend_for_device(device))
    return device


def report(name: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    """Print the mean loss and the bytes that rank 0 holds."""
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    states = [value for state in optimizer.state.values() for value in state.values()]
    held = {
        "parameters": count_bytes(model.parameters()),
        "gradients": count_bytes(parameter.grad for parameter in model.parameters()),
        "optimizer": count_bytes(states),
    }
    if dist.get_rank() == 0:
        print(f"{name} on {dist.get_world_size()} ranks: loss {mean.item() / dist.get_world_size():.6f}")
        print("held by rank 0: " + ", ".join(f"{what} {num_bytes:,} bytes" for what, num_bytes in held.items()))


def count_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes that this rank holds; a sharded tensor counts only with its local shard."""
    local = (tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors)
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


if __name__ == "__main__":
    main()
