"""Checks public multi-GPU Triton kernels, from checkouts of their repositories.

    python -m tests.check.checker.public_kernels --checkouts FOLDER  # check; write results, page
    python -m tests.check.checker.public_kernels                     # write the page from results

FOLDER holds the checkouts by name: ``iris``, ``kraken``, ``symm-mem-recipes`` and
``Triton-distributed``; those that are missing are left out. Kernels run as their authors launch
them, on tiny problems; nothing of theirs is stored here but the report's line.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from taxfree_check.checker import CheckFailed, World
from tests.check.checker.public_cases import PROJECTS, Case

RESULTS = Path(__file__).with_suffix(".json")
PAGE = Path(__file__).parents[3] / "docs" / "public-kernels.md"
_REPOSITORIES = {
    "kraken": "meta-pytorch/kraken",
    "symm-mem-recipes": "yifuwang/symm-mem-recipes",
    "iris": "ROCm/iris",
    "Triton-distributed": "ByteDance-Seed/Triton-distributed",
}


@dataclass(frozen=True)
class Row:
    """The result of one kernel; the fields are those of the table."""

    project: str
    commit: str
    kernel: str
    path: str
    ranks: int
    verdict: str
    schedules: int
    report: str
    reading: str
    confirmed: str
    lines: list[str] = field(default_factory=list)


def _check(case: Case, commit: str, seeds: int) -> Row:
    """Check one kernel."""
    world = World(case.ranks, seeds, co_resident=case.co_resident, covered=False)
    report, lines = "", []
    try:
        with world:
            case.run(world)
    except CheckFailed as error:
        violation = error.checked.violation
        assert violation is not None
        lines_of = [line.strip().rstrip(":") for line in violation.details]
        waits = [line for line in lines_of if line.startswith("for ")]
        report = f"{violation.reason.title}: {(waits or lines_of)[0]}"
        lines = list(violation.lines)
        print(error)
    checked = world.checks[-1]
    verdict = "pass" if checked.violation is None else checked.violation.reason.title
    print(f"{case.project} {case.kernel}: {verdict}, {checked.rate}", flush=True)
    return Row(
        case.project, commit, case.kernel, case.path, case.ranks, verdict, checked.schedules,
        report, case.reading if report else "", case.confirmed if report else "", lines,
    )  # fmt: skip


_PAGE = """# Public kernels, checked

<!-- Written by `python -m tests.check.checker.public_kernels`: change that, not this page. -->

Kernels of {projects} other projects ran in [the checker](check.md), from checkouts of their repositories: on tiny problems,
launched as their authors or their benchmarks do, in up to {seeds} schedules each. `reported` is what the checker says of
this commit, under the memory model of PTX; each report was compared with the source. It does not say that hardware
shows it. `pass` means that these schedules showed nothing.
The lines of each report are in `tests/check/checker/public_kernels.json`.

PyTorch's symmetric memory, Iris' hosts and Triton-distributed's language are simulated; the device functions of Iris are
its own. The recipes' all-reduce, the message passing and the tutorial make one call, all others three. Iris' kernels
have a barrier of all hosts after each call, as their benchmarks do.
"""  # noqa: E501


def page(rows: list[dict[str, Any]]) -> str:
    """The page that shows the results."""
    commits = {row["project"]: row["commit"] for row in rows}
    seeds = max(row["schedules"] for row in rows)
    lines = [_PAGE.format(projects=len(commits), seeds=seeds)]
    lines += ["| project | repository | commit |", "|---|---|---|"]
    lines += [
        f"| {name} | {_REPOSITORIES[name]} | `{each[:12]}` |" for name, each in commits.items()
    ]
    lines += [
        "",
        "| project | kernel | file | ranks | schedules | verdict |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        verdict = row["verdict"] if row["verdict"] == "pass" else f"reported: {row['verdict']}"
        cells = (row["project"], f"`{row['kernel']}`", row["path"], row["ranks"], row["schedules"])
        lines.append(f"| {' | '.join(map(str, cells))} | {verdict} |")
    lines += ["", "## What the reports say", ""]
    for row in rows:
        if row["report"]:
            end = row["confirmed"] or "no issue or pull request that says so was found"
            where = ", ".join(dict.fromkeys(row["lines"]))
            lines.append(
                f"- **{row['project']}, `{row['kernel']}`.** {row['report']} ({where}). "
                f"The source: {row['reading']}. Elsewhere: {end}."
            )
    return "\n".join(lines) + "\n"


def _rows(checkouts: Path, seeds: int, only: str) -> Iterator[Row]:
    """The results of the checkouts that are there."""
    for project, cases in PROJECTS.items():
        root = checkouts / project
        if not root.is_dir():
            continue
        command = ["git", "-C", str(root), "rev-parse", "HEAD"]
        commit = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        for case in cases(root):
            if only in f"{project} {case.kernel}":
                yield _check(case, commit, seeds)


def main() -> None:
    """Check what the arguments name, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkouts", type=Path)
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument(
        "--only", default="", help="a part of project and kernel: nothing is written"
    )
    given = parser.parse_args()
    rows = list(_rows(given.checkouts, given.seeds, given.only)) if given.checkouts else []
    if given.only:
        return
    if rows:
        RESULTS.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    PAGE.write_text(page(json.loads(RESULTS.read_text())), encoding="utf-8")


if __name__ == "__main__":
    main()
