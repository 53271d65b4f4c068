"""How wrong the cost model is on measured rows, and where its fitted numbers come from.

    python benchmarks/model_error.py           # the table of errors, as in docs/cost-model.md
    python benchmarks/model_error.py --check   # fails where that table is out of date
    python benchmarks/model_error.py --fit     # the numbers of H200, fitted anew

Rows are of benchmarks/results/all_gather_matmul/nvidia-h200-x{2,4}.json. Those with M in FITTED_M
are fitted to; all others are held out. The dispatcher's rows repeat those of variants and are left
out.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from taxfree.cost_model import H200, VARIANTS, Machine, times
from taxfree.results import Row, load
from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul

ROOT = Path(__file__).parents[1]
FILES = [ROOT / f"benchmarks/results/all_gather_matmul/nvidia-h200-x{n}.json" for n in (2, 4)]
FITTED_M = (1, 8, 64, 512)
DOCUMENT = ROOT / "docs/cost-model.md"
_BLOCK = re.compile(r"(<!-- model error -->\n).*?(<!-- end of model error -->)", re.DOTALL)


def rows() -> list[Row]:
    """All measured rows of variants that are modelled, but for the dispatcher's."""
    return [row for path in FILES for row in load(path).rows if row.variant in VARIANTS]


def error(machine: Machine, row: Row) -> float:
    """Modelled over measured time, minus one."""
    found = times(machine, AllGatherMatmul(**row.problem), row.variant, row.config)
    modelled_us = found.t_eager_us if row.mode == "eager" else found.t_graph_us
    return modelled_us / row.median_us - 1


def is_fitted(row: Row) -> bool:
    """Whether the machine's numbers were fitted to this row among others."""
    return row.problem["m"] in FITTED_M


# -- the fit --

_GIVEN = (
    "hardware",
    "flops_per_s",
    "memory_bytes_per_s",
    "link_bytes_per_s",
    "resident",
    "gap_us",
)


def fit(measured: Sequence[Row], machine: Machine) -> Machine:
    """Move one number after the other while the mean distance of logarithms gets less.

    Rates that result files hold are given, and so is what only a profile could tell.
    """
    measured = [row for row in measured if is_fitted(row)]
    names = [f.name for f in dataclasses.fields(Machine) if f.name not in _GIVEN]
    best = _distance(machine, measured)
    step = 1.5
    while step > 1.01:
        improved = False
        for name in names:
            for factor in (step, 1 / step):
                value = getattr(machine, name) * factor
                moved = dataclasses.replace(machine, **{name: value})
                distance = _distance(moved, measured)
                if distance < best - 1e-6:
                    machine, best, improved = moved, distance, True
        if not improved:
            step = math.sqrt(step)
    return machine


def _distance(machine: Machine, measured: Iterable[Row]) -> float:
    return statistics.fmean(abs(math.log1p(error(machine, row))) for row in measured)


# -- the table --


def table(machine: Machine, measured: Sequence[Row]) -> str:
    """Median and worst error by variant and mode, fitted and held-out rows apart, in Markdown."""
    columns = ("variant", "mode", "fitted rows", "median", "held-out rows", "median", "90 %")
    lines = [columns, ("---", "---", *["---:"] * 5)]
    for variant in dict.fromkeys(row.variant for row in measured):
        for mode in ("eager", "graph"):
            own = [row for row in measured if (row.variant, row.mode) == (variant, mode)]
            lines.append((variant, mode, *_cells(machine, own)))
    lines.append(("all", "", *_cells(machine, measured)))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cells(machine: Machine, measured: Sequence[Row]) -> tuple[str, ...]:
    fitted = [abs(error(machine, row)) for row in measured if is_fitted(row)]
    held_out = [abs(error(machine, row)) for row in measured if not is_fitted(row)]
    most = statistics.quantiles(held_out, n=10)[-1]
    return (
        str(len(fitted)),
        f"{statistics.median(fitted):.0%}",
        str(len(held_out)),
        f"{statistics.median(held_out):.0%}",
        f"{most:.0%}",
    )


def held_out_error(machine: Machine, measured: Sequence[Row]) -> float:
    """Median over the rows that nothing was fitted to."""
    return statistics.median(abs(error(machine, row)) for row in measured if not is_fitted(row))


def main() -> int:
    """Write the table, check it, or fit; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="fail where the table is out of date")
    parser.add_argument("--fit", action="store_true", help="print the fitted numbers of H200")
    options = parser.parse_args()
    measured = rows()
    if options.fit:
        for name, value in dataclasses.asdict(fit(measured, H200)).items():
            print(f"{name}={value:.3g}" if isinstance(value, float) else f"{name}: given")
        return 0
    text = DOCUMENT.read_text(encoding="utf-8")
    updated = _BLOCK.sub(lambda block: f"{block[1]}\n{table(H200, measured)}\n{block[2]}", text)
    if updated == text:
        return 0
    if not options.check:
        DOCUMENT.write_text(updated, encoding="utf-8")
    print(f"{DOCUMENT.relative_to(ROOT)} {'is out of date' if options.check else 'updated'}")
    return 1 if options.check else 0


if __name__ == "__main__":
    sys.exit(main())
