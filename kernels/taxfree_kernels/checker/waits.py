"""The wait graph of a deadlock: who waits for what, and who has not even started."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import FrameType

from taxfree_kernels.checker import report
from taxfree_kernels.checker.report import Reason, Violation
from taxfree_kernels.checker.schedule import Task
from taxfree_kernels.checker.shadow import Shadow
from taxfree_kernels.checker.sites import SYNC_FILE, site_of
from taxfree_kernels.checker.watch import Thread


def deadlock(
    tasks: Iterable[Task[Thread]], others: Iterable[str], shadow: Shadow, first_generation: int
) -> Violation:
    """Describe tasks that all wait.

    Args:
        tasks: asleep.
        others: lines about who else is involved: programs that have not started.
    """
    details: list[str] = []
    lines: list[str] = []
    for task in tasks:
        if task.owner.actor.program is None:
            continue
        site = site_of(task.coroutine.gr_frame)
        details.append(f"{report.who(task.owner.actor, first_generation)} waits{_wanted(task)} in")
        details += report.source(site)
        details += [f"  for {place}" for place in _places(task, shadow)]
        lines.append(site.in_kernel.where)
    return Violation(Reason.DEADLOCK, (*details, *others), tuple(lines))


def _places(task: Task[Thread], shadow: Shadow) -> Iterator[str]:
    for address in sorted(each for each in task.waits_for if isinstance(each, int)):
        region = shadow.find(address)
        if region is not None:
            yield report.where(region, address)


def _wanted(task: Task[Thread]) -> str:
    """The generation that a sleeping `wait` wants, from its own variables."""
    frame: FrameType | None = task.coroutine.gr_frame
    while frame is not None:
        if frame.f_code.co_filename == SYNC_FILE and frame.f_code.co_name == "wait":
            wanted = frame.f_locals["generation"]
            return f" for generation {int(wanted.handle.data.item())}"
        frame = frame.f_back
    return ""
