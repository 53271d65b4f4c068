"""The acceptance script: what its judges find wrong, and that a step cannot run for ever."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.accept import __main__ as accept
from benchmarks.accept.__main__ import (
    Step,
    autotuned,
    benched,
    dispatched,
    entries,
    explained,
    in_turn,
    modelled,
    same,
    trained,
)
from tests.ranks import is_running


def row(variant: str, median_us: float, iqr_us: float = 0.0) -> dict[str, Any]:
    return {
        "op": "matmul_all_reduce", "problem": {"m": 16}, "mode": "graph", "config": {},
        "variant": variant, "median_us": median_us, "iqr_us": iqr_us,
        "samples_us": [median_us] * 25,
    }  # fmt: skip


def bench(*rows: dict[str, Any], skipped: tuple[dict[str, Any], ...] = ()) -> str:
    return json.dumps({"rows": rows, "skipped": skipped})


@pytest.mark.parametrize(
    ("rows", "is_slow"),
    [
        ([row("baseline", 20.0), row("dispatch", 15.0)], False),
        ([row("baseline", 20.0), row("torch_symm_mem", 14.0), row("dispatch", 15.0)], True),
        ([row("baseline", 20.0), row("push", 10.0), row("dispatch", 20.5)], False),  # ours may win
        ([row("baseline", 20.0, 2.0), row("dispatch", 21.5)], False),  # within the noise
        ([row("baseline", 20.0, 0.1), row("dispatch", 21.5, 0.1)], True),
    ],
)
def test_dispatch_is_compared_with_the_fastest_library_path(
    rows: list[dict[str, Any]], is_slow: bool
) -> None:
    _, wrong = benched(bench(*rows))
    assert bool(wrong) == is_slow


@pytest.mark.parametrize(
    ("state", "is_wrong"), [("refused", False), ("failed", True), ("wrong", True), ("hung", True)]
)
def test_a_variant_that_fails_is_an_error(state: str, is_wrong: bool) -> None:
    skipped = {"op": "attention", "variant": "flash", "state": state, "reason": "why"}
    _, wrong = benched(bench(skipped=(skipped,)))
    assert bool(wrong) == is_wrong


@pytest.mark.parametrize(
    ("unexplained", "why", "is_wrong"),
    [(9.0, [], False), (11.0, [], True), (-11.0, [], True), (11.0, ["the residual"], False)],
)
def test_an_account_is_closed_or_says_why(
    unexplained: float, why: list[str], is_wrong: bool
) -> None:
    account = {
        "op": "attention", "problem": {}, "variant": "baseline", "t_eager_us": 100.0,
        "t_graph_us": 90.0, "residual_us": 50.0, "unexplained_us": unexplained, "open": why,
    }  # fmt: skip
    figures, wrong = explained(json.dumps({"rows": [account]}))
    assert figures[0]["unexplained"] == pytest.approx(unexplained / 100)
    assert bool(wrong) == is_wrong


def test_dispatch_may_not_add_much_to_calls_of_the_library(tmp_path) -> None:
    cost = tmp_path / "host_cost.json"
    rows = [
        {"problem": "AllGatherMatmul", "library_us": library_us, "given_us": us, "method_us": 9.0}
        for library_us, us in ((50.0, 2.9), (50.0, 3.1), (80.0, 3.9))
    ]
    cost.write_text(json.dumps({"rows": rows}))
    figures, wrong = dispatched(cost)("a table")
    assert figures == rows
    assert wrong == ["dispatch adds 3.1 us to AllGatherMatmul"]


@pytest.mark.parametrize(
    ("seconds", "winner", "is_same", "wrong"),
    [(7.9, "push", True, 0), (8.1, "push", True, 1), (2.0, None, True, 1), (2.0, "push", False, 1)],
)
def test_tuning_in_ranks_is_quick_complete_and_right(
    seconds: float, winner: str | None, is_same: bool, wrong: int
) -> None:
    rows = [
        {"op": "matmul_all_reduce", "problem": {}, "winner": each, "is_same": is_same or not at,
         "reason": "out of budget"} for at, each in enumerate(("push", winner))
    ]  # fmt: skip
    _, found = autotuned(json.dumps({"seconds": seconds, "rows": rows}))
    assert len(found) == wrong


def test_another_result_is_an_error() -> None:
    document = json.dumps({"rows": [{"is_same": True}, {"is_same": False}]})
    assert len(same(f"a log line\n{document}\n")[1]) == 1


@pytest.mark.parametrize(("us", "iqr_us", "wrong"), [(102.0, 0.5, 0), (106.0, 6.0, 0), (106, 4, 1)])
def test_a_step_of_training_is_no_slower_than_pytorchs(
    us: float, iqr_us: float, wrong: int
) -> None:
    row = {
        "is_compiled": True, "is_same": True, "torch_us": 100.0, "torch_iqr_us": 0.5,
        "taxfree_us": us, "taxfree_iqr_us": iqr_us,
    }  # fmt: skip
    assert len(trained(json.dumps({"rows": [row]}))[1]) == wrong


@pytest.mark.parametrize(
    ("speedup", "iqr_us", "is_slow"),
    [
        (None, 0.0, False),
        (1.1, 0.0, False),
        (0.98, 0.0, False),
        (0.9, 0.0, True),
        (0.9, 8.0, True),
        (0.9, 12.0, False),
    ],
)
def test_a_mode_of_a_model_is_no_slower_than_pytorchs(
    speedup: float | None, iqr_us: float, is_slow: bool
) -> None:
    row = {
        "phase": {"name": "decode", "batch": 1, "length": 1024}, "path": "taxfree",
        "mode": "graph", "median_us": 100.0, "iqr_us": iqr_us, "tokens_per_s": 1e4,
        "speedup": speedup, "relative_error": 0.01, "samples_us": [100.0] * 25,
    }  # fmt: skip
    _, wrong = modelled(json.dumps({"rows": [row], "skipped": []}))
    assert bool(wrong) == is_slow


def test_a_step_ends_at_its_limit_with_all_that_it_started() -> None:
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    begin = time.monotonic()
    step = Step("endless", ("-c", f"{child}; import time; time.sleep(60)"), 2)
    found = step.run(step.start())
    assert time.monotonic() - begin < 20
    assert found["failures"] == ["ended after 2 s"]


def test_an_exit_code_and_an_unreadable_output_are_errors() -> None:
    step = Step("broken", ("-c", "import sys; print('no JSON'); sys.exit(3)"), 60, same)
    found = step.run(step.start())
    assert found["failures"][0] == "exit code 3"
    assert "not what it should be" in found["failures"][1]
    assert found["said"] == "no JSON\n"


def test_a_step_imports_while_the_one_before_runs(tmp_path, monkeypatch) -> None:
    (tmp_path / "imported.py").write_text(
        "import os, pathlib, time\n"
        "pathlib.Path('imported').touch()\n"
        "def main(): print(os.environ['VALUE'], os.path.exists('let go'))\n"
    )
    waits = "import os, time\nwhile not os.path.exists('imported'): time.sleep(0.01)"
    first = Step("first", ("-c", f"{waits}\nopen('let go', 'w')"), 60)
    command = "benchmarks.accept.ranks", "1", "imported"
    second = Step("second", ("-m", *command), 60, lambda out: (out, []), {"VALUE": "7"})
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{':'.join(sys.path)}")
    monkeypatch.chdir(tmp_path)
    found = list(in_turn([first, second], time.monotonic() + 60))
    assert [each["failures"] for each in found] == [[], []]
    assert found[1]["figures"] == "7 True\n"


SLEEP = ("-c", "import time; time.sleep(60)")


@pytest.mark.parametrize("at_once", [1, 2])
def test_at_the_deadline_what_runs_is_ended_and_nothing_is_begun(at_once: int) -> None:
    begin = time.monotonic()
    left = [Step(f"{number}", SLEEP, 60, at_once=at_once) for number in range(4)]
    found = list(entries(left, begin + 1))
    assert time.monotonic() - begin < 20
    assert sorted(entry["name"] for entry in found) == ["0", "1", "2", "3"]
    failures = sorted(entry["failures"] for entry in found)
    assert failures == [["not begun"]] * (4 - at_once) + [["not finished"]] * at_once


def test_steps_run_together_and_alone_in_their_order(tmp_path: Path) -> None:
    """Each of the first two waits for the other, the last two look for marks of others."""
    meet = (
        "import os, sys, time; os.chdir(sys.argv[1]); open(sys.argv[2], 'w')\n"
        "while not os.path.exists(sys.argv[3]): time.sleep(0.01)"
    )
    look = "import os, sys; print(*sorted(os.listdir(sys.argv[1]))); open(sys.argv[1] + '/c', 'w')"
    left = [
        Step("a", ("-c", meet, str(tmp_path), "a", "b"), 60, at_once=2),
        Step("b", ("-c", meet, str(tmp_path), "b", "a"), 60, at_once=2),
        Step("c", ("-c", look, str(tmp_path)), 60, accept.summed_up),
        Step("d", ("-c", look, str(tmp_path)), 60, accept.summed_up),
    ]
    found = list(entries(left, time.monotonic() + 60))
    assert [entry["failures"] for entry in found] == [[]] * 4
    assert [entry["name"] for entry in found[2:]] == ["c", "d"]
    assert [entry["figures"] for entry in found[2:]] == ["a b", "a b c"]


def test_who_stops_early_ends_what_runs(tmp_path: Path) -> None:
    say = f"import os, time; open({str(tmp_path)!r} + f'/{{os.getpid()}}', 'w'); time.sleep(60)"
    left = [Step("quick", ("-c", ""), 60, at_once=3)]
    left += [Step("slow", ("-c", say), 60, at_once=3)] * 5
    with contextlib.closing(entries(left, time.monotonic() + 60)) as ended:
        assert next(ended)["name"] == "quick"
        while len(pids := os.listdir(tmp_path)) < 3:
            time.sleep(0.01)
    time.sleep(0.2)
    assert os.listdir(tmp_path) == pids
    assert not any(is_running(int(pid)) for pid in pids)


def test_each_file_of_gpu_tests_is_run_once_and_what_measures_is_alone() -> None:
    files = accept.gpu_tests()
    assert {*accept.AT_ONCE, *accept.PARTS} <= set(files)
    steps = list(accept.tests())
    parts = [step.arguments[-2:] for step in steps]
    assert sorted(parts) == sorted(
        (f"{number}/{accept.PARTS.get(path, 1)}", path)
        for path in files
        for number in range(1, accept.PARTS.get(path, 1) + 1)
    )
    assert len({step.name for step in steps}) == len(steps)
    alone = [step.name for step in steps if step.at_once == 1]
    assert alone == [
        "tests/taxfree/test_faults.py", "tests/taxfree/test_life.py",
        "tests/tune/test_autotune.py", "tests/tune/test_taxes_gpu.py",
    ]  # fmt: skip
    assert steps[-4:] == [step for step in steps if step.at_once == 1]


def test_how_many_tests_have_passed_is_in_the_record() -> None:
    step = Step("tests", ("-c", "print('.s', '1 passed, 1 skipped in 2 s', sep=chr(10))"), 60,
                accept.summed_up)  # fmt: skip
    assert step.run(step.start())["figures"] == "1 passed, 1 skipped in 2 s"


def test_a_long_run_goes_on_where_it_was_cut(tmp_path, monkeypatch, capsys) -> None:
    file, ran = tmp_path / "ran", tmp_path / "accept.json"
    once = f"open({str(file)!r}, 'a').write('x')"
    fails = f"import os, sys; sys.exit(os.path.getsize({str(file)!r}) == 1)"
    made = [Step("first", ("-c", once), 60), Step("second", ("-c", fails), 60)]
    monkeypatch.setattr(accept, "long_steps", lambda *_: iter(made))
    monkeypatch.setattr("sys.argv", ["accept", "--long", "--out", str(ran)])
    assert accept.main() == 1
    file.write_text("xx")
    assert accept.main() == 0
    assert file.read_text() == "xx"  # the first was not run again
    assert [step["failures"] for step in json.loads(ran.read_text())["steps"]] == [[], []]
    monkeypatch.setattr(accept, "digest_of", lambda _: "of another day")
    monkeypatch.setattr("sys.argv", [*sys.argv, "--keep"])
    assert accept.main() == 0
    assert file.read_text() == "xx"
    monkeypatch.setattr("sys.argv", sys.argv[:-1])
    assert accept.main() == 0
    assert file.read_text() == "xxx"


def test_a_step_that_is_run_alone_leaves_the_others_on_record(tmp_path, monkeypatch) -> None:
    path, made = tmp_path / "accept.json", [Step(name, ("-c", ""), 60) for name in "ab"]
    monkeypatch.setattr(accept, "steps", lambda *_: iter(made))
    monkeypatch.setattr("sys.argv", ["accept", "--out", str(path)])
    assert accept.main() == 0
    first = json.loads(path.read_text())
    path.write_text(json.dumps(first | {"created": "yesterday"}))
    monkeypatch.setattr("sys.argv", [*sys.argv, "--only", "b"])
    assert accept.main() == 0
    kept, again = json.loads(path.read_text())["steps"]
    assert kept == {"created": "yesterday"} | first["steps"][0]
    assert again["name"] == "b"
    assert "created" not in again
