"""Writes what dispatch reads of the library's paths (library.json), from the committed results.

python -m benchmarks.library
"""

from __future__ import annotations

import dataclasses
import json
from functools import cache

from benchmarks.documents import ROOT
from taxfree._runtime.library import BASELINE, Measured, Path
from taxfree.problems import recorded_problem
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


if __name__ == "__main__":
    FILE.write_text(text(measured()), encoding="utf-8")
