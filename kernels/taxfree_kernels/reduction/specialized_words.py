"""Programs of Lamport sums whose warps have roles, for Hopper: device functions, plan and limits.

A producer warp loads boxes, one or two warpgroups (the *consumer*) multiply and exchange words, and
another warp, the *clerk*, empties the words of the previous turn meanwhile.

A call overlaps with the next one. Once a program has issued its last loads it allows the next
kernel to be launched, whose programs become resident when all programs of this one have done so:
each has started, and none waits for a place. So a waiting program of the next call keeps no program
of this call from finishing, on any rank. If weights are static (``init``'s promise), these programs
fill their stages with the weight before they wait for the end of this call, while it exchanges and
memory is idle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from taxfree_kernels.device import packets, specialized, sync
from taxfree_kernels.device.peers import EMPTY, USED
from taxfree_kernels.device.sync import gdc_launch_dependents, gdc_wait
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.launch import (
    OperandDescriptors,
    RowDescriptors,
    is_aligned,
    weight_descriptors,
)
from taxfree_kernels.reduction import spaces
from taxfree_kernels.reduction.fused import Layout
from taxfree_kernels.reduction.packets import LamportPlan, LamportVariant, halves_of
from taxfree_kernels.spaces import power_of_2, within
from taxfree_kernels.variant import Config, PartialSum, Space


class ReductionWork(NamedTuple):
    """The constants of these kernels: ``WORK: tl.constexpr``.

    Args:
        STAGES: boxes of both operands in shared memory.
        EARLY: the weight's boxes of the first stages are loaded before the preceding kernel ends.
        OTHER_REGISTERS: of a thread of the producer and the clerk.
    """

    STAGES: int
    EARLY: bool
    OTHER_REGISTERS: int


class ReductionTile(NamedTuple):
    """The work of a program: a tile, of so many, its first row and column, and its steps of K."""

    tile: Any
    tiles: Any
    row: Any
    col: Any
    steps: Any


class Books(NamedTuple):
    """Shared memory: the generation and the turn, which the clerk reads, and a barrier."""

    generation: Any
    turn: Any
    read: Any


@gluon.constexpr_function
def words_layout(columns, swap, warps):
    """The layout of a tile's words, [BLOCK_M, columns / 2]: each thread has runs of 16 bytes."""
    if swap:
        across = columns // 8
        return gl.BlockedLayout([1, 4], [32 // across, across], [warps, 1], [1, 0])
    whole = specialized.lines(columns, warps)
    bases = (whole.reg_bases[1:], whole.lane_bases, whole.warp_bases)
    halved = [[[row, column // 2] for row, column in base] for base in bases]
    return gl.DistributedLinearLayout(*halved, [], [16 * warps, columns // 2])


@gluon.jit
def make_books():
    """Allocate the clerk's shared memory, and make its barrier."""
    word: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    books = Books(
        gl.allocate_shared_memory(gl.int64, [1], word),
        gl.allocate_shared_memory(gl.int64, [1], word),
        gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),
    )
    mbarrier.init(books.read, count=1)
    return books


@gluon.jit
def keep_books(books, buffers, used, number, programs, GROUP: gl.constexpr):
    """The clerk: read the generation and the turn, empty words as ``packets.empty_last_turn`` does.

    It also counts the program out: the program does not read the generation or the turn again, and
    the next call begins to read them once this one has ended.
    """
    gdc_wait(GROUP)
    LANES: gl.constexpr = 512
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    turn = packets.running_turn(buffers.control_ptr)
    generation = sync.running_generation(buffers.control_ptr)
    books.turn.store(gl.full([1], turn, gl.int64, ONE))
    books.generation.store(gl.full([1], generation, gl.int64, ONE))
    mbarrier.arrive(books.read, count=1)
    if number == 0:
        gl.store(buffers.control_ptr + USED + turn % 2, used)
    last = gl.cdiv(gl.load(buffers.control_ptr + USED + (turn + 1) % 2), 4) * 4
    slot_ptr = gl.multiple_of(buffers.inbox_ptr + (turn + 2) % 3 * buffers.stride_slot, 16)
    lanes = gl.arange(0, LANES, LAYOUT)
    empty = gl.full([LANES], EMPTY, gl.int32, LAYOUT)
    for first in range(number * LANES, last, programs * LANES):
        words_at = first + lanes
        gl.store(slot_ptr + words_at, empty, mask=words_at < last, cache_modifier=".wt")
    packets.leave_turn(buffers.control_ptr)
    sync.leave(buffers.control_ptr)


@gluon.jit
def open_books(books):
    """The generation and the turn, once the clerk has read them."""
    mbarrier.wait(books.read, 0)
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(books.generation.load(ONE), 0), gl.max(books.turn.load(ONE), 0)


@gluon.jit
def _load_weight(w_desc, boxes, place, step, TILE: gl.constexpr, WORK: gl.constexpr):
    """Load the weight's box of a step; its stage then expects the box of x as well."""
    ITEM: gl.constexpr = w_desc.dtype.primitive_bitwidth // 8
    NBYTES: gl.constexpr = (TILE.BLOCK_M + TILE.BLOCK_N) * TILE.BLOCK_K * ITEM
    stage, k_begin = step % WORK.STAGES, step * TILE.BLOCK_K
    full, box = boxes.full.index(stage), boxes.long if TILE.SWAP_AB else boxes.other
    mbarrier.expect(full, NBYTES)
    specialized.load_box(w_desc, [0, place.col, k_begin], full, box.index(stage))


@gluon.jit
def load_tile(
    x_desc, w_desc, boxes, place, GROUP: gl.constexpr, TILE: gl.constexpr, WORK: gl.constexpr
):
    """The producer: load the boxes of all steps, as stages become empty."""
    early = 0
    if WORK.EARLY:
        early = gl.minimum(place.steps, WORK.STAGES)
        for step in range(early):
            _load_weight(w_desc, boxes, place, step, TILE, WORK)
    gdc_wait(GROUP)
    for step in range(place.steps):
        stage, k_begin = step % WORK.STAGES, step * TILE.BLOCK_K
        mbarrier.wait(boxes.empty.index(stage), step // WORK.STAGES & 1 ^ 1)
        if step >= early:
            _load_weight(w_desc, boxes, place, step, TILE, WORK)
        box = boxes.other if TILE.SWAP_AB else boxes.long
        specialized.load_box(
            x_desc, [0, 0, place.row, k_begin], boxes.full.index(stage), box.index(stage)
        )
    gdc_launch_dependents(GROUP)


@gluon.jit
def multiply_tile(boxes, place, stride_w, m, n, k, TILE: gl.constexpr, WORK: gl.constexpr):
    """The consumer's product, float32 [BLOCK_M, BLOCK_N], or its transpose when SWAP_AB.

    Args:
        stride_w: where factors are fp8, ``ScaledStrides``.
    """
    if TILE.SCALES == "none":
        acc = specialized.multiply(0, place.steps, boxes, TILE, 1, WORK.STAGES)
        mbarrier.arrive(boxes.empty.index((place.steps - 1) % WORK.STAGES), count=1)
        return acc
    else:
        return specialized.multiply_tile_fp8(
            place.steps, boxes, place.row, m, place.col, n, k, stride_w.x_scale_ptr,
            stride_w.w_scale_ptr, TILE, WORK.STAGES,
        )  # fmt: skip


@gluon.jit
def words_of_tile(acc, ELEMENT: gl.constexpr, TILE: gl.constexpr):
    """int32 [BLOCK_M, BLOCK_N / 2]: a product in 16 bits, two elements of a row in a word."""
    WARPS: gl.constexpr = gl.num_warps()
    tile = acc.to(ELEMENT)
    if TILE.SWAP_AB:
        across: gl.constexpr = TILE.BLOCK_N // 8
        TURNED: gl.constexpr = gl.BlockedLayout([8, 1], [across, 32 // across], [1, WARPS], [0, 1])
        tile = gl.convert_layout(tile, TURNED).permute((1, 0))
    else:
        tile = gl.convert_layout(tile, specialized.lines(TILE.BLOCK_N, WARPS))
    LAYOUT: gl.constexpr = words_layout(TILE.BLOCK_N, TILE.SWAP_AB, WARPS)
    pairs = tile.to(gl.uint16, bitcast=True).to(gl.int32)
    low, high = gl.split(pairs.reshape([TILE.BLOCK_M, TILE.BLOCK_N // 2, 2]))
    return gl.convert_layout(low | (high << 16), LAYOUT, assert_trivial=True)


@gluon.constexpr_function
def polled_layout(sources, warps):
    """The layout of words of all ranks, [sources, lanes]: each thread adds runs of 4 lanes."""
    return gl.BlockedLayout([sources, 4], [1, 32], [1, warps], [1, 0])


@gluon.jit
def sum_of_words(
    offsets, mask, slot_ptr, stride_source, peers, ELEMENT: gl.constexpr, GROUP: gl.constexpr
):
    """See ``packets.sum_of_lamport_words``.

    Args:
        offsets, mask: int32 and int1 [lanes], in the layout of the lanes of :func:`polled_layout`.
    """
    SOURCES: gl.constexpr = triton.next_power_of_2(GROUP.WORLD)
    POLLED: gl.constexpr = polled_layout(SOURCES, gl.num_warps())
    lane = gl.arange(0, SOURCES, gl.SliceLayout(1, POLLED))[:, None]
    source = gl.minimum(lane, GROUP.WORLD - 1)
    words, arrived = packets.receive(
        peers,
        slot_ptr + source * stride_source + offsets[None, :],
        source,
        GROUP,
        mask=mask[None, :],
    )
    low, high = halves_of(words, ELEMENT)
    counted = lane < GROUP.WORLD
    low = gl.sum(gl.where(counted, low, 0.0), 0)
    high = gl.sum(gl.where(counted, high, 0.0), 0)
    return gl.join(low, high).reshape([2 * offsets.shape[0]]), arrived


class SpecializedPlan(LamportPlan):
    """One launch of programs whose warps have roles."""

    def __init__(
        self,
        problem: PartialSum,
        fabric: Fabric,
        config: Config,
        function: Any,
        layout: Callable[[Any], Layout],
        constants: Mapping[str, Any],
        loads_early: bool | None = None,
    ) -> None:
        early = fabric.static_weights if loads_early is None else loads_early
        self._waiting: SpecializedPlan | None = None  # for a weight that is copied: see run
        if early:
            arguments = (problem, fabric, config, function, layout, constants)
            self._waiting = SpecializedPlan(*arguments, loads_early=False)
        is_wide_fp8 = problem.is_fp8 and config["num_warps"] == 8  # two products and a sum
        work = ReductionWork(config["num_stages"], early, 40 if is_wide_fp8 else 56)
        super().__init__(problem, fabric, config, function, layout, {**constants, "WORK": work})
        registers = registers_of(problem, fabric.hardware, config)
        options = {**self._kernel.options, "maxnreg": registers}
        static = ("w_desc",) if early else ()
        self._kernel = replace(self._kernel, options=options, static=static)

    def run(self, *tensors: Any) -> torch.Tensor:
        if self._waiting is not None and not is_aligned(tensors[1].t()):
            return self._waiting.run(*tensors)  # the copy is written just before
        return super().run(*tensors)

    def descriptors(
        self, problem: PartialSum, config: Config
    ) -> tuple[OperandDescriptors, OperandDescriptors]:
        block_m, block_n, block_k = (config[f"BLOCK_{side}"] for side in "MNK")
        dtype = getattr(gl, "float8e4nv" if problem.is_fp8 else problem.dtype)
        x_box, w_box = [1, 1, block_m, block_k], [1, block_n, block_k]
        x_layout, w_layout = (
            gl.NVMMASharedLayout.get_default_for(box, dtype) for box in (x_box, w_box)
        )
        return (
            RowDescriptors(x_box, TensorDescriptor, x_layout),
            weight_descriptors(1, w_box, True, TensorDescriptor, w_layout),
        )


def registers_of(problem: PartialSum, hardware: Hardware, config: Config) -> int:
    """Registers of a thread, on average.

    Two programs find room on a compute unit if their shared memory does; of wide tiles in fp8 one,
    for each has a step's product besides its sum.
    """
    if config["num_warps"] == 4:
        return 128
    is_alone = problem.is_fp8 or spaces.tiles_at_once(problem, hardware, config) == 1
    return 168 if is_alone else 80


class Specialized(LamportVariant):
    """A variant of programs whose warps have roles, in place of one without; to be mixed in."""

    def unsupported_reason(self, problem: PartialSum, hardware: Hardware) -> str | None:
        if hardware.architecture not in ("sm_90", "cpu"):
            return "warps have roles on Hopper alone"
        if problem.weight_layout != "nk":
            return "columns of the weight are not contiguous"
        if True not in spaces.ways_to_load(problem, hardware):
            return "rows do not start at multiples of 16 bytes"
        return super().unsupported_reason(problem, hardware)

    def space(self, problem: PartialSum, hardware: Hardware) -> Space:
        space = {**super().space(problem, hardware), "TMA": (True,), "SPLIT_K": (1,)}
        if hardware.backend != "interpreter":
            space["num_stages"] = (3, 4, 5, 6, 7, 8, 10, 11, 12)
            if problem.is_fp8:
                space["num_stages"] += (14, 16, 20)
        return space

    def seed_configs(self, problem: PartialSum, hardware: Hardware) -> list[dict[str, Any]]:
        if hardware.backend == "interpreter":
            return super().seed_configs(problem, hardware)
        rows = power_of_2(problem.m, 16)
        few = {"BLOCK_M": rows, "BLOCK_N": 64, "GROUP_M": 1, "SWAP_AB": True, "num_warps": 4,
               "num_stages": {16: 10, 32: 8}.get(rows, 6)}  # fmt: skip
        deep, two_at_once = (few | {"BLOCK_K": block_k} for block_k in (128, 64))
        if problem.is_fp8:
            two_at_once = deep
            deep = deep | {"num_stages": {16: 20, 32: 16}.get(rows, 10)}
        square = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP_M": 8, "num_warps": 8,
                  "num_stages": 6}  # fmt: skip
        square["BLOCK_K"] *= 2 // problem.factor_bytes
        space, guesses = self.space(problem, hardware), [deep, two_at_once]
        configs = [within(space, guess) for guess in (guesses if rows <= 64 else [square])]
        return [config for config in configs if not self.illegal_reason(problem, hardware, config)]

    def illegal_reason(self, problem: PartialSum, hardware: Hardware, config: Config) -> str | None:
        if hardware.backend != "interpreter":
            block_m, block_n, warps = config["BLOCK_M"], config["BLOCK_N"], config["num_warps"]
            longer, other = (block_n, block_m) if config["SWAP_AB"] else (block_m, block_n)
            if longer != 16 * warps or other > 256:
                return "each warp has 16 rows of the product"
            if not config["SWAP_AB"] and block_n < 64:
                return "eight threads have a cache line of a row"
            if block_m < power_of_2(problem.world_size, 1):
                return "slices of a tile are whole rows"
        return super().illegal_reason(problem, hardware, config)
