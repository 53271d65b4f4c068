"""Measuring everything: what it runs, and what becomes of steps that fail."""

from __future__ import annotations

import sys

import pytest

from benchmarks import measure
from benchmarks.measure import SHAPES, MeasureStep, run_all, steps
from taxfree_kernels.variant import operation_names
from tests.ranks import LOCAL


def test_every_operation_of_several_ranks_is_searched_and_benched():
    searched = set(operation_names()) - set(LOCAL)
    found = list(steps(4, "nvidia-h200", 40, 20))
    for kind in ("tune", "bench"):
        both_types = 1  # of the gather
        assert sum(step.kind == kind for step in found) == len(searched) + both_types
    assert SHAPES.keys() == searched


def python(source: str, **fields: object) -> MeasureStep:
    return MeasureStep("test", ("-c", source), 1, **fields)  # type: ignore[arg-type]


PRINTS = "print('{\"rows\": [1]}')"
STORES = "import sys; open(sys.argv[2], 'w').write('{\"rows\": [2]}')"
KEEPS = "import os; open(os.environ['RECORD'], 'w').write('{\"rows\": [3]}')"


@pytest.mark.parametrize(
    ("source", "option", "rows"), [(PRINTS, None, 1), (STORES, "--out", 2), (KEEPS, "RECORD", 3)]
)
def test_a_file_is_made_in_any_of_three_ways(tmp_path, source, option, rows):
    file = tmp_path / "new" / "r.json"
    assert python(source, file=file, option=option).run() is None
    assert file.read_text() == f'{{"rows": [{rows}]}}\n'


def test_a_step_that_fails_leaves_its_file_and_the_others_run(tmp_path, capfd):
    file = tmp_path / "r.json"
    file.write_text("old")
    broken = python(f"{PRINTS}; raise SystemExit(4)", file=file)
    nothing = python("pass", file=file, option="--out")
    late = MeasureStep("test", ("-c", "import time; time.sleep(60)"), 0.005)
    done = python("print('ran')")
    assert run_all([broken, nothing, late, done]) == 1
    assert file.read_text() == "old"
    out = capfd.readouterr().out
    assert "ran" in out
    for reason in ("exit code 4", "it made no file", "ended after 0.005 minutes"):
        assert f"test: {reason}: python -c" in out


def test_commands_are_printed_instead(monkeypatch, capsys):
    arguments = ["measure", "--gpus", "2", "--only", "tune", "--only", "instrument", "--dry-run"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert measure.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(SHAPES) + 2
    assert all("--gpus 2" in line for line in lines[:-1])
    record = "benchmarks/results/instrument/nvidia-h200-x2.json"
    assert lines[-1].startswith(f"TAXFREE_INSTRUMENT_RECORD={record} python -m pytest")


def test_an_operation_can_be_measured_by_itself(monkeypatch, capsys):
    arguments = ["measure", "--gpus", "2", "--op", "flash_decode", "--dry-run"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert measure.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[3] for line in lines] == ["tune", "bench"]
