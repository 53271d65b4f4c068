"""`taxfree check`: what it prints, and its exit codes."""

from __future__ import annotations

import json

import pytest

from taxfree_cli.app import run
from taxfree_kernels.device import sync
from tests.check.checker.mutate import mutants
from tests.check.cross_compile.conftest import run_python
from tests.tritons import FOLDERS, TRITONS, before

CHECK = ["check", "--op", "all_gather_matmul", "--variant", "push"]


@pytest.fixture
def deleted_signals():
    deleted = [each for each in mutants([sync.signal]) if "atomic_xchg(...) deleted" in str(each)]
    with deleted[0].installed():
        yield


@pytest.mark.usefixtures("deleted_signals")
def test_a_violation_is_exit_code_4_with_a_report_and_a_replay(capsys):
    assert run([*CHECK, "--seeds", "1"]) == 4
    captured = capsys.readouterr()
    assert "deadlock: all programs wait" in captured.out
    assert "signal word of channel 0, source rank" in captured.out
    assert captured.err.splitlines()[-1].startswith("hint: replay: taxfree check --op")


@pytest.mark.usefixtures("deleted_signals")
def test_json_is_one_document_with_the_violation(capsys):
    assert run([*CHECK, "--seeds", "1", "--json"]) == 4
    (checked,) = json.loads(capsys.readouterr().out)["checks"]
    assert checked["verdict"] == "violation"
    assert checked["violation"]["reason"] == "deadlock"
    assert checked["coverage"]


def test_thin_coverage_is_a_failure_that_shows_what_is_missing(capsys):
    one_shot = ["check", "--op", "all_gather_matmul", "--variant", "one_shot"]
    assert run([*one_shot, "--seeds", "1"]) == 1
    captured = capsys.readouterr()
    assert "not covered" in captured.out
    assert "error: too little was executed" in captured.err


def test_a_pass_prints_its_coverage(capsys):
    assert run([*CHECK, "--seeds", "16"]) == 0
    assert "sync.signal(" in capsys.readouterr().out


@pytest.mark.parametrize("triton", [each for each in TRITONS if FOLDERS[each]])
def test_another_triton_checks_too(triton):
    if triton in before(7):
        pytest.skip("its interpreter needs numpy < 2.4")
    out = run_python(
        "-m", "taxfree_cli.app", *CHECK, "--seeds", "16", triton=triton, TRITON_INTERPRET="1"
    )
    assert "sync.signal(" in out


@pytest.mark.parametrize(
    "arguments", [["--variant", "nope"], ["--shapes", "m=0 n=1 k=1"], ["--gpus", "none"]]
)
def test_a_wrong_argument_is_one_error_line(arguments, capsys):
    assert run(["check", "--op", "all_gather_matmul", *arguments]) in (1, 2)
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
