"""Replays searches on recorded landscapes, without a GPU: how many trials find a fast config?

    python benchmarks/replay.py --json

Three methods choose what to measure next: `random` draws from the configs that no variant refuses,
`tpe` is Optuna's sampler as it comes, and `taxfree` the search of `taxfree tune`, in its batches,
without winners of other problems. A trial is a config that gets a time, as for `tune --trials`:
what a variant, the screen or the GPU refuses is not counted, for any of the methods. The recorded
time counts as the true one.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import optuna

from benchmarks.commands import exit_code, positive
from benchmarks.landscapes import FOLDER, SUBJECTS, Landscape, load
from benchmarks.tables import replays
from taxfree.measuring.trial import Candidate, key
from taxfree.tuning.candidates import every_candidate, first_candidates
from taxfree.tuning.search import Search
from taxfree.tuning.tuner import BATCH
from taxfree_kernels.variant import op_of

_NEAR = 1.03  # times the best of the landscape
_MOST = 300  # trials of a replay
_FEW = 20


@dataclass(frozen=True)
class Row:
    """What a method needs on a landscape, over seeds.

    Args:
        op, problem: what is tuned.
        method: "random", "tpe" or "taxfree".
        held_out: whether the search was not improved on it.
        configs: with a time, in the landscape.
        best_us: the landscape's best time.
        trials_to_3pct_median, trials_to_3pct_p90: until a config within 3 % of the best; None if
            that takes more than the trials of a replay.
        above_best_at_20_pct, above_best_at_20_pct_p90: the median, and the 90th percentile.
        seeds: how many.
        most: trials of a replay.
    """

    op: str
    problem: dict[str, Any]
    method: str
    held_out: bool
    configs: int
    best_us: float
    trials_to_3pct_median: float | None
    trials_to_3pct_p90: float | None
    above_best_at_20_pct: float
    above_best_at_20_pct_p90: float
    seeds: int
    most: int


def drawn(landscape: Landscape, seed: int) -> Iterator[float]:
    """Times of configs that are drawn without replacement."""
    found, problem, hardware = landscape.variants, landscape.problem, landscape.hardware
    for candidate in every_candidate(found, problem, hardware, seed):
        us = landscape.times.get(key(candidate))
        if isinstance(us, float):
            yield us


def by_tpe(landscape: Landscape, seed: int) -> Iterator[float]:
    """Times of what Optuna's TPE asks for; of what it asks for again, too."""
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    spaces = {
        name: variant.space(landscape.problem, landscape.hardware)
        for name, variant in landscape.variants.items()
    }
    while True:
        trial = study.ask()
        name = trial.suggest_categorical("variant", list(spaces))
        config = {
            parameter: trial.suggest_categorical(f"{name}.{parameter}", values)
            for parameter, values in spaces[name].items()
        }
        us = landscape.times.get(key(Candidate(name, config)))
        if isinstance(us, float):
            study.tell(trial, us)
            yield us
        else:
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)


def by_taxfree(landscape: Landscape, seed: int) -> Iterator[float]:
    """Times of what the search of `taxfree tune` asks for."""
    found, problem, hardware = landscape.variants, landscape.problem, landscape.hardware
    search = Search(found, problem, hardware, seed, journal=None, name="replay")
    search.enqueue(first_candidates(found, problem, hardware))
    while batch := search.ask(BATCH):
        for candidate in batch:
            us = landscape.times.get(key(candidate))
            if isinstance(us, float):
                search.tell(candidate, us)
                yield us
            else:
                search.tell_pruned(candidate, us or "not recorded")


METHODS: Mapping[str, Callable[[Landscape, int], Iterator[float]]] = {
    "random": drawn,
    "tpe": by_tpe,
    "taxfree": by_taxfree,
}


def replay(landscape: Landscape, method: str, seed: int) -> tuple[float, float]:
    """Trials until a config within 3 % of the best, infinite if too many; and per cent at 20."""
    times: list[float] = []
    near = _NEAR * landscape.best_us
    for us in METHODS[method](landscape, seed):
        times.append(us)
        if len(times) == _MOST or (len(times) >= _FEW and min(times) <= near):
            break
    trials = next((trial for trial, us in enumerate(times, start=1) if us <= near), math.inf)
    return trials, 100 * (min(times[:_FEW]) / landscape.best_us - 1)


def row(path: Path, method: str, seeds: int) -> Row:
    """Replay a landscape's search with each seed."""
    landscape = load(path)
    found = [replay(landscape, method, seed) for seed in range(seeds)]
    trials, above = zip(*found, strict=True)
    return Row(
        op_of(landscape.problem),
        asdict(landscape.problem),
        method,
        landscape.held_out,
        sum(isinstance(time, float) for time in landscape.times.values()),
        landscape.best_us,
        _finite(statistics.median(trials)),
        _finite(_p90(trials)),
        round(statistics.median(above), 1),
        round(_p90(above), 1),
        seeds,
        _MOST,
    )


def _p90(values: Sequence[float]) -> float:
    """The 90th percentile: the smallest that nine of ten do not exceed."""
    return sorted(values)[math.ceil(0.9 * len(values)) - 1]


def _finite(trials: float) -> float | None:
    return trials if math.isfinite(trials) else None


def rows(paths: Sequence[Path], methods: Sequence[str], seeds: int) -> list[Row]:
    """A row per landscape and method, in processes of their own."""
    with ProcessPoolExecutor() as processes:
        asked = [processes.submit(row, path, each, seeds) for path in paths for each in methods]
        return [each.result() for each in asked]


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="rows as JSON")
    parser.add_argument("--seeds", type=positive, default=20)
    parser.add_argument("--method", action="append", choices=METHODS, help="repeatable")
    parser.add_argument("--landscapes", type=Path, default=FOLDER / "nvidia-h200", help="folder")
    parser.add_argument("--seen", action="store_true", help="without what is held out")
    parser.add_argument("--rows", type=Path, help="a file of --json: its rows, no new replay")
    parser.add_argument("--plot", type=Path, metavar="PICTURE", help="also draw the trials")
    options = parser.parse_args()
    return exit_code(lambda: _print(options))


def _print(options: argparse.Namespace) -> None:
    held_out = {subject.name for subject in SUBJECTS if subject.held_out}
    paths = [
        path
        for path in sorted(options.landscapes.glob("*.json"))
        if not options.seen or path.stem not in held_out
    ]
    if options.rows:
        found = json.loads(options.rows.read_text(encoding="utf-8"))["rows"]
    else:
        replayed = rows(paths, options.method or list(METHODS), options.seeds)
        found = [asdict(each) for each in replayed]
    if options.plot:
        draw(found, options.plot)
    if options.json:
        print(json.dumps({"schema": 1, "rows": found}, indent=1))
    else:
        print(replays(found), end="")


def draw(found: Sequence[Mapping[str, Any]], path: Path) -> None:
    """The picture: per problem and method, trials in the median, and a line to the p90."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    problems = list(dict.fromkeys((each["op"], each["held_out"]) for each in found))
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    styles = dict(zip(METHODS, ("tab:gray", "tab:blue", "tab:red"), strict=True))
    for place, (method, color) in enumerate(styles.items()):
        own = [each for each in found if each["method"] == method]
        for each in own:
            y = problems.index((each["op"], each["held_out"])) + 0.22 * (place - 1)
            median, p90 = (
                min(each["trials_to_3pct_" + which] or math.inf, each["most"])
                for which in ("median", "p90")
            )
            axes.plot([median, p90], [y, y], color=color, linewidth=2, alpha=0.5)
            label = method if each is own[0] else None
            is_more = each["trials_to_3pct_median"] is None
            axes.plot(median, y, ">" if is_more else "o", color=color, label=label)
    axes.set_xscale("log")
    ticks = (1, 3, 10, 30, 100, 300)
    axes.set_xticks(ticks, [f"{tick}" if tick < _MOST else f"{tick} or more" for tick in ticks])
    titles = [f"{op}{', held out' if held_out else ''}" for op, held_out in problems]
    axes.set_yticks(range(len(titles)), titles)
    axes.invert_yaxis()
    axes.set_xlabel("trials until a config within 3 % of the best: median, and line to the p90")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="lower left", fontsize=9)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
