"""Predictions for sizes without records, from the shipped table and the committed evidence."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from taxfree import fingerprints
from taxfree._runtime import prediction
from taxfree._runtime.dispatch import Dispatcher
from taxfree._runtime.legality import refusal
from taxfree._runtime.prediction import Evidence, evidence, fixed_fields
from taxfree.errors import NoRecord
from taxfree.settings import Settings
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.variant import problem_class, variants
from taxfree_tuning_db import Record, Table, shipped_records

pytestmark = pytest.mark.usefixtures("no_library_results")

SHIPPED = shipped_records()
HARDWARE = dataclasses.replace(
    KNOWN["h200"], memory_bytes=SHIPPED[0].hardware.memory_bytes
)  # as drivers report it
GATHER, REDUCE = "all_gather_matmul", "matmul_all_reduce"


def all_reduce(k: int, world_size: int = 8, **changes: Any) -> Any:
    fields: dict[str, Any] = {"m": 64, "n": 8192, "dtype": "bfloat16"} | changes
    return problem_class(REDUCE)(k=k, world_size=world_size, **fields)


def gather(n: int, k: int, world_size: int = 2, **changes: Any) -> Any:
    fields: dict[str, Any] = {"m": 64, "gather_dim": 0, "dtype": "bfloat16"} | changes
    return problem_class(GATHER)(n=n, k=k, world_size=world_size, **fields)


def dispatcher(*records: Record, **settings: Any) -> Dispatcher:
    return Dispatcher(Table(shipped=records or SHIPPED), HARDWARE, Settings(**settings))


def said(op: str, problem: Any, *records: Record) -> str:
    """Why nothing is predicted."""
    assert dispatcher(*records).choose(op, problem).kind == "baseline"
    lookup_trace = dispatcher(*records).look_up(op, problem).lookup_trace
    (why,) = [step.why for step in lookup_trace if step.looked_for.startswith("a prediction")]
    return why


def recorded(**fields: Any) -> Record:
    """The only shipped all-reduce on eight ranks with these fields."""
    wanted = {"world_size": 8, "rms_norm": False, "residual": False} | fields
    (found,) = [
        record
        for record in SHIPPED
        if record.op == REDUCE and wanted.items() <= record.problem.items()
    ]
    return found


class TestPrediction:
    def test_the_nearest_record_lends_what_is_expected_to_be_the_fastest(self) -> None:
        choice = dispatcher().choose(REDUCE, all_reduce(2048))
        source = recorded(m=64, k=3584)
        assert (choice.kind, choice.variant) == ("predicted", source.winner.variant)
        assert choice.config == source.winner.config
        assert "nearest is m=64 n=8192 k=3584" in choice.why

    def test_a_runner_up_may_be_expected_to_be_faster_here(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = recorded(m=64, k=3584)
        slow = source.winner.variant
        times = prediction._modelled_us

        def modelled(machine: Any, op: str, problem: Any, name: str, *rest: Any) -> float:
            factor = 10 if (problem.k, name) == (2048, slow) else 1
            return factor * times(machine, op, problem, name, *rest)

        monkeypatch.setattr(prediction, "_modelled_us", modelled)
        choice = dispatcher().choose(REDUCE, all_reduce(2048))
        assert choice.kind == "predicted"
        assert choice.variant in {each.variant for each in source.runners_up} - {slow}

    def test_the_model_alone_takes_first_configs(self) -> None:
        problem = gather(5120, 5120)
        choice = dispatcher().choose(GATHER, problem)
        assert choice.kind == "predicted"
        assert choice.config in variants(GATHER)[choice.variant].seed_configs(problem, HARDWARE)

    def test_in_eager_calls_the_baseline_runs(self) -> None:
        choice = dispatcher().choose(REDUCE, all_reduce(2048))
        assert choice.of("eager").variant == "baseline"
        assert choice.in_eager_calls == "in eager calls baseline: predictions are for graphs"

    def test_records_and_neighbours_come_first(self) -> None:
        kinds = [dispatcher().choose(REDUCE, all_reduce(3584, m=m)).kind for m in (64, 48)]
        assert kinds == ["exact", "neighbour"]

    def test_the_order_of_records_does_not_matter(self) -> None:
        for op, problem in ((REDUCE, all_reduce(2048)), (GATHER, gather(5120, 5120))):
            backwards = dispatcher(*reversed(SHIPPED)).choose(op, problem)
            assert backwards == dispatcher().choose(op, problem)

    def test_whatever_is_predicted_runs(self) -> None:
        """With odd sizes too, of which nothing can be loaded 16 bytes at a time."""
        predicted = 0
        for each, m, factor in itertools.product(evidence(), (1, 3, 100, 512), (0.5, 0.73, 1.37)):
            if each.method is None:
                continue
            record = next(
                record
                for record in SHIPPED
                if record.op == each.op and fixed_fields(each.op, record.problem) == each.fixed
            )
            sizes = {"m": m, "k": 2 * int(factor * record.problem["k"] / 2)}
            problem = problem_class(each.op)(**record.problem | sizes)
            choice = dispatcher().choose(each.op, problem)
            predicted += choice.kind == "predicted"
            variant = variants(each.op)[choice.variant]
            assert refusal(variant, problem, HARDWARE, choice.config) is None
        assert predicted > 20


class TestTheLibraryRuns:
    def test_where_another_n_was_never_judged(self) -> None:
        assert "with the same n, k within 3.5x" in said(REDUCE, all_reduce(3584, n=5120))

    def test_where_k_is_further_away_than_was_judged(self) -> None:
        assert "no record is near enough" in said(REDUCE, all_reduce(16384))

    def test_where_m_is_outside_of_what_was_judged(self) -> None:
        assert "only with m from 1 to 8192" in said(GATHER, gather(5120, 5120, m=8193))

    def test_where_there_is_one_family(self) -> None:
        why = said(GATHER, gather(5120, 5120, world_size=8))
        assert why == (
            "not shown for gather_dim=0 weight_layout=nk world_size=8: "
            "all results have n=3584 k=8192"
        )

    def test_where_predictions_fell_behind(self) -> None:
        assert "of the library's speed without n=" in said(GATHER, gather(5120, 5120, 4))

    def test_where_no_such_layout_was_measured(self) -> None:
        why = said(REDUCE, all_reduce(2048, weight_layout="kn"))
        assert why.startswith("no results judge predictions for")
        assert "weight_layout=kn" in why

    def test_where_the_baseline_is_expected_to_be_the_fastest(self) -> None:
        source = recorded(m=64, k=3584)
        fast = dataclasses.replace(source.baseline, median_us={"graph": 1.0}, iqr_us={"graph": 0.1})
        why = said(REDUCE, all_reduce(2048), dataclasses.replace(source, baseline=fast))
        assert why.startswith("the baseline is expected to be the fastest")

    def test_where_the_only_near_record_is_of_an_unknown_variant(self) -> None:
        source = recorded(m=64, k=3584)
        winner = dataclasses.replace(source.winner, variant="removed")
        useless = dataclasses.replace(source, winner=winner)
        assert "no record is near enough" in said(REDUCE, all_reduce(2048), useless)

    def test_on_hardware_without_results(self) -> None:
        table = Table(shipped=SHIPPED)
        choice = Dispatcher(table, KNOWN["cpu"], Settings()).choose(REDUCE, all_reduce(2048))
        assert choice.kind == "baseline"

    def test_where_records_must_be_exact(self) -> None:
        with pytest.raises(NoRecord) as caught:
            dispatcher(strict=True).choose(REDUCE, all_reduce(2048))
        assert "k: 3584 there, 2048 asked" in caught.value.hint


def test_the_evidence_names_what_there_is() -> None:
    for each in evidence():
        assert isinstance(each, Evidence)
        assert each.method is None or each.method in prediction.METHODS
        names = {field.name for field in dataclasses.fields(problem_class(each.op))}
        assert {*each.fixed, *each.reach, *each.sizes} <= names
        assert set(each.sizes) <= set(fingerprints.interpolated_fields(each.op))


@pytest.mark.parametrize("method", prediction.METHODS)
def test_variants_that_are_not_searched_are_not_predicted(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, problem = variants(GATHER)["push_two_kernel"], gather(n=3584, k=4096)
    record = next(
        each
        for each in SHIPPED
        if each.op == GATHER
        and {"world_size": 2, "m": 64, "n": 3584}.items() <= each.problem.items()
    )
    config = step.seed_configs(problem, HARDWARE)[0]
    fast = dataclasses.replace(
        record.winner,
        variant=step.name,
        config=config,
        version=fingerprints.versions(GATHER)[step.name],
        median_us=dict.fromkeys(record.winner.median_us, 0.1),
    )
    source = dataclasses.replace(record, runners_up=(fast,))
    monkeypatch.setattr(
        prediction, "_modelled_us", lambda machine, op, problem, name, *_: 1 + (name != step.name)
    )

    def found() -> str:
        predicted = prediction.predict(method, GATHER, problem, [source], record.hardware, HARDWARE)
        assert predicted is not None
        return predicted.variant

    assert found() != step.name
    monkeypatch.setattr(type(step), "searched", True)
    assert found() == step.name
