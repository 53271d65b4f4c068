"""Agreement of ranks through the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from taxfree.errors import one_line
from taxfree_kernels.errors import PeerTimeout

_T = TypeVar("_T")


@dataclass(frozen=True)
class Failure:
    """A rank that could not take a step, and why."""

    rank: int
    why: str


@dataclass(frozen=True)
class Left:
    """The vote of a rank that does not go on with what all do together, and why."""

    why: Any


class PeersLeft(Exception):
    """Ranks do not go on: why, by rank."""

    def __init__(self, why: Mapping[int, Any]) -> None:
        super().__init__(f"ranks {list(why)} have left")
        self.why = why


def vote(group: dist.ProcessGroup | None, value: Any) -> list[Any]:
    """Every rank's value, indexed by rank; collective.

    Raises:
        PeerTimeout: not all ranks joined within the process group's own timeout.
        PeersLeft: some voted that they have `Left`; raised on all.
    """
    values: list[Any] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(values, value, group)
    except RuntimeError as error:  # each backend says it in its own way
        raise PeerTimeout(
            f"rank {dist.get_rank(group)} timed out waiting for its peers: "
            f"{str(error).partition(chr(10))[0]}",
            "all ranks make the same calls in the same order; one may have failed before",
        ) from error
    left = {rank: answer.why for rank, answer in enumerate(values) if isinstance(answer, Left)}
    if left:
        raise PeersLeft(left)
    return values


_COMPARED: Counter[str] = Counter()  # by group: how often
_ALONE: set[str] = set()  # groups in which a rank has not come: their counts differ from now on


def all_find_differing(group: dist.ProcessGroup, value: str, timeout_s: float) -> bool:
    """Whether all ranks have come, within the time, and have seen that their values differ.

    By the store, where a rank that does not come costs the others the time, once, and nothing else:
    they no longer compare in that group. So ranks that may not all come can use it.
    """
    store, name, rank = dist.distributed_c10d._get_default_store(), group.group_name, group.rank()
    if name in _ALONE:
        return False
    number = _COMPARED[name]
    _COMPARED[name] += 1

    def keys(what: str) -> list[str]:
        return [f"taxfree {what} {number} {name} {other}" for other in range(group.size())]

    def exchanged(what: str, said: str) -> list[bytes]:
        store.set(keys(what)[rank], said)
        store.wait(keys(what), timedelta(seconds=timeout_s))
        return [store.get(key) for key in keys(what)]

    try:
        verdict = len(set(exchanged("compares", value))) > 1
        return set(exchanged("has compared", str(verdict))) == {b"True"}
    except RuntimeError:
        _ALONE.add(name)
        store.set(keys("has compared")[rank], str(False))  # who comes late need not wait for it
        return False


def attempt(
    group: dist.ProcessGroup | None, steps: Iterable[Callable[[], _T]]
) -> list[_T | Failure]:
    """Take steps, then vote: a step that fails on one rank has failed on all; collective.

    Returns:
        For each step its result on this rank, or the failure of the first rank that has one.
    """
    results: list[_T | Failure] = []
    for step in steps:
        try:
            results.append(step())
        except Exception as error:  # whatever a compiler or library raises: the peers wait to vote
            results.append(Failure(dist.get_rank(group), one_line(error)))
    failures = vote(group, [result if isinstance(result, Failure) else None for result in results])
    return [
        next(filter(None, told), result) for result, *told in zip(results, *failures, strict=True)
    ]
