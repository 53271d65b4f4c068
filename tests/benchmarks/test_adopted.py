"""Committed benches are records."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from taxfree_kernels.variant import operation_names
from taxfree_tune.measuring.results import load
from taxfree_tune.tuning.winner import adopted
from taxfree_tuning_db import shipped_records

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
    known, found = {record.key for record in shipped_records()}, adopted(load(path))
    assert [record.problem for record in found.records if record.key not in known] == []
    raised = "has changed since|this version's"  # a version, since the bench
    unexpected = [
        each for each in found.left_out if not re.search(f"is already faster|{raised}", each[1])
    ]
    assert unexpected == []
