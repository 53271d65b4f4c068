"""Variants to add to a copy of the kernels' tree: bad ones of every kind, and a good one."""

from __future__ import annotations

_HEAD = '''
"""{what}."""

from __future__ import annotations

import os
import signal
import time

from taxfree_kernels.all_gather_matmul.baseline import BaselinePlan
from taxfree_kernels.errors import PlanError
from taxfree_kernels.launch import _launcher
from taxfree_kernels.variant import Variant


class ThePlan(BaselinePlan):
    calls = 0

    def __init__(self, problem, fabric, config):
{plan}
        super().__init__(problem, fabric)
        self.fabric, self.config = fabric, config

    def __call__(self, a, weight, bias, out):
        compiling = _launcher.get() is not None
        self.calls += not compiling
{call}
        return super().__call__(a, weight, bias, out)


class TheVariant(Variant):
    name = "{name}"
    fused = False

    def space(self, problem, hardware):
        return {space}

    def seed_configs(self, problem, hardware):
        knobs = self.space(problem, hardware)
        return [{{knob: value}} for knob, values in knobs.items() for value in values] or [{{}}]

    def plan(self, problem, fabric, config):
        return ThePlan(problem, fabric, config)


VARIANT = TheVariant()
'''


def variant(
    name: str, what: str, plan: str = "pass", call: str = "pass", space: str = "{}"
) -> dict[str, str]:
    """A variant that is the baseline, but for statements at planning and at each call."""
    indented = [f"        {line}" for line in plan.splitlines()]
    called = [f"        {line}" for line in call.splitlines()]
    return {
        name: _HEAD.format(
            name=name, what=what, plan="\n".join(indented), call="\n".join(called), space=space
        ).lstrip()
    }


WORKS = variant("works", "Is the baseline")
REFUSED = variant("prune_reason", "Cannot be planned", plan="raise PlanError('the moon is wrong')")
RAISES = variant(
    "raises",
    "Raises on one rank",
    call="if self.fabric.rank == 1 and self.calls: raise OSError('no')",
)
WRONG = variant(
    "is_wrong",
    "Is wrong on one rank",
    call="super().__call__(a, weight, bias, out)\nreturn out.add_(self.fabric.rank == 1)",
)
CRASHES = variant("crashes", "Aborts", call="if self.fabric.rank == 1 and self.calls: os.abort()")
SLEEPS = variant("sleeps", "Never returns", call="if self.calls: time.sleep(1000)")
#: fails on all ranks, and with it all that the same processes try from then on
POISONS = variant(
    "poisons",
    "Loses every rank's device",
    call=(
        "def lost(*_):\n"
        "    raise RuntimeError('CUDA error: an illegal memory access was encountered')\n"
        "if self.calls:\n"
        "    BaselinePlan.__call__ = lost"
    ),
)


def dies(phases: tuple[str, ...]) -> dict[str, str]:
    """A variant with a config for each phase of a trial in which it dies.

    Args:
        phases: of "plan", "compile", "check" and "time".
    """
    return variant(
        "dies",
        "Dies in a phase of a trial",
        plan="if config['PHASE'] == 'plan' and fabric.rank: os.kill(os.getpid(), signal.SIGKILL)",
        call=(
            "phase = 'compile' if compiling else 'check' if self.calls <= 2 else 'time'\n"
            "if self.config['PHASE'] == phase and self.fabric.rank:\n"
            "    os.kill(os.getpid(), signal.SIGKILL)"
        ),
        space=f"{{'PHASE': {phases!r}}}",
    )


#: waits for a signal that nobody sends
HANGS = {
    "hangs": '''
"""Waits for a message that nobody sends."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from taxfree_kernels.device import sync
from taxfree_kernels.launch import Kernel
from taxfree_kernels.variant import Plan, Variant


@triton.jit(do_not_specialize=["rank"])
def _hang(control_ptr, heap_bases, rank, WORLD: tl.constexpr, BACKEND: tl.constexpr):
    generation = sync.running_generation(control_ptr)
    sync.wait(control_ptr, 9, (rank + 1) % WORLD, generation, heap_bases, rank,
              WORLD=WORLD, BACKEND=BACKEND)
    sync.leave(control_ptr)


class HangingPlan(Plan):
    def __init__(self, problem, fabric):
        self._args = (fabric.pool.control, fabric.heap_bases, fabric.rank)
        self._kernel = Kernel(
            _hang, 1, {"WORLD": problem.world_size, "BACKEND": fabric.backend}
        )

    def __call__(self, a, weight, bias, out):
        self._kernel(*self._args)
        return out


class Hangs(Variant):
    name = "hangs"

    def plan(self, problem, fabric, config):
        return HangingPlan(problem, fabric)


VARIANT = Hangs()
'''.lstrip()
}

#: a correct fused variant on the primitives alone, as somebody's first kernel would be
GOOD = {
    "two_steps": '''
"""One kernel: a program per peer sends the whole shard, tile programs wait for all of it.

Removes the launch tax. The senders have the lowest ids and wait for nobody; every tile program
waits for every peer, so two slots suffice.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

import torch
from taxfree_kernels.device import sync
from taxfree_kernels.device.tiles import copy
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.launch import Kernel
from taxfree_kernels.variant import Config, Plan, Space, Variant


@triton.jit(do_not_specialize=["rank", "own_rows", "m", "shard_rows"])
def _two_steps(
    a_ptr, own_rows, w_ptr, stride_wk, stride_wn, bias_ptr, out_ptr,
    inbox_ptr, slot_elements, control_ptr, heap_bases, rank, m, n, k, shard_rows, shard_columns,
    WORLD: tl.constexpr, BACKEND: tl.constexpr, GATHER_DIM: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    generation = sync.running_generation(control_ptr)
    slot_ptr = tl.multiple_of(inbox_ptr + (generation % 2) * slot_elements, 16)
    if program < WORLD:
        block_ptr = slot_ptr + rank.to(tl.int64) * shard_rows * shard_columns
        peer = (rank + program) % WORLD
        target = sync.translate(block_ptr, heap_bases, rank, peer)
        copy(target, a_ptr, 0, own_rows * shard_columns, 1024)
        sync.signal(control_ptr, 0, peer, generation, heap_bases, rank,
                    WORLD=WORLD, BACKEND=BACKEND)
    else:
        lane = tl.arange(0, triton.next_power_of_2(WORLD))
        arrived = sync.wait(control_ptr, 0, lane % WORLD, generation, heap_bases, rank,
                            mask=lane < WORLD, WORLD=WORLD, BACKEND=BACKEND)
        tiles_n = tl.cdiv(n, BLOCK)
        rows = (program - WORLD) // tiles_n * BLOCK + tl.arange(0, BLOCK)
        cols = (program - WORLD) % tiles_n * BLOCK + tl.arange(0, BLOCK)
        acc = tl.zeros((BLOCK, BLOCK), tl.float32)
        for begin in range(0, k, BLOCK):
            ks = begin + tl.arange(0, BLOCK)
            if GATHER_DIM == 0:
                at = rows[:, None] * k + ks[None, :]
            else:
                source, column = ks // shard_columns, ks % shard_columns
                at = source * m * shard_columns + column
                at = at[None, :] + (rows * shard_columns)[:, None]
            a = tl.load(slot_ptr + at, mask=(rows < m)[:, None] & (ks < k)[None, :], other=0.0)
            w_at = ks[:, None] * stride_wk + cols[None, :] * stride_wn
            w = tl.load(w_ptr + w_at, mask=(ks < k)[:, None] & (cols < n)[None, :], other=0.0)
            acc = tl.dot(a, w, acc)
        if HAS_BIAS:
            acc += tl.load(bias_ptr + cols, mask=cols < n, other=0.0).to(tl.float32)[None, :]
        acc = tl.where(arrived, acc, float("nan"))
        mask = (rows < m)[:, None] & (cols < n)[None, :]
        target = out_ptr + rows[:, None] * n + cols[None, :]
        tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=mask)
    sync.leave(control_ptr)


class TwoStepsPlan(Plan):
    def __init__(self, problem: Any, fabric: Fabric, config: Config) -> None:
        dtype, block = getattr(torch, problem.dtype), config["BLOCK"]
        inbox, slot_elements = fabric.pool.slots(problem.gathered_elements, dtype)
        self._own_rows = problem.rows_of(fabric.rank)
        self._fixed_args = (
            inbox, slot_elements, fabric.pool.control, fabric.heap_bases, fabric.rank,
            problem.m, problem.n, problem.k, problem.shard_rows, problem.shard_columns,
        )  # fmt: skip
        self._kernel = Kernel(
            _two_steps,
            grid=problem.world_size + -(-problem.m // block) * -(-problem.n // block),
            constants={
                "WORLD": problem.world_size, "BACKEND": fabric.backend, "BLOCK": block,
                "GATHER_DIM": problem.gather_dim, "HAS_BIAS": problem.bias,
            },
        )  # fmt: skip

    def __call__(self, a, weight, bias, out):
        self._kernel(
            a, self._own_rows, weight, weight.stride(0), weight.stride(1),
            out if bias is None else bias, out, *self._fixed_args,
        )  # fmt: skip
        return out


class TwoSteps(Variant):
    name = "two_steps"

    def unsupported_reason(self, problem: Any, hardware: Any) -> str | None:
        return "one rank has no peers" if problem.world_size == 1 else None

    def space(self, problem: Any, hardware: Any) -> Space:
        return {"BLOCK": (16, 32, 64)}

    def plan(self, problem: Any, fabric: Fabric, config: Config) -> Plan:
        return TwoStepsPlan(problem, fabric, config)


VARIANT = TwoSteps()
'''.lstrip()
}
