"""Train a toy model with FSDP or DDP in plain PyTorch, and print what rank 0 holds.

The loss is the same with both.

    torchrun --nproc-per-node 2 examples/toy_fsdp.py            # FSDP: each rank holds its shard
    torchrun --nproc-per-node 2 examples/toy_fsdp.py --ddp      # DDP: each rank holds everything

Without accelerators, the ranks run on CPUs. On Gaudi, export PT_HPU_LAZY_MODE=0 first.
docs/gaudi_fsdp.md shows the output.
"""

import contextlib
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

WIDTH = 256
NUM_LAYERS = 4


def main() -> None:
    """Train with FSDP, or with DDP if --ddp is given."""
    device = start()
    # Frees the model: a DDP model can hang if it outlives the process group.
    train("--ddp" in sys.argv, device)
    dist.destroy_process_group()


def train(ddp: bool, device: torch.device) -> None:
    """Train the toy model on random rows and print the loss and memory."""
    torch.manual_seed(0)  # the same model on every rank
    model = torch.nn.Sequential(
        *(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS))
    ).to(device)
    if ddp:
        model = DistributedDataParallel(model)
    else:
        for layer in model:
            # Each layer is a unit: it is gathered before it computes, and freed afterwards.
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    torch.manual_seed(dist.get_rank())  # different rows on every rank
    rows = torch.rand(8, WIDTH, device=device)
    for _ in range(5):
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
    device = torch.device(
        torch.accelerator.current_accelerator().type, int(os.environ["LOCAL_RANK"])
    )
    torch.accelerator.set_device_index(device.index)
    dist.init_process_group(dist.get_default_backend_for_device(device))
    return device


def report(
    name: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor
) -> None:
    """Print the mean loss of all ranks and the bytes that rank 0 holds."""
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    held = {
        "parameters": list(model.parameters()),
        "gradients": [parameter.grad for parameter in model.parameters()],
    }
    held["optimizer"] = [value for state in optimizer.state.values() for value in state.values()]
    if dist.get_rank() == 0:
        print(f"{name} on {dist.get_world_size()} ranks: loss {mean.item():.6f}")
        print(
            "held by rank 0: "
            + ", ".join(f"{what} {count_bytes(held[what]):,} bytes" for what in held)
        )


def count_bytes(tensors: list[torch.Tensor]) -> int:
    """Return how many bytes this rank holds. Of a sharded tensor, only the local shard counts."""
    return sum(getattr(tensor, "_local_tensor", tensor).nbytes for tensor in tensors)


if __name__ == "__main__":
    main()
