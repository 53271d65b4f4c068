"""The cost of noting: its record."""

from __future__ import annotations

import json

import pytest

from benchmarks import timeline_cost
from benchmarks.timeline_cost import Row
from taxfree.errors import WorkerLost
from taxfree_cli.exits import ExitCode
from tests.benchmarks.no_workers import NoWorkers


@pytest.mark.parametrize(("broken", "drawn"), [("costs", 0), ("pictures", 1)])
def test_what_was_finished_is_kept_where_the_rest_was_not(
    tmp_path, monkeypatch, capsys, broken, drawn
):
    def stub(name, found):
        def iterate(*_):
            yield found
            if name == broken:
                raise WorkerLost("rank 1 died")

        monkeypatch.setattr(timeline_cost, name, iterate)

    stub("costs", Row("all_gather_matmul", {"m": 16}, "push", {}, [10.0], [11.0]))
    stub("pictures", {"timelines": []})
    file = tmp_path / "host.json"
    monkeypatch.setenv("TAXFREE_DB", str(tmp_path / "none.db"))
    monkeypatch.setattr(timeline_cost, "group_for", NoWorkers)
    command = ["timeline_cost", "--fabric", "host", "--shapes", "16x64x64", "--out", str(file)]
    monkeypatch.setattr("sys.argv", command)
    assert timeline_cost.main() == ExitCode.PEER_LOST, capsys.readouterr().err
    found = json.loads(file.read_text())
    assert [row["variant"] for row in found["rows"]] == ["push"]
    assert len(found["pictures"]) == drawn
