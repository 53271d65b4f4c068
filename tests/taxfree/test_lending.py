"""Winners that another device lent, tried on the ranks that borrow them."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from taxfree._runtime import lending
from taxfree_tuning_db import Database
from tests.ranks import Ranks, on_every_fabric
from tests.taxfree.runtime_tasks import problem_of, record_of, tensors_of


def run(ranks: Ranks, scenario: str, **arguments: Any) -> list[Any]:
    return ranks.run(ranks.few, f"{__name__}:on_rank", scenario=scenario, **arguments)


def on_rank(fabric: Any, scenario: str, **arguments: Any) -> Any:
    return globals()[scenario](fabric, **arguments)


# -- what runs on the ranks --------------------------------------------------------------------


def lent_record(fabric: Any) -> Any:
    """A record of a device that computes like the ranks'."""
    record = record_of(fabric, problem_of())
    return dataclasses.replace(
        record, hardware=dataclasses.replace(record.hardware, gpu="another device")
    )


def start(fabric: Any, records: Any, keep: Any = None, **settings: Any) -> Any:
    from taxfree._runtime.dispatch import Dispatcher
    from taxfree._runtime.runtime import Runtime
    from taxfree.settings import Settings
    from taxfree_tuning_db import Table

    dispatcher = Dispatcher(Table(user=records), fabric.hardware, Settings(**settings))
    return Runtime(fabric, dispatcher, keep=keep)


def call(rt: Any, fabric: Any) -> bool:
    (a, weight, _), expected = tensors_of(fabric, problem_of())
    return torch.equal(rt.all_gather_matmul(a, weight, gather_dim=1), expected)


def timed_as(library_us: float, ours_us: float) -> Any:
    """In place of the timer: the library's plan is the first."""
    from taxfree_tune.measuring.timer import Timing

    def time_together(fabric: Any, calls: Any, repetitions: int, chain: int) -> list[Timing]:
        modes = 2 if fabric.has_graphs else 1
        times = [library_us] * modes + [ours_us] * (len(calls) - modes)
        for compute, _ in calls:
            compute(0)
        return [Timing((us,) * repetitions, 0.0) for us in times]

    return mock.patch("taxfree_tune.measuring.timer.time_together", time_together)


def try_and_start_again(fabric: Any, library_us: float, ours_us: float, path: str) -> Any:
    keep = lending.keep_in(Path(path)) if fabric.rank == 0 else None
    rt, problem = start(fabric, [lent_record(fabric)], keep), problem_of()
    with timed_as(library_us, ours_us):
        rt.prepare([problem])
    found = [call(rt, fabric), rt.explain(problem).splitlines()[:2], list(rt.stats().values())]
    fabric.barrier()
    with Database(path, read_only=True) as database:
        own = list(database.records())
    rt = start(fabric, [lent_record(fabric), *own])
    with mock.patch("taxfree_tune.measuring.lent.try_beside_library", side_effect=AssertionError):
        again = [call(rt, fabric), rt.choice(problem).kind, rt.choice(problem).variant]
    assert not any(entry.is_tuned for entry in rt._plans)
    return found, again, [record.provenance for record in own]


def try_for_real(fabric: Any) -> Any:
    kept: list[Any] = []
    rt = start(fabric, [lent_record(fabric)], kept.extend)
    right = call(rt, fabric)
    (record,) = kept
    samples = {record.winner.samples, record.baseline.samples}
    return right, rt.choice(problem_of()).source, samples, sorted(record.baseline.median_us)


def leave_untried(fabric: Any) -> Any:
    rt = start(fabric, [lent_record(fabric)], verify=False)
    with mock.patch("taxfree_tune.measuring.lent.try_beside_library", side_effect=AssertionError):
        right = call(rt, fabric)
    return right, rt.choice(problem_of()).source, rt.choice(problem_of()).variant


def fail_to_try(fabric: Any) -> Any:
    """One rank has no memory for inputs."""
    from taxfree_tune.measuring import lent

    rt, made = start(fabric, [lent_record(fabric)]), lent.Calls

    def calls(*arguments: Any) -> Any:
        if fabric.rank == 1:
            raise MemoryError("no memory")
        return made(*arguments)

    with mock.patch.object(lent, "Calls", calls), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        right = call(rt, fabric)
    choice = rt.choice(problem_of())
    return right, choice.variant, choice.why, [str(each.message) for each in caught]


def try_what_is_wrong(fabric: Any) -> Any:
    from taxfree_tune.measuring.lent import try_beside_library
    from taxfree_tune.measuring.trial import Calls, Candidate

    problem = problem_of()
    calls = Calls(fabric, "all_gather_matmul", dataclasses.asdict(problem))
    library = calls.plan(Candidate("baseline", {}))

    def wrong(*tensors: Any) -> torch.Tensor:
        library(*tensors)
        return tensors[-1].mul_(1 + (fabric.rank == 1))

    outcomes = try_beside_library(fabric, problem, [library, wrong, library], 1e6)
    return [(each.state, sorted(each.timings)) for each in outcomes]


# -- tests -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ours_us", "variant"), [(1.0, "push"), (2.0, "push"), (3.0, "baseline")])
def test_what_is_faster_runs_and_the_next_start_knows(
    ranks: Ranks, tmp_path: Path, ours_us: float, variant: str
) -> None:
    path = str(tmp_path / "new" / "tuning.sqlite")
    for found, again, provenance in run(
        ranks, "try_and_start_again", library_us=2.0, ours_us=ours_us, path=path
    ):
        right, (runs, because), stats = found
        assert right
        assert runs.startswith(variant)
        assert runs.endswith("(lent: another device)")
        assert "another device's record of m=5; here" in because
        assert stats == [{"lent: another device": 1}]
        assert again == [True, "exact", variant]
        (said,) = provenance
        assert (said["method"], said["lender"]) == ("lent", "another device")


@on_every_fabric
def test_first_calls_try_what_was_lent(ranks: Ranks, fabric: str) -> None:
    for right, source, samples, modes in run(ranks, "try_for_real"):
        assert right
        assert source == "lent: another device"
        assert samples == {5}
        assert modes == ["eager"] if fabric == "host" else ["eager", "graph"]


def test_it_may_run_untried(ranks: Ranks) -> None:
    for found in run(ranks, "leave_untried"):
        assert found == (True, "lent: another device", "push")


def test_what_cannot_be_tried_does_not_run(ranks: Ranks) -> None:
    for right, variant, why, said in run(ranks, "fail_to_try"):
        assert (right, variant) == (True, "baseline")
        assert why == "lent: another device: MemoryError: no memory"
        assert any("runs the library" in each for each in said)


def test_what_is_wrong_on_a_rank_is_not_timed(ranks: Ranks) -> None:
    for outcomes in run(ranks, "try_what_is_wrong"):
        assert outcomes == [("measured", ["eager"]), ("wrong", []), ("measured", ["eager"])]


def test_a_database_that_cannot_be_written_costs_a_warning(tmp_path: Path) -> None:
    keep = lending.keep_in(tmp_path)  # a folder
    with pytest.warns(RuntimeWarning, match="timed again at the next start"):
        keep([])
    keep([])  # a second warning would be an error
