"""``one_shot`` with a low-latency (LL) protocol: each word that is sent carries its own flag.

For decode sizes, where a collective is all latency: no stores are drained, there is no release, and
no signal follows the data. An 8-byte word holds two elements and the generation; this doubles the
bytes on the links, which is why larger sums do better with signals.

Protocol. All programs are alike: each sends its block of this rank's partial sum to every peer,
waits for the same block from every peer, and adds in rank order. A program waits only for programs
with its own id, which send before they wait, so any order that starts low ids first makes progress.
Every rank sends to, and receives from, every peer in every call, so two slots of words suffice
(:class:`taxfree_kernels.fabric.heap.Pool`).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from taxfree_kernels.device import sync
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.launch import Kernel, compile_options
from taxfree_kernels.matmul_all_reduce.one_shot import OneShot
from taxfree_kernels.matmul_all_reduce.problem import MatmulAllReduce
from taxfree_kernels.partial_sums import spaces
from taxfree_kernels.partial_sums.addends import with_addends
from taxfree_kernels.partial_sums.sums import SumPlan
from taxfree_kernels.partial_sums.words import MOST_ELEMENTS, sum_by_words
from taxfree_kernels.variant import Config, Plan, Space


@triton.jit(do_not_specialize=["rank"])
def _one_shot_ll(
    partial_ptr, bias_ptr, residual_ptr, out_ptr,
    flags_ptr, slot_words, stride_source, control_ptr, heap_bases, rank, count, n,
    WORLD: tl.constexpr, BACKEND: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    generation = sync.running_generation(control_ptr)
    slot_ptr = tl.multiple_of(flags_ptr + (generation % 2) * slot_words, 16)
    at = program * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(tl.cast(partial_ptr, tl.pointer_type(tl.int32)) + at)
    total, arrived = sum_by_words(
        own, at, None, slot_ptr, stride_source, control_ptr, generation, heap_bases, rank,
        out_ptr.dtype.element_ty, WORLD, BACKEND,
    )  # fmt: skip
    element = program * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
    mask = element < count
    total = with_addends(
        total, element % n, mask, element, mask, bias_ptr, residual_ptr, HAS_BIAS, HAS_RESIDUAL
    )
    total = tl.where(arrived, total, float("nan"))
    tl.store(out_ptr + element, total.to(out_ptr.dtype.element_ty), mask=mask)
    sync.leave(control_ptr)


class OneShotLLPlan(SumPlan):
    """Our one-step sum of words."""

    def __init__(self, problem: MatmulAllReduce, fabric: Fabric, config: Config) -> None:
        self._block = config["BLOCK"]
        words = self._programs(problem) * self._block
        super().__init__(problem, fabric, 2 * words)
        self._flags = fabric.pool.flag_slots(problem.world_size * words)
        self._ranks = (fabric.pool.control, fabric.heap_bases, fabric.rank)
        self._kernel = Kernel(
            _one_shot_ll,
            grid=0,
            constants={
                "WORLD": problem.world_size,
                "BACKEND": fabric.backend,
                "HAS_BIAS": problem.bias,
                "HAS_RESIDUAL": problem.residual,
                "BLOCK": self._block,
            },
            options=compile_options(fabric.backend, config),
        )

    def _programs(self, problem: MatmulAllReduce) -> int:
        return int(-(-problem.elements // (2 * self._block)))

    def _launch(self, problem: MatmulAllReduce) -> tuple[int, tuple[Any, ...]]:
        programs = self._programs(problem)
        words = programs * self._block
        return programs, (*self._flags, words, *self._ranks, problem.elements, problem.n)

    def add_up(self, partial: torch.Tensor, kernel: Kernel, *rest: torch.Tensor | None) -> None:
        bias, residual, _, _, out = rest
        super().add_up(partial, kernel, bias, residual, out)


class OneShotLL(OneShot):
    """Vendor matmul, one-shot all-reduce of ours whose words carry their flags."""

    name = "one_shot_ll"

    def refuses_problem(self, problem: Any, hardware: Hardware) -> str | None:
        if problem.elements > MOST_ELEMENTS:
            return "larger sums gain nothing from words that carry their flags"
        if problem.rms_norm:
            return "no program has whole rows of the sum"
        return super().refuses_problem(problem, hardware)

    def space(self, problem: Any, hardware: Hardware) -> Space:
        return spaces.word_space(hardware)

    def first_configs(self, problem: Any, hardware: Hardware) -> list[dict[str, Any]]:
        return spaces.first_words(hardware, self.space(problem, hardware), problem.elements)

    def refuses_config(self, problem: Any, hardware: Hardware, config: Config) -> str | None:
        return spaces.refuses_words(hardware, config, config["BLOCK"], problem.world_size)

    def plan(self, problem: Any, fabric: Fabric, config: Config) -> Plan:
        return OneShotLLPlan(problem, fabric, config)


VARIANT = OneShotLL()
