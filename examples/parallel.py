"""An MLP under PyTorch's tensor parallelism, on taxfree.

torchrun --nproc-per-node 2 examples/parallel.py      # without GPUs: TRITON_INTERPRET=1
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
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
x = torch.randn(2, 8, 64, device=device, dtype=torch.bfloat16)
with torch.no_grad():
    expected = model(x)

    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    with taxfree.enable(mesh):
        y = model(x)
        if dist.get_rank() == 0:
            print(f"largest difference {(y - expected).abs().max():.4f}")
            print(taxfree.report())
dist.destroy_process_group()
