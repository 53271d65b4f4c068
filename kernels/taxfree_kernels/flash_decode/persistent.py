"""One kernel: the last split of some heads to end merges and pushes them, combiners wait.

Removes the last launch: the parts of heads whose splits are done travel while other splits still
run, and combiners stand ready on compute units as these become free.

Protocol. Splits have the lowest ids and wait for nobody, those that merge and push included: they
count themselves in, and the last one of a chunk goes on. Combiners wait for signals of pushing
splits only, of this rank (lower ids) and of peers (which never wait). Every row has a combiner, so
in each call every rank signals, and waits for, every peer on every channel, as in ``fused``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from taxfree_kernels.device import sync
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.fabric.heap import Pool
from taxfree_kernels.flash_decode.attend import attend
from taxfree_kernels.flash_decode.exchange import combine, merge_and_push
from taxfree_kernels.flash_decode.local import (
    Attention,
    Exchange,
    ExchangingVariant,
    merge_constants,
)
from taxfree_kernels.flash_decode.problem import FlashDecode
from taxfree_kernels.launch import Kernel
from taxfree_kernels.variant import Config, Plan


@triton.jit(do_not_specialize=["rank", "batch", "capacity", "rows"])
def _decode(
    q_ptr, k_ptr, v_ptr, lens_ptr, table_ptr, scaling_ptr,
    stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    batch, capacity, parts_ptr, part_elements, rank, out_ptr, counters_ptr,
    inbox_ptr, slot_elements, rows, control_ptr, heap_bases,
    WORLD: tl.constexpr, BACKEND: tl.constexpr, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, PAGE: tl.constexpr, SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr, SPLITS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    XCDS: tl.constexpr, ATTENDING: tl.constexpr, CHUNK_GROUPS: tl.constexpr,
    CHUNK_ROWS: tl.constexpr, PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr, ROWS: tl.constexpr,
    SOURCES_BLOCK: tl.constexpr, OUT_ROWS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    generation = sync.running_generation(control_ptr)
    slot_ptr = tl.multiple_of(inbox_ptr + (generation % 2) * slot_elements, 16)
    if program < ATTENDING:
        group = attend(
            program, q_ptr, k_ptr, v_ptr, lens_ptr, table_ptr, scaling_ptr,
            stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
            batch, capacity, parts_ptr, part_elements, rank,
            WORLD, Q_HEADS, KV_HEADS, HEAD_DIM, V_DIM, PAGE, SOFT_CAP, WINDOW,
            SPLITS, BLOCK_H, BLOCK_N, XCDS,
        )  # fmt: skip
        chunk = group // CHUNK_GROUPS
        members = min(ATTENDING // SPLITS - chunk * CHUNK_GROUPS, CHUNK_GROUPS) * SPLITS
        if sync.arrive(counters_ptr + chunk, members, BACKEND):
            merge_and_push(
                chunk, parts_ptr, slot_ptr, part_elements, rows,
                control_ptr, generation, heap_bases, rank,
                WORLD, BACKEND, CHUNK_ROWS, PARTS, PARTS_BLOCK, V_DIM, ROWS,
            )  # fmt: skip
    else:
        combine(
            program - ATTENDING, slot_ptr, out_ptr, part_elements, rows,
            control_ptr, generation, heap_bases, rank,
            WORLD, BACKEND, CHUNK_ROWS, SOURCES_BLOCK, V_DIM, OUT_ROWS,
        )  # fmt: skip
    sync.leave(control_ptr)


class PersistentPlan(Plan):
    """One launch."""

    launches = 1

    def __init__(self, problem: FlashDecode, fabric: Fabric, config: Config) -> None:
        self._attention = Attention(problem, fabric, config)
        head_blocks = -(-problem.group_size // config["BLOCK_H"])
        kv_heads = _kv_heads_per_chunk(problem, config)
        exchange = Exchange(problem, fabric, config, kv_heads * problem.group_size)
        inbox, slot_elements, _, rows, control, heap_bases, _ = exchange.args
        counters = torch.zeros(exchange.chunks, dtype=torch.int32, device=fabric.device)
        self._fixed_args = counters, inbox, slot_elements, rows, control, heap_bases
        self._kernel = Kernel(
            _decode,
            grid=self._attention.programs + exchange.combiners,
            constants=self._attention.constants
            | exchange.constants
            | merge_constants(problem, config["SPLITS"], config["ROWS"])
            | {"ATTENDING": self._attention.programs, "CHUNK_GROUPS": kv_heads * head_blocks},
            options=self._attention.options,
        )

    def __call__(self, *tensors: torch.Tensor | None) -> torch.Tensor:
        *inputs, out = tensors
        assert out is not None
        self._kernel(*self._attention.args(inputs), out, *self._fixed_args)
        return out


def _kv_heads_per_chunk(problem: FlashDecode, config: Config) -> int:
    """As many as CHUNKS asks for, or more where there would be more chunks than channels."""
    kv_heads = problem.batch * problem.kv_heads
    return -(-kv_heads // min(config["CHUNKS"], Pool.CHANNELS))


class Persistent(ExchangingVariant):
    """Splits, merges and combiners in one kernel."""

    name = "persistent"

    def plan(self, problem: Any, fabric: Fabric, config: Config) -> Plan:
        return PersistentPlan(problem, fabric, config)


VARIANT = Persistent()
