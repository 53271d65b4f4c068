"""Replayed searches: what counts as a trial, what is found, and the committed landscapes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import replay
from benchmarks.landscapes import FOLDER, GRIDS, SUBJECTS, Subject, load, on_grids
from taxfree.measuring.trial import Candidate, key
from taxfree.tuning.candidates import valid_candidates
from taxfree_kernels.hardware import KNOWN

H200 = KNOWN["h200"]
SUBJECT = next(each for each in SUBJECTS if each.name == "matmul_all_reduce-down")
SLOW, FAST, REFUSED = 100.0, 50.0, "spills 80 bytes a thread"


def time_of(config: dict[str, int]) -> float | str:
    """A landscape with one fast config in 208, two changes from one that the screen refuses."""
    if config["BLOCK_K"] == 128 and config["num_warps"] == 8:
        return REFUSED
    good = {"BLOCK_M": 64, "BLOCK_N": 64, "num_stages": 6, "TMA": True, "SPLIT_K": 1}
    good |= {"BLOCK_K": 64, "num_warps": 4}
    wrong = sum(config[name] != value for name, value in good.items())
    return FAST + wrong * (SLOW - FAST) / len(good)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A landscape of `push` alone."""
    problem = SUBJECT.problem
    grid = {"push": on_grids(problem, H200, SUBJECT.op)["push"]}
    space = grid["push"].space(problem, H200)
    configs = [each.config for each in valid_candidates(grid, problem, H200)]
    content = {
        "environment": {"hardware": {"gpu": "NVIDIA H200"}},
        "op": SUBJECT.op,
        "problem": vars(problem),
        "held_out": False,
        "spaces": {"push": space},
        "trials": {"push": [[*(each[n] for n in space), time_of(dict(each))] for each in configs]},
    }
    found = tmp_path / "made-up.json"
    found.write_text(json.dumps(content))
    return found


class TestMethods:
    @pytest.mark.parametrize("method", replay.METHODS)
    def test_a_seed_decides(self, path: Path, method: str) -> None:
        landscape = load(path)

        def times(seed: int) -> list[float]:
            found = replay.METHODS[method](landscape, seed)
            return [next(found) for _ in range(15)]

        assert times(1) == times(1) != times(2)

    def test_random_draws_each_config_once_and_counts_no_refused_one(self, path: Path) -> None:
        landscape = load(path)
        times = sorted(replay.drawn(landscape, 0))
        assert times == sorted(t for t in landscape.times.values() if isinstance(t, float))
        assert REFUSED in landscape.times.values()

    def test_the_search_needs_far_fewer_trials_than_drawing(self, path: Path) -> None:
        drawn, searched = (replay.row(path, each, seeds=3) for each in ("random", "taxfree"))
        assert searched.trials_to_3pct_median is not None
        assert searched.trials_to_3pct_median <= 30
        assert (drawn.trials_to_3pct_median or 300) > searched.trials_to_3pct_median


class TestRow:
    def test_counts_trials_to_within_3_percent(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = [[90.0, 51.4, 51.5], [60.0, 54.0], [90.0] * 25 + [50.0]]
        monkeypatch.setitem(replay.METHODS, "random", lambda _, seed: iter(found[seed]))
        row = replay.row(path, "random", seeds=3)
        assert row.best_us == FAST
        assert (row.trials_to_3pct_median, row.trials_to_3pct_p90) == (26, None)
        assert (row.above_best_at_20_pct, row.above_best_at_20_pct_p90) == (8.0, 80.0)


class TestCommittedLandscapes:
    @pytest.mark.parametrize("subject", SUBJECTS, ids=lambda each: each.name)
    def test_is_dense_and_of_its_subject(self, subject: Subject) -> None:
        landscape = load(FOLDER / "nvidia-h200" / f"{subject.name}.json")
        assert landscape.problem == subject.problem
        assert landscape.held_out == subject.held_out
        assert set(landscape.variants) <= set(GRIDS[subject.op])
        assert sum(isinstance(time, float) for time in landscape.times.values()) >= 1000

    def test_every_valid_config_was_recorded(self) -> None:
        landscape = load(FOLDER / "nvidia-h200" / "matmul_reduce_scatter-out.json")
        valid = valid_candidates(landscape.variants, landscape.problem, landscape.hardware)
        assert {key(each) for each in valid} == set(landscape.times)

    def test_one_problem_of_each_operation_is_held_out(self) -> None:
        held_out = [each.op for each in SUBJECTS if each.held_out]
        assert sorted(held_out) == sorted({each.op for each in SUBJECTS})


def test_a_first_config_outside_of_the_grid_is_moved_onto_it() -> None:
    problem = next(each for each in SUBJECTS if each.name == "all_gather_matmul-up").problem
    variant = on_grids(problem, H200, "all_gather_matmul")["push_tma"]
    space = variant.space(problem, H200)
    seeds = variant.seed_configs(problem, H200)
    assert seeds
    assert all(value in space[name] for config in seeds for name, value in config.items())
    assert Candidate("push_tma", seeds[0]) in list(
        valid_candidates({"push_tma": variant}, problem, H200)
    )
