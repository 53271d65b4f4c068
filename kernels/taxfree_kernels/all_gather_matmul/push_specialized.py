"""``push_tma`` with roles for warps, for Hopper: one warp waits and loads, warpgroups multiply.

In ``push_tma`` each wait for peers' data ends a loop over K: the pipeline of loads runs empty, and
fills again after the wait. Here a producer warp waits for each source and keeps the TMA busy, so
the matrix units go on with what is in shared memory. Triton's compiler does not do this, so the
kernel is written in Gluon. The interpreter does not run Gluon: there, and for the happens-before
checker, this variant is ``push_tma`` that waits for one source at a time, the same protocol.

Protocol. As in ``push_tma`` with gather_dim 1: senders have the lowest ids and wait for nobody, a
tile's producer waits for all sources, one by one, each wait followed by a proxy fence. Signals,
channels and waits are the same.

Barriers of shared memory. Each stage has one that counts the bytes that have arrived, and one that
counts the warpgroups that have read them. A stage's n-th use has parity n % 2; the first wait for
an empty stage passes at once, because its parity is that of a phase before.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from taxfree_kernels.all_gather_matmul import spaces
from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_kernels.all_gather_matmul.push_tma import PushTma, PushTmaPlan
from taxfree_kernels.all_gather_matmul.tile import Shard, place_of, running_slot
from taxfree_kernels.descriptors import RowDescriptors, weight_descriptors
from taxfree_kernels.device import sync
from taxfree_kernels.device.fences import before_tma_loads
from taxfree_kernels.device.pdl import gdc_launch_dependents, gdc_wait
from taxfree_kernels.device.peers import Peers, translate
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.launch import Kernel
from taxfree_kernels.variant import Config, Plan, Space

# Triton 3.6 has the old name alone; later versions refuse it.
_load_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
ROWS = 64
_ROWS = gl.constexpr(ROWS)  # of a warpgroup's accumulators: those of a matrix instruction


class Work(NamedTuple):
    """The constants of the kernel: ``WORK: tl.constexpr``.

    Args:
        WARPGROUPS: that multiply; each has 64 rows of the tile, or 64 columns when SWAP_AB.
        STAGES: boxes of both operands in shared memory.
        LAUNCH_NEXT: the next kernel may be launched once all programs have left their loops over K;
            its programs are resident when this kernel ends, if shared memory has room for both.
        REGISTERS, PRODUCER_REGISTERS: of a thread of a warpgroup, and of the producer.
    """

    WARPGROUPS: int
    STAGES: int
    LAUNCH_NEXT: bool
    REGISTERS: int = 232
    PRODUCER_REGISTERS: int = 40


class Place(NamedTuple):
    """The work of a program: see ``tile.place_of``."""

    tile: Any
    split: Any
    row: Any
    col: Any
    step_begin: Any
    step_end: Any


class Boxes(NamedTuple):
    """Shared memory: the long operand's boxes, the other's, and their barriers."""

    long: Any
    other: Any
    full: Any
    empty: Any
    failed: Any


@gluon.constexpr_function
def _accumulators(columns):
    """The layout of a warpgroup's matrix product of so many columns."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def _stored(columns, swap):
    """The layout in which 64 rows and so many columns are stored, 16 bytes of bf16 a thread."""
    if swap:
        return gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    across = min(columns // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])


@gluon.jit
def _send(
    program, a_ptr, own_rows, shard_rows, shard_columns, slot_ptr, peers,
    GROUP: gl.constexpr, GATHER: gl.constexpr,
):  # fmt: skip
    """Send messages to peers as ``tile.push_chunk`` does."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    MESSAGES: gl.constexpr = GATHER.CHUNKS * (GROUP.WORLD - 1)
    own_block = slot_ptr + peers.rank.to(gl.int64) * shard_rows * shard_columns
    chunk_rows = gl.cdiv(shard_rows, GATHER.CHUNKS)
    for message in range(program, MESSAGES, GATHER.SENDERS):
        peer = (peers.rank + GROUP.WORLD - 1 - message // GATHER.CHUNKS) % GROUP.WORLD
        chunk = message % GATHER.CHUNKS
        begin = chunk * chunk_rows
        end = gl.minimum(begin + chunk_rows, own_rows)
        target = translate(own_block, peers, peer)
        for start in range(begin * shard_columns, end * shard_columns, GATHER.SEND_BLOCK):
            at = start + gl.arange(0, GATHER.SEND_BLOCK, LAYOUT)
            mask = at < end * shard_columns
            gl.store(target + at, gl.load(a_ptr + at, mask=mask), mask=mask)
        sync.signal(peers, chunk, peer, GROUP)


@gluon.jit
def _wait_for_source(
    source, row_begin, row_end, peers, m, shard_rows, GROUP: gl.constexpr, GATHER: gl.constexpr
):
    """Wait for the chunks of a source that ``tile.wait_for_rows`` would wait for."""
    arrived = row_end > 0
    chunk_rows = gl.cdiv(shard_rows, GATHER.CHUNKS)
    for chunk in range(GATHER.CHUNKS):
        begin = chunk * chunk_rows
        end = gl.minimum(begin + chunk_rows, shard_rows)
        has_rows = (begin < row_end) & (end > row_begin)
        is_last = (begin >= end) & (row_end >= m)  # a chunk without rows falls to the last tile
        if has_rows | is_last:
            arrived = sync.wait(peers, chunk, source, GROUP) & arrived
    return arrived


@gluon.jit
def _load_source(
    a_desc, slot, at, source, number, w_desc, boxes, place,
    TILE: gl.constexpr, WORK: gl.constexpr,
):  # fmt: skip
    """Load all steps of a source's part of K, as stages become empty.

    Args:
        a_desc, slot, at: the descriptor of its part of A, and the first two coordinates there.
        number: of stages filled before; returned with these steps added.
    """
    NBYTES: gl.constexpr = (TILE.BLOCK_M + TILE.BLOCK_N) * TILE.BLOCK_K * 2
    for step in range(place.step_begin, place.step_end):
        stage, k = number % WORK.STAGES, step * TILE.BLOCK_K
        full, other = boxes.full.index(stage), boxes.other.index(stage)
        mbarrier.wait(boxes.empty.index(stage), number // WORK.STAGES & 1 ^ 1)
        mbarrier.expect(full, NBYTES)
        for part in gl.static_range(WORK.WARPGROUPS):
            long = boxes.long.index(stage * WORK.WARPGROUPS + part)
            if TILE.SWAP_AB:
                _load_box(w_desc, [source, place.col + part * _ROWS, k], full, long)
            else:
                _load_box(a_desc, [slot, at, place.row + part * _ROWS, k], full, long)
        if TILE.SWAP_AB:
            _load_box(a_desc, [slot, at, place.row, k], full, other)
        else:
            _load_box(w_desc, [source, place.col, k], full, other)
        number += 1
    return number


@gluon.jit
def _produce(
    own_desc, inbox_desc, w_desc, boxes, place, memory, rank, m, shard_rows,
    GROUP: gl.constexpr, GATHER: gl.constexpr, TILE: gl.constexpr, WORK: gl.constexpr,
):  # fmt: skip
    """Load this rank's part of A, then each peer's once it is there, and the weight."""
    gdc_wait(GROUP)
    row_end = gl.minimum(place.row + TILE.BLOCK_M, m)
    none = gl.to_tensor(0)
    number = _load_source(own_desc, 0, 0, rank, none, w_desc, boxes, place, TILE, WORK)
    # read here, because the first loads need not wait for it
    generation = sync.running_generation(memory.control_ptr)
    peers = Peers(memory.control_ptr, memory.heap_bases, rank, generation)
    slot = (generation % 2).to(gl.int32)
    for near in range(1, GROUP.WORLD):
        source = (rank + near) % GROUP.WORLD
        arrived = _wait_for_source(source, place.row, row_end, peers, m, shard_rows, GROUP, GATHER)
        before_tma_loads(GROUP)
        if not arrived:
            LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
            boxes.failed.store(gl.full([1], 1, gl.int32, LAYOUT))
        number = _load_source(
            inbox_desc, slot, source, source, number, w_desc, boxes, place, TILE, WORK
        )


@gluon.jit
def _consume(
    part: gl.constexpr, boxes, place, m, n, output, memory,
    GROUP: gl.constexpr, GATHER: gl.constexpr, TILE: gl.constexpr, WORK: gl.constexpr,
):  # fmt: skip
    """Multiply and store 64 rows of the tile, or 64 columns when SWAP_AB."""
    gdc_wait(GROUP)
    COLUMNS: gl.constexpr = TILE.BLOCK_M if TILE.SWAP_AB else TILE.BLOCK_N
    STORED: gl.constexpr = _stored(COLUMNS, TILE.SWAP_AB)
    acc = gl.zeros([_ROWS, COLUMNS], gl.float32, _accumulators(COLUMNS))
    steps = (place.step_end - place.step_begin) * GROUP.WORLD
    gl.assume(steps > 0)
    for step in range(steps):
        stage = step % WORK.STAGES
        mbarrier.wait(boxes.full.index(stage), step // WORK.STAGES & 1)
        long = boxes.long.index(stage * WORK.WARPGROUPS + part).reshape([_ROWS, TILE.BLOCK_K])
        other = boxes.other.index(stage).reshape([COLUMNS, TILE.BLOCK_K]).permute((1, 0))
        acc = warpgroup_mma(long, other, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        last = (step + WORK.STAGES - 1) % WORK.STAGES
        mbarrier.arrive(boxes.empty.index(last), count=1, pred=step > 0)
    acc = warpgroup_mma_wait(0, deps=[acc])
    if WORK.LAUNCH_NEXT:
        gdc_launch_dependents(GROUP)
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    failed = gl.max(boxes.failed.load(ONE), 0) > 0
    acc = gl.where(failed, float("nan"), acc)
    down = part * _ROWS + gl.arange(0, _ROWS, gl.SliceLayout(1, STORED))[:, None]
    across = gl.arange(0, COLUMNS, gl.SliceLayout(0, STORED))[None, :]
    if TILE.SWAP_AB:
        rows, cols = place.row + across, place.col + down
    else:
        rows, cols = place.row + down, place.col + across
    mask = (rows < m) & (cols < n)
    at = rows.to(gl.int64) * n + cols
    element: gl.constexpr = output.ptr.dtype.element_ty
    if TILE.SPLIT_K == 1:
        if not GATHER.HAS_BIAS:
            acc = acc.to(element)  # half of the bytes to exchange
        total = gl.convert_layout(acc, STORED)
        is_whole = place.split >= 0
    else:
        total = gl.convert_layout(acc, STORED)
        plane = m.to(gl.int64) * n
        gl.store(memory.partials_ptr + place.split * plane + at, total, mask=mask)
        counter = memory.counters_ptr + place.tile * WORK.WARPGROUPS + part
        is_whole = sync.arrive(counter, TILE.SPLIT_K, GROUP)
        if is_whole:
            total = gl.zeros([_ROWS, COLUMNS], gl.float32, STORED)
            for each in gl.static_range(TILE.SPLIT_K):
                total += gl.load(memory.partials_ptr + each * plane + at, mask=mask, other=0.0)
    if is_whole:
        if GATHER.HAS_BIAS:
            total += gl.load(output.bias_ptr + cols, mask=cols < n, other=0.0).to(gl.float32)
        gl.store(output.ptr + at, total.to(element), mask=mask)


@gluon.jit(do_not_specialize=["rank", "own_rows", "m", "shard_rows"])
def _push_specialized(
    a_ptr, own_rows, a_desc, w_desc, inbox_desc, output, memory, rank, m, n, k, shard_rows,
    shard_columns, GROUP: gl.constexpr, GATHER: gl.constexpr, TILE: gl.constexpr,
    WORK: gl.constexpr,
):  # fmt: skip
    program = gl.program_id(0)
    if program < GATHER.SENDERS:
        gdc_wait(GROUP)
        generation = sync.running_generation(memory.control_ptr)
        peers = Peers(memory.control_ptr, memory.heap_bases, rank, generation)
        slot_ptr = running_slot(memory, generation)
        _send(program, a_ptr, own_rows, shard_rows, shard_columns, slot_ptr, peers, GROUP, GATHER)
    else:
        shard = Shard(a_ptr, own_rows, shard_rows, shard_columns)
        tile, split, row, col, step_begin, step_end = place_of(
            program - GATHER.SENDERS, rank, m, n, shard, GATHER.GATHER_DIM, TILE
        )
        place = Place(tile, split, row, col, step_begin, step_end)
        dtype: gl.constexpr = w_desc.dtype
        barrier: gl.constexpr = mbarrier.MBarrierLayout()
        STAGES: gl.constexpr = WORK.STAGES
        LONG: gl.constexpr = w_desc if TILE.SWAP_AB else a_desc
        OTHER: gl.constexpr = a_desc if TILE.SWAP_AB else w_desc
        boxes = Boxes(
            gl.allocate_shared_memory(
                dtype, [STAGES * WORK.WARPGROUPS] + LONG.block_shape, LONG.layout
            ),
            gl.allocate_shared_memory(dtype, [STAGES] + OTHER.block_shape, OTHER.layout),
            gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
            gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
            gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        )
        boxes.failed.store(gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
        for stage in gl.static_range(STAGES):
            mbarrier.init(boxes.full.index(stage), count=1)
            mbarrier.init(boxes.empty.index(stage), count=WORK.WARPGROUPS)
        if WORK.WARPGROUPS == 2:
            gl.warp_specialize(
                [
                    (_consume, (0, boxes, place, m, n, output, memory, GROUP, GATHER, TILE, WORK)),
                    (_consume, (1, boxes, place, m, n, output, memory, GROUP, GATHER, TILE, WORK)),
                    (_produce, (a_desc, inbox_desc, w_desc, boxes, place, memory, rank, m,
                                shard_rows, GROUP, GATHER, TILE, WORK)),
                ],
                [4, 1],
                [WORK.REGISTERS, WORK.PRODUCER_REGISTERS],
            )  # fmt: skip
        else:
            gl.warp_specialize(
                [
                    (_consume, (0, boxes, place, m, n, output, memory, GROUP, GATHER, TILE, WORK)),
                    (_produce, (a_desc, inbox_desc, w_desc, boxes, place, memory, rank, m,
                                shard_rows, GROUP, GATHER, TILE, WORK)),
                ],
                [1],
                [WORK.PRODUCER_REGISTERS],
            )  # fmt: skip
    sync.leave(memory.control_ptr)


class PushSpecializedPlan(PushTmaPlan):
    """One launch: senders, then tiles."""

    def __init__(self, problem: AllGatherMatmul, fabric: Fabric, config: Config) -> None:
        super().__init__(problem, fabric, config)
        block_m, block_n, block_k = (config[f"BLOCK_{side}"] for side in "MNK")
        rows, columns = (block_m, ROWS) if config["SWAP_AB"] else (ROWS, block_n)
        warpgroups = (block_n if config["SWAP_AB"] else block_m) // ROWS
        counters = warpgroups * self._tiles(problem)
        self._counters = fabric.workspace.counters(counters)
        work = Work(warpgroups, config["num_stages"], config["LAUNCH_NEXT"])
        self._kernel = Kernel(
            _push_specialized,
            grid=0,
            constants={**self._kernel.constants, "WORK": work},
            options={**self._kernel.options, "num_warps": 4}
            | ({"maxnreg": 128} if warpgroups == 1 else {}),
        )
        dtype = {"float16": gl.float16, "bfloat16": gl.bfloat16}[problem.dtype]
        a_box, w_box = [1, 1, rows, block_k], [1, columns, block_k]
        a_layout, w_layout = (
            gl.NVMMASharedLayout.get_default_for(box, dtype) for box in (a_box, w_box)
        )
        self._a_descriptors = RowDescriptors(a_box, TensorDescriptor, a_layout)
        self._w_descriptors = weight_descriptors(
            problem.world_size, w_box, True, TensorDescriptor, w_layout
        )
        inbox = self._inbox_desc
        self._inbox_desc = TensorDescriptor(inbox.base, inbox.shape, inbox.strides, a_box, a_layout)


class PushSpecialized(PushTma):
    """Senders, and tiles whose warps have roles, in one kernel."""

    name = "push_specialized"
    searched = False  # until it is measured on several GPUs

    def unsupported_reason(self, problem: AllGatherMatmul, hardware: Hardware) -> str | None:
        if problem.gather_dim == 0:
            return "tiles would load rows of several tensors"
        if problem.weight_layout != "nk":
            return "columns of the weight are not contiguous"
        return super().unsupported_reason(problem, hardware)

    def space(self, problem: AllGatherMatmul, hardware: Hardware) -> Space:
        return spaces.specialized_space(problem, hardware)

    def seed_configs(self, problem: AllGatherMatmul, hardware: Hardware) -> list[dict[str, Any]]:
        return spaces.first_specialized_configs(problem, hardware, self.space(problem, hardware))

    def prune_reason(
        self, problem: AllGatherMatmul, hardware: Hardware, config: Config
    ) -> str | None:
        return spaces.specialized_prune_reason(problem, hardware, config)

    def plan(self, problem: AllGatherMatmul, fabric: Fabric, config: Config) -> Plan:
        config = {**config, "SOURCES_PER_WAIT": 1, "K_PARTS": 1, "SEND_STAGES": 1}
        if fabric.hardware.backend == "interpreter":
            return PushTmaPlan(problem, fabric, config)
        return PushSpecializedPlan(problem, fabric, config)


VARIANT = PushSpecialized()
