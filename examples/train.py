"""Training with sequence parallelism: the backward of a gather is a reduce-scatter.

torchrun --nproc-per-node 2 examples/train.py         # without GPUs: TRITON_INTERPRET=1
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import taxfree

if "WORLD_SIZE" not in os.environ:
    sys.exit(__doc__)

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.SiLU(), nn.Linear(256, 64)).to(device, torch.bfloat16)
rows = Shard(1)  # of [batch, tokens, features]: each rank has its own tokens
parallelize_module(
    model,
    mesh,
    {"0": ColwiseParallel(input_layouts=rows), "2": RowwiseParallel(output_layouts=rows)},
)
torch.manual_seed(1 + dist.get_rank())
x, target = torch.randn(2, 2, 8, 64, device=device, dtype=torch.bfloat16)
with taxfree.enable(mesh) as rt:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
    for step in range(10):
        loss = nn.functional.mse_loss(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step}  loss {loss.item():.4f}")
    rt.check()
    if dist.get_rank() == 0:
        print(taxfree.report())
dist.destroy_process_group()
