"""`taxfree bench`."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from typing import ClassVar

import pytest
from rich.console import Console

from taxfree._runtime.dispatch import Choice
from taxfree.errors import TaxfreeError
from taxfree_cli.bench import fail_if_broken
from taxfree_cli.bench_views import print_problem, problem_table, us
from taxfree_cli.exits import ExitCode, failure
from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_kernels.hardware import KNOWN
from taxfree_tune.benching.bench import ProblemResult
from taxfree_tune.benching.model import PhaseResult
from taxfree_tune.benching.model_tasks import ModeOutcome, Phase
from taxfree_tune.measuring.bounds import Bounds, Peaks
from taxfree_tune.measuring.results import Results, Row, Skipped, save
from taxfree_tune.measuring.timer import Timing

HOST = AllGatherMatmul(m=5, n=32, k=32, world_size=2)
SHAPE = ("--shapes", "m=5 n=32 k=32", "--gpus", 2, "--fabric", "host", "--variant", "one_shot")
PROBLEM = {
    "m": 16, "n": 3584, "k": 8192, "gather_dim": 1, "dtype": "float16", "world_size": 8,
    "x_dtype": "same", "scales": "none", "fast_accumulation": False,
}  # fmt: skip


def row(variant: str, mode: str, us: float, m: int = 16) -> Row:
    return Row(
        "all_gather_matmul", PROBLEM | {"m": m}, variant, {}, mode, us, 0.5, (us,), 14.0, 20.0,
        3.0, 14.0, 0.001, speedup_eager=140 / us, speedup_graph=42 / us, tflops=33.0, gbps=2100.0,
    )  # fmt: skip


ROWS = [
    row("baseline", "eager", 140.25),
    row("baseline", "graph", 42.0),
    row("push_two_kernel", "graph", 28.12),
    row("dispatch", "graph", 28.25),
]
RESULT = ProblemResult(
    "all_gather_matmul", HOST, tuple(ROWS), (), Choice("exact", "push", {}, "its record"), (),
    Bounds(14.0, 3.0, 20.2), Peaks(1.0, 1.0, 1.0), KNOWN["cpu"],
)  # fmt: skip


def shown(width: int) -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(problem_table(ROWS, width))
    return capture.get().splitlines()


class TestTable:
    def test_dispatch_is_not_the_fastest_as_it_runs_another_row(self):
        rows = [*ROWS[:-1], row("dispatch", "graph", 20.0)]
        console = Console(width=60, color_system=None)
        with console.capture() as capture:
            console.print(problem_table(rows, 60))
        (marked,) = (line for line in capture.get().splitlines() if line.startswith("*"))
        assert "push_two_kernel" in marked

    def test_a_narrow_terminal_shows_what_matters_most(self):
        lines = shown(40)
        assert lines[0].split() == ["variant", "mode", "us", "x", "bound"]
        assert lines[3].split() == ["*push_two_kernel", "graph", "28.12", "2.01"]
        assert len(lines) == 1 + len(ROWS)
        assert max(map(len, lines)) <= 40

    def test_a_wide_terminal_shows_everything(self):
        lines = shown(120)
        for heading in ("vs eager", "vs graph", "±us", "skew us", "#wrong", "TFLOP/s", "GB/s"):
            assert heading in lines[0]
        assert "4.98x" in lines[3]
        assert "1.49x" in lines[3]

    def test_what_held_clocks_down_is_shown_as_it_is(self, capsys):
        rows = tuple(dataclasses.replace(r, sm_mhz=900.0, throttled=("[/heat]",)) for r in ROWS)
        print_problem(dataclasses.replace(RESULT, rows=rows))
        assert "slowest GPU at 900 MHz, held down by [/heat]" in capsys.readouterr().out

    def test_times_of_interpreted_kernels_are_not_compared(self, capsys):
        print_problem(RESULT)
        said = capsys.readouterr().out
        assert "push_two_kernel  graph  28.12" in said
        for word in ("bound", "vs ", "*", "x\n", "TFLOP/s"):
            assert word not in said

    def test_only_the_fastest_row_is_marked(self):
        assert [line[0] for line in shown(120)] == [" ", " ", " ", "*", " "]

    @pytest.mark.parametrize(
        ("time", "text"),
        [(0.1234567, "0.1235"), (28.123, "28.12"), (67003.4, "67003"), (9999.6, "10000")],
    )
    def test_times_have_no_exponent(self, time, text):
        assert us(time) == text


def test_a_bench_on_the_host_writes_what_it_prints(cli, tmp_path):
    out, before = tmp_path / "rows.json", tmp_path / "before.json"
    slow = dataclasses.replace(row("one_shot", "eager", 1e12), problem=dataclasses.asdict(HOST))
    save(Results({}, (slow,)), before)
    files = ("--out", out, "--compare", before)
    outcome = cli("bench", *SHAPE, "--json", *files, "--min-speedup", 1000)
    document = json.loads(outcome.out)
    (verdict,) = document.pop("comparison")
    assert (verdict["variant"], verdict["judgement"]) == ("one_shot", "better")
    assert document == json.loads(out.read_text())
    assert document["schema"] == 1
    assert document["environment"]["fabric"] == "host"
    assert document["environment"]["peaks"][0]["world_size"] == 2
    variants = [row["variant"] for row in document["rows"]]
    assert variants == ["baseline", "one_shot", "dispatch"]
    assert {row["mode"] for row in document["rows"]} == {"eager"}
    assert all(row["t_bound_us"] > 0 and row["wrong"] == 0 for row in document["rows"])
    assert outcome.code == ExitCode.FAILED
    assert "interpreted kernels" in outcome.err
    assert "error: dispatch is less than 1000x as fast as the library: m=5 n=32" in outcome.err


def test_without_json_it_prints_tables_and_verdicts(cli, monkeypatch, tmp_path):
    wrong = Skipped("all_gather_matmul", PROBLEM, "pull", {}, "wrong", "3 of 160 values wrong", 3)
    result = dataclasses.replace(RESULT, skipped=(wrong,), hardware=KNOWN["h200"])
    monkeypatch.setattr("taxfree_tune.benching.bench.run", lambda *asked: iter([result]))
    save(Results({}, tuple(ROWS)), tmp_path / "before.json")
    picture = tmp_path / "rows.png"
    outcome = cli("bench", *SHAPE, "--compare", tmp_path / "before.json", "--plot", picture)
    assert "bound 14 us (floor 14, link 3), gemm alone 20.2 us" in outcome.out
    assert "pull: wrong, #wrong 3: 3 of 160 values wrong" in outcome.out
    assert "dispatch: push (exact: its record)" in outcome.out
    assert outcome.out.count("same") == len(ROWS)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert outcome.code == ExitCode.WRONG_RESULT


class TestWholeModel:
    CONFIG: ClassVar = {
        "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 63,
        "num_hidden_layers": 3, "torch_dtype": "bfloat16",
    }  # fmt: skip

    def test_is_measured_on_the_host_and_not_compared(self, cli, tmp_path, monkeypatch):
        config, out = tmp_path / "config.json", tmp_path / "out.json"
        config.write_text(json.dumps(self.CONFIG))
        monkeypatch.setenv("COLUMNS", "80")
        phases = ("--layers", 1, "--prefill", 6, "--decode", 2, "--context", 5)
        on_host = ("--gpus", 2, "--fabric", "host", "--mode", "eager", "--mode", "graph")
        outcome = cli("bench", "--model", config, *phases, *on_host, "--out", out)
        assert outcome.code == ExitCode.DONE, outcome.err
        assert "interpreted kernels" in outcome.err
        lines = outcome.out.splitlines()
        assert max(map(len, lines)) <= 80
        assert lines[0].strip() == "prefill of 6 tokens"
        assert lines[1].split() == ["mode", "us", "±us", "tokens/s", "error"]
        assert [line.split()[:2] for line in lines[2:4]] == [
            ["torch", "eager"],
            ["taxfree", "eager"],
        ]
        assert "taxfree graph: left out: there are no graphs on a CPU" in lines
        found = json.loads(out.read_text())
        assert (found["model"]["layers"], found["model"]["vocabulary"]) == (1, 64)
        assert [row["phase"]["name"] for row in found["rows"]] == ["prefill"] * 2 + ["decode"] * 2
        assert {row["speedup"] for row in found["rows"]} == {None}
        assert all(
            0 < row["relative_error"] <= row["allowed_error"] < 0.02 for row in found["rows"]
        )
        assert {row["mode"] for row in found["skipped"]} == {"graph"}

    def test_has_its_file_after_each_phase(self, cli, monkeypatch, tmp_path):
        phase = Phase("decode", 16, 1024)
        measured = ModeOutcome("torch", "graph", "measured", "", 0.01, Timing((100.0, 102.0), 0.0))
        out = tmp_path / "out.json"

        def until_killed(*_):
            yield PhaseResult(phase, [measured], {}, KNOWN["h100"])
            assert len(json.loads(out.read_text())["rows"]) == 1
            raise TaxfreeError("the machine is gone")

        monkeypatch.setattr("taxfree_tune.benching.model.run", until_killed)
        of_model = ("bench", "--model", "llama-3.1-8b", "--gpus", 2, "--fabric", "host")
        assert "the machine is gone" in cli(*of_model, "--out", out).err

    @pytest.mark.parametrize("json_too", [(), ("--json",)])
    def test_that_is_wrong_is_shown_and_has_its_exit_code(self, cli, monkeypatch, json_too):
        timing = Timing((100.0, 102.0), 0.0)
        outcomes = [
            ModeOutcome("torch", "graph", "measured", "", 0.01, timing),
            ModeOutcome("taxfree", "eager", "wrong", "relative error 1, 0.01 is allowed", 1.0),
            ModeOutcome("taxfree", "graph", "measured", "", 0.01, timing),
        ]
        result = PhaseResult(
            Phase("decode", 16, 1024), outcomes, {"a": {"exact": 2}}, KNOWN["h100"]
        )
        monkeypatch.setattr("taxfree_tune.benching.model.run", lambda *_: iter([result]))
        outcome = cli(
            "bench", "--model", "llama-3.1-8b", "--gpus", 2, "--fabric", "host", *json_too
        )
        assert outcome.code == ExitCode.WRONG_RESULT
        assert (
            "error: taxfree eager, decode of batch 16 behind 1024 tokens: relative" in outcome.err
        )
        if json_too:
            rows = json.loads(outcome.out)["rows"]
            assert [(row["path"], row["speedup"]) for row in rows] == [
                ("torch", None),
                ("taxfree", 1),
            ]
        else:
            assert "taxfree graph" in outcome.out
            assert "1.00x" in outcome.out
            assert "taxfree's problems: 1 exact" in outcome.out


class TestErrors:
    @pytest.mark.parametrize(
        ("state", "said", "code"),
        [("wrong", "is wrong", ExitCode.WRONG_RESULT), ("hung", "hangs", ExitCode.PEER_LOST)],
    )
    def test_a_broken_variant_has_its_exit_code(self, state, said, code):
        broken = Skipped("all_gather_matmul", PROBLEM, "push", {}, state, "3 values", 3)
        refused = dataclasses.replace(broken, state="refused")
        fail_if_broken([refused])
        with pytest.raises(Exception, match=f"push {said} on m=16") as caught:
            fail_if_broken([refused, broken])
        assert failure(caught.value).exit_code == code

    def test_a_picture_needs_altair(self, cli, monkeypatch, tmp_path):
        find = importlib.util.find_spec
        monkeypatch.setattr(
            "importlib.util.find_spec", lambda name: None if name == "altair" else find(name)
        )
        outcome = cli("bench", *SHAPE, "--plot", tmp_path / "rows.png")
        assert outcome.code == ExitCode.FAILED
        assert "taxfree[plot]" in outcome.err


def test_it_measures_all_operations_that_a_file_names(cli, tmp_path):
    path = tmp_path / "shapes.yaml"
    path.write_text(
        "- {op: matmul_all_reduce, m: 5, n: 32, k: 32, world_size: 2, calls: 3}\n"
        "- {op: all_gather_matmul, m: 5, n: 32, k: 32, world_size: 2, calls: 2}\n"
    )
    options = ("--fabric", "host", "--variant", "push", "--json")
    rows = json.loads(cli("bench", "--shapes", path, *options).out)["rows"]
    assert list(dict.fromkeys(row["op"] for row in rows)) == [
        "matmul_all_reduce", "all_gather_matmul",
    ]  # fmt: skip
