"""FSDP2 fails in the backward pass of an accumulated micro-batch if a unit was never called.

It does so where gradients are reduced in float32.

torchrun --nproc_per_node 2 accumulate.py
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
model = torch.nn.Linear(8, 8)
model.unused = torch.nn.Linear(8, 8)
fully_shard(model.unused, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
model.set_requires_gradient_sync(False)
model(torch.ones(2, 8)).sum().backward()
