"""How wrong the cost model is on measured rows, and where its fitted numbers come from.

    python benchmarks/model_error.py           # the table of errors, as in docs/cost-model.md
    python benchmarks/model_error.py --check   # fails where that table is out of date
    python benchmarks/model_error.py --fit     # the numbers of H200, fitted anew

Rows are of benchmarks/results/<op>/nvidia-h200-x*.json. Those of the sizes in FITTED are fitted to;
all others are held out. The dispatcher's rows repeat those of variants and are left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from taxfree.cost_model import H200, Machine, modelled_variants, times, vendor_us
from taxfree.results import Row, load
from taxfree_kernels.variant import problem_class

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
#: operation -> the field of its problems, and the values of it, that machines are fitted to
FITTED = {
    "all_gather_matmul": ("m", (1, 8, 64, 512)),
    "flash_decode": ("kv_len_per_rank", (32768,)),
    "matmul_all_reduce": ("m", (1, 64)),
    "matmul_reduce_scatter": ("m", (1024,)),
}
DOCUMENT = ROOT / "docs/cost-model.md"
_BLOCK = re.compile(r"(<!-- model error -->\n).*?(<!-- end of model error -->)", re.DOTALL)


def rows() -> list[Row]:
    """All measured rows of variants that are modelled, but for the dispatcher's."""
    paths = [path for op in FITTED for path in sorted(RESULTS.glob(f"{op}/nvidia-h200-x*.json"))]
    return [
        row for path in paths for row in load(path).rows if row.variant in modelled_variants(row.op)
    ]


def error(machine: Machine, row: Row) -> float:
    """Modelled over measured time, minus one."""
    found = times(machine, _problem(row), row.variant, row.config)
    modelled_us = found.t_eager_us if row.mode == "eager" else found.t_graph_us
    return modelled_us / row.median_us - 1


def _problem(row: Row) -> Any:
    return problem_class(row.op)(**row.problem)


def is_fitted(row: Row) -> bool:
    """Whether the machine's numbers were fitted to this row among others."""
    field, values = FITTED[row.op]
    return row.problem[field] in values


# -- the fit --

_GIVEN = (
    "hardware",
    "flops_per_s",
    "memory_bytes_per_s",
    "link_bytes_per_s",
    "copy_bytes_per_s",
    "gap_us",
)
_OF_THE_VENDOR = ("matmul_start_us", "split_us")


def fit(measured: Sequence[Row], machine: Machine) -> Machine:
    """The machine whose times are nearest to those of the rows that may be fitted to.

    Rates that result files hold are given, and so is what only a profile could tell. The vendor's
    matmul is fitted to its times alone.
    """
    measured = [row for row in measured if is_fitted(row)]
    matmuls = [row for row in measured if row.op != "flash_decode" and row.t_gemm_us is not None]
    names = [field.name for field in dataclasses.fields(Machine)]
    others = [name for name in names if name not in (*_GIVEN, *_OF_THE_VENDOR)]
    machine = _descend(machine, _OF_THE_VENDOR, lambda moved: _of_the_vendor(moved, matmuls))
    return _descend(machine, others, lambda moved: _distance(moved, measured))


def _descend(
    machine: Machine, names: Sequence[str], distance: Callable[[Machine], float]
) -> Machine:
    """Move one number after the other while the distance gets less."""
    best = distance(machine)
    step = 1.5
    while step > 1.01:
        improved = False
        for name in names:
            for factor in (step, 1 / step):
                moved = dataclasses.replace(machine, **{name: getattr(machine, name) * factor})
                if (found := distance(moved)) < best - 1e-6:
                    machine, best, improved = moved, found, True
        if not improved:
            step = math.sqrt(step)
    return machine


def _of_the_vendor(machine: Machine, measured: Sequence[Row]) -> float:
    return statistics.fmean(
        abs(math.log(vendor_us(machine, _problem(row)) / row.t_gemm_us))
        for row in measured
        if row.t_gemm_us is not None
    )


def _distance(machine: Machine, measured: Iterable[Row]) -> float:
    """The mean over groups of one operation, variant and mode, which weigh sqrt(their rows)."""
    groups: dict[tuple[str, str, str], list[float]] = {}
    for row in measured:
        distance = abs(math.log1p(error(machine, row)))
        groups.setdefault((row.op, row.variant, row.mode), []).append(distance)
    weights = [math.sqrt(len(group)) for group in groups.values()]
    return statistics.fmean(map(statistics.fmean, groups.values()), weights)


# -- the table --


def table(machine: Machine, measured: Sequence[Row]) -> str:
    """Median and worst error by variant and mode, fitted and held-out rows apart, in Markdown."""
    columns = ("variant", "mode", "fitted rows", "median", "held-out rows", "median", "worst")
    lines = []
    for op in FITTED:
        own = [row for row in measured if row.op == op]
        lines += [(f"**{op}**", "", *_cells(machine, own))]
        for variant in dict.fromkeys(row.variant for row in own):
            for mode in ("eager", "graph"):
                group = [row for row in own if (row.variant, row.mode) == (variant, mode)]
                lines.append((variant, mode, *_cells(machine, group)))
    lines.append(("**all**", "", *_cells(machine, measured)))
    lines = [columns, ("---", "---", *["---:"] * 5), *lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cells(machine: Machine, measured: Sequence[Row]) -> tuple[str, ...]:
    fitted = [abs(error(machine, row)) for row in measured if is_fitted(row)]
    held_out = [abs(error(machine, row)) for row in measured if not is_fitted(row)]
    return (
        str(len(fitted)),
        f"{statistics.median(fitted):.0%}",
        str(len(held_out)),
        f"{statistics.median(held_out):.0%}",
        f"{max(held_out):.0%}",
    )


def held_out_errors(machine: Machine, measured: Sequence[Row]) -> dict[str, float]:
    """Operation -> median over the rows that nothing was fitted to."""
    return {
        op: statistics.median(
            abs(error(machine, row)) for row in measured if row.op == op and not is_fitted(row)
        )
        for op in FITTED
    }


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
