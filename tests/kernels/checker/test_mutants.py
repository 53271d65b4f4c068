"""Every mutant of the real synchronisation is reported, but for those that change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest

from taxfree_kernels.all_gather_matmul import one_shot, overlap, pull, push, push_two_kernel, tile
from taxfree_kernels.checker import MIXED, Violation, check_variant
from taxfree_kernels.checker.mutate import Mutant, mutants
from taxfree_kernels.device import exchange, sync
from taxfree_kernels.matmul_all_reduce import one_shot as sum_one_shot
from taxfree_kernels.matmul_all_reduce import push as sum_push
from taxfree_kernels.matmul_all_reduce import tile as sum_tile
from taxfree_kernels.matmul_all_reduce import two_shot as sum_two_shot
from taxfree_kernels.matmul_reduce_scatter import one_shot as scatter_one_shot
from taxfree_kernels.matmul_reduce_scatter import push as scatter_push

pytestmark = pytest.mark.timeout(300)

OP = "all_gather_matmul"
SEEDS = range(14)

_SYNC = (
    sync._poll,
    sync.signal,
    sync.wait,
    sync.has_given_up,
    sync.running_generation,
    sync.leave,
    sync.arrive,
)

#: functions, the variants in which their mutants are looked for, and of which operation if not OP
GROUPS: dict[str, tuple] = {
    "sync": (_SYNC, ("push", "one_shot")),
    "tile: send": ((tile.push_chunk,), ("push",)),
    "tile: receive": ((tile.wait_for_rows, tile.gathered_tile), ("push", "pull", "push_tma")),
    "push": ((push._push,), ("push",)),
    "pull": ((pull._pull,), ("pull",)),
    "push_two_kernel": ((push_two_kernel._send,), ("push_two_kernel",)),
    "one_shot": ((one_shot._gather,), ("one_shot",)),
    "overlap": ((overlap._enter, overlap._announce, overlap._await), ("overlap",)),
    "exchange: everybody": (
        (exchange.signal_everybody, exchange.wait_for_everybody),
        ("push",),
        "matmul_all_reduce",
    ),
    "exchange: peers": ((exchange.wait_for_peers,), ("one_shot",), "matmul_all_reduce"),
    "sum: push": ((sum_push._push, sum_tile.announce_tile), ("push",), "matmul_all_reduce"),
    "sum: one_shot": ((sum_one_shot._one_shot,), ("one_shot",), "matmul_all_reduce"),
    "scatter: push": ((scatter_push._push,), ("push",), "matmul_reduce_scatter"),
    "scatter: one_shot": ((scatter_one_shot._one_shot,), ("one_shot",), "matmul_reduce_scatter"),
    # alone it would hold its protocol with one payload slot: it waits for everybody twice
    "sum: two_shot": ((sum_two_shot._two_shot,), ("two_shot", MIXED), "matmul_all_reduce"),
}

#: mutants that are as right as the original as long as no wait times out, and why
HARMLESS = {
    "wait: _poll: generation + 1": "the first poll only decides whether the loop is entered",
    "wait: _poll: generation - 1": "the last poll only acquires: the loop has seen the generation",
    "has_given_up: atomic_add: scope='sys' -> 'gpu'": "only a timeout makes peers write that word",
    "arrive: atomic_xchg: scope='gpu' -> 'cta'": "the last one in resets the counter, alone",
}


def _without_place(mutant: Mutant) -> str:
    return str(mutant).partition(" ")[2]


def _find(mutant: Mutant, names: tuple[str, ...], op: str = OP) -> Violation | None:
    with mutant.installed():
        for name in names:
            violation = check_variant(op, name, seeds=SEEDS).violation
            if violation is not None:
                return violation
    return None


@cache
def _results(group: str) -> tuple[tuple[Mutant, Violation | None], ...]:
    functions, *where = GROUPS[group]
    return tuple((mutant, _find(mutant, *where)) for mutant in mutants(functions))


def _all_results() -> Iterator[tuple[Mutant, Violation | None]]:
    for group in GROUPS:
        yield from _results(group)


@pytest.mark.parametrize("group", GROUPS)
def test_a_mutant_that_is_not_reported_changes_nothing(group):
    survivors = [str(mutant) for mutant, violation in _results(group) if violation is None]
    unexpected = [each for each in survivors if each.partition(" ")[2] not in HARMLESS]
    assert unexpected == []


def test_95_of_100_mutants_are_reported():
    results = list(_all_results())
    reported = [mutant for mutant, violation in results if violation is not None]
    assert len(results) > 80
    assert len(reported) >= 0.95 * len(results)


def test_a_harmless_mutant_is_still_a_mutant():
    """The list above has no entry that the sources no longer have."""
    assert HARMLESS.keys() <= {_without_place(mutant) for mutant, _ in _all_results()}


def test_the_original_is_back_after_a_mutant():
    mutant = next(mutants([sync.signal]))
    original = sync.signal.rewrite()
    with mutant.installed():
        assert sync.signal.rewrite() is not original
    assert sync.signal.rewrite() is original
