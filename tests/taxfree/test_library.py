"""The library's fastest path: from synthetic results, and from the committed ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from benchmarks import library as script
from taxfree import fingerprints
from taxfree._runtime import library
from taxfree._runtime.dispatch import Dispatcher
from taxfree._runtime.library import Measured, Path
from taxfree.settings import Settings
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.variant import problem_class
from taxfree_tuning_db import Table
from taxfree_tuning_db.renamed import RENAMED

OP, H100 = "matmul_all_reduce", KNOWN["h100"]
H200 = fingerprints.hardware_fingerprint(KNOWN["h200"])


def problem_of(m: int, **changes: Any) -> Any:
    fields = {"n": 8192, "k": 3584, "dtype": "bfloat16", "world_size": 2} | changes
    return problem_class(OP)(m=m, **fields)


def measured(m: int, shots: int, graph: float, eager: float, **changes: Any) -> Measured:
    """Times of PyTorch's all-reduce; the baseline takes 100."""
    paths = (
        Path("baseline", {}, {"graph": 100.0, "eager": 100.0}),
        Path("torch_symm_mem", {"SHOTS": shots}, {"graph": graph, "eager": eager}),
    )
    return Measured(OP, problem_of(m, **changes), H200, paths)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> list[Measured]:
    found = [measured(16, 1, 98.0, 50.0), measured(64, 2, 80.0, 60.0)]
    monkeypatch.setattr(library, "evidence", lambda: found)
    return found


def choice(problem: Any, **changes: Any) -> Any:
    hardware = dataclasses.replace(H100, **changes)
    return Dispatcher(Table(), hardware, Settings()).choose(OP, problem)


class TestRule:
    def test_times_are_interpolated_between_messages(self, known: list[Measured]) -> None:
        found = choice(problem_of(48))
        assert (found.kind, found.variant, found.config) == ("baseline", "torch_symm_mem",
                                                             {"SHOTS": 2})  # fmt: skip
        assert "torch_symm_mem SHOTS=2 in graphs 0.83" in found.why
        assert "by m=16" in found.why
        assert "on NVIDIA H200" in found.why
        assert found.eager is None

    def test_graphs_and_eager_calls_may_differ(self, known: list[Measured]) -> None:
        found = choice(problem_of(17))
        assert [found.of(mode).variant for mode in ("graph", "eager")] == [
            "baseline",
            "torch_symm_mem",
        ]
        assert "in eager calls 0.50" in found.of("eager").why

    def test_a_small_message_takes_the_time_of_the_smallest(self, known: list[Measured]) -> None:
        known.reverse()
        assert choice(problem_of(8)).of("eager").config == {"SHOTS": 1}

    @pytest.mark.parametrize(
        "changes", [{"m": 65}, {"m": 2}, {"k": 64}, {"world_size": 4}, {"rms_norm": True}]
    )
    def test_nothing_is_said_of_others(self, known: list[Measured], changes: dict) -> None:
        found = choice(problem_of(**{"m": 48} | changes))
        assert (found.variant, found.eager) == ("baseline", None)

    def test_devices_are_alike(self, known: list[Measured]) -> None:
        assert choice(problem_of(48), compute_units=114).variant == "baseline"

    def test_its_own_results_come_first(self, known: list[Measured]) -> None:
        own = fingerprints.hardware_fingerprint(H100)
        known += [dataclasses.replace(measured(m, 1, 300.0, 300.0), hardware=own) for m in (16, 64)]
        assert choice(problem_of(48)).variant == "baseline"

    def test_what_it_refuses_does_not_run(self, known: list[Measured]) -> None:
        assert choice(problem_of(48, dtype="float16")).variant == "baseline"

    def test_calls_that_few_variants_can_run(self, known: list[Measured]) -> None:
        dispatcher = Dispatcher(Table(), H100, Settings()).limited_to(["registered"])
        assert dispatcher.choose(OP, problem_of(48)).variant == "baseline"


class TestCommittedResults:
    def test_what_dispatch_reads_is_made_of_them(self) -> None:
        assert script.FILE.read_text(encoding="utf-8") == script.text(script.measured())

    def test_results_from_before_a_field_was_added_are_read(self) -> None:
        for each in library.evidence():
            added = RENAMED[each.op].added if each.op in RENAMED else {}
            fields = dataclasses.asdict(each.problem)
            former = {name: value for name, value in fields.items() if name not in added}
            assert library._problem(each.op, former) == each.problem

    def test_no_choice_is_slower_than_the_baseline_where_it_was_left_out(self) -> None:
        known, limits = script.measured(), {each.name: each for each in KNOWN.values()}
        of_baseline, others = [], 0
        for timed in known:
            left = [other for other in known if other.problem != timed.problem]
            device = timed.hardware, limits[timed.hardware.gpu]
            chosen, _ = library.fastest(timed.problem, *device, left)
            for mode, path in chosen.items():
                of_baseline.append(timed.us("baseline", mode) / timed.us(path.variant, mode))
                others += path.variant != "baseline"
        assert len(of_baseline) > 0.8 * 2 * len(known)
        assert min(of_baseline) > 0.95
        assert others > 100
