"""`taxfree explain`."""

from __future__ import annotations

import dataclasses
import json

from rich.console import Console

from taxfree.bench import ProblemResult
from taxfree.bounds import Bounds, Peaks
from taxfree.dispatch import Choice
from taxfree.explain import NO_GRAPHS, Explanation, Pipeline
from taxfree.results import Row
from taxfree_cli.exits import ExitCode
from taxfree_cli.explain import tree
from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_kernels.hardware import KNOWN
from taxfree_tuning_db import Rung

OP = "all_gather_matmul"
PROBLEM = {"m": 16, "n": 3584, "k": 8192, "dtype": "float16", "world_size": 8}
EXPLANATION = Explanation(
    op=OP,
    problem=PROBLEM,
    bounds=Bounds(14.0, 3.0, 20.2),
    pipelines=(
        Pipeline("baseline", {}, 3, 147.0, None, False),
        Pipeline("push", {"BLOCK_M": 16}, 1, 60.0, None, True),
    ),
    skipped=(),
    choice=Choice("exact", "push", {"BLOCK_M": 16}, "its own record"),
    ladder=(Rung("all_gather_matmul with m=16", True, "record: user"),),
    unmeasured={"t_graph_us": NO_GRAPHS},
)


def shown(width: int) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(tree(EXPLANATION))
    return capture.get()


def test_the_tree_names_every_time_and_launch():
    text = shown(100)
    for name in ("t_eager", "t_graph", "t_gemm", "t_floor", "t_link", "t_bound", "launches 3"):
        assert name in text
    assert "dispatch: push BLOCK_M=16" in text
    assert "10.50 x bound" in text
    assert "dispatch picks push (exact): its own record" in text
    assert "+ all_gather_matmul with m=16: record: user" in text


def test_what_cannot_be_measured_has_a_reason():
    assert f"-  {NO_GRAPHS}" in shown(120)


def test_the_tree_fits_a_narrow_terminal():
    assert max(map(len, shown(40).splitlines())) <= 40


def test_it_prints_one_document(cli, monkeypatch):
    problem = AllGatherMatmul(m=5, n=32, k=32, world_size=2)
    fields = dataclasses.asdict(problem)
    row = Row(
        OP, fields, "baseline", {}, "eager", 9.0, 1.0, (9.0,), 2.0, 3.0, 1.0, 2.0, 0.001,
        launches=3,
    )  # fmt: skip
    result = ProblemResult(
        OP, problem, (row,), (), EXPLANATION.choice, EXPLANATION.ladder, Bounds(2.0, 1.0, 3.0),
        Peaks(1.0, 1.0, 1.0), KNOWN["cpu"],
    )  # fmt: skip
    monkeypatch.setattr("taxfree_cli.explain.measuring", lambda asked: iter([result]))
    outcome = cli("explain", "--shapes", "m=5 n=32 k=32", "--fabric", "host", "--json")
    document = json.loads(outcome.out)
    assert document["schema"] == 1
    (row,) = document["rows"]
    assert (row["variant"], row["launches"]) == ("baseline", 3)
    times = {name: row[name] for name in row if name.startswith("t_")}
    assert times == {
        "t_eager_us": 9.0, "t_graph_us": None, "t_gemm_us": 3.0, "t_floor_us": 2.0,
        "t_link_us": 1.0, "t_bound_us": 2.0,
    }  # fmt: skip
    assert document["unmeasured"] == {"t_graph_us": NO_GRAPHS}
    assert document["dispatch"][0]["ladder"][0]["why"] == "record: user"
    assert "interpreted kernels" in outcome.err
    assert outcome.code == ExitCode.DONE
