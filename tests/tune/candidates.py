"""Variants to add to a copy of the kernels' tree: bad ones of every kind."""

from __future__ import annotations

from textwrap import indent

_HEAD = '''
"""{what}."""

from __future__ import annotations

import os
import signal
import time

from taxfree_kernels.all_gather_matmul.baseline import BaselinePlan
from taxfree_kernels.errors import PlanError
from taxfree_kernels.variant import Variant


class ThePlan(BaselinePlan):
    calls = 0

    def __init__(self, problem, fabric, config):
{plan}
        super().__init__(problem, fabric, config)
        self.fabric, self.config = fabric, config

    def compile(self, size, *tensors, **launching):
{compile}

    def run(self, a, weight, bias, out):
        self.calls += 1
{call}
        return super().run(a, weight, bias, out)


class TheVariant(Variant):
    name = "{name}"
    fused = False

    def space(self, problem, hardware):
        return {space}

    def seed_configs(self, problem, hardware):
        space = self.space(problem, hardware)
        return [{{name: value}} for name, values in space.items() for value in values] or [{{}}]

    def plan(self, problem, fabric, config):
        return ThePlan(problem, fabric, config)


VARIANT = TheVariant()
'''


def variant(
    name: str, what: str, plan: str = "pass", compile: str = "pass", call: str = "pass",
    space: str = "{}",
) -> dict[str, str]:  # fmt: skip
    """A variant that is the baseline, but for statements when it plans, compiles and is called."""
    body = {"plan": plan, "compile": compile, "call": call}
    indented = {at: indent(statements, " " * 8) for at, statements in body.items()}
    return {name: _HEAD.format(name=name, what=what, space=space, **indented).lstrip()}


WORKS = variant("works", "Is the baseline")
REFUSED = variant(
    "illegal_reason", "Cannot be planned", plan="raise PlanError('the moon is wrong')"
)
RAISES = variant(
    "raises",
    "Raises on one rank",
    call="if self.fabric.rank == 1 and self.calls: raise OSError('no')",
)
WRONG = variant(
    "is_wrong",
    "Is wrong on one rank",
    call="super().run(a, weight, bias, out)\nreturn out.add_(self.fabric.rank == 1)",
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
        "    BaselinePlan.run = lost"
    ),
)


def dies(phases: tuple[str, ...]) -> dict[str, str]:
    """A variant with a config for each phase of a trial in which it dies.

    Args:
        phases: of "plan", "compile", "check" and "time".
    """
    kill = "os.kill(os.getpid(), signal.SIGKILL)"
    return variant(
        "dies",
        "Dies in a phase of a trial",
        plan=f"if fabric.rank and config['PHASE'] == 'plan': {kill}",
        compile=f"if self.fabric.rank and self.config['PHASE'] == 'compile': {kill}",
        call=(
            "phase = 'check' if self.calls <= 2 else 'time'\n"
            f"if self.fabric.rank and self.config['PHASE'] == phase: {kill}"
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
from taxfree_kernels.device.peers import Group, Peers
from taxfree_kernels.launch import Kernel
from taxfree_kernels.variant import Plan, Variant


@triton.jit(do_not_specialize=["rank"])
def _hang(control_ptr, heap_bases, rank, GROUP: tl.constexpr):
    generation = sync.running_generation(control_ptr)
    peers = Peers(control_ptr, heap_bases, rank, generation)
    sync.wait(peers, 9, (rank + 1) % GROUP.WORLD, GROUP)
    sync.leave(control_ptr)


class HangingPlan(Plan):
    def __init__(self, problem, fabric):
        self._args = (fabric.pool.control, fabric.heap_bases, fabric.rank)
        self._kernel = Kernel(
            _hang, 1, {"GROUP": Group(problem.world_size, fabric.backend)}
        )

    def run(self, a, weight, bias, out):
        self._kernel(*self._args)
        return out


class Hangs(Variant):
    name = "hangs"

    def plan(self, problem, fabric, config):
        return HangingPlan(problem, fabric)


VARIANT = Hangs()
'''.lstrip()
}

#: raises on a rank for which a kernel of the others waits, in a phase of a trial
RAISES_ALONE = {
    "raises_alone": HANGS["hangs"]
    .replace("HangingPlan(Plan)", "RaisingPlan(BaselinePlan)")
    .replace("def __init__(self, problem, fabric):", "def __init__(self, problem, fabric, phase):")
    .replace(
        "        self._args =",
        "        super().__init__(problem, fabric, {})\n"
        "        self._right = {'check': 0, 'time': 2}[phase]\n"
        "        self._args =",
    )
    .replace(
        "        self._kernel(*self._args)",
        "        self._right -= 1\n"
        "        if self._right >= 0:\n"
        "            return super().run(a, weight, bias, out)\n"
        "        if self._args[-1] == 1:\n"
        "            raise OSError('no')\n"
        "        self._kernel(*self._args)",
    )
    .replace("HangingPlan(problem, fabric)", "RaisingPlan(problem, fabric, config['PHASE'])")
    .replace('name = "hangs"', 'name = "raises_alone"\n    fused = False')
    .replace(
        "    def plan(self",
        "    def space(self, problem, hardware):\n"
        "        return {'PHASE': ('check', 'time')}\n\n"
        "    def seed_configs(self, problem, hardware):\n"
        "        return [{'PHASE': 'check'}, {'PHASE': 'time'}]\n\n"
        "    def plan(self",
    )
    .replace(
        "from taxfree_kernels.device import sync",
        "from taxfree_kernels.all_gather_matmul.baseline import BaselinePlan\n"
        "from taxfree_kernels.device import sync",
    )
}

EVERY = WORKS | REFUSED | RAISES | WRONG | CRASHES | SLEEPS | POISONS | HANGS
