"""The block benchmark: its paths compute the same block, and its record says what ran."""

from __future__ import annotations

import json
import statistics

import pytest

from benchmarks import block
from taxfree.errors import WorkerLost
from taxfree_cli.exits import ExitCode
from tests.benchmarks.no_workers import NoWorkers

SHAPE = ["--rows", "3,4", "--hidden", "32", "--intermediate", "64", "--repetitions", "2"]


@pytest.mark.timeout(900)
def test_a_record_has_every_path_of_every_block(tmp_path, monkeypatch, capsys):
    file = tmp_path / "host.json"
    command = ["block", "--fabric", "host", "--gpus", "2", *SHAPE, "--out", str(file)]
    monkeypatch.setenv("TAXFREE_DB", str(tmp_path / "none.db"))
    monkeypatch.setattr("sys.argv", command)
    assert block.main() == 0, capsys.readouterr().err
    record = json.loads(file.read_text())
    assert record["environment"]["fabric"] == "host"
    tried = [(row["block"]["m"], row["block"]["activations"]) for row in record["rows"]]
    # three rows cannot be sharded; on the host PyTorch's ops serve nothing, and there is no graph
    assert tried == [(3, "replicated")] * 2 + [(4, "replicated")] * 2 + [(4, "sharded")] * 2
    for row in record["rows"]:
        assert (row["path"], row["mode"]) in [("library", "eager"), ("dispatch", "eager")]
        assert row["median_us"] == statistics.median(row["samples_us"])
        assert 0 < row["relative_error"] < 0.02
        ops = {"replicated": 1, "sharded": 2}[row["block"]["activations"]]
        assert list(row["choices"].values()) == ["baseline"] * ops


def test_what_was_finished_is_kept_where_the_rest_was_not(tmp_path, monkeypatch, capsys):
    def time_block(group, of, history, repetitions):
        if of.m > 3:
            raise WorkerLost("rank 1 died")
        return [{"path": "library", "mode": "eager", "choices": {}, "median_us": 1.0, "speedup": 1}]

    file = tmp_path / "host.json"
    command = ["block", "--fabric", "host", "--gpus", "2", *SHAPE, "--out", str(file)]
    monkeypatch.setattr("benchmarks.block.time_block", time_block)
    monkeypatch.setattr("benchmarks.block.WorkerGroup", NoWorkers)
    monkeypatch.setattr("sys.argv", command)
    assert block.main() == ExitCode.PEER_LOST, capsys.readouterr().err
    assert len(json.loads(file.read_text())["rows"]) == 1


def test_columns_that_do_not_divide_are_an_error(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["block", "--fabric", "host", "--gpus", "3", *SHAPE])
    assert block.main() == 2
    assert "do not divide over 3 ranks" in capsys.readouterr().err
