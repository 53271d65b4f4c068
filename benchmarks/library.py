"""Which path of the library is the fastest, from the committed results; and how good the rule is.

    python -m benchmarks.library            # the rule, judged on problems that are left out
    python -m benchmarks.library --write    # write what dispatch reads (library.json)

A problem is judged by the times of the path that the results of all other problems choose for it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from benchmarks.documents import ROOT, table
from taxfree._runtime import library
from taxfree._runtime.library import BASELINE, Measured, Path
from taxfree.problems import recorded_problem
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.variant import operation_names
from taxfree_tune.measuring.results import by_problem, load
from taxfree_tuning_db import HardwareFingerprint

FILE = ROOT / "taxfree/_runtime/library.json"
RESULTS = ROOT / "benchmarks/results"


@cache
def measured() -> tuple[Measured, ...]:
    """The library's paths on all problems of several ranks, by the newest result of each."""
    newest: dict[str, tuple[str, Measured]] = {}
    files = [file for op in operation_names() for file in sorted(RESULTS.glob(f"{op}/*.json"))]
    for results in map(load, files):
        hardware = HardwareFingerprint(**results.environment["hardware"])
        for rows in by_problem(results.rows):
            problem = recorded_problem(rows[0].op, rows[0].problem)
            paths: dict[str, Path] = {}
            for row in rows:
                if row.is_library:
                    path = Path(row.variant, row.config)
                    us = float(f"{row.median_us:.4g}")  # more digits than a timed has
                    paths.setdefault(str(path), path).median_us[row.mode] = us
            is_baseline_alone = paths.keys() <= {str(BASELINE)}
            if problem is None or problem.world_size == 1 or is_baseline_alone:
                continue
            key, created = repr((hardware, problem)), results.environment["created"]
            if created > newest.get(key, ("",))[0]:
                made = Measured(rows[0].op, problem, hardware, tuple(paths.values()))
                newest[key] = created, made
    return tuple(timed for _, timed in newest.values())


def text(known: tuple[Measured, ...]) -> str:
    """The content of `taxfree/_runtime/library.json`: a line per problem."""
    groups: dict[str, list[str]] = {}
    for timed in known:
        of_device = json.dumps({"op": timed.op, "hardware": dataclasses.asdict(timed.hardware)})
        paths = [[path.variant, path.config, path.median_us] for path in timed.paths]
        entry = json.dumps([dataclasses.asdict(timed.problem), *paths])
        groups.setdefault(of_device, []).append(entry)
    texts = [
        f'{of_device[:-1]}, "measured": [\n' + ",\n".join(lines) + "\n]}"
        for of_device, lines in groups.items()
    ]
    return "[\n" + ",\n".join(texts) + "\n]\n"


@dataclass(frozen=True)
class Judged:
    """The path that other problems' results choose for one.

    Args:
        measured: the problem.
        mode: "graph" or "eager".
        path: what is chosen; None if nothing is near.
        of_baseline, of_best: its speed over the baseline's, and the fastest path's.
    """

    measured: Measured
    mode: str
    path: Path | None
    of_baseline: float = 1.0
    of_best: float = 1.0


def judged(known: tuple[Measured, ...]) -> Iterator[Judged]:
    """Judge the rule on every problem, without its own results."""
    hardware = {hardware.name: hardware for hardware in KNOWN.values()}
    for timed in known:
        others = [other for other in known if other.problem != timed.problem]
        limits = hardware[timed.hardware.gpu]
        chosen, _ = library.fastest(timed.problem, timed.hardware, limits, others)
        for mode in ("graph", "eager"):
            path = chosen.get(mode)
            if path is None:
                yield Judged(timed, mode, None)
                continue
            us = timed.us(path.variant, mode)
            best = min(timed.us(other.variant, mode) for other in timed.paths)
            yield Judged(timed, mode, path, timed.us(BASELINE.variant, mode) / us, best / us)


def summary(found: Iterable[Judged]) -> str:
    """A table in Markdown: a line per operation, number of ranks and mode."""
    groups: dict[tuple[str, int, str], list[Judged]] = {}
    for verdict in found:
        key = verdict.measured.op, verdict.measured.problem.world_size, verdict.mode
        groups.setdefault(key, []).append(verdict)
    lines = []
    for (op, ranks, mode), group in sorted(groups.items()):
        chosen = [verdict for verdict in group if verdict.path is not None]
        others = sum(verdict.path != BASELINE for verdict in chosen)
        of_baseline = [verdict.of_baseline for verdict in chosen] or [1.0]
        figures = min(of_baseline), statistics.median(of_baseline), max(of_baseline)
        worst = min((verdict.of_best for verdict in chosen), default=1.0)
        numbers = map(str, (ranks, len(group), len(chosen), others))
        speeds = [f"{speed:.2f}" for speed in (*figures, worst)]
        lines.append([op, mode, *numbers, *speeds])
    header = ["operation", "mode", "ranks", "problems", "chosen", "not the baseline"]
    header += ["least of the baseline's speed", "median", "most", "least of the best's"]
    return table(header, lines, text=[0, 1])


def main() -> int:
    """Print or write; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write what dispatch reads")
    known = measured()
    if parser.parse_args().write:
        FILE.write_text(text(known), encoding="utf-8")
    print(summary(judged(known)), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
