"""FSDP2 adds up gradients of different parameters if each rank uses others, such as experts.

If the parameters have different sizes, or one rank uses more of them, the backward pass fails.

accelerate launch --num_processes 2 --use_fsdp --fsdp_version 2 \
  --fsdp_auto_wrap_policy NO_WRAP unused_expert.py
"""

import torch
from accelerate import Accelerator


class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(4, 4, bias=False) for _ in range(2))

    def forward(self, hidden, expert):
        return self.experts[expert](hidden)


accelerator = Accelerator()
rank = accelerator.process_index
torch.manual_seed(0)
model = Experts()
before = [expert.weight.detach().clone().to(accelerator.device) for expert in model.experts]
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
hidden = torch.full((1, 4), 1.0 + rank, device=accelerator.device)
accelerator.backward(model(hidden, rank).sum())
optimizer.step()
for number, expert in enumerate(model.experts):
    change = expert.weight.full_tensor() - before[number]
    # The mean over two ranks, of which one does not use the expert.
    expected_change = torch.full_like(change, -(1.0 + number) / 2)
    assert torch.allclose(change, expected_change), (
        f"expert {number} changes by {change[:, 0].tolist()}, not {expected_change[0, 0].item()}"
    )
