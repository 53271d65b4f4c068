"""Committed benches are records."""

from __future__ import annotations

from pathlib import Path

import pytest

from taxfree.fingerprints import versions
from taxfree_kernels.variant import operation_names
from taxfree_tune.measuring.results import load
from taxfree_tune.tuning.winner import adopted
from taxfree_tuning_db import Table, shipped_records

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
FILES = [
    path
    for op in operation_names()
    for path in sorted(RESULTS.glob(f"{op}/*.json"))
    if not path.name.startswith("local-")  # beside other implementations, on one GPU
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_each_problem_has_a_record(path: Path) -> None:
    """Else `taxfree db adopt` makes it; exports of the database are the shipped tables."""
    table, found = Table(shipped=shipped_records()), adopted(load(path))
    known = {record.key for op in operation_names() for record in table.serving(versions(op))}
    assert [record.problem for record in found.records if record.key not in known] == []
    assert all("is already faster" in reason for _, reason in found.left_out)
