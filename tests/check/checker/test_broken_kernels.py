"""Each known mistake is reported, with its reason, and the kernel without it is clean."""

from __future__ import annotations

from functools import partial

import pytest

from taxfree_check.checker import Reason, ScheduleOutcome

from . import broken

SEEDS = range(12)

MISTAKES = {
    "plain poll": (partial(broken.exchange, "plain poll"), Reason.NO_ACQUIRE),
    "relaxed poll": (partial(broken.exchange, "relaxed poll"), Reason.NO_ACQUIRE),
    "relaxed signal": (partial(broken.exchange, "relaxed signal"), Reason.NO_RELEASE),
    "gpu scope": (partial(broken.exchange, "gpu scope"), Reason.SCOPE),
    "signal first": (partial(broken.exchange, "signal first"), Reason.EARLY_SIGNAL),
    "constant flag": (partial(broken.exchange, "constant flag"), Reason.STALE_SIGNAL),
    "one slot": (partial(broken.exchange, "one slot"), Reason.LIFETIME),
    "late generation": (partial(broken.exchange, "late generation"), Reason.DEADLOCK),
    "host clears": (partial(broken.host_cleared_flag, barriers=False), Reason.HOST_WRITE),
    "higher program id": (partial(broken.relay, 1), Reason.DEADLOCK),
    "waiting for each other": (partial(broken.handshake, waits_first=True), Reason.DEADLOCK),
    "empty message skipped by its sender": (
        partial(broken.one_way, signals_empty=False, awaits_empty=True),
        Reason.DEADLOCK,
    ),
    "empty message skipped by both": (
        partial(broken.one_way, signals_empty=False, awaits_empty=False),
        Reason.LIFETIME,
    ),
    "torn word": (partial(broken.flag_in_data, "torn"), Reason.TORN),
    "constant flag in data": (partial(broken.flag_in_data, "constant flag"), Reason.WRONG_RESULT),
    "one slot of words": (partial(broken.flag_in_data, "one slot"), Reason.LIFETIME),
    "one word for all": (partial(broken.flag_in_data, "one word"), Reason.WRONG_RESULT),
    "early kernel that waits late": (partial(broken.early, "waits late"), Reason.NO_WAIT),
    "release to the device before a word, for a peer's memory": (
        partial(broken.stored_by_both, owner=1, scope="gpu"),
        Reason.NO_WAIT,
    ),
    "data that words announce": (partial(broken.flag_in_data, "other data"), Reason.NO_WAIT),
}

TWINS = {
    "exchange": broken.exchange,
    "host clears between barriers": partial(broken.host_cleared_flag, barriers=True),
    "lower program id": partial(broken.relay, 0),
    "handshake": partial(broken.handshake, waits_first=False),
    "empty message signalled": partial(broken.one_way, signals_empty=True, awaits_empty=True),
    "whole words": broken.flag_in_data,
    "release to the device before a word": partial(broken.stored_by_both, owner=0, scope="gpu"),
    "release to all before a word": partial(broken.stored_by_both, owner=1, scope="sys"),
    "early kernel that waits": broken.early,
}


def _violations(run, seeds=SEEDS) -> list:
    outcomes: list[ScheduleOutcome] = [run(seed=seed) for seed in seeds]
    return [each.violation for each in outcomes if each.violation is not None]


@pytest.mark.parametrize("name", MISTAKES)
def test_a_known_mistake_is_reported_with_its_reason(name):
    run, reason = MISTAKES[name]
    violations = _violations(run)
    assert violations, "not reported"
    assert reason in {violation.reason for violation in violations}, str(violations[0])


@pytest.mark.parametrize("name", TWINS)
def test_the_kernel_without_the_mistake_is_clean(name):
    assert [str(violation) for violation in _violations(TWINS[name])] == []
