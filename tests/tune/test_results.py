"""Result files, and what is made from them: comparisons, tables."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from taxfree import fingerprints
from taxfree.errors import TaxfreeError, UsageError
from taxfree_tune.drivers import nvidia
from taxfree_tune.measuring import environment
from taxfree_tune.measuring.results import (
    Results,
    Row,
    Skipped,
    below,
    by_problem,
    compare,
    load,
    save,
    write,
)

ROOT = Path(__file__).parents[2]
OP = "all_gather_matmul"


def row(variant: str, mode: str, us: float, m: int = 16, **other: object) -> Row:
    problem = {
        "m": m, "n": 3584, "k": 8192, "gather_dim": 1, "dtype": "float16", "world_size": 8,
        "weight_layout": "nk", "bias": False, "x_dtype": "same", "scales": "none",
        "fast_accumulation": False,
    }  # fmt: skip
    values = {
        "op": OP, "problem": problem, "variant": variant, "config": {}, "mode": mode,
        "median_us": us, "iqr_us": 0.5, "samples_us": (us,), "t_floor_us": 14.0,
        "t_gemm_us": 20.0, "t_link_us": 3.0, "t_bound_us": 14.0, "relative_error": 0.001,
        "fused": variant in ("push", "dispatch"),
    }  # fmt: skip
    return Row(**values | other)


ROWS = (
    row("baseline", "eager", 140.0),
    row("baseline", "graph", 42.0),
    row("registered", "graph", 39.2),
    row("one_shot", "graph", 31.6),
    row("push", "graph", 28.0),
    row("dispatch", "eager", 60.0, config={"variant": "push"}),
    row("dispatch", "graph", 28.0, config={"variant": "push"}, speedup_graph=1.5),
)
SKIPPED = (Skipped(OP, ROWS[0].problem, "pull", {}, "wrong", "3 values", 3),)


def script(name: str) -> ModuleType:
    """A script of benchmarks/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


class TestFiles:
    def test_what_is_saved_is_loaded(self, tmp_path):
        results = Results({"fabric": "cuda"}, ROWS, SKIPPED)
        save(results, tmp_path / "new" / "results.json")
        assert load(tmp_path / "new" / "results.json") == results
        assert [path.name for path in (tmp_path / "new").iterdir()] == ["results.json"]

    def test_fields_of_another_version_are_left_out(self, tmp_path):
        document = Results({}, ROWS[:1]).to_json()
        document["rows"][0]["colour"] = "red"
        del document["rows"][0]["tflops"]
        (tmp_path / "results.json").write_text(json.dumps(document))
        assert load(tmp_path / "results.json").rows == ROWS[:1]

    @pytest.mark.parametrize("text", ["", "[]", '{"schema": 2}', '{"schema": 1, "rows": [{}]}'])
    def test_anything_else_is_refused(self, tmp_path, text):
        path = tmp_path / "results.json"
        path.write_text(text)
        with pytest.raises(UsageError, match=r"results\.json"):
            load(path)

    def test_a_link_stays_and_its_file_is_replaced(self, tmp_path):
        (tmp_path / "latest.json").symlink_to("new/today.json")
        for text in ("first", "second"):
            write(tmp_path / "latest.json", text)
            assert (tmp_path / "latest.json").is_symlink()
            assert (tmp_path / "new/today.json").read_text() == text
        assert [path.name for path in (tmp_path / "new").iterdir()] == ["today.json"]

    def test_what_is_no_file_is_written_into(self, tmp_path):
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        try:
            write(pipe, "text")
            assert os.read(reader, 100) == b"text"
        finally:
            os.close(reader)
        assert pipe.is_fifo()
        assert list(tmp_path.iterdir()) == [pipe]

    @pytest.mark.parametrize("path", ["/", "."])
    def test_a_folder_is_no_place_for_results(self, path):
        with pytest.raises(TaxfreeError, match="cannot be written: Is a directory"):
            write(Path(path), "text")


class TestComparison:
    @pytest.mark.parametrize(
        ("us", "iqr", "judgement"),
        [(28.5, 0.1, "same"), (30.0, 0.1, "worse"), (26.0, 0.1, "better"), (30.0, 2.0, "same")],
    )
    def test_a_change_must_stand_out_of_the_noise(self, us, iqr, judgement):
        (verdict,) = compare([row("push", "graph", us, iqr_us=iqr)], ROWS)
        assert verdict.judgement == judgement
        assert verdict.change == pytest.approx(us / 28.0 - 1)

    def test_rows_without_a_past_are_left_out(self):
        assert compare([row("push", "graph", 1.0, m=17)], ROWS) == []

    def test_dispatch_is_held_against_the_baseline_in_a_graph(self):
        assert below(ROWS, 1.4) == []
        assert below(ROWS, 1.6) == [ROWS[-1]]


def test_rows_are_grouped_by_problem():
    groups = list(by_problem([*ROWS, row("push", "graph", 9.0, m=1)]))
    assert [len(group) for group in groups] == [len(ROWS), 1]


class TestEnvironment:
    def test_only_variables_that_steer_are_recorded_and_no_paths(self):
        recorded = environment.variables(
            {"NCCL_ALGO": "Ring", "TRITON_CACHE_DIR": "/here/it/is", "HOME": "/root", "USER": "me"}
        )
        assert recorded == {"NCCL_ALGO": "Ring"}

    def test_clocks_and_throttling_are_read(self, monkeypatch):
        line = (
            "0, NVIDIA H200, GPU-a, 143771, 17, 1755, 1980, 3201, 3201, 61, 690.10, 700.00, 0x6\n"
        )
        monkeypatch.setattr(nvidia, "output", lambda *command: line)
        (gpu,) = environment.gpus("GPU-a")
        assert (gpu["name"], gpu["sm_mhz"], gpu["throttled"]) == (
            "NVIDIA H200", 1755.0, ["power cap"],
        )  # fmt: skip

    def test_a_machine_without_the_tool_is_recorded_too(self, monkeypatch):
        monkeypatch.setenv("PATH", "")
        assert environment.gpus() == []
        assert environment._topology() == []


class TestTables:
    TEXT = "before\n<!-- results: r.json dtype=float16 -->\nold\n<!-- end of results -->\nafter\n"

    def test_a_table_has_a_row_per_m(self, tmp_path):
        tables = script("tables")
        save(Results({}, (*ROWS, row("baseline", "eager", 99.0, m=1))), tmp_path / "r.json")
        text = tables.update(self.TEXT, tmp_path)
        lines = text.splitlines()
        assert lines[0] == "before"
        assert lines[-1] == "after"
        assert "old" not in lines
        assert "| 1 | 99.0 | - | - | - | - | - | - | - |" in lines
        row_of_16 = "| 16 | 140.0 | 39.2 | 31.6 | 28.0 (push) | 28.0 (push) | 1.40 | 2.00 | 60.0 |"
        assert row_of_16 in lines
        assert tables.update(text, tmp_path) == text

    def test_other_rows_make_other_tables(self, tmp_path):
        half = dataclasses.replace(ROWS[0], problem=ROWS[0].problem | {"dtype": "bfloat16"})
        save(Results({}, (*ROWS, half)), tmp_path / "r.json")
        text = script("tables").update(self.TEXT.replace(" dtype=float16", ""), tmp_path)
        assert text.count("| m |") == 2

    def test_a_table_names_the_variants_that_have_changed_since(self):
        current, of_another = fingerprints.versions("all_gather_matmul"), {"version": 0}
        new = dataclasses.replace(row("one_shot", "graph", 9.0), version=current["one_shot"])
        old = dataclasses.replace(row("push", "graph", 9.0), **of_another)
        picked = row("dispatch", "graph", 9.0)
        picked = dataclasses.replace(picked, config={"variant": "pull"}, **of_another)
        text = script("tables").tables([new, old, picked], {})
        assert text.rstrip().endswith("Changed since: pull, push.")
        assert "Changed since" not in script("tables").tables([new], {})

    def test_the_documents_are_up_to_date(self):
        command = [sys.executable, "benchmarks/tables.py", "--check"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        advice = "run `python -m benchmarks.tables`"
        assert done.returncode == 0, f"{done.stdout}{done.stderr}: {advice}"
