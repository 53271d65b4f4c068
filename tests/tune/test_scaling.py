"""`taxfree explain --scale`: constants that were measured, and eight ranks predicted from fewer."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest

from taxfree_tune.cost import scaling
from taxfree_tune.cost.scaling import LIBRARY, MEASURED, Link, Recorded, Scaled
from taxfree_tuning_db import shipped_records

EXPLAINED = Path(__file__).parents[2] / "benchmarks/results/explain"
WITHIN = {"all_gather_matmul": 0.12, "matmul_all_reduce": 0.12, "matmul_reduce_scatter": 0.06}
#: all-reduces of 64 rows and of 1024; shapes as in the records
FEW, MANY = 64, 1024


@pytest.fixture(scope="module")
def problems() -> list[Recorded]:
    return scaling.recorded(shipped_records())


def sums(problems: list[Recorded], rows: int) -> Recorded:
    wanted = {"m": rows, "k": 3584, "residual": False, "rms_norm": False}
    return next(
        each
        for each in problems
        if each.op == "matmul_all_reduce" and wanted.items() <= each.problem.items()
    )


@pytest.mark.parametrize("ranks", MEASURED)
def test_constants_are_medians_of_committed_explanations(ranks: int) -> None:
    document = json.loads((EXPLAINED / f"nvidia-h200-x{ranks}.json").read_text("utf-8"))
    library = [row for row in document["rows"] if row["variant"] == "baseline"]
    fused = [row for row in document["rows"] if row["variant"] not in ("baseline", "one_shot")]

    def parts(rows: list[dict], name: str) -> list[float]:
        return [part["us"] for row in rows for part in row["parts"] if part["name"] == name]

    def rounded(values: list[float]) -> float:
        return pytest.approx(median(values), abs=0.006)

    constants = MEASURED[ranks]
    assert constants.link_bytes_per_s == pytest.approx(
        document["environment"]["peaks"][0]["link_bytes_per_s"], rel=1e-3
    )
    assert constants.skew_us == rounded(parts(library, "skew"))
    assert constants.collective_us == rounded(parts(library, "latency"))
    assert constants.gaps_us == rounded(parts(library, "gaps"))
    assert constants.signal_us == rounded(parts(fused, "latency"))
    ends, start = parts(fused, "ends"), parts(fused, "start")
    assert constants.launch_us == pytest.approx(median(ends) + median(start), abs=0.01)


@pytest.mark.parametrize("op", WITHIN)
def test_eight_ranks_are_predicted_from_two_and_four(problems: list[Recorded], op: str) -> None:
    left_out = [each for each in scaling.left_out(problems) if each[0] == op]
    ours = [abs(apart) for _, apart, _ in left_out]
    library = [abs(apart) for *_, apart in left_out]
    print(f"{op}: {len(ours)} records, median {median(ours):.1%}, worst {max(ours):.1%}")
    assert len(ours) >= 4
    assert max(ours) <= WITHIN[op]
    assert median(library) <= 0.05  # of the library the records hold only some paths


def test_a_prediction_knows_nothing_of_the_ranks_that_are_left_out(
    problems: list[Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = sums(problems, MANY)
    before = scaling.scaled(problem, 8, known=(2, 4))
    fewer = {ranks: times for ranks, times in problem.times.items() if ranks < 8}
    monkeypatch.delitem(MEASURED, 8)
    scaling.constants.cache_clear()
    assert scaling.scaled(Recorded(problem.op, problem.problem, fewer), 8, known=(2, 4)) == before


def test_recorded_sums_are_the_records(problems: list[Recorded]) -> None:
    for problem in problems:
        for ranks, times in problem.times.items():
            for call in scaling.scaled(problem, ranks):
                ways = [
                    us for way, us in times.items() if (way == LIBRARY) == (call.way == LIBRARY)
                ]
                assert call.is_recorded
                assert call.us == pytest.approx(min(ways))
                assert min(call.parts["bytes"], call.parts["work"]) >= 0


def test_between_nodes_a_flat_kernel_pays_for_bytes_and_a_rail_does_not(
    problems: list[Recorded],
) -> None:
    link = Link(50e9, 5.0)
    ways = {call.way: call for call in scaling.scaled(sums(problems, MANY), 64, link)}
    assert ways.keys() == {"flat", "rail", LIBRARY}
    assert {call.nodes for call in ways.values()} == {8}
    assert ways["rail"].us < ways[LIBRARY].us < ways["flat"].us
    assert ways["flat"].parts["bytes"] > 0.5 * ways["flat"].us
    few = {call.way: call for call in scaling.scaled(sums(problems, FEW), 64, link)}
    assert few["rail"].parts["signals"] > few["rail"].parts["bytes"]


def test_skew_and_signals_grow_with_ranks() -> None:
    known = tuple(MEASURED)
    grown = [scaling.constants(ranks, known) for ranks in (8, 16, 32, 64)]
    for name in ("skew_us", "signal_us", "collective_us"):
        values = [getattr(each, name) for each in grown]
        assert values == sorted(values)


def test_the_crossing_is_where_the_library_stays_ahead() -> None:
    def call(ranks: int, way: str, us: float) -> Scaled:
        return Scaled(ranks, 1, way, {"work": us}, False)

    ours = [call(ranks, "in a node", us) for ranks, us in ((2, 9.0), (4, 11.0), (8, 9.0))]
    library = [call(ranks, LIBRARY, 10.0) for ranks in (2, 4, 8)]
    assert scaling.crossing([*ours, *library]) is None
    ours[2] = call(8, "in a node", 12.0)
    assert scaling.crossing([*ours, *library]) == 4
