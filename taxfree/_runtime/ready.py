"""Plans that can be called: the one way by which ranks make them together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from taxfree._runtime.aside import aside
from taxfree._runtime.collectives import Failure, attempt
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.variant import Plan, Ready


def ready_plans(fabric: Fabric, makers: Sequence[Callable[[], Plan]]) -> list[Ready | Failure]:
    """Make plans that can be called; collective.

    Each rank makes its plans without its peers, and all vote: what fails on one rank is made on
    none. So no rank waits inside a kernel for another rank's compiler, or in a collective for a
    rank that failed. Plans with a setup among peers connect then, and all vote once more.

    Args:
        fabric: of this rank.
        makers: make a plan and compile what its calls launch; the same on all ranks.

    Returns:
        For each maker its plan, or the failure of the first rank that has one.
    """
    if not makers:
        return []
    made = attempt(fabric.group, [partial(aside, fabric.device, maker) for maker in makers])
    plans = [plan for plan in made if isinstance(plan, Plan)]
    ready: Iterator[Ready | Failure] = map(Ready, plans)
    if any(plan.connects for plan in plans):
        connecting = [partial(aside, fabric.device, partial(Ready, plan)) for plan in plans]
        ready = iter(attempt(fabric.group, connecting))
    return [next(ready) if isinstance(plan, Plan) else plan for plan in made]
