"""What a rank does by itself, timed beside the vendor's kernel."""

from __future__ import annotations

import json
from functools import partial

import pytest

from benchmarks import alone, emulate
from taxfree.measuring.trial import key
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.variant import operation_shapes, variants
from tests.benchmarks import emulate_tasks

SUMS_AND_GATHERS = [op for op in alone.SHAPES if op != "flash_decode"]


def test_rows_have_the_time_the_vendors_and_the_floor():
    problems = [operation_shapes(op).tiny(3)[0] for op in SUMS_AND_GATHERS]
    for _, rows in alone.measure(problems, "host", repetitions=1):
        assert len({row["vendor_us"] for row in rows}) == 1
        assert all(row["median_us"] > 0 < row["floor_us"] for row in rows)
        assert all(variants(row["op"])[row["variant"]].fused for row in rows)
        assert {row["peers"] for row in rows} == {"absent"}


def test_decode_attention_is_that_of_one_rank():
    ((_, rows),) = alone.measure([operation_shapes("flash_decode").tiny(1)[0]], "host", 1)
    assert {row["variant"] for row in rows} == {"baseline", "library"}


@pytest.mark.parametrize("op", alone.SHAPES)
def test_each_variant_ends_with_peers_alike(op):
    problems = operation_shapes(op).tiny(3)
    every = partial(emulate.candidates, op, attempts=[])
    timed = alone.measure(problems, "host", 1, every, "alike")
    for problem, (_, rows) in zip(problems, timed, strict=True):
        names = {each.variant for each in every(problem, KNOWN["cpu"])}
        assert names - {row["variant"] for row in rows} <= {"overlap"}  # copies to absent ranks
        assert {row["peers"] for row in rows} == {"alike"}


def test_a_rank_with_peers_alike_waits_for_its_own_signals(monkeypatch, capsys):
    monkeypatch.setattr(alone, "emulate_ranks", emulate_tasks)
    problem = operation_shapes("matmul_all_reduce").tiny(3)[0]
    push = partial(emulate.candidates, "matmul_all_reduce", attempts=["push"])
    ((_, rows),) = alone.measure([problem], "host", 1, push, "alike")
    assert not rows
    assert "waited" in capsys.readouterr().out


def test_the_usual_shapes_have_candidates():
    for op in alone.SHAPES:
        for problem in alone.usual_problems(op, 8):
            found = alone.seed_candidates(problem, KNOWN["h200"])
            assert found
            assert len(found) == len({key(each) for each in found})


def test_attempts_come_after_seeds_without_repeating_them(monkeypatch, tmp_path):
    out = tmp_path / "rows.json"
    shapes = "m=16 n=64 k=64 gather_dim=1"
    command = f"alone --fabric host --ranks 2 --repetitions 1 --seeds 1 --out {out}".split()
    command += ["--op", "all_gather_matmul", "--shapes", shapes]
    for attempt in ("m=16 push", "m=64 push_tma", "op=flash_decode fused"):
        command += ["--try", attempt]
    monkeypatch.setattr("sys.argv", command)
    assert alone.main() == 0
    rows = json.loads(out.read_text())["rows"]
    seeds = alone.seed_candidates(*_problem_and_hardware(shapes), 1)
    assert len(rows) == len(seeds)


def _problem_and_hardware(shapes):
    (problem,) = alone.usual_problems("all_gather_matmul", 2, [shapes])
    return problem, KNOWN["cpu"]


def test_shapes_need_an_operation(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["alone", "--shapes", "m=16 n=64 k=64", "--fabric", "host"])
    assert alone.main() != 0
    assert "of one operation" in capsys.readouterr().err
