"""What programs of fused kernels do when, and the taxes that it shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np
import pytest

from taxfree_kernels.device import sync
from taxfree_tune.profiling.program_trace import Activity, activities, trace_of, variables
from taxfree_tune.taxes import ProgramTrace, inside
from taxfree_tune.workers.group import WorkerGroup
from tests.ranks import HEAP_BYTES, TIMEOUT_S
from tests.tune import program_trace_tasks
from tests.tune.pipelines import TRUE_CLOCKS, Fused

DELAY_US, REPETITIONS = 200_000.0, 5
AMOUNTS = (5.0, 20.0, 100.0)
EVENTS = {
    "started": sync.STARTED.value,
    "sent": sync.SENT.value,
    "began": sync.WAIT_BEGAN.value,
    "ended": sync.WAIT_ENDED.value,
    "done": sync.DONE.value,
}


def of_events(events: Mapping[tuple[int, int, str, int], float], programs: int = 3) -> ProgramTrace:
    """Of one call of three ranks; events are (rank, program, event, peer) -> microseconds."""
    log = np.zeros((3, 1, programs, sync.EVENTS.value, 3), dtype=np.int64)
    for (rank, program, event, peer), us in events.items():
        log[rank, 0, program, EVENTS[event], peer] = round(us * 1000)
    return trace_of(list(log), TRUE_CLOCKS, np.full((3, 1), 100.0), launches=1)


class TestActivities:
    def test_a_sender_sends_until_its_last_signal(self):
        sender = {(1, 0, "started", 0): 1.0, (1, 0, "sent", 0): 5.0, (1, 0, "sent", 2): 4.0}
        found = activities(of_events(sender | {(1, 0, "done", 0): 6.0}))
        assert list(found) == [Activity(1, 0, "send", 0, 1.0, 5.0)]

    def test_a_tile_computes_and_waits_for_each_source(self):
        tile = {(1, 1, "started", 0): 1.0, (1, 1, "done", 0): 9.0}
        tile |= {(1, 1, "began", 0): 2.0, (1, 1, "ended", 0): 3.0}
        tile |= {(1, 1, "began", 2): 5.0, (1, 1, "ended", 2): 7.0}
        assert list(activities(of_events(tile))) == [
            Activity(1, 1, "compute", None, 1.0, 9.0),
            Activity(1, 1, "wait", 0, 2.0, 3.0),
            Activity(1, 1, "wait", 2, 5.0, 7.0),
        ]

    def test_a_second_launch_notes_over_the_first(self):
        program = {(1, 0, "started", 0): 5.0, (1, 0, "sent", 0): 3.0, (1, 0, "done", 0): 8.0}
        assert list(activities(of_events(program))) == [Activity(1, 0, "compute", None, 5.0, 8.0)]


USUAL = Fused()


class TestInside:
    """The taxes of a made-up kernel: one thing is changed, and one part changes."""

    def parts(self, fused: Fused, rank: int = 0) -> dict[str, float]:
        return dataclasses.asdict(inside(fused.trace(), rank, 0))

    def assert_only(self, changed: Fused, name: str, amount: float) -> None:
        before, after = self.parts(USUAL), self.parts(changed)
        expected = dict.fromkeys(before, 0.0) | {name: amount}
        found = {each: after[each] - before[each] for each in before}
        assert found == pytest.approx(expected, abs=0.01)

    def test_the_parts_of_the_usual_kernel(self):
        assert self.parts(USUAL) == pytest.approx(
            {"outside": 3.0, "starting": 1.5, "skew": 0.0, "latency": 2.0, "transfer": 6.0,
             "work": 22.0}, abs=0.01,
        )  # fmt: skip

    @pytest.mark.parametrize("fused", [USUAL, Fused(late=4.0, waves=3, tile=1.0)])
    @pytest.mark.parametrize("rank", range(3))
    def test_they_sum_to_the_time_of_a_call(self, fused, rank):
        assert sum(self.parts(fused, rank).values()) == pytest.approx(fused.call_us(rank), abs=0.01)

    @pytest.mark.parametrize("amount", AMOUNTS)
    @pytest.mark.parametrize(
        ("parameter", "part"),
        [("gap", "outside"), ("ramp", "starting"), ("late", "skew"), ("latency", "latency"),
         ("send", "transfer"), ("tile", "work")],
    )  # fmt: skip
    def test_each_is_found_and_nowhere_else(self, parameter, part, amount):
        changed = dataclasses.replace(USUAL, **{parameter: getattr(USUAL, parameter) + amount})
        if parameter == "ramp":  # what starts later has waited less when the signal comes
            changed = dataclasses.replace(changed, send=changed.send + amount)
        self.assert_only(changed, part, amount)

    def test_a_wave_waits_for_the_one_before(self):
        found = self.parts(dataclasses.replace(USUAL, waves=3))
        usual = self.parts(USUAL)
        assert found["work"] == pytest.approx(3 * usual["work"], abs=0.01)
        assert found["starting"] == pytest.approx(usual["starting"] + 2 * USUAL.dispatch, abs=0.01)
        assert found["transfer"] == pytest.approx(usual["transfer"], abs=0.01)

    def test_what_has_come_is_not_waited_for(self):
        found = self.parts(dataclasses.replace(USUAL, send=0.5))
        assert (found["transfer"], found["skew"]) == (0.0, 0.0)

    def test_a_program_may_record_its_start_late(self):
        usual = USUAL.trace()
        assert usual.shows_starts
        started = usual.started.copy()
        started[0, 0, 0] = np.nan  # the sender, which reads the generation late
        assert not dataclasses.replace(usual, started=started).shows_starts

    def test_a_coarse_clock_gives_programs_no_length(self):
        usual = USUAL.trace()
        coarse = dataclasses.replace(
            usual, started=usual.started // 50 * 50, done=usual.done // 50 * 50,
            began=usual.began // 50 * 50, ended=usual.ended // 50 * 50,
        )  # fmt: skip
        found = inside(coarse, 0, 0)
        assert (found.work, found.starting) == (0.0, 0.0)
        assert found.outside == pytest.approx(USUAL.call_us(0))

    def test_without_notes_of_programs_there_is_nothing_to_see(self):
        nothing = of_events({(0, 0, "sent", 1): 3.0})
        assert not nothing.shows_programs
        assert USUAL.trace().shows_programs

    def test_programs_of_an_earlier_launch_are_outside(self):
        second = {(rank, 0, "started", 0): 10.0 for rank in range(3)}
        second |= {(rank, 0, "done", 0): 30.0 for rank in range(3)}
        first = {(0, 1, "started", 0): 1.0, (0, 2, "started", 0): 1.0, (0, 2, "done", 0): 0.5}
        found = inside(of_events(second | first), 0, 0)
        assert (found.work, found.outside, found.starting) == (20.0, 80.0, 0.0)

    def test_to_wait_for_the_own_part_is_work(self):
        combiner = {(rank, 0, "started", 0): 1.0 for rank in range(3)}
        combiner |= {(rank, 0, "done", 0): 32.0 for rank in range(3)}
        combiner |= {(0, 0, "began", 1): 1.0, (0, 0, "ended", 1): 31.0}
        combiner |= {(1, 1, "sent", 0): 29.0}
        sent_itself = {(0, 1, "sent", 0): 21.0}
        before, after = (
            inside(of_events(each), 0, 0) for each in (combiner, combiner | sent_itself)
        )
        assert (before.work, before.transfer, before.latency) == (1.0, 28.0, 2.0)
        assert (after.work, after.transfer, after.latency) == (21.0, 8.0, 2.0)


@pytest.fixture(scope="module")
def tracing() -> Iterator[WorkerGroup]:
    with WorkerGroup(2, "host", HEAP_BYTES, TIMEOUT_S, variables("host")) as group:
        yield group


def traced(tracing: WorkerGroup, **delays: float) -> ProgramTrace:
    return tracing.call(program_trace_tasks.delayed, 60.0, repetitions=REPETITIONS, **delays)[0]


def parts_of_ranks(tracing: WorkerGroup, *delays: str) -> dict[str, float]:
    """Of the first rank, with delays in each call; the least of each part, as others' load adds."""
    found = traced(tracing, **dict.fromkeys(delays, DELAY_US))
    calls = [dataclasses.asdict(inside(found, 0, each)) for each in range(REPETITIONS)]
    return {name: min(call[name] for call in calls) for name in calls[0]}


@pytest.fixture(scope="module")
def usual(tracing) -> dict[str, float]:
    return parts_of_ranks(tracing)


class TestRanks:
    """Interpreted programs that record events, with delays that are known."""

    @pytest.mark.parametrize(
        ("delay", "part"),
        [("late", "skew"), ("send", "transfer"), ("tile", "work"), ("other", "outside")],
    )
    def test_a_delay_is_found_where_it_was_put(self, tracing, usual, delay, part):
        found = parts_of_ranks(tracing, delay)
        assert found[part] - usual[part] == pytest.approx(DELAY_US, rel=0.5)
        others = [name for name in found if name != part]
        assert max(abs(found[name] - usual[name]) for name in others) < 0.5 * DELAY_US

    def test_every_program_of_every_rank_is_there(self, tracing):
        found = list(activities(traced(tracing)))
        kinds = {(a.rank, a.program): a.kind for a in found if a.kind != "wait"}
        assert kinds == {(r, p): kind for r in (0, 1) for p, kind in ((0, "send"), (1, "compute"))}
        whole = {(a.rank, a.program): a for a in found if a.kind == "compute"}
        waits = [a for a in found if a.kind == "wait"]
        assert {(a.rank, a.program, a.peer) for a in waits} == {(0, 1, 1), (1, 1, 0)}
        for wait in waits:
            program = whole[wait.rank, wait.program]
            assert program.begin_us < wait.begin_us < wait.end_us < program.end_us
