"""The instrument on GPUs: a tax that was put into a pipeline is found, and in no other place."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from taxfree.group import WorkerGroup

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

TASKS = "tests.taxfree.gpu_tax_tasks"
AMOUNTS = (5.0, 20.0, 100.0)
DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def gpus() -> Iterator[WorkerGroup]:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with WorkerGroup(2, "auto", 64 << 20, 30.0) as group:
        yield group


@pytest.fixture(scope="module")
def usual(gpus) -> list[dict[str, float]]:
    return parts(gpus)


def parts(gpus: WorkerGroup, **knobs: float) -> list[dict[str, float]]:
    """Parts by rank; the knobs are those of the tasks, which only workers may import."""
    return gpus.call(f"{TASKS}:parts_with", DEADLINE_S, **knobs)[0]


def assert_only(
    before: dict[str, float], after: dict[str, float], name: str, amount: float
) -> None:
    """The amount has come to one part, and to no other."""
    allowed = max(1.5, 0.1 * amount)
    found = {each: after[each] - before[each] for each in after}
    assert found.pop(name) == pytest.approx(amount, abs=allowed)
    assert {each: us for each, us in found.items() if abs(us) > allowed} == {}


def test_the_clocks_serve(gpus):
    found = gpus.call(f"{TASKS}:instrument", DEADLINE_S)[0]
    assert 0 < found["step_us"] <= 1.1
    assert 0 < found["error_us"] < 5
    assert 0 < found["gap_us"] < 5
    assert 0 < found["stamp_us"] < 10
    assert found["empty_kernels"] == 7
    assert 300 < found["mhz"] < 3000


@pytest.mark.parametrize("amount", AMOUNTS)
class TestKnownTaxes:
    def test_a_host_delay_is_launch(self, gpus, usual, amount):
        # Above the host's own time, so that calls of either pipeline are the host's to delay.
        before, after = (parts(gpus, host_us=100.0 + each)[0] for each in (0.0, amount))
        assert_only(before, after, "host", amount)

    def test_a_late_rank_is_skew_of_the_others(self, gpus, usual, amount):
        # A kernel more, which does nothing where the rank is not late.
        before, after = (parts(gpus, late_us=each) for each in (0.01, amount))
        in_graph = {name: us for name, us in after[0].items() if name not in ("host", "residual")}
        # The first call of a chain finds all ranks aligned.
        assert_only(before[0], in_graph, "skew", amount * 19 / 20)
        assert after[1]["skew"] - before[1]["skew"] == pytest.approx(0, abs=1.5)

    def test_a_chain_of_empty_kernels_is_launch(self, gpus, usual, amount):
        gap = gpus.call(f"{TASKS}:instrument", DEADLINE_S)[0]["gap_us"]
        kernels = round(amount / gap)
        after = parts(gpus, empty_kernels=1 + kernels)[0]
        in_graph = {name: us for name, us in after.items() if name not in ("host", "residual")}
        assert_only(usual[0], in_graph, "gaps", kernels * gap)

    def test_evicted_input_is_locality(self, gpus, usual, amount):
        per_block = gpus.call(f"{TASKS}:missed_us_per_block", DEADLINE_S)[0]
        blocks = 1 + round(amount / per_block)
        after = parts(gpus, blocks=blocks)[0]
        in_graph = {name: us for name, us in after.items() if name not in ("host", "residual")}
        assert_only(usual[0], in_graph, "read", (blocks - 1) * per_block)
