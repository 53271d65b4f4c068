"""`taxfree tune`, and `taxfree check --compiled` as far as it needs no compiler."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from taxfree.errors import WorkerLost
from taxfree_check.cross_compile.screen import ScreenVerdict
from taxfree_cli import tune_search
from taxfree_cli.exits import ExitCode, failure
from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_tune.measuring.trial import Candidate
from taxfree_tune.tuning.tuner import Event
from taxfree_tuning_db import Database
from tests.check.cross_compile.conftest import run_python
from tests.shipped import shipped_as_of_today
from tests.tritons import needs_3_8

SHAPE = ("--shapes", "m=5 n=32 k=32", "--gpus", 2, "--fabric", "host")


def test_nothing_but_candidates_that_hang_is_a_failure() -> None:
    row = {
        "op": "all_gather_matmul", "problem": {"m": 5, "dtype": "float16", "world_size": 2},
        "not_measured": {"hung": 3}, "is_library_alone": False,
    }  # fmt: skip
    tune_search._fail_if_all_hung([row, {"state": "refused"}])
    with pytest.raises(WorkerLost, match=r"m=5 .*: 3 candidates hung") as raised:
        tune_search._fail_if_all_hung([row | {"is_library_alone": True}])
    assert "taxfree check --op all_gather_matmul" in raised.value.hint
    assert failure(raised.value).exit_code == ExitCode.PEER_LOST


def test_progress_compares_no_times_of_interpreted_kernels() -> None:
    event = Event(AllGatherMatmul(5, 32, 32, world_size=2), 1, 4, 9.0, Candidate("push", {}), 6.0)
    assert "best 9 us push  library 6 us  0.67x" in tune_search._line(event, False).plain
    assert tune_search._line(event, True).plain.endswith("world_size=2  1/4")


class TestTune:
    def test_it_stores_a_record_and_goes_on_where_it_stopped(
        self, cli: Callable[..., Any], tmp_path: Path
    ) -> None:
        first = cli("tune", *SHAPE, "--trials", 3, "--json")
        document = json.loads(first.out)
        row = document["rows"][0]
        assert document["skipped"] == []
        assert first.code == ExitCode.DONE
        assert row["measured"] == 3
        assert row["problem"]["m"] == 5

        again = json.loads(cli("tune", *SHAPE, "--trials", 4, "--json").out)["rows"][0]
        assert again["measured"] == 4  # one more, the others are known

        with Database(tmp_path / "tuning.sqlite", read_only=True) as database:
            (record,) = database.records()
            assert len(database.trials(record.key)) >= 4

    def test_it_tunes_what_a_run_has_collected(
        self, cli: Callable[..., Any], tmp_path: Path
    ) -> None:
        fields = {"m": 5, "n": 32, "k": 32, "world_size": 2}
        met = [
            {"op": "matmul_all_reduce", **fields, "residual": True, "calls": 3},
            {"op": "all_gather_matmul", **fields, "calls": 2},
            {"op": "matmul_all_reduce", **fields, "calls": 1},
        ]
        path = tmp_path / "problems.yaml"
        path.write_text(yaml.safe_dump(met), encoding="utf-8")
        command = ("tune", "--shapes", path, "--fabric", "host", "--trials", 1, "--json")

        def tuned(*options: object) -> list[tuple[str, bool]]:
            rows = json.loads(cli(*command, *options).out)["rows"]
            return [(row["op"], row["problem"].get("residual", False)) for row in rows]

        assert tuned("--op", "all_gather_matmul") == [("all_gather_matmul", False)]
        assert tuned() == [
            ("matmul_all_reduce", True), ("matmul_all_reduce", False), ("all_gather_matmul", False),
        ]  # fmt: skip
        with Database(tmp_path / "tuning.sqlite", read_only=True) as database:
            assert {record.problem["world_size"] for record in database.records()} == {2}

    def test_a_problem_that_was_not_tried_gets_no_record(
        self, cli: Callable[..., Any], tmp_path: Path
    ) -> None:
        outcome = cli("tune", *SHAPE, "--budget", "0.001s", "--json")
        assert "1 problems were not tried" in outcome.err
        (skipped,) = json.loads(outcome.out)["skipped"]
        assert (skipped["problem"]["m"], skipped["state"]) == (5, "not tried")
        assert skipped["reason"] == "out of budget"
        with Database(tmp_path / "tuning.sqlite", read_only=True) as database:
            assert list(database.records()) == []

    def test_a_problem_that_no_variant_serves_is_left_to_the_library(
        self, cli: Callable[..., Any], tmp_path: Path
    ) -> None:
        outcome = cli("tune", "--shapes", "16x64x64", "--gpus", "1", "--fabric", "host", "--json")
        assert outcome.code == ExitCode.DONE
        assert "is left to the library: one_shot: one rank has no peers" in outcome.err
        document = json.loads(outcome.out)
        assert document["rows"] == []
        (skipped,) = document["skipped"]
        assert (skipped["op"], skipped["state"]) == ("all_gather_matmul", "refused")
        assert skipped["problem"]["world_size"] == 1
        assert "one_shot: one rank has no peers" in skipped["reason"]
        with Database(tmp_path / "tuning.sqlite", read_only=True) as database:
            assert list(database.records()) == []

    def test_a_search_among_some_variants_keeps_what_is_known_of_others(
        self, cli: Callable[..., Any], tmp_path: Path
    ) -> None:
        for variant in ("pull", "push_two_kernel"):
            cli("tune", *SHAPE, "--trials", 1, "--variant", variant)
        with Database(tmp_path / "tuning.sqlite", read_only=True) as database:
            (record,) = database.records()
        measured = {each.variant for each in (record.winner, *record.runners_up)}
        assert measured >= {"pull", "push_two_kernel"}

    def test_two_searches_do_not_share_a_database(
        self, cli: Callable[..., Any], tmp_path: Path
    ) -> None:
        with Database(tmp_path / "tuning.sqlite"), (tmp_path / "tuning.sqlite").open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            outcome = cli("tune", *SHAPE, "--trials", 1)
        assert outcome.code == ExitCode.FAILED
        assert "another taxfree tune writes into" in outcome.err

    def test_check_fails_where_a_problem_lacks_a_record_and_measures_nothing(
        self, cli: Callable[..., Any], tmp_path: Path
    ) -> None:
        check = ("tune", "--check", "--hardware", "h200", "--gpus", 8)
        with pytest.MonkeyPatch.context() as current:
            current.setattr("taxfree_tuning_db.shipped_records", shipped_as_of_today)
            done = cli(*check, "--shapes", "paper", "--dtype", "bf16")
        assert (done.code, done.out) == (ExitCode.DONE, "")
        assert "all 11 problems have a current record of NVIDIA H200" in done.err

        missing = cli(*check, "--model", "llama-3.1-70b", "--shapes", "model m=17")
        assert missing.code == ExitCode.FAILED
        assert "matmul_all_reduce m=17 n=8192 k=1024" in missing.out
        assert "6 of 6 problems lack a current record" in missing.err
        with pytest.MonkeyPatch.context() as narrow:
            narrow.setenv("COLUMNS", "80")
            lines = cli(*check, "--model", "llama-3.1-70b", "--shapes", "model m=17,18").out
        assert lines.startswith("no record:\n  matmul_all_reduce m=17,18 n=8192 k=1024")
        document = json.loads(cli(*check, "--shapes", "17x64x64", "--json").out)
        assert (document["checked"], len(document["lacking"])) == (1, 1)
        assert document["lacking"][0]["problem"]["m"] == 17
        assert not (tmp_path / "tuning.sqlite").exists()

    def test_check_takes_the_table_that_a_team_commits(
        self, cli: Callable[..., Any], tmp_path: Path
    ) -> None:
        cli("tune", *SHAPE, "--trials", 1)
        cli("db", "export", tmp_path / "team.json")
        check = ("tune", "--check", *SHAPE, "--db", tmp_path / "team.json")
        assert cli(*check).code == ExitCode.DONE
        assert cli(*check, "--shapes", "6x32x32").code == ExitCode.FAILED

    def test_a_line_that_tunes_may_be_tried_dry(
        self, cli: Callable[..., Any], tmp_path: Path
    ) -> None:
        path = tmp_path / "other.sqlite"
        others = ("--trials", 1, "--budget", "10m", "--db", path)
        outcome = cli("tune", *SHAPE, *others, "--dry-run", "--json")
        assert outcome.code == ExitCode.DONE
        assert not path.exists()

    def test_a_dry_run_says_why_nothing_would_be_tried(self, cli: Callable[..., Any]) -> None:
        arguments = ("--variant", "push_tma", "--hardware", "mi300x", "--shapes", "16x64x64")
        outcome = cli("tune", "--dry-run", *arguments, "--gpus", 8, "--json")
        (row,) = json.loads(outcome.out)["rows"]
        assert row["refused"] == "not written for gfx942"
        assert (row["op"], row["problem"]["world_size"]) == ("all_gather_matmul", 8)
        assert row["config"] == {}
        table = cli("tune", "--dry-run", *arguments, "--gpus", 8).out
        assert "m=16 n=64 k=64" in table

    def test_a_dry_run_prints_each_problem_when_it_is_compiled(
        self, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def dry_run(problem: Any, *_: Any) -> list[ScreenVerdict]:
            if problem.m > 16:
                raise KeyboardInterrupt
            return [ScreenVerdict("push", {"BLOCK_M": 16}, {}, None)]

        monkeypatch.setattr("taxfree_tune.tuning.session.dry_run", dry_run)
        outcome = cli("tune", "--dry-run", "--shapes", "m=16,32 n=64 k=64", "--gpus", 8)
        assert outcome.code == ExitCode.INTERRUPTED
        assert "32 candidates of each of 2 problems" in outcome.err
        assert "m=16 n=64 k=64" in outcome.out
        assert "BLOCK_M=16" in outcome.out

    @needs_3_8
    def test_a_dry_run_says_what_does_not_fit_a_gpu_that_is_not_here(self, tmp_path: Path) -> None:
        out = run_python(
            "-m", "taxfree_cli.app", "tune", "--dry-run", "--hardware", "mi300x", "--variant",
            "push", "--shapes", "m=16 n=512 k=1024", "--gpus", "8", "--trials", "3", "--json",
            TAXFREE_DB=str(tmp_path / "tuning.sqlite"),
        )  # fmt: skip
        rows = json.loads(out)["rows"]
        assert all(row["refused"] or row["registers"] > 0 for row in rows)
        assert any(row["refused"] is None for row in rows)
