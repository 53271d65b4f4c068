"""What a report says of records, trials and result files, before it is drawn."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from taxfree import fingerprints
from taxfree.errors import UsageError
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.variant import is_library
from taxfree_tune.reporting import calls, comparisons, models, sources, studies
from taxfree_tune.reporting.page import page
from taxfree_tuning_db import Database, DatabaseMissing, Record, TrialRecord, shipped_records

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
ACCOUNTS = RESULTS / "explain/nvidia-h200-x2-large.json"
TIMELINES = RESULTS / "timeline/nvidia-h200-x2.json"
BENCH = RESULTS / "matmul_all_reduce/nvidia-h200-x2-rms-norm.json"


@pytest.fixture
def record() -> Record:
    return next(r for r in shipped_records() if r.winner.variant == "push" and r.runners_up)


def read(folder: Path, *results: Path) -> sources.Sources:
    return sources.read(folder / "tuning.sqlite", False, results)


def store(folder: Path, record: Record, *trials: TrialRecord) -> None:
    with Database(folder / "tuning.sqlite") as database:
        database.put(record)
        for trial in trials:
            database.add_trial(record.key, trial)


def trial(record: Record, us: float, **config: int) -> TrialRecord:
    version = fingerprints.versions(record.op)["push"]
    return TrialRecord("push", dict(config), "measured", "", {"graph": us}, 1.0, version)


class TestSources:
    def test_files_are_known_by_their_content(self, tmp_path: Path) -> None:
        found = read(tmp_path, RESULTS)
        assert {name.partition("/")[0] for name, _ in found.benches} >= {"flash_decode"}
        assert "explain/nvidia-h200-x2-large.json" in [each.source for each in found.accounts]
        assert [each.source for each in found.timelines] == ["timeline/nvidia-h200-x2.json"]
        assert "soak/nvidia-h200-x2.json" in found.left_out

    def test_what_cannot_be_read_in_a_folder_is_listed(self, tmp_path: Path) -> None:
        folder = tmp_path / "results"
        folder.mkdir()
        (folder / "broken.json").write_text("{")
        (folder / "half.json").write_text('{"pictures": [{}]}')
        assert read(tmp_path, folder).left_out == ["broken.json", "half.json"]
        with pytest.raises(UsageError, match="cannot be read as JSON"):
            read(tmp_path, folder / "broken.json")

    def test_times_of_interpreted_kernels_are_left_out(
        self, tmp_path: Path, record: Record
    ) -> None:
        hardware = fingerprints.hardware_fingerprint(KNOWN["cpu"])
        with Database(tmp_path / "tuning.sqlite") as database:
            database.put(replace(record, hardware=hardware))
        assert {each.source for each in read(tmp_path).records} == {sources.SHIPPED}
        text = (RESULTS / "timeline/nvidia-h200-x2.json").read_text()
        (tmp_path / "host.json").write_text(text.replace('"fabric": "cuda"', '"fabric": "host"'))
        assert read(tmp_path, tmp_path).left_out == ["host.json"]

    def test_a_file_that_holds_nothing_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="holds nothing that a report shows"):
            read(tmp_path, RESULTS / "soak/nvidia-h200-x2.json")

    @pytest.mark.parametrize("entry", [{}, None, {"op": "all_gather_matmul"}])
    def test_an_incomplete_timeline_is_refused(self, tmp_path: Path, entry: object) -> None:
        path = tmp_path / "trace.json"
        path.write_text(json.dumps({"pictures": [entry]}), encoding="utf-8")
        with pytest.raises(UsageError, match="an entry has no"):
            read(tmp_path, path)

    def test_a_database_that_was_named_must_be_there(self, tmp_path: Path) -> None:
        with pytest.raises(DatabaseMissing):
            sources.read(tmp_path / "none.sqlite", True, ())


class TestComparisons:
    def test_ours_and_dispatch_stand_beside_the_fastest_library(
        self, tmp_path: Path, record: Record
    ) -> None:
        newest = replace(record, provenance=record.provenance | {"created": "2030-01-01T00:00"})
        store(tmp_path, newest)
        (found,) = [
            each for each in comparisons.comparisons(read(tmp_path)) if each.created[:4] == "2030"
        ]
        times = [
            min(each.median_us.values())
            for each in (record.baseline, *record.runners_up)
            if is_library(record.op, each.variant)
        ]
        assert found.library.us == min(times)
        assert found.ours is not None
        assert found.ours.us == found.dispatch.us == record.winner.median_us["graph"]
        assert found.source == "tuning.sqlite"

    def test_a_loss_is_shown_though_dispatch_runs_the_library(self, tmp_path: Path) -> None:
        rows = comparisons.rows(comparisons.comparisons(read(tmp_path, BENCH)))
        losses = [row for row in rows if (row["ours_x"] or 1) < 1]
        assert losses
        assert all(row["ours_us"] > row["library_us"] for row in losses)

    def test_bounds_are_measured_or_said_to_be_modelled(self, tmp_path: Path) -> None:
        def kinds(*results: Path) -> set[str]:
            rows = comparisons.rows(comparisons.comparisons(read(tmp_path, *results)))
            return {row["bound"] for row in rows if row["bound_us"] is not None}

        assert kinds() == {"modelled"}
        assert kinds(BENCH) == {"modelled", "at measured rates"}

    def test_a_changed_kernel_is_marked(self, tmp_path: Path, record: Record) -> None:
        changed = replace(record, winner=replace(record.winner, version=0))
        store(tmp_path, replace(changed, provenance={"created": "2030-01-01T00:00"}))
        rows = comparisons.rows(comparisons.comparisons(read(tmp_path)))
        assert [row["kernel"] for row in rows if row["measured"][:4] == "2030"] == ["changed since"]


class TestStudies:
    def test_the_line_is_the_best_so_far(self, tmp_path: Path, record: Record) -> None:
        store(
            tmp_path,
            record,
            *(trial(record, us, block=block) for block, us in enumerate((31.0, 11.0, 21.0))),
        )
        line = studies.convergence(read(tmp_path))
        assert [row["best_us"] for row in line] == [31.0, 11.0, 11.0]

    def test_trials_of_other_kernels_are_left_out(self, tmp_path: Path, record: Record) -> None:
        store(tmp_path, record, replace(trial(record, 9.0, block=1), version=0))
        assert studies.convergence(read(tmp_path)) == []


class TestCalls:
    def test_the_parts_of_a_bar_add_up_to_the_call(self, tmp_path: Path) -> None:
        rows = calls.taxes(read(tmp_path, ACCOUNTS))
        for place in {(row["panel"], row["size"], row["pipeline"]) for row in rows}:
            own = [r for r in rows if (r["panel"], r["size"], r["pipeline"]) == place]
            assert sum(row["us"] for row in own) == pytest.approx(own[0]["total_us"], abs=0.1)
            assert own[0]["pipeline"] or sum(r["percent"] for r in own) == pytest.approx(100, abs=1)

    def test_programs_lie_in_the_band_of_their_rank(self, tmp_path: Path) -> None:
        rows = calls.timelines(read(tmp_path, TIMELINES))
        assert {row["rank"] for row in rows} == {0, 1}
        assert all(abs(row["top"] - row["rank"]) <= 0.5 for row in rows)
        assert all(row["begin_us"] <= row["end_us"] for row in rows)


class TestModels:
    ROW: ClassVar = {
        "model": "llama-3.1-8b", "layers": 4, "world_size": 2,
        "phase": {"name": "decode", "batch": 16, "length": 1024}, "path": "taxfree",
        "mode": "graph", "median_us": 500.0, "iqr_us": 1.0, "tokens_per_s": 32000.0,
        "speedup": 1.2, "relative_error": 0.005123,
    }  # fmt: skip

    def read(self, folder: Path, fabric: str, row: dict[str, Any]) -> sources.Sources:
        path = folder / "model.json"
        environment = {"fabric": fabric, "hardware": {"gpu": "NVIDIA H100"}}
        path.write_text(json.dumps({"environment": environment, "rows": [row]}), encoding="utf-8")
        return read(folder, path)

    def test_are_bars_of_each_phase(self, tmp_path: Path) -> None:
        found = self.read(tmp_path, "cuda", self.ROW)
        (row,) = models.rows(found)
        assert row["panel"] == "llama-3.1-8b, 4 layers, decode of batch 16 behind 1024, 2 GPUs"
        assert (row["mode"], row["tokens_per_s"], row["error"]) == ("taxfree graph", 32000, 0.0051)
        assert 'id="models-bars"' in page(found)

    def test_of_interpreted_kernels_are_not_shown(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="holds nothing that a report shows"):
            self.read(tmp_path, "host", self.ROW)

    def test_that_are_incomplete_are_refused(self, tmp_path: Path) -> None:
        row = {name: value for name, value in self.ROW.items() if name != "phase"}
        with pytest.raises(UsageError, match="an entry has no 'phase'"):
            self.read(tmp_path, "cuda", row)


def test_what_is_modelled_says_so_on_the_page(tmp_path: Path) -> None:
    document = json.loads(ACCOUNTS.read_text(encoding="utf-8"))
    for row in document["rows"]:
        row |= {"is_modelled": True, "hardware": "AMD MI300X"}
    document["environment"] = {"hardware": {"gpu": "AMD MI300X"}, "modelled": True}
    path = tmp_path / "modelled.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    text = page(read(tmp_path, path))
    assert "AMD MI300X, modelled" in text
    assert text.count("AMD MI300X") == text.count("AMD MI300X, modelled")


def test_names_in_files_are_no_markup(tmp_path: Path) -> None:
    document = json.loads(ACCOUNTS.read_text(encoding="utf-8"))
    for row in document["rows"]:
        row["hardware"] = "<script>alert(1)</script>"
    path = tmp_path / "hostile.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    assert "<script>alert" not in page(read(tmp_path, path))


def test_families_stand_by_their_numbers() -> None:
    families = ["batch=16 n=64", "n=11008 k=4096", "batch=8 n=64", "n=3584 k=8192"]
    assert sorted(families, key=comparisons._by_numbers) == [
        "batch=8 n=64", "batch=16 n=64", "n=3584 k=8192", "n=11008 k=4096",
    ]  # fmt: skip
