"""A training step of an MLP with sequence parallelism, by PyTorch and on taxfree.

    torchrun --nproc-per-node 2 -m benchmarks.accept.train

Rank 0 prints one JSON document: eager and compiled, the microseconds of forward and backward, and
how far the losses of both are apart in some steps from the same weights. What is on record of its
four problems runs; `taxfree shapes --model llama-3.1-8b --path sequence --training` lists them too.
"""

from __future__ import annotations

import copy
import json
import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import taxfree

ALLOWED = 0.02  # of a loss: steps in bfloat16, whose sums are in other orders
STEPS, ROUNDS = 10, 30


def _model(weights: dict[str, torch.Tensor], mesh: DeviceMesh, sizes: tuple[int, int]) -> nn.Module:
    hidden, inner = sizes
    with torch.device(mesh.device_type):
        model = nn.Sequential(
            nn.Linear(hidden, inner, bias=False), nn.SiLU(), nn.Linear(inner, hidden, bias=False)
        ).bfloat16()
    model.load_state_dict(weights)
    rows = Shard(1)  # of [batch, tokens, features]
    plan = {
        "0": ColwiseParallel(input_layouts=rows),
        "2": RowwiseParallel(output_layouts=rows),
    }
    return parallelize_module(model, mesh, plan)


def _trained(model: Any, x: torch.Tensor, target: torch.Tensor) -> list[float]:
    """The losses of some steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    losses = []
    for _ in range(STEPS):
        x.grad = None  # a subclass behind eager calls, with which PyTorch 2.11 compiles none
        loss = nn.functional.mse_loss(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _timed(models: dict[str, Any], x: torch.Tensor, target: torch.Tensor) -> dict[str, float]:
    """Microseconds of forward and backward, in rounds of all models: medians and quartiles."""
    times: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(ROUNDS):
        for name in sorted(models, reverse=turn % 2 > 0):
            models[name].zero_grad()
            x.grad = None
            _synchronize()
            begin = time.perf_counter()
            nn.functional.mse_loss(models[name](x), target).backward()
            _synchronize()
            times[name].append(1e6 * (time.perf_counter() - begin))
    figures: dict[str, float] = {}
    for name, samples in times.items():
        first, median, third = statistics.quantiles(samples, n=4, method="inclusive")
        figures |= {f"{name}_us": median, f"{name}_iqr_us": third - first}
    return figures


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()


def main() -> None:
    """Run the command line."""
    has_gpus = torch.cuda.is_available()
    if has_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    kind = "cuda" if has_gpus else "cpu"
    dist.init_process_group()
    world_size = dist.get_world_size()
    # The compile pass serves a group. Meshes of the same ranks are equal to DTensor, unless their
    # dimensions have other names.
    meshes = {
        name: DeviceMesh.from_group(dist.new_group(), kind, mesh_dim_names=(name,))
        for name in ("torch", "taxfree")
    }
    hidden, inner, tokens = (4096, 14336, 2048) if has_gpus else (64, 256, 8)
    torch.manual_seed(0)
    weights = {
        name: torch.randn(shape, dtype=torch.bfloat16) / shape[1] ** 0.5
        for name, shape in (("0.weight", (inner, hidden)), ("2.weight", (hidden, inner)))
    }
    torch.manual_seed(1 + dist.get_rank())
    x, target = torch.randn(2, 2, tokens // world_size, hidden, dtype=torch.bfloat16).to(kind)
    x.requires_grad_()  # as in a model, where layers precede
    rows: list[dict[str, Any]] = []
    for is_compiled in (False, True):
        row: dict[str, Any] = {"is_compiled": is_compiled}
        models: dict[str, Any] = {}
        for name, mesh in meshes.items():
            model = _model(copy.deepcopy(weights), mesh, (hidden, inner))
            if name == "taxfree":
                taxfree.enable(mesh, model)
            models[name] = torch.compile(model) if is_compiled else model
        losses = {name: _trained(model, x, target) for name, model in models.items()}
        row |= _timed(models, x, target)
        apart = max(abs(a / b - 1) for a, b in zip(*losses.values(), strict=True))
        row |= {"apart": apart, "is_same": apart <= ALLOWED, "losses": losses}
        rows.append(row)
    if dist.get_rank() == 0:
        report = taxfree.report()
        document = {"rows": rows, "layers": report.layers, "problems": report.problems}
        print(json.dumps(document), flush=True)
    dist.barrier()
    os._exit(0)  # captured collectives make NCCL's own teardown slow


if __name__ == "__main__":
    main()
