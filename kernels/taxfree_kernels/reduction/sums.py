"""The vendor's matmul for a partial sum, then our kernel that sums flat tensors in chunks.

The size of a flat tensor and the bounds of chunks are multiples of 16 elements, so that accesses
can be 16 bytes wide for all dimensions. The kernel of two shots is here, because copy engines may
take the place of its senders.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
import triton
import triton.language as tl

from taxfree_kernels.device import sync
from taxfree_kernels.device.peers import Group, translate
from taxfree_kernels.device.sync import signal_everybody, wait_for_everybody
from taxfree_kernels.device.tiles import copy
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.launch import Kernel, compile_options
from taxfree_kernels.reduction.fused import Addends, Epilogue, add_bias_residual, with_sources
from taxfree_kernels.variant import Config, PartialSum, Plan, Step, resized
from taxfree_kernels.vendor import multiply_into, try_fp8


@triton.jit
def bounds_of_chunk(chunk, begin, end, CHUNKS: tl.constexpr):
    """Begin and end of one of CHUNKS parts of [begin, end), in units of 16 elements."""
    per_chunk = tl.cdiv(end - begin, CHUNKS)
    chunk_begin = min(begin + chunk * per_chunk, end)
    return chunk_begin, min(chunk_begin + per_chunk, end)


@triton.jit(do_not_specialize=["rank", "block_vec16"])
def two_shot(
    partial_ptr, addends, out_ptr, memory, rank, block_vec16, num_vec16, count, columns,
    GROUP: tl.constexpr, EPILOGUE: tl.constexpr, CHUNKS: tl.constexpr, SEND_BLOCK: tl.constexpr,
    COPIED: tl.constexpr,
):  # fmt: skip
    """Sum in two shots, see :mod:`taxfree_kernels.matmul_all_reduce.two_shot`.

    Args:
        partial_ptr: this rank's partial sum; addends: see :class:`Addends`; memory: of two inboxes.
        block_vec16, num_vec16: elements of a rank's block and of the sum, in units of 16.
        count: elements of the sum; columns: of a row.
        COPIED: the channel of copies that replace the senders, in a call that goes on; else None.
    """
    program = tl.program_id(0)
    peers, slot_ptr = sync.running_slot(memory, rank)
    block = block_vec16.to(tl.int64) * 16
    result_ptr = slot_ptr + GROUP.WORLD * block
    SENDERS: tl.constexpr = CHUNKS * (GROUP.WORLD - 1) if COPIED is None else 0
    if program < SENDERS:
        chunk = program // (GROUP.WORLD - 1)
        peer = (rank + 1 + program % (GROUP.WORLD - 1)) % GROUP.WORLD
        begin, end = chunk_of_owner(peer, chunk, block_vec16, num_vec16, CHUNKS)
        # The inbox is [source, block]; element 0 of the flat sum would lie before it.
        own_ptr = slot_ptr + (rank - peer) * block
        target_ptr = translate(own_ptr, peers, peer)
        copy(target_ptr, partial_ptr, begin, end, SEND_BLOCK)
        sync.signal(peers, chunk, peer, GROUP)
    elif program < SENDERS + CHUNKS:
        chunk = program - SENDERS
        begin, end = chunk_of_owner(rank, chunk, block_vec16, num_vec16, CHUNKS)
        distance = tl.arange(0, triton.next_power_of_2(GROUP.WORLD))
        results_ptr = translate(result_ptr, peers, (rank + distance) % GROUP.WORLD)
        is_peer = (distance > 0) & (distance < GROUP.WORLD)
        announced = chunk if COPIED is None else COPIED
        arrived = wait_for_everybody(peers, announced, GROUP, BUT_SELF=True)
        for start in range(begin, end, SEND_BLOCK):
            offsets = start + tl.arange(0, SEND_BLOCK)
            mask = offsets < end
            total = tl.zeros((SEND_BLOCK,), tl.float32)
            total = with_sources(
                total, offsets, mask, partial_ptr, slot_ptr - rank * block, block, rank, GROUP
            )
            stored = mask & (offsets < count)
            total = add_bias_residual(
                total, offsets % columns, stored, offsets, stored, addends, EPILOGUE
            )
            total = tl.where(arrived, total, float("nan")).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + offsets, total, mask=stored)
            everywhere = results_ptr[:, None] + offsets[None, :]
            tl.store(everywhere, total[None, :], mask=is_peer[:, None] & mask[None, :])
        signal_everybody(peers, CHUNKS + chunk, GROUP)
    else:
        index = program - SENDERS - CHUNKS
        chunk = index // (GROUP.WORLD - 1)
        source = (rank + 1 + index % (GROUP.WORLD - 1)) % GROUP.WORLD
        begin, end = chunk_of_owner(source, chunk, block_vec16, num_vec16, CHUNKS)
        arrived = sync.wait(peers, CHUNKS + chunk, source, GROUP)
        for start in range(begin, end, SEND_BLOCK):
            offsets = start + tl.arange(0, SEND_BLOCK)
            mask = (offsets < end) & (offsets < count)
            result = tl.where(arrived, tl.load(result_ptr + offsets, mask=mask), float("nan"))
            tl.store(out_ptr + offsets, result, mask=mask)
    if COPIED is None:
        sync.leave(memory.control_ptr)


def two_shot_kernel(
    fabric: Fabric, config: Config, epilogue: Epilogue, copied: tl.constexpr | None = None
) -> Kernel:
    """It with all of its programs: senders unless copies replace them, reducers, copiers."""
    world, chunks = fabric.world_size, config["CHUNKS"]
    return Kernel(
        two_shot,
        grid=chunks * (2 * world - 1 if copied is None else world),
        constants={
            "GROUP": Group(world, fabric.backend),
            "EPILOGUE": epilogue,
            "CHUNKS": chunks,
            "SEND_BLOCK": config["SEND_BLOCK"],
            "COPIED": copied,
        },
        options=compile_options(fabric.backend, config),
    )


def addends_of(
    bias: torch.Tensor | None, residual: torch.Tensor | None, out: torch.Tensor | None
) -> Addends:
    """What it adds; the output stands where it adds nothing."""
    return Addends(*(out if addend is None else addend for addend in (bias, residual)))


@triton.jit
def chunk_of_owner(owner, chunk, block_vec16, num_vec16, CHUNKS: tl.constexpr):
    """First and last element of a chunk of the block that a rank owns."""
    begin = min(owner * block_vec16, num_vec16)
    end = min(begin + block_vec16, num_vec16)
    begin, end = bounds_of_chunk(chunk, begin, end, CHUNKS)
    return begin * 16, end * 16


class SumPlan(Plan):
    """The vendor's matmul for this rank's partial sum, then one kernel that sums all ranks'.

    Args:
        elements: number of elements of the largest partial sum, as the kernel reads it.
    """

    launches = 2
    _kernel: Kernel

    def __init__(self, problem: PartialSum, fabric: Fabric, elements: int) -> None:
        self._problem = problem
        try_fp8(problem, fabric.device)
        self._partials = fabric.workspace.scratch(((elements,), getattr(torch, problem.dtype)))
        self._sized = fabric.workspace.by_size(self._of_size)

    @abstractmethod
    def _launch(self, problem: PartialSum) -> tuple[int, tuple[Any, ...]]:
        """The grid of the kernel, and its last arguments."""

    def _of_size(self, m: int) -> tuple[torch.Tensor, torch.Tensor, Kernel]:
        """The partial sum in the kernel's layout and as a matrix; the kernel."""
        problem, (flat,) = resized(self._problem, m=m), self._partials()
        matrix = flat[: problem.elements].view(m, problem.n)
        return flat, matrix, self._kernel.resized(*self._launch(problem))

    def kernels(self, size: int) -> tuple[Kernel, ...]:
        return (self._sized[size][2],)

    def add_up(self, partial: torch.Tensor, kernel: Kernel, *rest: torch.Tensor | None) -> None:
        """Launch the sum; takes the plan's arguments but for x, the weight and their scales."""
        kernel(partial, *rest)

    def run(self, x: torch.Tensor, weight: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        flat, matrix, kernel = self._sized[x.shape[0]]
        rest, scales = self._scales_apart(rest)
        multiply_into(matrix, x, weight, None, *scales, is_fast=self._problem.fast_accumulation)
        self.add_up(flat, kernel, *rest)
        return rest[-1]

    def _scales_apart(
        self, rest: tuple[torch.Tensor, ...]
    ) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        if not self._problem.is_fp8:
            return rest, ()
        *others, x_scale, weight_scale, out = rest
        return (*others, out), (x_scale, weight_scale)

    def steps(self, x: torch.Tensor, weight: torch.Tensor, *rest: torch.Tensor) -> list[Step]:
        flat, matrix, kernel = self._sized[x.shape[0]]
        rest, scales = self._scales_apart(rest)
        kind = {"is_fast": self._problem.fast_accumulation}
        return [
            Step(
                "matmul",
                "producer",
                lambda: multiply_into(matrix, x, weight, None, *scales, **kind),
            ),
            Step("sum", "collective", lambda: self.add_up(flat, kernel, *rest)),
        ]
