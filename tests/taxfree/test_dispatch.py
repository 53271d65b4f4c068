"""The choice between fused and library, from synthetic tables."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from taxfree import fingerprints
from taxfree._runtime.dispatch import Dispatcher
from taxfree._runtime.legality import refusal
from taxfree.errors import NoRecord
from taxfree.settings import Settings
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.variant import problem_class, variants
from taxfree_tuning_db import (
    OF_A_LENDER,
    Measurement,
    Record,
    Table,
    shipped_records,
)
from tests.shipped import shipped_as_of_today

pytestmark = pytest.mark.usefixtures("no_library_results")

OP = "all_gather_matmul"
HARDWARE = KNOWN["h200"]
PROBLEM = problem_class(OP)(m=64, n=3584, k=8192, dtype="bfloat16", world_size=8)


def measurement(
    variant: str, median_us: float, eager_us: float | None = None, **config: Any
) -> Measurement:
    times = {"graph": median_us} | ({} if eager_us is None else {"eager": eager_us})
    return Measurement(
        variant=variant,
        config=config,
        version=fingerprints.versions(OP)[variant],
        median_us=times,
        iqr_us=dict.fromkeys(times, 0.1),
        samples=30,
        relative_error=1e-3,
    )


def push_config(problem: Any) -> dict[str, Any]:
    return variants(OP)["push"].seed_configs(problem, HARDWARE)[0]


def record(problem: Any = PROBLEM, **changes: Any) -> Record:
    fields: dict[str, Any] = {
        "op": OP,
        "problem": dataclasses.asdict(problem),
        "hardware": fingerprints.hardware_fingerprint(HARDWARE),
        "software": fingerprints.software_fingerprint(),
        "winner": measurement("push", 20.0, **push_config(problem)),
        "baseline": measurement("baseline", 40.0),
        "runners_up": (),
        "trials": 10,
        "seconds_spent": 1.0,
        "provenance": {"source": "user"},
    }
    return Record(**fields | changes)


def dispatcher(*records: Record, **settings: Any) -> Dispatcher:
    return Dispatcher(Table(user=records), HARDWARE, Settings(**settings))


class TestChoice:
    def test_a_record_lends_its_config_whatever_is_added(self) -> None:
        biased = dataclasses.replace(PROBLEM, bias=True)
        choice = dispatcher(record()).choose(OP, biased)
        assert (choice.kind, choice.variant) == ("neighbour", "push")
        assert choice.why == "the record of m=64 bias=False"
        own = record(biased, winner=measurement("baseline", 40.0))
        assert dispatcher(record(), own).choose(OP, biased).kind == "exact"

    def test_outside_of_graphs_runs_what_was_faster_there(self) -> None:
        winner = measurement("push", 20.0, 60.0, **push_config(PROBLEM))
        for theirs, runs in ((50.0, "baseline"), (59.0, "push"), (None, "push")):
            found = record(winner=winner, baseline=measurement("baseline", 40.0, theirs))
            choice = dispatcher(found).choose(OP, PROBLEM)
            assert [choice.of(mode).variant for mode in ("graph", "eager")] == ["push", runs]

    def test_copies_run_outside_of_graphs_only_where_they_save_their_launches(self) -> None:
        problem = dataclasses.replace(PROBLEM, m=4096, gather_dim=0)
        config = variants(OP)["overlap"].seed_configs(problem, HARDWARE)[0]
        winner = measurement("overlap", 373.0, 386.0, **config)
        for theirs, runs in ((460.0, "baseline"), (760.0, "overlap")):
            baseline = measurement("baseline", theirs, theirs)
            choice = dispatcher(record(problem, winner=winner, baseline=baseline)).choose(
                OP, problem
            )
            assert [choice.of(mode).variant for mode in ("graph", "eager")] == ["overlap", runs]

    def test_a_runner_up_may_be_the_fastest_outside_of_graphs(self) -> None:
        winner = measurement("push", 20.0, 60.0, **push_config(PROBLEM))
        space = variants(OP)["one_shot"].seed_configs(PROBLEM, HARDWARE)[0]
        second = measurement("one_shot", 25.0, 45.0, **space)
        changes = {"winner": winner, "baseline": measurement("baseline", 40.0, 50.0)}
        choice = dispatcher(record(**changes, runners_up=(second,))).choose(OP, PROBLEM)
        assert choice.of("eager").variant == "one_shot"
        earlier = dataclasses.replace(second, version=0)
        choice = dispatcher(record(**changes, runners_up=(earlier,))).choose(OP, PROBLEM)
        kinds = [(choice.of(mode).kind, choice.of(mode).variant) for mode in ("graph", "eager")]
        assert kinds == [("exact", "push"), ("another version", "one_shot")]

    def test_calls_that_few_variants_can_run_take_the_fastest_of_these(self) -> None:
        config = variants(OP)["one_shot"].seed_configs(PROBLEM, HARDWARE)[0]

        def chosen(measured: Measurement) -> Any:
            found = dispatcher(record(runners_up=(measured,)))
            return found.limited_to(["one_shot"]).choose(OP, PROBLEM)

        second = measurement("one_shot", 25.0, **config)
        choice = chosen(second)
        assert (choice.kind, choice.variant, choice.config) == ("exact", "one_shot", config)
        too_slow = measurement("one_shot", 39.5, **config)  # the baseline took 40
        for measured in (too_slow, measurement("push_two_kernel", 25.0)):
            assert chosen(measured).variant == "baseline"
        assert dispatcher().limited_to(["one_shot"]).choose(OP, PROBLEM).variant == "baseline"

    def test_a_variant_that_was_removed_is_not_used(self) -> None:
        gone = dataclasses.replace(measurement("push", 10.0, 10.0), variant="removed")
        ours = measurement("push", 20.0, 60.0, **push_config(PROBLEM))
        baseline = measurement("baseline", 40.0, 50.0)
        second = record(winner=ours, baseline=baseline, runners_up=(gone,))
        choice = dispatcher(second).choose(OP, PROBLEM)
        assert [choice.of(mode).variant for mode in ("graph", "eager")] == ["push", "baseline"]
        choice = dispatcher(record(winner=gone, baseline=baseline)).choose(OP, PROBLEM)
        assert (choice.kind, choice.variant) == ("baseline", "baseline")

    def test_a_problem_with_its_own_record_gets_the_winner(self) -> None:
        choice = dispatcher(record()).choose(OP, PROBLEM)
        assert (choice.kind, choice.variant) == ("exact", "push")
        assert choice.config == push_config(PROBLEM)

    def test_a_record_may_say_that_the_library_is_faster(self) -> None:
        baseline = measurement("baseline", 40.0)
        choice = dispatcher(record(winner=baseline)).choose(OP, PROBLEM)
        assert (choice.kind, choice.variant) == ("exact", "baseline")

    def test_a_neighbour_within_a_factor_of_two_lends_its_config(self) -> None:
        near = dataclasses.replace(PROBLEM, m=48)
        choice = dispatcher(record()).choose(OP, near)
        assert (choice.kind, choice.variant) == ("neighbour", "push")
        assert "m=64" in choice.why

    def test_a_neighbour_further_away_does_not(self) -> None:
        far = dataclasses.replace(PROBLEM, m=200)
        choice = dispatcher(record()).choose(OP, far)
        assert (choice.kind, choice.variant) == ("baseline", "baseline")
        assert "m is 64, not 200" in choice.why
        steps = dispatcher(record()).answer(OP, far).lookup_trace
        assert "nearest is m=64" in steps[1].why
        assert "a factor of 3.13 away" in steps[1].why

    def test_a_neighbour_whose_config_is_illegal_here_does_not(self) -> None:
        config = push_config(PROBLEM) | {"CHUNKS": 64}
        source = record(winner=measurement("push", 20.0, **config))
        choice = dispatcher(source).choose(OP, dataclasses.replace(PROBLEM, m=33))
        assert choice.variant == "baseline"
        assert "CHUNKS=64" in choice.why
        other = record(dataclasses.replace(PROBLEM, m=36))
        near = dispatcher(source, other).choose(OP, dataclasses.replace(PROBLEM, m=33))
        assert (near.kind, near.why) == ("neighbour", "the record of m=36")

    def test_what_its_variant_refuses_today_does_not_run_from_its_own_record(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        push = type(variants(OP)["push"])
        monkeypatch.setattr(push, "illegal_reason", lambda *_: "it hangs")
        choice = dispatcher(record()).choose(OP, PROBLEM)
        assert (choice.variant, choice.why) == ("baseline", "push: it hangs")

    def test_what_a_space_has_lost_still_runs_from_its_own_record(self) -> None:
        measured = measurement("push", 20.0, **push_config(PROBLEM) | {"SENDERS": 17})
        choice = dispatcher(record(winner=measured)).choose(OP, PROBLEM)
        assert (choice.kind, choice.config["SENDERS"]) == ("exact", 17)

    @pytest.mark.parametrize(
        "changes",
        [{"BLOCK_M": value} for value in (10**9, "64", True, 1.5, 0)]
        + [{"SWAP_AB": 1}, {"SWAP_AB": "no"}],
    )
    def test_what_is_beyond_a_space_runs_the_library(self, changes: dict[str, Any]) -> None:
        measured = measurement("push", 20.0, **push_config(PROBLEM) | changes)
        choice = dispatcher(record(winner=measured)).choose(OP, PROBLEM)
        assert choice.variant == "baseline"
        assert "is beyond its values" in choice.why

    @pytest.mark.parametrize("wire", [0, 10**9, "float8", True])
    def test_a_parameter_of_names_takes_no_other_value(self, wire: Any) -> None:
        shipped = next(each for each in shipped_records() if "WIRE" in each.winner.config)
        config = {**shipped.winner.config, "WIRE": wire}
        winner = dataclasses.replace(shipped.winner, config=config)
        reason = refusal(dataclasses.replace(shipped, winner=winner))
        assert f"WIRE={wire!r} is beyond its values" in str(reason)

    def test_what_ships_is_of_todays_operations(self) -> None:
        assert [reason for each in shipped_records() if (reason := refusal(each))] == []

    def test_a_library_variant_may_be_the_fastest_outside_of_graphs(self) -> None:
        second = measurement("registered", 41.0, 50.0)
        changes = {"winner": measurement("baseline", 40.0, 60.0), "runners_up": (second,)}
        choice = dispatcher(record(**changes)).choose(OP, PROBLEM)
        assert [choice.of(mode).variant for mode in ("graph", "eager")] == [
            "baseline",
            "registered",
        ]

    def test_the_other_type_of_as_many_bits_lends_its_config(self) -> None:
        half = dataclasses.replace(PROBLEM, dtype="float16")
        near = record(dataclasses.replace(half, m=128))
        assert "m=64 dtype=bfloat16" in dispatcher(record(), near).choose(OP, half).why

    def test_what_names_its_type_is_lent_with_the_other(self) -> None:
        op = "matmul_all_reduce"
        source = problem_class(op)(m=512, n=8192, k=3584, dtype="bfloat16", world_size=8)
        config = variants(op)["push"].seed_configs(source, HARDWARE)[0]
        winner = measurement("push", 20.0, **config)
        baseline = dataclasses.replace(winner, variant="baseline", config={})
        lent = dataclasses.replace(
            record(), op=op, problem=dataclasses.asdict(source), winner=winner, baseline=baseline
        )
        half = dataclasses.replace(source, dtype="float16")
        choice = dispatcher(lent).choose(op, half)
        assert (choice.kind, config["WIRE"]) == ("neighbour", "bfloat16")
        assert choice.config == config | {"WIRE": "float16"}

    @pytest.mark.parametrize("change", [{"n": 1024}, {"world_size": 4}, {"gather_dim": 0}])
    def test_nothing_is_lent_across_other_fields(self, change: dict[str, Any]) -> None:
        choice = dispatcher(record()).choose(OP, dataclasses.replace(PROBLEM, **change))
        assert choice.variant == "baseline"

    def test_a_record_of_another_version_serves_and_says_so(self) -> None:
        earlier = dataclasses.replace(record().winner, version=0)
        own = dispatcher(record(winner=earlier)).choose(OP, PROBLEM)
        assert (own.kind, own.config) == ("another version", earlier.config)
        now = fingerprints.versions(OP)["push"]
        assert own.why == f"its own record, measured with version 0 of push, now {now}"
        near = dispatcher(record(winner=earlier)).choose(OP, dataclasses.replace(PROBLEM, m=48))
        assert near.kind == "neighbour"
        assert near.why.endswith(f"m=64, measured with version 0 of push, now {now}")
        with pytest.raises(NoRecord, match="own"):
            dispatcher(record(winner=earlier), strict=True).choose(OP, PROBLEM)

    def test_a_config_of_another_version_must_be_in_todays_space(self) -> None:
        """The own record of today's version may hold what its space has lost since."""
        odd = dataclasses.replace(
            record().winner, config=push_config(PROBLEM) | {"SEND_BLOCK": 12345}
        )
        assert dispatcher(record(winner=odd)).choose(OP, PROBLEM).kind == "exact"
        earlier = dataclasses.replace(odd, version=0)
        choice = dispatcher(record(winner=earlier)).choose(OP, PROBLEM)
        assert (choice.kind, choice.variant) == ("baseline", "baseline")
        assert "SEND_BLOCK=12345 is not in the space" in choice.why

    def test_another_software_is_used_and_flagged(self) -> None:
        software = dataclasses.replace(fingerprints.software_fingerprint(), triton="3.0.0")
        choice = dispatcher(record(software=software)).choose(OP, PROBLEM)
        assert choice.kind == "exact"
        assert "triton" in choice.why

    def test_an_empty_table_gives_the_baseline(self) -> None:
        assert dispatcher().choose(OP, PROBLEM).variant == "baseline"


class TestLentRecords:
    """Of a device that computes alike, for one without records of its own."""

    def lent(self, *records: Record, **settings: Any) -> Dispatcher:
        return Dispatcher(Table(shipped=records), KNOWN["h100"], Settings(**settings))

    @pytest.mark.parametrize("m", [64, 48])
    def test_one_serves_as_an_own_one_would(self, m: int) -> None:
        problem = dataclasses.replace(PROBLEM, m=m)
        choice = self.lent(record()).choose(OP, problem)
        assert (choice.kind, choice.source) == ("lent", "lent: NVIDIA H200")
        assert (choice.variant, choice.config) == ("push", push_config(PROBLEM))
        assert choice.why == "NVIDIA H200's record of m=64"
        steps = [step.why for step in self.lent(record()).answer(OP, problem).lookup_trace]
        assert "lent: NVIDIA H200" in steps

    def test_outside_of_graphs_runs_what_was_faster_there(self) -> None:
        winner = measurement("push", 20.0, 60.0, **push_config(PROBLEM))
        found = record(winner=winner, baseline=measurement("baseline", 40.0, 50.0))
        choice = self.lent(found).choose(OP, PROBLEM)
        assert (choice.of("graph").variant, choice.of("eager").variant) == ("push", "baseline")

    @pytest.mark.parametrize("m", [64, 48])
    def test_its_own_and_their_neighbours_come_first(self, m: int) -> None:
        own = record(
            dataclasses.replace(PROBLEM, m=m),
            winner=measurement("baseline", 40.0),
            hardware=fingerprints.hardware_fingerprint(KNOWN["h100"]),
        )
        choice = Dispatcher(Table(user=[own, record()]), KNOWN["h100"], Settings())
        found = choice.choose(OP, PROBLEM)
        assert (found.kind, found.variant) == ("exact" if m == 64 else "neighbour", "baseline")

    def test_limits_are_the_borrowers(self) -> None:
        small = dataclasses.replace(KNOWN["h100"], shared_memory=1024)
        config = variants(OP)["push_tma"].seed_configs(PROBLEM, HARDWARE)[0]
        large = record(winner=measurement("push_tma", 20.0, **config))
        choice = Dispatcher(Table(shipped=[large]), small, Settings()).choose(OP, PROBLEM)
        assert (choice.kind, choice.variant) == ("baseline", "baseline")

    def test_one_is_no_record_of_its_own(self) -> None:
        with pytest.raises(NoRecord):
            self.lent(record(), strict=True).choose(OP, PROBLEM)

    def test_what_was_verified_is(self) -> None:
        provenance = {"source": "user", "method": OF_A_LENDER, "lender": "NVIDIA H200"}
        choice = dispatcher(record(provenance=provenance)).choose(OP, PROBLEM)
        assert choice.kind == choice.source == "exact"
        assert choice.why == "its own record, of a winner that NVIDIA H200 lent"

    def test_data_sheets_find_the_shipped_records(self) -> None:
        """Their memory is not quite what drivers report."""
        found = Dispatcher(Table(shipped=shipped_as_of_today()), HARDWARE, Settings())
        assert found.choose(OP, PROBLEM).kind == "exact"


class TestEnvironment:
    def test_disable_makes_every_dispatch_the_baseline(self) -> None:
        choice = dispatcher(record(), disable=True).choose(OP, PROBLEM)
        assert (choice.kind, choice.variant) == ("disabled", "baseline")

    def test_strict_refuses_a_miss_and_shows_the_nearest_field_by_field(self) -> None:
        other = dataclasses.replace(PROBLEM, n=1024)
        with pytest.raises(NoRecord) as caught:
            dispatcher(record(), strict=True).choose(OP, other)
        assert "n: 3584 there, 1024 asked" in caught.value.hint

    def test_strict_refuses_a_neighbour(self) -> None:
        with pytest.raises(NoRecord):
            dispatcher(record(), strict=True).choose(OP, dataclasses.replace(PROBLEM, m=48))

    def test_strict_takes_an_exact_record(self) -> None:
        assert dispatcher(record(), strict=True).choose(OP, PROBLEM).variant == "push"
