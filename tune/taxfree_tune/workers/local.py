"""Ranks that are there already as a worker group: rank 0 leads, and the others do what it calls.

What `workers.group` is to ranks that can be replaced. Here a rank that fails in a task says so at
its next vote, and there all others leave the task as well. So between its votes a task
must not meet its peers in other ways that have no bound of their own.
"""

from __future__ import annotations

import contextlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from taxfree._runtime.collectives import Left, PeersLeft, vote
from taxfree_kernels.errors import PeerTimeout
from taxfree_tune.measuring import disturbance
from taxfree_tune.measuring.trial import hang
from taxfree_tune.workers.group import TaskFailed, cause
from taxfree_tune.workers.worker import failure

if TYPE_CHECKING:
    from taxfree_kernels.fabric.base import Fabric

_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass(frozen=True)
class _Call:
    """A task that all ranks run."""

    task: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class LocalGroup:
    """The ranks of a fabric, of which this is rank 0; takes the place of `Workers` and its group.

    Args:
        fabric: of this rank. The others are in `together`.
    """

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric

    def group(self) -> LocalGroup:
        """Itself: it is never replaced."""
        return self

    def call(
        self,
        task: Callable[Concatenate[Fabric, _P], _T],
        deadline_s: float,
        *args: _P.args,
        **kwargs: _P.kwargs,
    ) -> list[_T]:
        """As of `WorkerGroup`, but that nothing ends a task which is late.

        Raises:
            TaskFailed: it raised on some rank; all are ready for the next task.
            PeerTimeout: a rank is lost.
        """
        call = _Call(f"{task.__module__}:{task.__qualname__}", args, kwargs)
        vote(self._fabric.group, call)
        return _run(self._fabric, call)


def together(fabric: Fabric, work: Callable[[LocalGroup], _T]) -> _T:
    """Do `work` on rank 0, while the others run the tasks that it calls; collective.

    Returns:
        What it returned, on all ranks.

    Raises:
        TaskFailed: it raised on rank 0; there the error itself is raised.
        PeerTimeout: a rank is lost.
    """
    if fabric.rank:
        return _follow(fabric)  # type: ignore[no-any-return]
    try:
        result = work(LocalGroup(fabric))
    except Exception as error:
        with contextlib.suppress(PeersLeft, PeerTimeout):
            vote(fabric.group, Left(failure(error)))
        raise
    vote(fabric.group, result)
    return result


def _follow(fabric: Fabric) -> Any:
    while True:
        try:
            told = vote(fabric.group, None)[0]
        except PeersLeft as error:
            raise TaskFailed(0, error.why[0]) from None
        disturbance.worked()  # a vote may wait on the GPU
        if not isinstance(told, _Call):
            return told
        with contextlib.suppress(TaskFailed):
            _run(fabric, told)


def _run(fabric: Fabric, call: _Call) -> list[Any]:
    """Run a task, and return the results of all ranks."""
    try:
        result = pkgutil.resolve_name(call.task)(fabric, *call.args, **call.kwargs)
        return vote(fabric.group, result)
    except PeersLeft as error:
        left = error.why
    except Exception as error:
        left = _leave(fabric, error)
    hang(fabric)
    raise TaskFailed(*cause({rank: ("failed", why) for rank, why in left.items()}))


def _leave(fabric: Fabric, error: Exception) -> Any:
    """Tell the other ranks of an error; returns why ranks have left, by rank."""
    try:
        vote(fabric.group, Left(failure(error)))
    except PeersLeft as found:
        return found.why
    raise AssertionError("a rank has left, and the vote does not say so")
