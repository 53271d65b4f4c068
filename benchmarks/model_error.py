"""The error of the cost model on measured rows, and the fit of its numbers.

    python benchmarks/model_error.py           # the tables of errors, into docs/cost-model.md
    python benchmarks/model_error.py --check   # fail if those are out of date
    python benchmarks/model_error.py --fit     # fit the numbers of H200

The rows are those of benchmarks/results/<op>/nvidia-h200-x*.json. The fit uses the sizes in FITTED;
all others are held out. The dispatcher's rows repeat those of variants and are left out.

Each file was measured on another host. Two numbers (`Host`) describe its speed; they are fitted to
the file's fitted rows, and applied to its other rows.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from benchmarks.documents import ROOT, check_parser, table, with_blocks, write_changed
from taxfree.cost_model import H200, Machine, modelled_variants, times, vendor_us
from taxfree.measuring.results import Row, load
from taxfree_kernels.variant import problem_class, variants

RESULTS = ROOT / "benchmarks/results"
#: operation -> the field of its problems, and the values of it, that machines are fitted to
FITTED = {
    "all_gather_matmul": ("m", (1, 8, 64, 512)),
    "flash_decode": ("kv_len_per_rank", (32768,)),
    "matmul_all_reduce": ("m", (1, 64, 1024)),
    "matmul_reduce_scatter": ("m", (1024,)),
}
DOCUMENT = ROOT / "docs/cost-model.md"
_TURNS = 3

_T = TypeVar("_T")


@dataclass(frozen=True)
class FittedRow:
    """A row and the name of its file, the visit."""

    row: Row
    visit: str

    @property
    def problem(self) -> Any:
        return problem_class(self.row.op)(**self.row.problem)

    @property
    def is_fitted(self) -> bool:
        """Whether the row is one that the machine's numbers are fitted to."""
        field, values = FITTED[self.row.op]
        return self.row.problem[field] in values


def rows() -> list[FittedRow]:
    """All measured rows of modelled variants, without the dispatcher's, oldest file first."""
    paths = [path for op in FITTED for path in RESULTS.glob(f"{op}/nvidia-h200-x*.json")]
    results = {str(path.relative_to(RESULTS).with_suffix("")): load(path) for path in paths}
    visits = sorted(results, key=lambda visit: results[visit].environment["created"])
    return [
        FittedRow(row, visit)
        for visit in visits
        for row in results[visit].rows
        if row.variant in modelled_variants(row.op) and _is_of_space(row)
    ]


def _is_of_space(row: Row) -> bool:
    """Whether a row's variant still has all meta-parameters of the row."""
    problem = problem_class(row.op)(**row.problem)
    return row.config.keys() <= variants(row.op)[row.variant].space(problem, H200.hardware).keys()


def error(machine: Machine, measured: FittedRow) -> float:
    """Modelled over measured time, minus one."""
    row = measured.row
    found = times(machine, measured.problem, row.variant, row.config)
    modelled_us = found.t_eager_us if row.mode == "eager" else found.t_graph_us
    return modelled_us / row.median_us - 1


# -- hosts --


@dataclass(frozen=True)
class Host:
    """The host of one visit (one result file), relative to the machine's.

    Args:
        slowness: factor on all host times.
        launches: additional factor on launches of our kernels, which depend on the version of
            taxfree that was measured.
    """

    slowness: float = 1.0
    launches: float = 1.0

    def of(self, machine: Machine) -> Machine:
        """The machine with this host."""
        names = [field.name for field in dataclasses.fields(Machine)]
        numbers = {
            name: self.slowness * getattr(machine, name)
            for name in names
            if name.startswith("host_")
        }
        for name in ("host_kernel_us", "host_descriptors_us"):
            numbers[name] *= self.launches
        return dataclasses.replace(machine, **numbers)


def hosts(machine: Machine, measured: Sequence[FittedRow]) -> dict[str, Host]:
    """The host of each visit, from rows that may be fitted to.

    The machine's launches are those of the newest visit. Undetermined numbers stay near 1.
    """
    visits = list(dict.fromkeys(each.visit for each in measured))
    found = {}
    for visit in visits:
        group = [
            each
            for each in measured
            if each.visit == visit and each.is_fitted and each.row.mode == "eager"
        ]

        def distance(host: Host, group: Sequence[FittedRow] = group) -> float:
            moved = abs(math.log(host.slowness)) + abs(math.log(host.launches))
            return _distance(dict.fromkeys(visits, host.of(machine)), group) + moved / 50

        names = ["slowness", "launches"] if visit != visits[-1] else ["slowness"]
        found[visit] = _descend(Host(), names, distance) if group else Host()
    return found


def machines(machine: Machine, measured: Sequence[FittedRow]) -> dict[str, Machine]:
    """The machine with the host of each visit."""
    return {visit: host.of(machine) for visit, host in hosts(machine, measured).items()}


# -- the fit --

_GIVEN = (
    "hardware", "flops_per_s", "memory_bytes_per_s", "link_bytes_per_s", "copy_bytes_per_s",
    "gap_us", "round_trip_us",
)  # fmt: skip
_OF_THE_VENDOR = ("matmul_start_us", "split_us")


def fit(measured: Sequence[FittedRow], machine: Machine) -> Machine:
    """The machine whose times are closest to those of the rows to fit.

    Rates from result files are fixed, and so are those that need a profile. The vendor's matmul is
    fitted to its own times only. The other numbers are fitted in turn with the visits' hosts.
    """
    measured = [each for each in measured if each.is_fitted]
    matmuls = [each for each in measured if each.row.op != "flash_decode"]
    names = [field.name for field in dataclasses.fields(Machine)]
    others = [name for name in names if name not in (*_GIVEN, *_OF_THE_VENDOR)]
    machine = _descend(machine, _OF_THE_VENDOR, lambda moved: _of_the_vendor(moved, matmuls))
    for _ in range(_TURNS):
        by_visit = hosts(machine, measured)
        machine = _descend(
            machine,
            others,
            lambda moved, found=by_visit: _distance(
                {visit: host.of(moved) for visit, host in found.items()}, measured
            ),
        )
    return machine


def _descend(start: _T, names: Sequence[str], distance: Callable[[_T], float]) -> _T:
    """Coordinate descent: change one number after the other while the distance decreases."""
    at, best = start, distance(start)
    step = 1.5
    while step > 1.01:
        improved = False
        for name in names:
            for factor in (step, 1 / step):
                moved = dataclasses.replace(at, **{name: getattr(at, name) * factor})
                if (found := distance(moved)) < best - 1e-6:
                    at, best, improved = moved, found, True
        if not improved:
            step = math.sqrt(step)
    return at


def _of_the_vendor(machine: Machine, measured: Sequence[FittedRow]) -> float:
    return statistics.fmean(
        abs(math.log(vendor_us(machine, each.problem) / each.row.t_gemm_us))
        for each in measured
        if each.row.t_gemm_us is not None
    )


def _distance(by_visit: Mapping[str, Machine], measured: Iterable[FittedRow]) -> float:
    """The mean over groups of one operation, variant and mode, which weigh sqrt(their rows)."""
    groups: dict[tuple[str, str, str], list[float]] = {}
    for each in measured:
        row, distance = each.row, abs(math.log1p(error(by_visit[each.visit], each)))
        groups.setdefault((row.op, row.variant, row.mode), []).append(distance)
    weights = [math.sqrt(len(group)) for group in groups.values()]
    return statistics.fmean(map(statistics.fmean, groups.values()), weights)


# -- the tables --


def tables(machine: Machine, measured: Sequence[FittedRow]) -> str:
    """Both tables, as in the document."""
    return f"{table_of_errors(machine, measured)}\n{table_of_hosts(machine, measured)}"


def table_of_errors(machine: Machine, measured: Sequence[FittedRow]) -> str:
    """Median and worst error by variant and mode, fitted and held-out rows apart, in Markdown."""
    by_visit = machines(machine, measured)
    columns = ("variant", "mode", "fitted rows", "median", "held-out rows", "median", "worst")
    lines = []
    for op in FITTED:
        own = [each for each in measured if each.row.op == op]
        lines += [(f"**{op}**", "", *_cells(by_visit, own))]
        for variant in dict.fromkeys(each.row.variant for each in own):
            for mode in ("eager", "graph"):
                group = [
                    each for each in own if (each.row.variant, each.row.mode) == (variant, mode)
                ]
                lines.append((variant, mode, *_cells(by_visit, group)))
    lines.append(("**all**", "", *_cells(by_visit, measured)))
    return table(columns, lines, text=[0, 1])


def table_of_hosts(machine: Machine, measured: Sequence[FittedRow]) -> str:
    """The visits' hosts, and the median error of held-out eager rows without and with them."""
    columns = ("measured rows", "host", "launches of ours", "eager, one host", "eager, own host")
    lines = []
    for visit, host in hosts(machine, measured).items():
        group = [
            each
            for each in measured
            if each.visit == visit and each.row.mode == "eager" and not each.is_fitted
        ]
        medians = [
            _percent(statistics.median, [abs(error(with_host, each)) for each in group])
            for with_host in (machine, host.of(machine))
        ]
        lines.append((visit, f"{host.slowness:.2f}", f"{host.launches:.2f}", *medians))
    return table(columns, lines, text=[0])


def _cells(by_visit: Mapping[str, Machine], measured: Sequence[FittedRow]) -> tuple[str, ...]:
    errors = [(abs(error(by_visit[each.visit], each)), each.is_fitted) for each in measured]
    fitted = [found for found, is_fitted in errors if is_fitted]
    held_out = [found for found, is_fitted in errors if not is_fitted]
    return (
        str(len(fitted)),
        _percent(statistics.median, fitted),
        str(len(held_out)),
        _percent(statistics.median, held_out),
        _percent(max, held_out),
    )


def _percent(of: Callable[[Sequence[float]], float], errors: Sequence[float]) -> str:
    return f"{of(errors):.0%}" if errors else ""


def main() -> int:
    """Write the tables, check them, or fit; returns the exit code."""
    parser = check_parser(__doc__)
    parser.add_argument("--fit", action="store_true", help="print the fitted numbers of H200")
    options = parser.parse_args()
    measured = rows()
    if options.fit:
        for name, value in dataclasses.asdict(fit(measured, H200)).items():
            print(f"{name}={value:.3g}" if isinstance(value, float) else f"{name}: given")
        return 0
    text = DOCUMENT.read_text(encoding="utf-8")
    updated = with_blocks(text, {"model error": lambda _: tables(H200, measured)})
    is_outdated = write_changed({DOCUMENT: updated}, check=options.check)
    return int(is_outdated and options.check)


if __name__ == "__main__":
    sys.exit(main())
