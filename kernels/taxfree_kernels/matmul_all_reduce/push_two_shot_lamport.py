"""One fused kernel: each rank adds a slice of every tile, exchanged as Lamport words.

``push_in_place`` with a second shot. There a tile goes to every peer. Here each peer gets only the
slice that it adds, and sends the sum to all, so that 2 / world_size as much crosses every link.
Neither shot drains stores or sends a signal, and the program that computes a tile does all of it.
Words carry no flags, which would be half of the bytes: until a word arrives, its location holds
EMPTY, and receivers write EMPTY back. The Lamport buffers of TensorRT-LLM's all-reduces work the
same way. It suits few rows on many ranks, where sending a tile to every peer would fill the link.

Protocol. A tile's words are cut into as many slices as there are ranks, or a few more. Slice s
belongs to rank (s + tile) % world_size: few rows fill only the first slices, which thus rotate over
the ranks. A program that holds a complete tile sends each rank its slices, this rank included;
while these are in flight, empties its share of the slot that the previous turn used; waits for this
rank's slices from every rank, and adds in rank order; sends the sums to every rank; and waits for
all slices, so that all ranks get the bits that the owners computed. The words of the two shots have
separate locations. A program waits only for programs of its tile, which send the first shot before
they wait at all, and the second once they have the first from every rank. Consider the rank that
has started the fewest programs: the programs of a tile that waits there have started everywhere,
since all ranks start the same programs in the same order, so first shots arrive, and then second
ones. After a failed wait the slice is NaN, which is sent on. Every tile has at least one row, so a
program that waits for it hears from an owner, which has heard from all ranks: the full exchange
under which three slots of words suffice (:class:`taxfree_kernels.fabric.heap.Pool`).

If the sum is normalised, tile programs are done once they have sent the second shot. Additional
programs, with higher ids than any tile's, each wait for one row and store it and its RMSNorm. By
then the row has been rounded, as between a library's all-reduce and its normalisation.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import triton
import triton.language as tl

from taxfree_kernels.device import packets, sync
from taxfree_kernels.device.peers import Peers, translate
from taxfree_kernels.device.sync import gdc_wait
from taxfree_kernels.device.tiles import xcd_swizzle
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.matmul_all_reduce.problem import MatmulAllReduce
from taxfree_kernels.reduction import fused, spaces
from taxfree_kernels.reduction.packets import (
    LamportPlan,
    LamportVariant,
    halves_of,
    total_of_lamport_words,
    words_of,
)
from taxfree_kernels.spaces import power_of_2
from taxfree_kernels.variant import Config, Plan, Space


@triton.jit(do_not_specialize=["rank", "m", "used"])
def _push_two_shot_lamport(
    x, w, stride_w, epilogue, out_ptr, buffers, rank, m, n, k, used,
    GROUP: tl.constexpr, TILE: tl.constexpr, EPILOGUE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """See the module.

    Args:
        inbox_ptr: int32, the first slot of Lamport words.
        used: number of words of a slot that all tiles use.
        LANES: lanes for the words of a slice; words are repeated to fill them. With fewer lanes,
            each thread would hold the words of only some ranks, and threads would exchange sums.
        EPILOGUE: its BLOCK_ROW lanes hold a row across all tiles, which one program normalises.
    """
    gdc_wait(GROUP)
    ELEMENT: tl.constexpr = out_ptr.dtype.element_ty
    WIDTH: tl.constexpr = TILE.BLOCK_N // 2  # words of a tile's row
    WORDS: tl.constexpr = TILE.BLOCK_M * WIDTH
    SLICES: tl.constexpr = triton.next_power_of_2(GROUP.WORLD)
    SLICE: tl.constexpr = WORDS // SLICES
    ROUNDS: tl.constexpr = triton.cdiv(SLICES, GROUP.WORLD)  # slices of a tile that a rank may own
    generation = sync.running_generation(buffers.control_ptr)
    turn = packets.running_turn(buffers.control_ptr)
    peers = Peers(buffers.control_ptr, buffers.heap_bases, rank, generation)
    slot_ptr = tl.multiple_of(buffers.inbox_ptr + (turn % 3) * buffers.stride_slot, 16)
    tiles = tl.cdiv(m, TILE.BLOCK_M) * tl.cdiv(n, TILE.BLOCK_N)
    program = tl.program_id(0)
    if EPILOGUE.BLOCK_ROW == 0 or program < tiles * TILE.SPLIT_K:
        tile, row_begin, col_begin, acc, is_whole = fused.numbered_tile(
            xcd_swizzle(program, tiles * TILE.SPLIT_K, TILE.XCDS), m, n, k, x, w, stride_w, buffers,
            GROUP, TILE,
        )  # fmt: skip
        if is_whole:
            slices, lane = tl.arange(0, SLICES), tl.arange(0, SLICE)[None, :]
            owner = (slices + tile) % GROUP.WORLD
            word_offsets = (slices * SLICE)[:, None] + lane
            has_row = row_begin + word_offsets // WIDTH < m

            # -- the first shot, [source, tile, ROUNDS, SLICE]: each rank's slices -----------------
            stride_source = (tiles * ROUNDS * SLICE).to(tl.int64)
            target_ptr = translate(slot_ptr + rank * stride_source, peers, owner)
            target_ptr += (tile * ROUNDS + slices // GROUP.WORLD) * SLICE
            words = tl.reshape(words_of(acc, ELEMENT), (SLICES, SLICE))
            owner = owner[:, None]
            packets.send(peers, target_ptr[:, None] + lane, words, owner, mask=has_row)
            packets.empty_last_turn(
                buffers.control_ptr, buffers.inbox_ptr, buffers.stride_slot, turn, used, tile, tiles
            )

            # -- the second, [tile, WORDS]: sums of this rank's slices to every rank ---------------
            sums_ptr = slot_ptr + GROUP.WORLD * stride_source + tile * WORDS
            repeated = tl.arange(0, LANES)
            in_slice = repeated % SLICE
            for nth in tl.static_range(ROUNDS):
                own_slice = (
                    rank + GROUP.WORLD - tile % GROUP.WORLD
                ) % GROUP.WORLD + nth * GROUP.WORLD
                offsets = own_slice * SLICE + in_slice
                # compilers do not see that lanes of a row stay contiguous after the remainder
                row = row_begin + tl.max_constancy(offsets // WIDTH, min(SLICE, WIDTH))
                row_end = tl.where(own_slice < SLICES, m, 0)
                total, _, _ = total_of_lamport_words(
                    (tile * ROUNDS + nth) * SLICE + in_slice, row, row_end,
                    col_begin + offsets % WIDTH * 2, n, epilogue, slot_ptr, stride_source, peers,
                    ELEMENT, GROUP, EPILOGUE,
                )  # fmt: skip
                sent, is_sent = words_of(total, ELEMENT), (row < row_end) & (repeated < SLICE)
                for step in tl.static_range(1, GROUP.WORLD + 1):
                    peer = (rank + step) % GROUP.WORLD
                    target_ptr = translate(sums_ptr, peers, peer)
                    packets.send(peers, target_ptr + offsets, sent, peer, mask=is_sent)
            if EPILOGUE.BLOCK_ROW == 0:
                sums, came = packets.receive(
                    peers, sums_ptr + word_offsets, owner, GROUP, mask=has_row
                )
                low, high = halves_of(sums, ELEMENT)
                result = tl.reshape(tl.join(low, high), (TILE.BLOCK_M, TILE.BLOCK_N))
                rows = row_begin + tl.arange(0, TILE.BLOCK_M)
                cols = col_begin + tl.arange(0, TILE.BLOCK_N)
                fused.store_tile(
                    out_ptr, rows, cols, rows < m, n, tl.where(came, result, float("nan"))
                )
    else:
        _normalise_row(
            program - tiles * TILE.SPLIT_K, slot_ptr + GROUP.WORLD * tiles * ROUNDS * SLICE,
            epilogue, out_ptr, m, n, peers, GROUP, TILE, SLICE, EPILOGUE,
        )  # fmt: skip
    packets.leave_turn(buffers.control_ptr)
    sync.leave(buffers.control_ptr)


@triton.jit
def _normalise_row(
    row, sums_ptr, epilogue, out_ptr, m, n, peers, GROUP: tl.constexpr,
    TILE: tl.constexpr, SLICE: tl.constexpr, EPILOGUE: tl.constexpr,
):  # fmt: skip
    """Wait for the sums of a row from their owners, and store the row and its RMSNorm.

    Args:
        sums_ptr: int32 [tile, words], the second shot; tiles are counted row by row.
    """
    ELEMENT: tl.constexpr = out_ptr.dtype.element_ty
    WIDTH: tl.constexpr = TILE.BLOCK_N // 2  # words of a tile's row
    column = tl.arange(0, EPILOGUE.BLOCK_ROW)
    mask = column < n
    norm_weight = tl.load(epilogue.norm_weight_ptr + column, mask=mask, other=0.0)
    lane = tl.arange(0, EPILOGUE.BLOCK_ROW // 2)
    tiles_n = tl.cdiv(n, TILE.BLOCK_N)
    tile = row // TILE.BLOCK_M * tiles_n + tl.minimum(lane // WIDTH, tiles_n - 1)
    within = row % TILE.BLOCK_M * WIDTH + lane % WIDTH
    owner = (within // SLICE + tile) % GROUP.WORLD
    words, arrived = packets.receive(
        peers, sums_ptr + tile * (TILE.BLOCK_M * WIDTH) + within, owner, GROUP,
        mask=lane < tiles_n * WIDTH,
    )  # fmt: skip
    low, high = halves_of(words, ELEMENT)
    total = tl.reshape(tl.join(low, high), (EPILOGUE.BLOCK_ROW,))
    total = tl.where(arrived, tl.where(mask, total, 0.0), float("nan"))
    offsets = row.to(tl.int64) * n + column
    fused.store_normalised(
        total, row, offsets, mask, norm_weight, epilogue.eps_ptr, epilogue.quantised, out_ptr,
        m.to(tl.int64) * n, n, EPILOGUE.OUT_SCALES,
    )  # fmt: skip


class PushTwoShotLamport(LamportVariant):
    """Slices of tiles go to their owners and back; the programs that computed them do it."""

    def unsupported_reason(self, problem: MatmulAllReduce, hardware: Hardware) -> str | None:
        return spaces.rows_unsupported_reason(problem) or super().unsupported_reason(
            problem, hardware
        )

    def space(self, problem: MatmulAllReduce, hardware: Hardware) -> Space:
        space = super().space(problem, hardware)
        # Programs that normalise a row find its tiles by number.
        return {**space, "GROUP_M": (1,)} if problem.rms_norm else space

    def with_room(
        self, problem: MatmulAllReduce, hardware: Hardware, config: Config
    ) -> dict[str, Any]:
        return spaces.with_room_for_rows(problem, hardware, config)

    def illegal_reason(
        self, problem: MatmulAllReduce, hardware: Hardware, config: Config
    ) -> str | None:
        words = config["BLOCK_M"] * config["BLOCK_N"] // 2
        most = 64 if problem.world_size > spaces.FEW_RANKS else 32
        crowded = spaces.words_illegal_reason(hardware, config, words, 1, most)
        crowded = crowded or spaces.warps_illegal_reason(problem, hardware, config)
        return crowded or super().illegal_reason(problem, hardware, config)

    def words(self, problem: MatmulAllReduce, config: Config) -> int:
        """The number of Lamport words of both shots."""
        world, slices = problem.world_size, power_of_2(problem.world_size, 1)
        words = _slice_words(problem, config)
        return spaces.tiles_in(problem, config) * (world * -(-slices // world) + slices) * words

    def layout(self, config: Config, problem: MatmulAllReduce) -> fused.Layout:
        """The layout of a launch."""
        words = self.words(problem, config)
        rows = problem.m if problem.rms_norm else 0
        return fused.Layout(spaces.tiles_in(problem, config), rows, words, (words,))

    def constants(
        self, config: Config, problem: MatmulAllReduce, hardware: Hardware
    ) -> dict[str, Any]:
        """Constants of the kernel, besides those of all fused plans."""
        lanes = max(config["BLOCK_N"], power_of_2(problem.n, 1)) if problem.rms_norm else 0
        return {
            "EPILOGUE": fused.Epilogue(problem.bias, problem.residual, lanes, problem.out_scales),
            "LANES": spaces.lanes_of(hardware, config, _slice_words(problem, config)),
        }

    def plan(self, problem: MatmulAllReduce, fabric: Fabric, config: Config) -> Plan:
        constants = self.constants(config, problem, fabric.hardware)
        layout = partial(self.layout, config)
        return LamportPlan(problem, fabric, config, _push_two_shot_lamport, layout, constants)


def _slice_words(problem: MatmulAllReduce, config: Config) -> int:
    return int(config["BLOCK_M"] * config["BLOCK_N"] // 2 // power_of_2(problem.world_size, 1))


VARIANT = PushTwoShotLamport()
