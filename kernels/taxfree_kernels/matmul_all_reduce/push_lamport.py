"""One fused kernel for very few rows: tiles go to every rank as Lamport words, and are added there.

``push_in_place`` with words that carry no flags, which halves the traffic on the links and the
bytes polled. It is also the first shot of ``push_two_shot_lamport``, with whole tiles instead of
slices, so that no second shot is needed: lower latency if sending a tile to every peer is cheap.

Protocol. A program that holds a complete tile sends it to every rank, its own included; while these
words are in flight, empties its share of the slot that the previous turn used; waits for the tile
from every rank; and adds in rank order, so that all ranks get the same bits. It waits only for
programs of its tile, which send before they wait. Consider the rank that has started the fewest
programs: the programs of a tile that waits there have started everywhere, since all ranks start the
same programs in the same order, so their words arrive. Every tile has at least one row, so a
program that waits for it hears from all ranks: the full exchange under which three slots of words
suffice (:class:`taxfree_kernels.fabric.heap.Pool`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from taxfree_kernels.device import packets, sync
from taxfree_kernels.device.peers import Peers, translate
from taxfree_kernels.device.sync import gdc_wait
from taxfree_kernels.device.tiles import xcd_swizzle
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.matmul_all_reduce.problem import ONE_SHOT_ELEMENTS, MatmulAllReduce
from taxfree_kernels.reduction import spaces
from taxfree_kernels.reduction.fused import Epilogue, Layout, numbered_tile
from taxfree_kernels.reduction.packets import (
    LamportPlan,
    LamportVariant,
    total_of_lamport_words,
    words_of,
)
from taxfree_kernels.reduction.spaces import lanes_of, tiles_in
from taxfree_kernels.spaces import power_of_2
from taxfree_kernels.variant import Config, Plan


@triton.jit(do_not_specialize=["rank", "m", "used"])
def _push_lamport(
    x, w, stride_w, epilogue, out_ptr, buffers, rank, m, n, k, used,
    GROUP: tl.constexpr, TILE: tl.constexpr, EPILOGUE: tl.constexpr, WORDS: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """See the module.

    Args:
        inbox_ptr: int32, the first slot of Lamport words, [source, tile, WORDS].
        used: number of words of a slot that all tiles use.
        WORDS: words of a tile, without rows that never exist.
        LANES: lanes for these words; words are repeated to fill them.
    """
    gdc_wait(GROUP)
    ELEMENT: tl.constexpr = out_ptr.dtype.element_ty
    WIDTH: tl.constexpr = TILE.BLOCK_N // 2  # words of a tile's row
    generation = sync.running_generation(buffers.control_ptr)
    turn = packets.running_turn(buffers.control_ptr)
    peers = Peers(buffers.control_ptr, buffers.heap_bases, rank, generation)
    slot_ptr = tl.multiple_of(buffers.inbox_ptr + (turn % 3) * buffers.stride_slot, 16)
    tiles = tl.cdiv(m, TILE.BLOCK_M) * tl.cdiv(n, TILE.BLOCK_N)
    tile, row_begin, col_begin, acc, is_whole = numbered_tile(
        xcd_swizzle(tl.program_id(0), tiles * TILE.SPLIT_K, TILE.XCDS), m, n, k, x, w, stride_w,
        buffers, GROUP, TILE,
    )  # fmt: skip
    if is_whole:
        stride_source = (tiles * WORDS).to(tl.int64)
        own_ptr = slot_ptr + rank * stride_source + tile * WORDS
        words, offsets = words_of(acc, ELEMENT), tl.arange(0, TILE.BLOCK_M * WIDTH)
        is_sent = row_begin + offsets // WIDTH < m
        for step in tl.static_range(1, GROUP.WORLD + 1):
            peer = (rank + step) % GROUP.WORLD
            if GROUP.BACKEND == "hip":
                # Full addresses: on CDNA, accesses at a base plus small offsets are lane by lane
                # if the base was loaded from memory. On NVIDIA this would narrow the stores.
                target_ptr = translate(own_ptr + offsets, peers, peer)
            else:
                target_ptr = translate(own_ptr, peers, peer) + offsets
            packets.send(peers, target_ptr, words, peer, mask=is_sent)
        packets.empty_last_turn(
            buffers.control_ptr, buffers.inbox_ptr, buffers.stride_slot, turn, used, tile, tiles
        )

        repeated = tl.arange(0, LANES)
        offsets = repeated % WORDS
        total, rows, cols = total_of_lamport_words(
            tile * WORDS + offsets, row_begin + offsets // WIDTH, m,
            col_begin + offsets % WIDTH * 2, n, epilogue, slot_ptr, stride_source, peers, ELEMENT,
            GROUP, EPILOGUE,
        )  # fmt: skip
        is_first = tl.arange(0, 2 * LANES) < 2 * WORDS
        tl.store(
            out_ptr + rows.to(tl.int64) * n + cols, total.to(ELEMENT),
            mask=is_first & (rows < m) & (cols < n),
        )  # fmt: skip
    packets.leave_turn(buffers.control_ptr)
    sync.leave(buffers.control_ptr)


class PushLamport(LamportVariant):
    """Tiles go to all ranks as words; the same programs add them."""

    def unsupported_reason(self, problem: MatmulAllReduce, hardware: Hardware) -> str | None:
        if problem.elements > ONE_SHOT_ELEMENTS:
            return "all of the partial sum would cross the link to every peer"
        if problem.rms_norm:
            return "no program has whole rows of the sum"
        return super().unsupported_reason(problem, hardware)

    def illegal_reason(
        self, problem: MatmulAllReduce, hardware: Hardware, config: Config
    ) -> str | None:
        lanes = _lanes(problem, hardware, config)
        crowded = spaces.words_illegal_reason(hardware, config, lanes, problem.world_size, 64)
        return crowded or super().illegal_reason(problem, hardware, config)

    def words(self, problem: MatmulAllReduce, config: Config) -> int:
        tiles = tiles_in(problem, config)
        return int(problem.world_size * tiles * _words_of_tile(problem, config))

    def plan(self, problem: MatmulAllReduce, fabric: Fabric, config: Config) -> Plan:
        words_of_tile = _words_of_tile(problem, config)

        def layout(problem: MatmulAllReduce) -> Layout:
            tiles = tiles_in(problem, config)
            words = problem.world_size * tiles * words_of_tile
            return Layout(tiles, 0, words, (words,))

        constants = {
            "EPILOGUE": Epilogue(problem.bias, problem.residual),
            "WORDS": words_of_tile,
            "LANES": _lanes(problem, fabric.hardware, config),
        }
        return LamportPlan(problem, fabric, config, _push_lamport, layout, constants)


def _words_of_tile(problem: MatmulAllReduce, config: Config) -> int:
    rows = min(config["BLOCK_M"], power_of_2(problem.m, 1))
    return int(rows * config["BLOCK_N"] // 2)


def _lanes(problem: MatmulAllReduce, hardware: Hardware, config: Config) -> int:
    return lanes_of(hardware, config, _words_of_tile(problem, config))


VARIANT = PushLamport()
