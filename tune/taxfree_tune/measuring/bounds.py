"""How fast a problem could be on this machine: lower bounds from rates measured here.

 - `t_floor`: the operation's flops at the measured matmul rate, or its memory bytes at the measured
   memory bandwidth, whichever takes longer;
 - `t_link`: the bytes a rank must receive, at the measured receive rate;
 - `t_bound`: the longer of the two, as with perfect overlap;
 - `t_gemm`: the vendor's kernel alone, on an A that is already gathered.

Rates are measured by the same protocol and at the same duty cycle as everything else that is timed.
The fastest repetition counts, so that the bound really is a lower one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch

from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.fp8 import fp8_dtype
from taxfree_kernels.launch import Kernel
from taxfree_kernels.variant import Cost, operation
from taxfree_kernels.vendor import multiply_into
from taxfree_tune.measuring import probes, timer
from taxfree_tune.measuring.trial import Calls

_REPETITIONS = 5


@dataclass(frozen=True)
class Peaks:
    """Rates of one rank, measured.

    Args:
        flops_per_s: of the vendor's matmul on large square matrices of random numbers.
        memory_bytes_per_s: the higher of two rates: reading a large tensor, and a negation, which
            reads one and writes another (both counted). A copy is not used: a captured one of this
            size runs on a copy engine, at two thirds of that rate.
        link_bytes_per_s: receive rate of a rank while a kernel on each rank pushes to all peers at
            once, through the symmetric heap; infinite for one rank. Pushing to one peer after the
            other requires ranks in step: on 4 H200s that reached anything from 233 to 361 GB/s.
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
    """Sizes large enough to reach peak rates, small enough to take milliseconds.

    Args:
        side: of the square matrices.
        elements: number of 4-byte elements that are read, and negated.
        reading_block: elements that one program reads.
        programs, blocks, block: of the pushing kernel: each program sends `blocks` blocks of
            `block` 4-byte elements.
    """

    side: int
    elements: int
    reading_block: int
    programs: int
    blocks: int
    block: int

    @property
    def pushed_elements(self) -> int:
        return self.programs * self.blocks * self.block


_ON_GPU = _Sizes(
    side=8192, elements=1 << 28, reading_block=1 << 13, programs=528, blocks=15, block=4096
)
_ON_HOST = _Sizes(
    side=256, elements=1 << 22, reading_block=1 << 20, programs=4, blocks=2, block=1 << 14
)


def slot_bytes(fabric: str) -> int:
    """Bytes that a slot of the pool must have for the rates of a fabric to be measured."""
    return 4 * (_ON_HOST if fabric == "host" else _ON_GPU).pushed_elements


@cache
def peaks(fabric: Fabric, dtype: str, x_dtype: str = "same") -> Peaks:
    """Measure the rates of this group, once; collective.

    Args:
        fabric: of this rank.
        dtype: of the matmul's result.
        x_dtype: of its factors, "same" or "fp8".
    """
    sizes = _ON_GPU if fabric.has_graphs else _ON_HOST
    tensor = torch.arange(sizes.elements, dtype=torch.int32, device=fabric.device)
    steps = [
        _matmul(fabric, dtype, x_dtype, sizes.side),
        _negation(tensor),
        _reading(fabric, tensor, sizes.reading_block),
    ]
    amounts = [2 * sizes.side**3, 2 * tensor.nbytes, tensor.nbytes]
    if fabric.world_size > 1:
        steps.append(_pushes(fabric, sizes))
        amounts.append(4 * sizes.pushed_elements)
    mode = "graph" if fabric.has_graphs else "eager"
    timings = timer.time_together(fabric, [(step, mode) for step in steps], _REPETITIONS)
    rates = [
        amount / (min(timing.samples_us) * 1e-6)
        for amount, timing in zip(amounts, timings, strict=True)
    ]
    multiplied, negated, read, *pushed = rates
    return Peaks(multiplied, max(negated, read), pushed[0] if pushed else math.inf)


def _matmul(fabric: Fabric, dtype: str, x_dtype: str, side: int) -> timer.Call:
    kind = getattr(torch, dtype)
    factors = fp8_dtype(fabric.device) if x_dtype == "fp8" else kind
    a, b = (torch.randn(side, side, device=fabric.device).to(factors) for _ in range(2))
    out = torch.empty(side, side, dtype=kind, device=fabric.device)
    one = torch.ones(1, device=fabric.device)
    scales = (one, one) if x_dtype == "fp8" else ()
    return lambda step: multiply_into(out, a, b.t(), None, *scales)


def _negation(tensor: torch.Tensor) -> timer.Call:
    target = torch.empty_like(tensor)
    return lambda step: torch.neg(tensor, out=target)


def _reading(fabric: Fabric, tensor: torch.Tensor, block: int) -> timer.Call:
    options = {"num_warps": 8} if fabric.has_graphs else {}
    kernel = Kernel(probes.read, tensor.numel() // block, {"BLOCK": block}, options)
    maxima = torch.empty(kernel.grid, dtype=tensor.dtype, device=fabric.device)
    return lambda step: kernel(maxima, tensor)


def _pushes(fabric: Fabric, sizes: _Sizes) -> timer.Call:
    """Write to a payload slot of every peer; between calls, nobody reads the slots."""
    inbox, _ = fabric.pool.slots(sizes.pushed_elements, torch.float32)
    source = torch.randn_like(inbox)
    kernel = Kernel(
        probes.spread,
        grid=sizes.programs,
        constants={"WORLD": fabric.world_size, "BLOCK": sizes.block},
        options={"num_warps": 8} if fabric.has_graphs else {},
    )

    def call(step: int) -> None:
        chunk = sizes.blocks * sizes.block
        kernel(inbox, source, chunk, fabric.heap_bases, fabric.rank)

    return call


def vendor_kernel(bench: Calls) -> timer.Call | None:
    """The vendor's kernel of an operation as a call to time, with the weights rotated, or None."""
    make = operation(bench.op).vendor_kernel
    kernel = make and make(bench.problem, bench.fabric.device)
    if kernel is None:
        return None

    def call(step: int) -> torch.Tensor:
        copy = step % len(bench.inputs)
        return kernel(*bench.inputs[copy], bench.outputs[copy])

    return call
