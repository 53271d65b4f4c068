"""The instrument on GPUs: a tax that was put into a pipeline is found, and in no other place.

With TAXFREE_INSTRUMENT_RECORD in the environment, what was found is written to that file.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

from taxfree.files import write
from taxfree_tune.measuring import environment
from taxfree_tune.profiling.program_trace import variables
from taxfree_tune.taxes import inside
from taxfree_tune.workers.group import WorkerGroup
from tests.tune import gpu_tax_tasks, program_trace_tasks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

AMOUNTS = (5.0, 20.0, 100.0)
DEADLINE_S = 120.0
PACE_US = 400.0  # more than the host and the device take for a call
REPETITIONS = 15
ROUNDS = 3  # of what differs more between measurements than within one
ACROSS_CLOCKS = ("skew", "latency", "transfer", "work")
NOTHING = (0.0, 0.0)

Parts: TypeAlias = dict[str, tuple[float, float]]


@pytest.fixture(scope="module")
def gpus() -> Iterator[WorkerGroup]:
    yield from group({})


@pytest.fixture(scope="module")
def tracing() -> Iterator[WorkerGroup]:
    yield from group(variables("cuda"))


def group(environment: Mapping[str, str]) -> Iterator[WorkerGroup]:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with WorkerGroup(2, "auto", 64 << 20, 30.0, environment) as found:
        yield found


@pytest.fixture(scope="module")
def record(gpus) -> Iterator[list[dict[str, Any]]]:
    """What was put where, and found; written when all is measured, found or not."""
    rows: list[dict[str, Any]] = []
    yield rows
    if path := os.environ.get("TAXFREE_INSTRUMENT_RECORD"):
        machine = environment.record("cuda", gpus.hardware)
        document = {"schema": 1, "environment": machine, "rows": rows}
        write(Path(path), json.dumps(document) + "\n")


@pytest.fixture(scope="module")
def usual(gpus) -> list[Parts]:
    return parts(gpus)


@pytest.fixture(scope="module")
def clock_error_us(gpus) -> float:
    return float(gpus.call(gpu_tax_tasks.instrument, DEADLINE_S)[0]["error_us"])


def parts(gpus: WorkerGroup, **knobs: float) -> list[Parts]:
    """Parts by rank; the meta-parameters are those of the tasks, which only workers may import."""
    return gpus.call(gpu_tax_tasks.parts_with, DEADLINE_S, **knobs)[0]


def in_graph(found: Parts) -> Parts:
    """Without what is of eager calls too, whose noise is the host's."""
    return {name: part for name, part in found.items() if name not in ("host", "residual")}


def assert_only(
    record: list[dict[str, Any]],
    before: Parts,
    after: Parts,
    name: str,
    amount: float,
    clock_error_us: float,
) -> None:
    """The amount has come to one part, and to no other.

    A part may be wrong by 1.5 us or a tenth of the amount, and by its quartiles' distance: three
    standard deviations of the difference of two medians of 15. Parts that compare two ranks'
    clocks, which each measurement aligns anew, may differ by the errors of both.
    """

    def allowed(part: str) -> float:
        clocks = 2 * clock_error_us if part in ACROSS_CLOCKS and part != name else 0.0
        spread = max(before.get(part, NOTHING)[1], after[part][1])
        return max(1.5, 0.1 * amount) + spread + clocks

    others = {part: us - before.get(part, NOTHING)[0] for part, (us, _) in after.items()}
    found = others.pop(name)
    where = max(others, key=lambda part: abs(others[part]) - allowed(part))
    record.append(
        {
            "part": name,
            "put_us": amount,
            "found_us": found,
            "allowed_us": allowed(name),
            "elsewhere": where,
            "elsewhere_us": others[where],
            "elsewhere_allowed_us": allowed(where),
        }
    )
    if allowed(name) >= amount:
        assert amount < AMOUNTS[1], "the machine is too restless to tell anything"
        pytest.skip(f"{allowed(name):.1f} us of noise: the machine is too restless for so little")
    assert found == pytest.approx(amount, abs=allowed(name))
    assert {part: us for part, us in others.items() if abs(us) > allowed(part)} == {}


def test_the_clocks_serve(gpus):
    found = gpus.call(gpu_tax_tasks.instrument, DEADLINE_S)[0]
    assert 0 < found["step_us"] <= 1.1
    assert 0 < found["error_us"] < 5
    assert 0 < found["gap_us"] < 5
    assert 0 < found["clock_reading_us"] < 10
    assert found["empty_kernels"] == 7


def test_a_rank_may_have_nothing_to_launch(gpus):
    assert gpus.call(gpu_tax_tasks.kernels_of_copies, DEADLINE_S, rows=[0, 3]) == [[0, 1], [0, 1]]


@pytest.mark.parametrize("amount", AMOUNTS)
class TestKnownTaxes:
    def test_a_host_delay_is_launch(self, gpus, record, clock_error_us, amount):
        rounds = [
            gpus.call(gpu_tax_tasks.paced, DEADLINE_S, host_us=PACE_US + each)[0]
            for _ in range(ROUNDS)
            for each in (0.0, amount)
        ]
        (before, pace), (after, slower) = (middle(rounds[each::2]) for each in (0, 1))
        assert slower - pace == pytest.approx(amount, rel=0.5)  # else the pace was not kept
        assert_only(record, before, after, "host", slower - pace, clock_error_us)

    def test_a_late_rank_is_skew_of_the_others(self, gpus, record, clock_error_us, amount):
        # A kernel more, which does nothing where the rank is not late.
        before, after = (parts(gpus, late_us=each) for each in (0.01, amount))
        # The first call of a chain finds all ranks aligned.
        late = amount * 19 / 20
        assert_only(record, before[0], in_graph(after[0]), "skew", late, clock_error_us)
        (earlier, iqr), (later, iqr_later) = before[1]["skew"], after[1]["skew"]
        allowed = 1.5 + max(iqr, iqr_later) + 2 * clock_error_us
        assert later - earlier == pytest.approx(0, abs=allowed)

    def test_a_chain_of_empty_kernels_is_launch(self, gpus, record, usual, clock_error_us, amount):
        gap = gpus.call(gpu_tax_tasks.instrument, DEADLINE_S)[0]["gap_us"]
        kernels = round(amount / gap)
        after = parts(gpus, empty_kernels=1 + kernels)[0]
        put = kernels * gap
        assert_only(record, usual[0], in_graph(after), "gaps", put, clock_error_us)

    def test_evicted_input_is_locality(self, gpus, record, usual, clock_error_us, amount):
        _, of_hundred = gpus.call(gpu_tax_tasks.evicted, DEADLINE_S, blocks=100)[0]
        blocks = max(2, round(100 * amount / of_hundred))
        after, truth = gpus.call(gpu_tax_tasks.evicted, DEADLINE_S, blocks=blocks)[0]
        assert truth == pytest.approx(amount, rel=0.5)  # else the size does not tell the time
        nothing = usual[0] | {"read": NOTHING}
        assert_only(record, nothing, in_graph(after[0]), "read", truth, clock_error_us)


def middle(rounds: Sequence[tuple[list[Parts], float]]) -> tuple[Parts, float]:
    """The medians of rank 0's parts over rounds, and of what the host took."""
    first = [by_rank[0] for by_rank, _ in rounds]
    names = set.union(*map(set, first))  # "host" may be a penalty of graphs in one of them
    return {
        name: tuple(np.median([each.get(name, NOTHING) for each in first], axis=0))
        for name in names
    }, float(np.median([us for _, us in rounds]))


@pytest.mark.parametrize("amount", AMOUNTS)
class TestInsideFusedKernels:
    """A kernel that records what its programs do, one of which takes longer."""

    def parts(self, tracing: WorkerGroup, **delays: float) -> Parts:
        calls = []
        for _ in range(ROUNDS):  # each captures a graph, whose start takes another time
            trace = tracing.call(
                program_trace_tasks.delayed, DEADLINE_S, repetitions=REPETITIONS, **delays
            )[0]
            calls += [dataclasses.asdict(inside(trace, 0, each)) for each in range(REPETITIONS)]
        quartiles = {
            name: np.percentile([call[name] for call in calls], (25, 50, 75)) for name in calls[0]
        }
        return {
            name: (float(middle), float(high - low))
            for name, (low, middle, high) in quartiles.items()
        }

    @pytest.mark.parametrize(
        ("delay", "part"),
        [("late", "skew"), ("send", "transfer"), ("tile", "work"), ("other", "outside")],
    )
    def test_a_delay_is_found_where_it_was_put(
        self, tracing, record, clock_error_us, delay, part, amount
    ):
        before, after = self.parts(tracing), self.parts(tracing, **{delay: amount})
        assert_only(record, before, after, part, amount, clock_error_us)
