"""The surrogate: what it proposes from a few measurements."""

from __future__ import annotations

import itertools
import math

import pytest

from taxfree_tune.measuring.trial import Candidate
from taxfree_tune.tuning.surrogate import Surrogate

SPACE = {"BLOCK": (16, 32, 64, 128, 256), "STAGES": (2, 3, 4), "TMA": (False, True), "WIRE": ("a",)}
EVERY = [
    Candidate(name, dict(zip(SPACE, values, strict=True)))
    for name in ("push", "pull")
    for values in itertools.product(*SPACE.values())
]


def time_of(candidate: Candidate) -> float:
    config = candidate.config
    away = abs(math.log2(config["BLOCK"]) - 7) + 0.5 * (4 - config["STAGES"]) + (not config["TMA"])
    return 40.0 * 1.2**away * (1.5 if candidate.variant == "pull" else 1.0)


def surrogate() -> Surrogate:
    return Surrogate({"push": SPACE, "pull": SPACE})


def propose(known, failed=(), count=4):
    measured = [(each, time_of(each)) for each in known]
    pool = [each for each in EVERY if each not in known and each not in failed]
    return surrogate().propose(measured, list(failed), pool, count)


def test_proposes_different_candidates_of_the_pool() -> None:
    proposed = propose(EVERY[::9], count=6)
    assert len(proposed) == 6
    assert all(each not in EVERY[::9] for each in proposed)
    assert all(proposed.count(each) == 1 for each in proposed)
    assert propose(EVERY[::9], count=6) == proposed
    assert propose(EVERY, count=3) == []


def test_follows_what_the_measurements_say() -> None:
    best = min(EVERY, key=time_of)
    known = [each for each in EVERY[::5] if each != best]
    assert best in propose(known)


@pytest.mark.parametrize("fails", [False, True])
def test_avoids_what_resembles_failures(fails: bool) -> None:
    def at(block: int, tma: bool) -> Candidate:
        return Candidate("push", {"BLOCK": block, "STAGES": 3, "TMA": tma, "WIRE": "a"})

    measured = [
        (at(block, tma), us) for block, us in ((16, 90.0), (64, 50.0)) for tma in (False, True)
    ]
    failed = [at(256, fails)]
    pool = [at(128, False), at(128, True)]
    assert surrogate().propose(measured, failed, pool, 1) == [at(128, not fails)]
