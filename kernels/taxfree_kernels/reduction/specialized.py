"""Shared by the sums whose warps have roles, for Hopper: their shared memory, and their launch.

A program of these kernels stays on its compute unit and computes many tiles. Its warps have roles:

* the *producer*, one warp, draws the numbers of tiles, and loads their operands;
* two *consumers*, a warpgroup each, multiply: each has 64 rows of every tile, which it stores to
  the tile's owner. It goes on with the next tile at once;
* the *announcer*, one warp, counts tiles in their groups once both consumers have stored them, and
  signals what is complete;
* the *adder*, two warps, draws pieces of sums, waits until they are there, and adds them. When
  there are no more tiles, the consumers do as it does.

Progress. Tiles and pieces are drawn, so they belong to no program before it runs. The producer
waits for boxes and for the announcer, consumers for boxes, the announcer for consumers: none of
these waits for another program, so programs that run finish all tiles, however few run. Pieces are
drawn in the order in which a rank finishes what they need, and wait for tiles, or for pieces that
come earlier in the same order on another rank. So the earliest piece of all ranks that is
unfinished waits for tiles alone. One running program on each rank is enough.

Tickets. A role draws until it gets a number beyond the last, so the number of draws of a launch is
known, and the last one sets the counter back to 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from taxfree_kernels.descriptors import RowDescriptors, weight_descriptors
from taxfree_kernels.device import sync
from taxfree_kernels.device.fences import before_tma_loads
from taxfree_kernels.device.pdl import gdc_wait
from taxfree_kernels.device.peers import Peers
from taxfree_kernels.device.specialized import load_steps
from taxfree_kernels.device.tiles import swizzle2d
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.fabric.heap import Pool
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.launch import Kernel
from taxfree_kernels.problem import PartialSum
from taxfree_kernels.reduction import spaces
from taxfree_kernels.reduction.fused import FusedPlan, Layout
from taxfree_kernels.reduction.tile import announce_tile, signal_owners
from taxfree_kernels.spaces import allowed, power_of_2
from taxfree_kernels.variant import Config, Space

PruneReason = Callable[[Any, Hardware, Config], str | None]

_COPIED = 4096  # elements of a piece to copy, at least: a warpgroup has them all in flight
_SLOTS = gl.constexpr(2)  # of a mailbox
CONSUMERS = gl.constexpr(2)  # warpgroups that multiply, each with 64 rows of a tile
DRAWERS = gl.constexpr(1 + 2)  # roles of a program that draw pieces: the adder and consumers
# Counters: tickets of tiles, tickets of pieces, then those of groups of tiles
TILE_TICKETS, PIECE_TICKETS, TICKETS = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)


class Work(NamedTuple):
    """The constants of a kernel: ``WORK: tl.constexpr``.

    Args:
        STAGES: boxes of both operands in shared memory.
        COPIES: pieces in which a peer's sum of a tile is copied.
        REGISTERS, OTHER_REGISTERS: of a thread of a consumer, and of the other roles, which are
            one warpgroup.
    """

    STAGES: int
    COPIES: int
    REGISTERS: int = 176
    OTHER_REGISTERS: int = 152


class Mail(NamedTuple):
    """Shared memory through which the producer hands over tiles, in two slots that take turns.

    In a slot are the tile's number, -1 at the end, and its place: the row and column of tiles.

    A slot is full from the hand-over until the announcer has announced the tile. Consumers
    arrive at `stored` in between.
    """

    tile: Any
    tile_m: Any
    tile_n: Any
    full: Any
    stored: Any
    empty: Any


@gluon.constexpr_function
def added(columns, warps):
    """The layout in which warps add rows of so many columns, 16 bytes of bf16 a thread."""
    across = min(columns // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // across, across], [warps, 1], [1, 0])


@gluon.constexpr_function
def rows_at_once(rows, columns, warps):
    """Rows of a piece that warps add at once: of a part, a thread loads 16 or 32 bytes of bf16."""
    return min(rows, (256 if warps == 2 else 512) * warps // columns)


@gluon.jit
def make_mail():
    """Allocate a mailbox, and make its barriers."""
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    word: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    mail = Mail(
        gl.allocate_shared_memory(gl.int32, [_SLOTS, 1], word),
        gl.allocate_shared_memory(gl.int32, [_SLOTS, 1], word),
        gl.allocate_shared_memory(gl.int32, [_SLOTS, 1], word),
        gl.allocate_shared_memory(gl.int64, [_SLOTS, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [_SLOTS, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [_SLOTS, 1], barrier),
    )
    for slot in gl.static_range(_SLOTS):
        mbarrier.init(mail.full.index(slot), count=1)
        mbarrier.init(mail.stored.index(slot), count=CONSUMERS)
        mbarrier.init(mail.empty.index(slot), count=1)
    return mail


@gluon.jit
def hand_over(mail, turn, tile, tile_m, tile_n):
    """Hand over a tile, or the end. `turn` counts from 0."""
    slot = turn % _SLOTS
    mbarrier.wait(mail.empty.index(slot), turn // _SLOTS & 1 ^ 1)
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    mail.tile.index(slot).store(gl.full([1], tile, gl.int32, ONE))
    mail.tile_m.index(slot).store(gl.full([1], tile_m, gl.int32, ONE))
    mail.tile_n.index(slot).store(gl.full([1], tile_n, gl.int32, ONE))
    tl.debug_barrier()
    mbarrier.arrive(mail.full.index(slot), count=1)


@gluon.jit
def take(mail, turn):
    """The tile of this turn, once it is handed over."""
    slot = turn % _SLOTS
    mbarrier.wait(mail.full.index(slot), turn // _SLOTS & 1)
    return _word(mail.tile, slot)


@gluon.jit
def place_of(mail, turn):
    """The row and the column of tiles of the tile of this turn, which was taken."""
    return _word(mail.tile_m, turn % _SLOTS), _word(mail.tile_n, turn % _SLOTS)


@gluon.jit
def _word(words, slot):
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(words.index(slot).load(ONE), 0)


@gluon.jit
def report_stored(mail, turn):
    """Say that this consumer has stored its part of the tile of this turn."""
    tl.debug_barrier()
    mbarrier.arrive(mail.stored.index(turn % _SLOTS), count=1)


@gluon.jit
def entered(buffers, rank):
    """Of a role, once the preceding kernel has ended: the peers, and the slot of this call."""
    generation = sync.running_generation(buffers.control_ptr)
    peers = Peers(buffers.control_ptr, buffers.heap_bases, rank, generation)
    slot_ptr = buffers.inbox_ptr + (generation % 2) * buffers.stride_slot
    return peers, tl.multiple_of(slot_ptr, 16)


@gluon.jit
def produce(
    x_desc, w_desc, boxes, mail, counters_ptr, k, tiles_m, tiles_n, owner_tiles, owner_columns,
    GROUP: gl.constexpr, TILE: gl.constexpr, WORK: gl.constexpr,
):  # fmt: skip
    """The producer.

    Args:
        owner_tiles, owner_columns: columns of the product that one rank owns; tiles do not cross
            from one rank's to the next.
    """
    gdc_wait(GROUP)
    before_tma_loads(GROUP)
    tiles = tiles_m * tiles_n
    draws = tiles + gl.num_programs(0)
    steps = gl.cdiv(k, TILE.BLOCK_K)
    first = gl.minimum(steps, WORK.STAGES)
    number, turn = gl.to_tensor(0), gl.to_tensor(0)
    tile = sync.draw(counters_ptr + TILE_TICKETS, draws)
    while tile < tiles:
        tile_m, tile_n = swizzle2d(tile, tiles_m, tiles_n, TILE.GROUP_M)
        hand_over(mail, turn, tile, tile_m, tile_n)
        row = tile_m * TILE.BLOCK_M
        col = tile_n // owner_tiles * owner_columns + tile_n % owner_tiles * TILE.BLOCK_N
        number = load_steps(
            x_desc, 0, 0, row, w_desc, 0, col, 0, first, number, boxes, TILE, CONSUMERS,
            WORK.STAGES,
        )  # fmt: skip
        following = sync.draw(counters_ptr + TILE_TICKETS, draws)  # while consumers have boxes
        number = load_steps(
            x_desc, 0, 0, row, w_desc, 0, col, first, steps, number, boxes, TILE, CONSUMERS,
            WORK.STAGES,
        )  # fmt: skip
        tile = following
        turn += 1
    hand_over(mail, turn, -1, 0, 0)


@gluon.jit
def announce(
    mail, tiles, buffers, rank, GROUP: gl.constexpr, TILES_PER_SIGNAL: gl.constexpr,
    TO_OWNER: gl.constexpr,
):  # fmt: skip
    """The announcer: ``reduction.tile.signal_owners`` if TO_OWNER, else ``announce_tile``."""
    gdc_wait(GROUP)
    peers, _ = entered(buffers, rank)
    turn = gl.to_tensor(0)
    tile = take(mail, turn)
    while tile >= 0:
        mbarrier.wait(mail.stored.index(turn % _SLOTS), turn // _SLOTS & 1)
        if TO_OWNER:
            signal_owners(tile, tiles, peers, GROUP)
        else:
            counters_ptr = buffers.counters_ptr + TICKETS
            announce_tile(tile, tiles, 0, counters_ptr, peers, GROUP, TILES_PER_SIGNAL)
        mbarrier.arrive(mail.empty.index(turn % _SLOTS), count=1)
        turn += 1
        tile = take(mail, turn)


@gluon.jit
def sum_of_parts(source_ptr, stride_source, at, mask, LAYOUT: gl.constexpr, GROUP: gl.constexpr):
    """``reduction.tile.sum_of_sources`` of a block whose parts are all in flight at once."""
    total = gl.zeros(at.shape, gl.float32, LAYOUT)
    for source in gl.static_range(GROUP.WORLD):
        total += gl.load(source_ptr + source * stride_source + at, mask=mask, other=0.0).to(
            gl.float32
        )
    return total


class SpecializedPlan(FusedPlan):
    """One launch: a program on each compute unit."""

    def __init__(
        self,
        problem: PartialSum,
        fabric: Fabric,
        config: Config,
        function: Any,
        layout: Callable[[Any], Layout],
        constants: Mapping[str, Any],
    ) -> None:
        elements = config["BLOCK_M"] * config["BLOCK_N"]
        work = Work(config["num_stages"], min(config["PIECES"], elements // _COPIED))
        super().__init__(problem, fabric, config, function, layout, {**constants, "WORK": work})
        self._programs = fabric.hardware.compute_units
        self._counters = fabric.workspace.counters(layout(problem).tiles + Pool.CHANNELS + 2)
        self._kernel = Kernel(
            function, 0, self._kernel.constants, {**self._kernel.options, "num_warps": 4}
        )
        block_n, block_k = config["BLOCK_N"], config["BLOCK_K"]
        x_box, w_box = [1, 1, 64, block_k], [1, block_n, block_k]
        dtype = {"float16": gl.float16, "bfloat16": gl.bfloat16}[problem.dtype]
        x_layout, w_layout = (
            gl.NVMMASharedLayout.get_default_for(box, dtype) for box in (x_box, w_box)
        )
        self._x_descriptors = RowDescriptors(x_box, TensorDescriptor, x_layout)
        self._w_descriptors = weight_descriptors(1, w_box, True, TensorDescriptor, w_layout)

    def _grid(self, layout: Layout) -> int:
        return min(self._programs, layout.tiles)


def unsupported_reason(problem: PartialSum, hardware: Hardware) -> str | None:
    """The reason why these kernels cannot serve a problem, or None."""
    if hardware.architecture not in ("sm_90", "cpu"):
        return "warps have roles on Hopper alone"
    if problem.weight_layout != "nk":
        return "columns of the weight are not contiguous"
    if True not in spaces.ways_to_load(problem, hardware):
        return "rows do not start at multiples of 16 bytes"
    return None


def narrowed(space: Space, hardware: Hardware) -> Space:
    """The part of a space in which a program has two warpgroups that multiply."""
    if hardware.backend == "interpreter":
        return space
    return {
        **space,
        "BLOCK_M": (128,),
        "BLOCK_N": (128, 256),
        "BLOCK_K": (64,),
        "GROUP_M": (4, 8, 32),
        "SPLIT_K": (1,),
        "SWAP_AB": (False,),
        "TMA": (True,),
        "num_warps": (8,),
        "num_stages": (3, 4, 5, 6),
        "PIECES": (4, 8, 16, 32),
        "STAGGERED": (False,),
    }


def seed_configs(
    problem: PartialSum, hardware: Hardware, space: Space, prune_reason: PruneReason
) -> list[dict[str, Any]]:
    """Configs that should suit a problem, moved into `space`."""
    common = {"BLOCK_M": 128, "BLOCK_K": 64, "GROUP_M": 8, "SPLIT_K": 1, "num_warps": 8}
    if hardware.backend == "interpreter":
        common |= {"BLOCK_M": min(power_of_2(problem.m, 16), 32), "PIECES": 2}
    square = common | {"BLOCK_N": 128, "num_stages": 6, "PIECES": 8}
    wide = common | {"BLOCK_N": 256, "num_stages": 4, "PIECES": 16}
    guesses = [each | {"SIGNALS": space["SIGNALS"][-2]} for each in (square, wide)]
    return allowed(problem, hardware, space, guesses, prune_reason)
