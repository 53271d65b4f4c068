"""How fast a problem could be on this machine: bounds from rates that are measured here.

 - `t_floor`: the operation's flops at the measured matmul rate, or its memory bytes at the measured
   copy rate, whichever takes longer;
 - `t_link`: the bytes a rank must receive, at the measured rate of receiving;
 - `t_bound`: the longer of the two, as a perfect overlap would have it;
 - `t_gemm`: the vendor's kernel alone, on an A that is gathered already.

Rates are taken by the protocol and at the duty cycle of everything else that is timed, and are the
best repetition's, so that a bound is one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist

from taxfree import measure
from taxfree.trial import Bench
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.variant import Cost

_REPETITIONS = 5


@dataclass(frozen=True)
class Peaks:
    """Rates of one rank, measured.

    Args:
        flops_per_s: of the vendor's matmul on large square matrices of random numbers.
        memory_bytes_per_s: of a copy within device memory, read and written bytes counted.
        link_bytes_per_s: that a rank receives in a large all-gather of the collective library,
            from all peers together, while it sends to all of them; infinite for one rank.
    """

    flops_per_s: float
    memory_bytes_per_s: float
    link_bytes_per_s: float


@dataclass(frozen=True)
class Bounds:
    """Bounds of one problem in microseconds; see the module for what they are.

    Args:
        t_floor_us, t_link_us: from the problem's cost and the measured rates.
        t_gemm_us: measured; None for an operation without one vendor kernel.
    """

    t_floor_us: float
    t_link_us: float
    t_gemm_us: float | None

    @property
    def t_bound_us(self) -> float:
        return max(self.t_floor_us, self.t_link_us)


def bounds(cost: Cost, peaks: Peaks, gemm_us: float | None) -> Bounds:
    """The bounds of a problem.

    Args:
        cost: of one call on one rank.
        peaks: of the machine, for the problem's dtype.
        gemm_us: the vendor's kernel alone, in microseconds.
    """
    floor_s = max(cost.flops / peaks.flops_per_s, cost.memory_bytes / peaks.memory_bytes_per_s)
    return Bounds(floor_s * 1e6, cost.link_bytes / peaks.link_bytes_per_s * 1e6, gemm_us)


@dataclass(frozen=True)
class _Sizes:
    """Large enough for the peak rate, small enough to take milliseconds."""

    side: int
    copy_bytes: int
    shard_bytes: int


_ON_GPU = _Sizes(side=8192, copy_bytes=1 << 30, shard_bytes=64 << 20)
_ON_HOST = _Sizes(side=256, copy_bytes=16 << 20, shard_bytes=4 << 20)


@cache
def peaks(fabric: Fabric, dtype: str) -> Peaks:
    """Measure the rates of this group, once; collective.

    Args:
        fabric: of this rank.
        dtype: of the matmul.
    """
    sizes = _ON_GPU if fabric.has_graphs else _ON_HOST
    steps = [_matmul(fabric, dtype, sizes.side), _copy(fabric, sizes.copy_bytes)]
    amounts = [2 * sizes.side**3, 2 * sizes.copy_bytes]
    if fabric.world_size > 1:
        steps.append(_all_gather(fabric, sizes.shard_bytes))
        amounts.append((fabric.world_size - 1) * sizes.shard_bytes)
    mode = "graph" if fabric.has_graphs else "eager"
    timings = measure.time_together(fabric, [(step, mode) for step in steps], _REPETITIONS)
    rates = [
        amount / (min(timing.samples_us) * 1e-6)
        for amount, timing in zip(amounts, timings, strict=True)
    ]
    return Peaks(rates[0], rates[1], rates[2] if fabric.world_size > 1 else math.inf)


def _matmul(fabric: Fabric, dtype: str, side: int) -> measure.Call:
    a, b = (
        torch.randn(side, side, device=fabric.device).to(getattr(torch, dtype)) for _ in range(2)
    )
    out = torch.empty_like(a)
    return lambda step: torch.mm(a, b.t(), out=out)


def _copy(fabric: Fabric, size: int) -> measure.Call:
    source, target = (torch.empty(size, dtype=torch.uint8, device=fabric.device) for _ in range(2))
    source.random_()
    return lambda step: target.copy_(source)


def _all_gather(fabric: Fabric, shard_bytes: int) -> measure.Call:
    shard = torch.empty(shard_bytes, dtype=torch.uint8, device=fabric.device).random_()
    gathered = torch.empty(fabric.world_size * shard_bytes, dtype=torch.uint8, device=fabric.device)
    # torch 2.13 renamed it; earlier versions have only the old name.
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return lambda step: all_gather(gathered, shard, group=fabric.group)


# -- the vendor's kernel alone, by operation --


def vendor_kernel(bench: Bench) -> measure.Call | None:
    """The vendor's kernel of an operation as a call to time, with the weights rotated, or None."""
    make = _VENDOR_KERNELS.get(bench.op)
    return None if make is None else make(bench)


def _gathered_matmul(bench: Bench) -> measure.Call:
    from taxfree_kernels.all_gather_matmul.baseline import matmul_into

    problem, dtype = bench.problem, getattr(torch, bench.problem.dtype)
    a = torch.randn(problem.m, problem.k, device=bench.fabric.device).to(dtype)

    def call(step: int) -> torch.Tensor:
        copy = step % len(bench.inputs)
        _, weight, bias = bench.inputs[copy]
        assert weight is not None
        return matmul_into(bench.outputs[copy], a, weight, bias)

    return call


_VENDOR_KERNELS: dict[str, Callable[[Bench], measure.Call]] = {
    "all_gather_matmul": _gathered_matmul
}
