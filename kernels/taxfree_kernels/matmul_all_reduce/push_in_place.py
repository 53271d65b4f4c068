"""One fused kernel for few tiles: each program computes and sends a tile, and adds its peers'.

``push`` without separate adders. Adders start only after tile programs, which fill the shared
memory, have exited, and they reload partial sums that were in registers. Here a program keeps its
part of the sum, the bias and the residual while it waits. For decode sizes, tiles are sent as LL
packets (`LL`): no stores are drained and no signal follows. Otherwise each tile has a signal and a
channel of its own.

Protocol. A program that holds a complete tile sends it to every peer, waits for the same tile from
every peer, and adds in rank order, so that all ranks get the same bits. It waits only for programs
of that tile, which send before they wait. Consider the rank that has started the fewest programs.
Each program that waits there is the last of its tile's SPLIT_K programs, so all programs of that
tile have started there, and also on every other rank, since all ranks start the same programs in
the same order: the tile will be sent. So the programs of that rank end, and it makes progress,
however few are resident. This is why tiles cannot share a channel: a signal for several tiles might
wait for a program that has not started. Every rank sends every tile to, and receives it from, every
peer in every call, so two slots suffice, for words as for payload
(:class:`taxfree_kernels.fabric.heap.Pool`).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from taxfree_kernels.device import sync
from taxfree_kernels.device.peers import CHANNELS
from taxfree_kernels.device.sync import gdc_wait, signal_everybody, wait_for_everybody
from taxfree_kernels.device.tiles import xcd_swizzle
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.matmul_all_reduce.problem import ONE_SHOT_ELEMENTS, MatmulAllReduce
from taxfree_kernels.reduction import fused, spaces
from taxfree_kernels.reduction.packets import MOST_ELEMENTS, sum_by_words, words_of
from taxfree_kernels.reduction.spaces import padded_columns, padded_elements, tiles_in
from taxfree_kernels.spaces import within
from taxfree_kernels.variant import Config, Plan, Space

_MOST_WARPS = 8
_MOST_A_THREAD = 32  # elements: own part, addend, sum and loaded values take some 160 registers


@triton.jit(do_not_specialize=["rank", "m"])
def _push_in_place(
    x, w, stride_w, epilogue, out_ptr, buffers, rank, m, n, k, strides,
    GROUP: tl.constexpr, TILE: tl.constexpr, EPILOGUE: tl.constexpr, LL: tl.constexpr,
):  # fmt: skip
    gdc_wait(GROUP)
    peers, slot_ptr = sync.running_slot(buffers, rank)
    programs = tl.cdiv(m, TILE.BLOCK_M) * tl.cdiv(n, TILE.BLOCK_N) * TILE.SPLIT_K
    tile, row_begin, col_begin, acc, is_whole = fused.numbered_tile(
        xcd_swizzle(tl.program_id(0), programs, TILE.XCDS), m, n, k, x, w, stride_w, buffers, GROUP,
        TILE,
    )  # fmt: skip
    if is_whole:
        rows, cols = row_begin + tl.arange(0, TILE.BLOCK_M), col_begin + tl.arange(0, TILE.BLOCK_N)
        row_mask = rows < m
        added = fused.bias_residual_of_tile(rows, cols, row_mask, n, epilogue, EPILOGUE)
        if LL:  # words [WORLD, m, strides.row]; a row has room for all columns of its tiles
            lane = tl.arange(0, TILE.BLOCK_M * TILE.BLOCK_N // 2)
            row = row_begin + lane // (TILE.BLOCK_N // 2)
            offsets = (
                tl.minimum(row, m - 1) * strides.row + col_begin // 2 + lane % (TILE.BLOCK_N // 2)
            )
            total, arrived = sum_by_words(
                words_of(acc, out_ptr.dtype.element_ty), offsets, row < m, slot_ptr, strides.source,
                peers, out_ptr.dtype.element_ty, GROUP,
            )  # fmt: skip
            total = tl.reshape(total, [TILE.BLOCK_M, TILE.BLOCK_N])
        else:
            offsets = rows.to(tl.int64)[:, None] * strides.row + cols[None, :]
            mask = row_mask[:, None] & (cols < strides.row)[None, :]
            part = acc.to(slot_ptr.dtype.element_ty)
            own_ptr = slot_ptr + rank.to(tl.int64) * strides.source
            fused.send_tile(part, own_ptr, offsets, mask, peers, GROUP, TO_SELF=False)
            signal_everybody(peers, tile, GROUP)
            arrived = wait_for_everybody(peers, tile, GROUP)
            total = fused.sum_of_sources(slot_ptr, strides.source, offsets, mask, GROUP, part, rank)
        total = tl.where(arrived, total + added, float("nan"))
        fused.store_tile(out_ptr, rows, cols, row_mask, n, total)
    sync.leave(buffers.control_ptr)


class PushInPlace(fused.FusedReductionVariant):
    """Tiles go to all ranks; the programs that computed them add them."""

    def unsupported_reason(self, problem: MatmulAllReduce, hardware: Hardware) -> str | None:
        if problem.elements > ONE_SHOT_ELEMENTS:
            return "all of the partial sum would cross the link to every peer"
        if problem.rms_norm:
            return "no program has whole rows of the sum"
        if not self.seed_configs(problem, hardware):
            return f"each tile has a channel, of which there are {CHANNELS}"
        return super().unsupported_reason(problem, hardware)

    def space(self, problem: MatmulAllReduce, hardware: Hardware) -> Space:
        return {
            **spaces.tile_space(problem, hardware),
            "WIRE": problem.wires,
            "LL": (True, False) if problem.elements <= MOST_ELEMENTS else (False,),
        }

    def seed_configs(self, problem: MatmulAllReduce, hardware: Hardware) -> list[dict[str, Any]]:
        space, configs = self.space(problem, hardware), []
        for tile in super().seed_configs(problem, hardware):
            for in_data in space["LL"]:
                config = within(space, {**_with_room(hardware, tile), "LL": in_data})
                if config not in configs and not self.illegal_reason(problem, hardware, config):
                    configs.append(config)
        return configs

    def illegal_reason(
        self, problem: MatmulAllReduce, hardware: Hardware, config: Config
    ) -> str | None:
        crowded = _exchange_illegal_reason(problem, hardware, config)
        return crowded or super().illegal_reason(problem, hardware, config)

    def plan(self, problem: MatmulAllReduce, fabric: Fabric, config: Config) -> Plan:
        def layout(problem: MatmulAllReduce) -> fused.Layout:
            if config["LL"]:  # a row has room for all columns of its tiles
                row = -(-problem.n // config["BLOCK_N"]) * config["BLOCK_N"] // 2
                plane = problem.m * row
            else:
                row, plane = padded_columns(problem.n), padded_elements(problem.m, problem.n)
            tiles = tiles_in(problem, config)
            return fused.Layout(tiles, 0, problem.world_size * plane, (fused.Strides(plane, row),))

        epilogue = fused.Epilogue(problem.bias, problem.residual)
        constants = {"EPILOGUE": epilogue, "LL": config["LL"]}
        return fused.FusedReductionPlan(problem, fabric, config, _push_in_place, layout, constants)


def _with_room(hardware: Hardware, config: Config) -> dict[str, Any]:
    """`config` with more warps, then fewer columns, until the warps can hold a tile."""
    if hardware.backend == "interpreter":
        return dict(config)
    rows, most = config["BLOCK_M"], _MOST_A_THREAD * hardware.warp_size
    columns = min(config["BLOCK_N"], _MOST_WARPS * most // rows)
    warps = max(config["num_warps"], rows * columns // most)
    return {**config, "BLOCK_N": columns, "num_warps": warps}


def _exchange_illegal_reason(
    problem: MatmulAllReduce, hardware: Hardware, config: Config
) -> str | None:
    """The reason why a config's tiles cannot be exchanged or held in registers, or None."""
    block_m, block_n = config["BLOCK_M"], config["BLOCK_N"]
    tiles_m, tiles_n = -(-problem.m // block_m), -(-problem.n // block_n)
    if _with_room(hardware, config) != config:
        return f"more than {_MOST_A_THREAD} elements of a tile a thread"
    if not config["LL"]:
        too_many = tiles_m * tiles_n > CHANNELS
        return f"{tiles_m * tiles_n} tiles, {CHANNELS} channels" if too_many else None
    if config["WIRE"] != problem.dtype:
        return "words hold elements of the tensors' own type"
    if problem.m * tiles_n * block_n > MOST_ELEMENTS:
        return f"words of {tiles_n * block_n} columns do not fit the slot"
    return spaces.words_illegal_reason(hardware, config, block_m * block_n // 2, problem.world_size)


VARIANT = PushInPlace()
