"""``push_tma`` with roles for warps, for Hopper: two wait and load, warpgroups multiply.

In ``push_tma`` each wait for peers' data ends a loop over K: the pipeline of loads runs empty, and
fills again after the wait. Here one warp loads the weight, and another waits for sources and loads
their parts of A, so the matrix units go on with what is in shared memory. Triton's compiler does
not do this, so the kernel is written in Gluon. The interpreter does not run Gluon: there, and for
the happens-before checker, this variant is ``push_tma``, the same protocol.

Protocol. As in ``push_tma`` with gather_dim 1: senders have the lowest ids and wait for nobody; a
tile waits for all sources, in groups of SOURCES_PER_WAIT, each wait followed by a proxy fence.
Signals, channels and waits are the same.

Where weights are static, see :func:`taxfree.init`, the warp that loads the weight does not wait for
the preceding kernel. It touches nothing else in global memory, and no rank writes the weight, so
the protocol between ranks is the same: A is loaded, sent, and waited for after the wait for the
preceding kernel. The next kernel may be launched once all programs of this one have begun; its
programs then take the place of each that ends.

Barriers of shared memory. Each stage has one that counts the bytes that have arrived, announced by
both warps that load, and one that counts the warpgroups that have read them. A stage's n-th use has
parity n % 2; the first wait for an empty stage passes at once, because its parity is that of a
phase before.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from taxfree_kernels.all_gather_matmul import spaces
from taxfree_kernels.all_gather_matmul.fused import InputShard, inbox_scales, place_of
from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_kernels.all_gather_matmul.push_tma import PushTma, PushTmaPlan
from taxfree_kernels.device import sync
from taxfree_kernels.device.peers import Peers, translate
from taxfree_kernels.device.specialized import (
    accumulators,
    add_products,
    load_box,
    make_boxes,
    multiply,
    multiply_fp8,
    scaled_product,
    scales_of_groups,
    scales_of_product,
)
from taxfree_kernels.device.sync import before_tma_loads, gdc_launch_dependents, gdc_wait, lanes
from taxfree_kernels.device.tiles import BLOCK, select
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.launch import Kernel, RowDescriptors, folded, is_aligned, weight_descriptors
from taxfree_kernels.variant import Config, Plan

ROWS = 64
_ROWS = gl.constexpr(ROWS)  # of a warpgroup's accumulators: those of a matrix instruction


class GatherWork(NamedTuple):
    """The constants of the kernel: ``WORK: tl.constexpr``.

    Args:
        WARPGROUPS: that multiply; each has 64 rows of the tile, or 64 columns when SWAP_AB.
        STAGES: boxes of both operands in shared memory.
        PREFETCH: the weight is loaded before the preceding kernel has ended.
        FOLD: parts of a source's K that are multiplied at once, see :func:`_unfolded`.
        REGISTERS, LOADER_REGISTERS: of a thread of a second warpgroup, and of a warp that loads.
    """

    WARPGROUPS: int
    STAGES: int
    PREFETCH: bool
    FOLD: int
    REGISTERS: int = 208
    LOADER_REGISTERS: int = 88


class GatherTile(NamedTuple):
    """The work of a program: see ``tile.place_of``."""

    tile: Any
    split: Any
    row: Any
    col: Any
    step_begin: Any
    step_end: Any


class Call(NamedTuple):
    """The run-time values of all roles of a tile.

    Args:
        failed: shared memory: whether a wait has failed.
        shard: see ``fused.InputShard``.
    """

    a_desc: Any
    w_desc: Any
    inbox_desc: Any
    shard_rows: Any
    output: Any
    memory: Any
    rank: Any
    m: Any
    n: Any
    place: Any
    boxes: Any
    failed: Any
    shard: Any


@gluon.constexpr_function
def _stored(rows, columns, swap):
    """The layout in which so many rows and columns are stored, 16 bytes of bf16 a thread."""
    if swap:
        return gl.BlockedLayout([8, 1], [rows // 8, 256 // rows], [1, 4], [0, 1])
    across = min(columns // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])


@gluon.jit
def _send(program, shard, memory, rank, GROUP: gl.constexpr, GATHER: gl.constexpr):
    """Send messages to peers as ``tile.push_chunk`` does."""
    gdc_wait(GROUP)
    IN_16_BYTES: gl.constexpr = 128 // shard.ptr.dtype.element_ty.primitive_bitwidth
    LAYOUT: gl.constexpr = gl.BlockedLayout([IN_16_BYTES], [32], [4], [0])
    MESSAGES: gl.constexpr = GATHER.CHUNKS * (GROUP.WORLD - 1)
    peers, slot_ptr = sync.running_slot(memory, rank)
    own_block = slot_ptr + rank.to(gl.int64) * shard.rows * shard.columns
    chunk_rows = gl.cdiv(shard.rows, GATHER.CHUNKS)
    for message in range(program, MESSAGES, GATHER.SENDERS):
        peer = (rank + GROUP.WORLD - 1 - message // GATHER.CHUNKS) % GROUP.WORLD
        chunk = message % GATHER.CHUNKS
        begin = chunk * chunk_rows
        end = gl.minimum(begin + chunk_rows, shard.own_rows)
        target = translate(own_block, peers, peer)
        for start in range(begin * shard.columns, end * shard.columns, GATHER.SEND_BLOCK):
            offsets = start + gl.arange(0, GATHER.SEND_BLOCK, LAYOUT)
            mask = offsets < end * shard.columns
            gl.store(target + offsets, gl.load(shard.ptr + offsets, mask=mask), mask=mask)
        if GATHER.SCALE_COLUMNS > 0:
            WIDTH: gl.constexpr = GATHER.SCALE_COLUMNS
            ALIGNED: gl.constexpr = 1 if WIDTH % 4 else 4
            OF_SCALES: gl.constexpr = gl.BlockedLayout([ALIGNED], [32], [4], [0])
            scales_ptr = inbox_scales(slot_ptr, shard, GROUP) + rank * shard.rows * WIDTH
            at_peer = translate(scales_ptr, peers, peer)
            for start in range(begin * WIDTH, end * WIDTH, GATHER.SCALE_BLOCK):
                offsets = start + gl.arange(0, GATHER.SCALE_BLOCK, OF_SCALES)
                mask = offsets < end * WIDTH
                scales = gl.load(shard.scale_ptr + offsets, mask=mask)
                gl.store(at_peer + offsets, scales, mask=mask)
        sync.signal(peers, chunk, peer, GROUP)


@gluon.jit
def _wait_for_sources(
    nearest, row_begin, row_end, peers, m, shard_rows,
    GROUP: gl.constexpr, GATHER: gl.constexpr,
):  # fmt: skip
    """``tile.wait_for_rows`` of the SOURCES_PER_WAIT peers from a distance on, by one warp."""
    SOURCES: gl.constexpr = GATHER.SOURCES_PER_WAIT
    LANES: gl.constexpr = triton.next_power_of_2(GATHER.CHUNKS * SOURCES)
    lane = lanes(LANES)
    chunk, distance = lane // SOURCES, nearest + lane % SOURCES
    chunk_rows = gl.cdiv(shard_rows, GATHER.CHUNKS)
    begin = chunk * chunk_rows
    end = gl.minimum(begin + chunk_rows, shard_rows)
    has_rows = (begin < row_end) & (end > row_begin)
    is_last = (begin >= end) & (row_end >= m)  # a chunk without rows falls to the last tile
    needed = (has_rows | is_last) & (chunk < GATHER.CHUNKS) & (distance < GROUP.WORLD)
    source = (peers.rank + distance) % GROUP.WORLD
    return sync.wait(peers, chunk, source, GROUP, mask=needed)


@gluon.jit
def _load_source(
    desc, slot, source, row, ring, number, boxes, place,
    PARTS: gl.constexpr, TILE: gl.constexpr, WORK: gl.constexpr,
):  # fmt: skip
    """Load all steps of a source's part of one operand, as stages become empty.

    Args:
        desc: the operand's descriptor; that of A has slots before its sources.
        ring: the operand's boxes, PARTS of them in each stage.
        number: of stages filled before; returned with these steps added.
    """
    for step in range(place.step_begin, place.step_end):
        stage, k = number % WORK.STAGES, step * (TILE.BLOCK_K // WORK.FOLD)
        full = boxes.full.index(stage)
        mbarrier.wait(boxes.empty.index(stage), number // WORK.STAGES & 1 ^ 1)
        mbarrier.expect(full, PARTS * desc.block_type.nbytes)
        for part in gl.static_range(PARTS):
            box = ring.index(stage * PARTS + part)
            if len(desc.block_shape) == 4:
                load_box(desc, [source, 0, row + part * _ROWS, k], full, box)
            else:
                load_box(desc, [slot, source, 0, row + part * _ROWS, k], full, box)
        number += 1
    return number


@gluon.jit
def _load_weight(call, GROUP: gl.constexpr, TILE: gl.constexpr, WORK: gl.constexpr):
    """Load the weight of this rank's part of A, then of each peer's."""
    if not WORK.PREFETCH:
        gdc_wait(GROUP)
    PARTS: gl.constexpr = WORK.WARPGROUPS if TILE.SWAP_AB else 1
    ring = call.boxes.long if TILE.SWAP_AB else call.boxes.other
    number = gl.to_tensor(0)
    for near in range(GROUP.WORLD):
        source = (call.rank + near) % GROUP.WORLD
        number = _load_source(
            call.w_desc, 0, source, call.place.col, ring, number, call.boxes, call.place, PARTS,
            TILE, WORK,
        )  # fmt: skip


@gluon.jit
def _load_rows(
    call, GROUP: gl.constexpr, GATHER: gl.constexpr, TILE: gl.constexpr, WORK: gl.constexpr
):
    """Load this rank's part of A, then each peer's once it is there."""
    gdc_wait(GROUP)
    gdc_launch_dependents(GROUP)
    place, boxes, memory, rank, m = call.place, call.boxes, call.memory, call.rank, call.m
    PARTS: gl.constexpr = 1 if TILE.SWAP_AB else WORK.WARPGROUPS
    ring = boxes.other if TILE.SWAP_AB else boxes.long
    row, row_end = place.row, gl.minimum(place.row + TILE.BLOCK_M, m)
    none = gl.to_tensor(0)
    number = _load_source(call.a_desc, 0, 0, row, ring, none, boxes, place, PARTS, TILE, WORK)
    # read here, because the first loads need not wait for it
    generation = sync.running_generation(memory.control_ptr)
    peers = Peers(memory.control_ptr, memory.heap_bases, rank, generation)
    slot = (generation % 2).to(gl.int32)
    for near in range(1, GROUP.WORLD):
        if (near - 1) % GATHER.SOURCES_PER_WAIT == 0:
            arrived = _wait_for_sources(
                near, row, row_end, peers, m, call.shard_rows, GROUP, GATHER
            )
            before_tma_loads(GROUP)
            if not arrived:
                LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
                call.failed.store(gl.full([1], 1, gl.int32, LAYOUT))
        source = (rank + near) % GROUP.WORLD
        number = _load_source(
            call.inbox_desc, slot, source, row, ring, number, boxes, place, PARTS, TILE, WORK
        )


@gluon.jit
def _consume(
    part: gl.constexpr, call,
    GROUP: gl.constexpr, GATHER: gl.constexpr, TILE: gl.constexpr, WORK: gl.constexpr,
):  # fmt: skip
    """Multiply and store 64 rows of the tile, or 64 columns when SWAP_AB."""
    gdc_wait(GROUP)
    place = call.place
    if TILE.SCALES == "none":
        steps = (place.step_end - place.step_begin) * GROUP.WORLD
        acc = multiply(part, steps, call.boxes, TILE, WORK.WARPGROUPS, WORK.STAGES, WORK.FOLD)
    else:
        acc = _multiplied_fp8(part, call, GROUP, GATHER, TILE, WORK)
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    failed = gl.max(call.failed.load(ONE), 0) > 0
    acc = gl.where(failed, float("nan"), acc)
    row = place.row if TILE.SWAP_AB else place.row + part * _ROWS
    col = place.col + part * _ROWS if TILE.SWAP_AB else place.col
    if TILE.SPLIT_K > 1:
        _add_shares(acc, part, row, col, call, GROUP, GATHER, TILE, WORK)
    else:
        if WORK.FOLD > 1:
            acc = _unfolded(acc, WORK)
        if not GATHER.HAS_BIAS:
            acc = acc.to(call.output.ptr.dtype.element_ty)  # half of the bytes to exchange
        LAYOUT: gl.constexpr = _stored(acc.shape[0], acc.shape[1], TILE.SWAP_AB)
        _store(gl.convert_layout(acc, LAYOUT), row, col, call, GATHER, TILE)


@gluon.jit
def _multiplied_fp8(
    part: gl.constexpr, call,
    GROUP: gl.constexpr, GATHER: gl.constexpr, TILE: gl.constexpr, WORK: gl.constexpr,
):  # fmt: skip
    """As ``specialized.multiply``, of fp8 factors with their scales."""
    place, boxes, output = call.place, call.boxes, call.output
    COLUMNS: gl.constexpr = TILE.BLOCK_M if TILE.SWAP_AB else TILE.BLOCK_N
    LAYOUT: gl.constexpr = accumulators(COLUMNS, 4, 1)
    row = place.row if TILE.SWAP_AB else place.row + part * _ROWS
    col = place.col + part * _ROWS if TILE.SWAP_AB else place.col
    steps = place.step_end - place.step_begin
    gl.assume(steps > 0)
    if TILE.SCALES == "block":
        _, slot_ptr = sync.running_slot(call.memory, call.rank)
        scales = call, row, inbox_scales(slot_ptr, call.shard, GROUP)
        return add_products(
            part, GROUP.WORLD, steps, boxes, scales, _scales_of_source, (GROUP, GATHER), 1,
            TILE, WORK.WARPGROUPS, WORK.STAGES,
        )  # fmt: skip
    else:
        scales = scales_of_product(
            row, call.m, col, call.n, output.a_scale_ptr, output.w_scale_ptr, COLUMNS, LAYOUT, TILE
        )
        steps *= GROUP.WORLD
        if TILE.FAST:
            acc = multiply(part, steps, boxes, TILE, WORK.WARPGROUPS, WORK.STAGES)
            return scaled_product(acc, scales, TILE)
        else:
            return multiply_fp8(part, steps, boxes, scales, TILE, WORK.WARPGROUPS, WORK.STAGES)


@gluon.jit
def _scales_of_source(scales, near, first, ROWS: gl.constexpr, CONSTANTS: gl.constexpr):
    """See ``specialized.scales_of_groups``: of a source, whose rows have arrived."""
    call, row, inbox_ptr = scales
    GROUP: gl.constexpr = CONSTANTS[0]
    GATHER: gl.constexpr = CONSTANTS[1]
    place, output = call.place, call.output
    WIDTH: gl.constexpr = GATHER.SCALE_COLUMNS  # of a source
    source = (call.rank + near) % GROUP.WORLD
    x_ptr = inbox_ptr + source * call.shard_rows * WIDTH
    x_ptr = select(near == 0, output.a_scale_ptr, x_ptr, 4)
    w_ptr = output.w_scale_ptr + (place.col // BLOCK * GROUP.WORLD + source) * WIDTH
    first += place.step_begin
    return scales_of_groups(x_ptr, w_ptr, row, call.m, WIDTH, first, place.step_end, ROWS)


@gluon.jit
def _unfolded(acc, WORK: gl.constexpr):
    """[rows, columns] of a product from [FOLD * rows, FOLD * columns], of its parts of K.

    A matrix instruction has 64 rows. With FOLD 2, these are 32 columns of the weight, of one half
    of a source's K and of the other, so that a program needs no other to share K with. The products
    of unequal halves are left out.
    """
    LAYOUT: gl.constexpr = acc.type.layout
    ROWS: gl.constexpr = acc.shape[0] // WORK.FOLD
    COLUMNS: gl.constexpr = acc.shape[1] // WORK.FOLD
    down = gl.arange(0, acc.shape[0], gl.SliceLayout(1, LAYOUT))[:, None] // ROWS
    across = gl.arange(0, acc.shape[1], gl.SliceLayout(0, LAYOUT))[None, :] // COLUMNS
    acc = gl.where(down == across, acc, 0.0).reshape([WORK.FOLD, ROWS, WORK.FOLD, COLUMNS])
    return gl.sum(gl.sum(acc, 2), 0)


@gluon.jit
def _add_shares(
    acc, part: gl.constexpr, row, col, call,
    GROUP: gl.constexpr, GATHER: gl.constexpr, TILE: gl.constexpr, WORK: gl.constexpr,
):  # fmt: skip
    """Leave a warpgroup's share of a sum in memory; the last to do so stores the total.

    A share is [rows, columns] of the product: threads store what they hold, and whoever adds them
    loads pieces, in few registers, in the layout in which they are stored.
    """
    COLUMNS: gl.constexpr = TILE.BLOCK_M if TILE.SWAP_AB else TILE.BLOCK_N
    tiles = (gl.num_programs(0) - GATHER.SENDERS) // TILE.SPLIT_K
    number = call.place.tile * WORK.WARPGROUPS + part
    share_ptr = call.memory.partials_ptr + number.to(gl.int64) * (_ROWS * COLUMNS)
    stride = tiles.to(gl.int64) * (WORK.WARPGROUPS * _ROWS * COLUMNS)
    HELD: gl.constexpr = acc.type.layout
    there = _within(0, COLUMNS, COLUMNS, HELD, TILE)
    gl.store(share_ptr + call.place.split * stride + there, acc)
    if sync.arrive(call.memory.counters_ptr + number, TILE.SPLIT_K, GROUP):
        PIECE: gl.constexpr = min(32, COLUMNS)
        LAYOUT: gl.constexpr = _stored(_ROWS, PIECE, TILE.SWAP_AB)
        for begin in range(0, COLUMNS, PIECE):
            here = _within(begin, PIECE, COLUMNS, LAYOUT, TILE)
            total = gl.zeros([_ROWS, PIECE], gl.float32, LAYOUT)
            for share in gl.static_range(TILE.SPLIT_K):  # always in the same order
                total += gl.load(share_ptr + share * stride + here)
            if TILE.SWAP_AB:
                _store(total, row + begin, col, call, GATHER, TILE)
            else:
                _store(total, row, col + begin, call, GATHER, TILE)


@gluon.jit
def _within(
    begin, PIECE: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr, TILE: gl.constexpr
):
    """Where in a share the elements of PIECE of its columns are: as in the output."""
    down = gl.arange(0, _ROWS, gl.SliceLayout(1, LAYOUT))[:, None]
    across = begin + gl.arange(0, PIECE, gl.SliceLayout(0, LAYOUT))[None, :]
    return across * _ROWS + down if TILE.SWAP_AB else down * COLUMNS + across


@gluon.jit
def _store(acc, row, col, call, GATHER: gl.constexpr, TILE: gl.constexpr):
    """Write a product, or its transpose when SWAP_AB, to the output's rows and columns."""
    LAYOUT: gl.constexpr = acc.type.layout
    output, m, n = call.output, call.m, call.n
    down = gl.arange(0, acc.shape[0], gl.SliceLayout(1, LAYOUT))[:, None]
    across = gl.arange(0, acc.shape[1], gl.SliceLayout(0, LAYOUT))[None, :]
    if TILE.SWAP_AB:
        rows, cols = row + across, col + down
    else:
        rows, cols = row + down, col + across
    if GATHER.HAS_BIAS:
        acc += gl.load(output.bias_ptr + cols, mask=cols < n, other=0.0).to(gl.float32)
    out = output.ptr + (rows.to(gl.int64) * n + cols)
    gl.store(out, acc.to(output.ptr.dtype.element_ty), mask=(rows < m) & (cols < n))


@gluon.jit(do_not_specialize=["rank", "own_rows", "m", "shard_rows"])
def _push_specialized(
    a_ptr, own_rows, a_desc, w_desc, inbox_desc, output, memory, rank, m, n, k, shard_rows,
    shard_columns, GROUP: gl.constexpr, GATHER: gl.constexpr, TILE: gl.constexpr,
    WORK: gl.constexpr,
):  # fmt: skip
    program = gl.program_id(0)
    a_scale_ptr = None
    if TILE.SCALES != "none":
        a_scale_ptr = output.a_scale_ptr
    shard = InputShard(a_ptr, own_rows, shard_rows, shard_columns, a_scale_ptr)
    if program < GATHER.SENDERS:
        _send(program, shard, memory, rank, GROUP, GATHER)
    else:
        tile, split, row, col, step_begin, step_end = place_of(
            program - GATHER.SENDERS, rank, m, n, shard, GATHER.GATHER_DIM, TILE
        )
        place = GatherTile(tile, split, row, col, step_begin, step_end)
        failed = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        failed.store(gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
        boxes = make_boxes(a_desc, w_desc, TILE.SWAP_AB, WORK.WARPGROUPS, WORK.STAGES, LOADERS=2)
        call = Call(
            a_desc, w_desc, inbox_desc, shard_rows, output, memory, rank, m, n, place, boxes,
            failed, shard,
        )  # fmt: skip
        LOADER: gl.constexpr = WORK.LOADER_REGISTERS
        if WORK.WARPGROUPS == 2:
            gl.warp_specialize(
                [
                    (_consume, (0, call, GROUP, GATHER, TILE, WORK)),
                    (_consume, (1, call, GROUP, GATHER, TILE, WORK)),
                    (_load_weight, (call, GROUP, TILE, WORK)),
                    (_load_rows, (call, GROUP, GATHER, TILE, WORK)),
                ],
                [4, 1, 1],
                [WORK.REGISTERS, LOADER, LOADER],
            )
        else:
            gl.warp_specialize(
                [
                    (_consume, (0, call, GROUP, GATHER, TILE, WORK)),
                    (_load_weight, (call, GROUP, TILE, WORK)),
                    (_load_rows, (call, GROUP, GATHER, TILE, WORK)),
                ],
                [1, 1],
                [LOADER, LOADER],
            )
    sync.leave(memory.control_ptr)


class PushSpecializedPlan(PushTmaPlan):
    """One launch: senders, then tiles."""

    def __init__(
        self,
        problem: AllGatherMatmul,
        fabric: Fabric,
        config: Config,
        loads_early: bool | None = None,
    ) -> None:
        super().__init__(problem, fabric, config)
        block_m, block_n, block_k = (config[f"BLOCK_{side}"] for side in "MNK")
        swap, split_k, fold = config["SWAP_AB"], config["SPLIT_K"], config["FOLD"]
        warpgroups = fold * (block_n if swap else block_m) // ROWS
        tiles = self._tiles(problem)
        self._counters = fabric.workspace.counters(warpgroups * tiles)
        shares = split_k * tiles * block_m * block_n if split_k > 1 else 1
        self._partials = fabric.workspace.scratch(((shares,), torch.float32))
        prefetch = fabric.static_weights if loads_early is None else loads_early
        self._waiting: Plan | None = None  # for a weight that has to be copied first: see run
        if prefetch:
            self._waiting = PushSpecializedPlan(problem, fabric, config, loads_early=False)
        work = GatherWork(warpgroups, config["num_stages"], prefetch, fold)
        self._kernel = Kernel(
            _push_specialized,
            grid=0,
            constants={**self._kernel.constants, "WORK": work},
            options={**self._kernel.options, "num_warps": 4}
            | ({"maxnreg": 128} if warpgroups == 1 else {}),
            static=("w_desc",) if prefetch else (),
        )
        dtype = getattr(gl, "float8e4nv" if problem.is_fp8 else problem.dtype)
        width = block_k // fold
        self._a_box = [1, 1, fold, block_m if swap else ROWS, width]
        w_box = [1, fold, ROWS // fold if swap else block_n, width]
        self._a_layout, w_layout = (
            gl.NVMMASharedLayout.get_default_for(box, dtype) for box in (self._a_box, w_box)
        )
        self._fold = fold
        self._a_descriptors = RowDescriptors(
            self._a_box, TensorDescriptor, self._a_layout, fold=fold
        )

        def describe(rows: torch.Tensor, shape: list[int], strides: list[int], *others: Any) -> Any:
            return TensorDescriptor(rows, *folded(shape, strides, fold), *others)

        self._w_descriptors = weight_descriptors(
            problem.world_size, w_box, True, describe, w_layout
        )

    def _layout(self, problem: AllGatherMatmul) -> tuple[Any, bool]:
        inbox, reads_own = super()._layout(problem)
        sizes = folded(inbox.shape, inbox.strides, self._fold)
        return TensorDescriptor(inbox.base, *sizes, self._a_box, self._a_layout), reads_own

    def run(self, *tensors: Any) -> torch.Tensor:
        if self._waiting is not None and not is_aligned(tensors[1].t()):
            return self._waiting.run(*tensors)  # the copy of the weight is written just before
        return super().run(*tensors)


class PushSpecialized(PushTma):
    """Senders, and tiles whose warps have roles, in one kernel."""

    space = staticmethod(spaces.specialized_space)
    illegal_reason = staticmethod(spaces.specialized_illegal_reason)

    def unsupported_reason(self, problem: AllGatherMatmul, hardware: Hardware) -> str | None:
        if problem.gather_dim == 0:
            return "tiles would load rows of several tensors"
        if problem.weight_layout != "nk":
            return "columns of the weight are not contiguous"
        return super().unsupported_reason(problem, hardware)

    def seed_configs(self, problem: AllGatherMatmul, hardware: Hardware) -> list[dict[str, Any]]:
        return spaces.first_specialized_configs(problem, hardware, self.space(problem, hardware))

    def plan(self, problem: AllGatherMatmul, fabric: Fabric, config: Config) -> Plan:
        config = {**config, "K_PARTS": 1, "SEND_STAGES": 1}
        if fabric.hardware.backend == "interpreter":
            return PushTmaPlan(problem, fabric, config)
        return PushSpecializedPlan(problem, fabric, config)


VARIANT = PushSpecialized()
