"""The soak: passes with what is there, and finds what is broken."""

from __future__ import annotations

import contextlib
import json

import pytest

from benchmarks import soak as script
from benchmarks import soak_ranks
from benchmarks.soak import SoakRow, soak
from benchmarks.soak_ranks import Member
from taxfree.errors import WrongResult
from taxfree_cli.exits import ExitCode
from taxfree_kernels.fabric.gpu import SHARING
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.variant import problem_class
from tests.benchmarks import soak_tasks
from tests.benchmarks.no_workers import NoWorkers
from tests.ranks import on_every_fabric, our_names

OURS = {f"{op} {name}" for op in ("all_gather_matmul", "flash_decode") for name in our_names(op)}


@pytest.fixture
def broken(ranks):
    """A group whose kernels do not wait for signals."""
    group = ranks(2)
    group.call(soak_tasks.wait_for_nothing, 10)
    yield group
    group.call(soak_tasks.wait_again, 10)


@pytest.mark.timeout(900)
class TestSoak:
    @on_every_fabric
    def test_every_variant_with_kernels_is_called_alone_and_in_turns(self, ranks, sample):
        """On the host, programs may pause inside of kernels too."""
        modes, calls = {"host": (["eager"], 1), "cuda": (["graph", "eager"], 8000)}[ranks.fabric]
        all_pauses = [["between"], ["none"], ["inside"]]
        if ranks.fabric != "host":
            all_pauses = [["between", "none"]]
        for pauses in sample.one_of(all_pauses):
            rows = list(soak(ranks(ranks.few), pauses, modes, calls, seed=1))
            self.check(rows, modes, calls)

    @staticmethod
    def check(rows, modes, calls):
        alone = {f"{row.op} {row.variant}" for row in rows} - {"all mixed"}
        assert alone >= OURS
        assert sum(row.calls for row in rows) >= calls
        assert {row.mode for row in rows} == set(modes)
        for row in rows:
            assert row.mismatches == 0
            expected = alone if row.variant == "mixed" else {f"{row.op} {row.variant}"}
            called = {name.removesuffix(" promised") for name in row.calls_by_variant}
            assert called <= expected

    @pytest.mark.parametrize("pauses", ["between", "none"])
    def test_a_wait_that_does_not_wait_is_found_and_named(self, broken, pauses):
        with pytest.raises(WrongResult, match=r"mismatches on rank \d .*first in call \d+: \w+\("):
            list(soak(broken, [pauses], ["eager"], 100, seed=3))


def test_what_ranks_need_is_compiled_by_processes_all_at_once(monkeypatch):
    asked = []

    class Screen(contextlib.nullcontext):
        def __init__(self, hardware):
            super().__init__(self)

        def begin(self, op, problem, candidates):
            asked.append(("begin", op, problem.m, [name for name, _ in candidates]))

        def verdicts(self, op, problem, candidates):
            asked.append(("wait", op, problem.m, [name for name, _ in candidates]))

    op = "matmul_all_reduce"
    small, large = (problem_class(op)(m, 16, 16, world_size=2) for m in (1, 2))
    tried = [(small, "push", False), (large, "push", False), (small, "push_in_place", False)]
    # what a promise changes, and what calls a collective, only ranks compile
    tried += [(small, "push_two_shot_lamport_specialized", True), (small, "two_shot", False)]
    members = [Member(op, problem, name, {}, promised) for problem, name, promised in tried]
    monkeypatch.setattr(soak_ranks, "Screen", Screen)
    soak_ranks._compile_ahead(KNOWN["h100"], members)
    of_small, of_large = (op, 1, ["push", "push_in_place"]), (op, 2, ["push"])
    steps = ("begin", "wait")
    assert asked == [(step, *each) for step in steps for each in (of_small, of_large)]


def test_what_was_finished_is_kept_with_what_stopped_it(tmp_path, monkeypatch, capsys):
    def soak(*_):
        yield SoakRow("all", "mixed", "eager", "between", 4, 0, 1.0, {"all_gather_matmul push": 4})
        raise WrongResult("3 mismatches on rank 1")

    file = tmp_path / "host.json"
    monkeypatch.setattr(script, "soak", soak)
    monkeypatch.setattr(script, "WorkerGroup", NoWorkers)
    monkeypatch.setattr("sys.argv", ["soak", "--fabric", "host", "--out", str(file)])
    assert script.main() == ExitCode.WRONG_RESULT, capsys.readouterr().err
    found = json.loads(file.read_text())
    assert (found["calls"], len(found["rows"])) == (4, 1)
    assert found["stopped_by"] == "3 mismatches on rank 1"


@pytest.mark.parametrize(
    ("gpus", "options", "expected"),
    [
        (1, ["--share"], ({SHARING: "1"}, 1)),
        (8, ["--share"], ({}, None)),
        (8, [], ({}, None)),
        (1, [], ExitCode.NO_HARDWARE),
        (0, ["--share"], ExitCode.NO_HARDWARE),
    ],
)
def test_ranks_share_gpus_where_they_are_told_to_and_have_to(monkeypatch, gpus, options, expected):
    class Group(NoWorkers):
        def __init__(self, *arguments):
            super().__init__()
            self.variables = arguments[4]

    kept = []
    row = SoakRow("all", "mixed", "eager", "between", 4, 0, 1.0, {})
    monkeypatch.setattr(script, "soak", lambda *_: iter([row]))
    monkeypatch.setattr(script, "WorkerGroup", Group)
    monkeypatch.setattr(script, "keep", lambda *arguments: kept.append(arguments))
    monkeypatch.setattr("taxfree_tune.devices.available_gpus", lambda: gpus)
    monkeypatch.setattr("sys.argv", ["soak", "--fabric", "cuda", "--gpus", "8", *options])
    code = script.main()
    if isinstance(expected, ExitCode):
        assert (code, kept) == (expected, [])
    else:
        (_, group, _, _, _, shared_gpus) = kept[0]
        assert (code, group.variables, shared_gpus) == (0, *expected)
