"""The block benchmark on the ranks: the MLP block of a model, tensor parallel, end to end.

The first weight, gate and up side by side, is split by columns, the second by rows. With replicated
activations the block ends in ``matmul_all_reduce``. With activations sharded by rows (sequence
parallel) it begins with ``all_gather_matmul`` and ends in ``matmul_reduce_scatter``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.nn import functional

from taxfree._runtime.collectives import Failure, vote
from taxfree._runtime.ready import ready_plans
from taxfree._runtime.runtime import Runtime
from taxfree.errors import TaxfreeError
from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.matmul_all_reduce.problem import MatmulAllReduce
from taxfree_kernels.matmul_reduce_scatter.problem import MatmulReduceScatter
from taxfree_kernels.variant import Ready, op_of, variants
from taxfree_tune.measuring.timer import Timing, copies_needed, time_together
from taxfree_tuning_db import Record

#: path -> the variants of its operations, of which the first that serves runs; None: dispatched
PATHS: Mapping[str, Sequence[str] | None] = {
    "library": ("baseline",),
    "torch": ("torch_symm_mem", "torch_fused", "baseline"),
    "dispatch": None,
}

_Tensors = tuple[torch.Tensor, ...]
_Op = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Block:
    """An MLP block.

    Args:
        m: rows of activations, over all ranks.
        hidden, intermediate: columns of activations outside and inside the block; the intermediate
            ones are split over the ranks.
        activations: "replicated" or "sharded".
    """

    m: int
    hidden: int
    intermediate: int
    activations: Literal["replicated", "sharded"]
    dtype: str
    world_size: int

    @property
    def own_columns(self) -> int:
        """Columns inside the block, on one rank."""
        return self.intermediate // self.world_size

    @property
    def problems(self) -> list[Any]:
        """The operations between ranks, in order."""
        common = {"m": self.m, "dtype": self.dtype, "world_size": self.world_size}
        down = common | {"n": self.hidden, "k": self.own_columns}
        if self.activations == "replicated":
            return [MatmulAllReduce(**down, residual=True)]
        up = common | {"n": 2 * self.own_columns, "k": self.hidden}
        return [AllGatherMatmul(**up, gather_dim=0), MatmulReduceScatter(**down)]


@dataclass(frozen=True)
class PathTime:
    """The time of one path in one mode.

    Args:
        choices: operation -> the variant that ran.
        relative_error: Frobenius norm of the difference from the float64 reference over that of the
            reference; the worst rank's.
    """

    path: str
    mode: str
    timing: Timing
    choices: Mapping[str, str]
    relative_error: float


def measure(
    fabric: Fabric, block: Block, records: Sequence[Record], repetitions: int
) -> list[PathTime]:
    """Time all paths that serve a block together; collective."""
    weights = 3 * block.hidden * block.own_columns * getattr(torch, block.dtype).itemsize
    inputs = _inputs(fabric, block, copies_needed(fabric, weights))
    exact = _reference(fabric, block, inputs[0])
    modes = ("eager", "graph") if fabric.has_graphs else ("eager",)
    paths = {}
    for path, wanted in PATHS.items():
        if wanted is None:
            ops, choices = _dispatched(fabric, block, records)
        else:
            ops, choices = _planned(fabric, block, wanted)
        if path != "torch" or set(choices.values()) != {"baseline"}:
            paths[path] = (_call(block, ops, inputs), choices)
    errors = {path: _error(fabric, call(0), exact) for path, (call, _) in paths.items()}
    tried = [(path, mode) for path in paths for mode in modes]
    calls = [(paths[path][0], mode) for path, mode in tried]
    timings = time_together(fabric, calls, repetitions)
    return [
        PathTime(path, mode, timing, paths[path][1], errors[path])
        for (path, mode), timing in zip(tried, timings, strict=True)
    ]


def _call(block: Block, ops: Sequence[_Op], inputs: Sequence[_Tensors]) -> Callable[[int], Any]:
    """The block on the i-th set of inputs, by these operations between ranks."""

    def replicated(index: int) -> torch.Tensor:
        x, up, down = inputs[index % len(inputs)]
        return ops[0](_activate(x @ up), down, None, x)

    def sharded(index: int) -> torch.Tensor:
        x, up, down = inputs[index % len(inputs)]
        return ops[1](_activate(ops[0](x, up, None)), down).add_(x)

    return replicated if block.activations == "replicated" else sharded


def _activate(inside: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [m, gate and up]."""
    gate, up = inside.chunk(2, dim=1)
    return functional.silu(gate).mul_(up)


# -- operations between ranks --


def _dispatched(
    fabric: Fabric, block: Block, records: Sequence[Record]
) -> tuple[list[_Op], dict[str, str]]:
    """Methods of a runtime, as an engine calls them."""
    runtime = Runtime.on_fabric(fabric, records)
    runtime.prepare(block.problems)
    ops = [getattr(runtime, op_of(problem)) for problem in block.problems]
    return ops, {op_of(problem): runtime.choice(problem).variant for problem in block.problems}


def _planned(
    fabric: Fabric, block: Block, wanted: Sequence[str]
) -> tuple[list[_Op], dict[str, str]]:
    """Plans of the wanted variants, called directly without a dispatcher."""
    ops, choices = [], {}
    for problem in block.problems:
        known = variants(op_of(problem))
        name = next(
            name
            for name in wanted
            if name in known and known[name].unsupported_reason(problem, fabric.hardware) is None
        )
        config = known[name].seed_configs(problem, fabric.hardware)[0]
        (plan,) = ready_plans(fabric, [partial(known[name].plan, problem, fabric, config)])
        if isinstance(plan, Failure):
            raise TaxfreeError(f"{name} cannot be planned: {plan.why}")
        ops.append(_of_plan(plan, problem))
        choices[op_of(problem)] = name
    return ops, choices


def _of_plan(plan: Ready, problem: Any) -> _Op:
    size, rest = (problem.m, problem.n), ()
    if isinstance(problem, MatmulReduceScatter):
        size = (problem.shard_rows, problem.shard_columns)
    if isinstance(problem, MatmulAllReduce):
        rest = (None, None)  # of the RMSNorm that it does not ask for

    def run(*tensors: torch.Tensor | None) -> torch.Tensor:
        assert tensors[0] is not None
        return plan(*tensors, *rest, tensors[0].new_empty(size))

    return run


# -- inputs and the reference --


def _inputs(fabric: Fabric, block: Block, copies: int) -> list[_Tensors]:
    """x, gate and up [hidden, 2 own_columns], down [own_columns, hidden]; K contiguous."""
    rows = block.m if block.activations == "replicated" else block.m // block.world_size
    own = fabric.rank if block.activations == "sharded" else 0  # replicated rows have one seed

    def normal(size: tuple[int, int], seed: int, scale: float) -> torch.Tensor:
        generator = torch.Generator(device=fabric.device).manual_seed(seed)
        values = torch.randn(size, generator=generator, device=fabric.device)
        return (values * scale).to(getattr(torch, block.dtype))

    hidden, inside, first = block.hidden, block.own_columns, 1000 * fabric.rank
    return [
        (
            normal((rows, hidden), 1_000_000 * (own + 1) + copy, 1.0),
            normal((2 * inside, hidden), first + 2 * copy, hidden**-0.5).t(),
            normal((hidden, inside), first + 2 * copy + 1, block.intermediate**-0.5).t(),
        )
        for copy in range(copies)
    ]


def _reference(fabric: Fabric, block: Block, tensors: _Tensors) -> torch.Tensor:
    """The block in float64; this rank's rows where they are sharded."""
    x, up, down = (each.double() for each in tensors)
    is_sharded = block.activations == "sharded"
    if is_sharded:
        shards = [torch.empty_like(x) for _ in range(block.world_size)]
        dist.all_gather(shards, x, group=fabric.group)
        x = torch.cat(shards)
    total = _activate(x @ up) @ down
    dist.all_reduce(total, group=fabric.group)
    total += x
    return total.chunk(block.world_size)[fabric.rank] if is_sharded else total


def _error(fabric: Fabric, out: torch.Tensor, exact: torch.Tensor) -> float:
    own = float((out.double() - exact).norm() / exact.norm())
    return max(vote(fabric.group, own))
