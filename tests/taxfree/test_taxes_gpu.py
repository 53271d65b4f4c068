"""The instrument on GPUs: a tax that was put into a pipeline is found, and in no other place.

With TAXFREE_INSTRUMENT_RECORD in the environment, what was found is written to that file.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from taxfree.measuring import environment
from taxfree.measuring.results import write
from taxfree.profiling.program_trace import variables
from taxfree.taxes import inside
from taxfree.workers.group import WorkerGroup
from tests.taxfree import gpu_tax_tasks, program_trace_tasks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

AMOUNTS = (5.0, 20.0, 100.0)
DEADLINE_S = 120.0
PACE_US = 400.0  # more than the host and the device take for a call
REPETITIONS = 15


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
def usual(gpus) -> list[dict[str, float]]:
    return parts(gpus)


def parts(gpus: WorkerGroup, **knobs: float) -> list[dict[str, float]]:
    """Parts by rank; the meta-parameters are those of the tasks, which only workers may import."""
    return gpus.call(gpu_tax_tasks.parts_with, DEADLINE_S, **knobs)[0]


def in_graph(found: Mapping[str, float]) -> dict[str, float]:
    """Without what is of eager calls too, whose noise is the host's."""
    return {name: us for name, us in found.items() if name not in ("host", "residual")}


def assert_only(
    record: list[dict[str, Any]],
    before: Mapping[str, float],
    after: Mapping[str, float],
    name: str,
    amount: float,
) -> None:
    """The amount has come to one part, and to no other."""
    allowed = max(1.5, 0.1 * amount)
    others = {each: after[each] - before[each] for each in after}
    found = others.pop(name)
    where = max(others, key=lambda each: abs(others[each]))
    record.append(
        {
            "part": name,
            "put_us": amount,
            "found_us": found,
            "allowed_us": allowed,
            "elsewhere": where,
            "elsewhere_us": others[where],
        }
    )
    assert found == pytest.approx(amount, abs=allowed)
    assert {each: us for each, us in others.items() if abs(us) > allowed} == {}


def test_the_clocks_serve(gpus):
    found = gpus.call(gpu_tax_tasks.instrument, DEADLINE_S)[0]
    assert 0 < found["step_us"] <= 1.1
    assert 0 < found["error_us"] < 5
    assert 0 < found["gap_us"] < 5
    assert 0 < found["clock_reading_us"] < 10
    assert found["empty_kernels"] == 7
    assert 300 < found["mhz"] < 3000


def test_a_rank_may_have_nothing_to_launch(gpus):
    assert gpus.call(gpu_tax_tasks.kernels_of_copies, DEADLINE_S, rows=[0, 3]) == [[0, 1], [0, 1]]


@pytest.mark.parametrize("amount", AMOUNTS)
class TestKnownTaxes:
    def test_a_host_delay_is_launch(self, gpus, record, amount):
        (before, pace), (after, slower) = (
            gpus.call(gpu_tax_tasks.paced, DEADLINE_S, host_us=PACE_US + each)[0]
            for each in (0.0, amount)
        )
        assert slower - pace == pytest.approx(amount, rel=0.5)  # else the pace was not kept
        assert_only(record, before[0], after[0], "host", slower - pace)

    def test_a_late_rank_is_skew_of_the_others(self, gpus, record, amount):
        # A kernel more, which does nothing where the rank is not late.
        before, after = (parts(gpus, late_us=each) for each in (0.01, amount))
        # The first call of a chain finds all ranks aligned.
        assert_only(record, before[0], in_graph(after[0]), "skew", amount * 19 / 20)
        assert after[1]["skew"] - before[1]["skew"] == pytest.approx(0, abs=1.5)

    def test_a_chain_of_empty_kernels_is_launch(self, gpus, record, usual, amount):
        gap = gpus.call(gpu_tax_tasks.instrument, DEADLINE_S)[0]["gap_us"]
        kernels = round(amount / gap)
        after = parts(gpus, empty_kernels=1 + kernels)[0]
        assert_only(record, usual[0], in_graph(after), "gaps", kernels * gap)

    def test_evicted_input_is_locality(self, gpus, record, usual, amount):
        _, of_hundred = gpus.call(gpu_tax_tasks.evicted, DEADLINE_S, blocks=100)[0]
        blocks = max(2, round(100 * amount / of_hundred))
        after, truth = gpus.call(gpu_tax_tasks.evicted, DEADLINE_S, blocks=blocks)[0]
        assert truth == pytest.approx(amount, rel=0.5)  # else the size does not tell the time
        nothing = dict(usual[0]) | {"read": 0.0}
        assert_only(record, nothing, in_graph(after[0]), "read", truth)


@pytest.mark.parametrize("amount", AMOUNTS)
class TestInsideFusedKernels:
    """A kernel that records what its programs do, one of which takes longer."""

    def parts(self, tracing: WorkerGroup, **delays: float) -> dict[str, float]:
        trace = tracing.call(
            program_trace_tasks.delayed,
            DEADLINE_S,
            repetitions=REPETITIONS,
            **delays,
        )[0]
        calls = [dataclasses.asdict(inside(trace, 0, each)) for each in range(REPETITIONS)]
        return {name: float(np.median([call[name] for call in calls])) for name in calls[0]}

    @pytest.mark.parametrize(
        ("delay", "part"),
        [("late", "skew"), ("send", "transfer"), ("tile", "work"), ("other", "outside")],
    )
    def test_a_delay_is_found_where_it_was_put(self, tracing, record, delay, part, amount):
        before, after = self.parts(tracing), self.parts(tracing, **{delay: amount})
        assert_only(record, before, after, part, amount)
