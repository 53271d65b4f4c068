"""A layer's operations, one after another on a rank alone."""

from __future__ import annotations

import pytest

from benchmarks import alone, emulate, layer
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.variant import op_of, variants


@pytest.mark.parametrize("peers", ["absent", "alike"])
def test_a_layer_has_a_time_for_each_choice_of_its_operations(peers):
    tiny = layer.problems(8, 2, hidden=64, qkv=64, intermediate=128)
    ((_, rows),) = layer.measure([tiny], "host", 1, _seeds_and_unsearched, peers)
    assert [row["choice"] for row in rows] == ["vendor", "searched", "all", "promised"]
    for row in rows:
        assert row["m"] == 8
        assert row["peers"] == peers
        assert row["median_us"] > 0
        assert [each["op"] for each in row["operations"]] == [op_of(each) for each in tiny]
    vendor, searched, fastest, _ = (row["operations"] for row in rows)
    assert {each["variant"] for each in vendor} == {"vendor"}
    assert all(variants(each["op"])[each["variant"]].searched for each in searched)
    times = ([each["median_us"] for each in chosen] for chosen in (fastest, searched))
    assert all(a <= b for a, b in zip(*times, strict=True))


def _seeds_and_unsearched(problem, hardware):
    tried = alone.seed_candidates(problem, hardware, 1)
    if op_of(problem) == "all_gather_matmul":
        tried += emulate.candidates(op_of(problem), problem, hardware, ["push_specialized"])
    return tried


def test_the_operations_are_those_of_a_llama():
    qkv, attention, gate_up, down = layer.problems(16, 8)
    assert (qkv.n, attention.k, gate_up.n, down.k) == (1280, 1024, 7168, 3584)
    for problem in (qkv, attention, gate_up, down):
        assert any(
            variant.fused and variant.unsupported_reason(problem, KNOWN["h200"]) is None
            for variant in variants(op_of(problem)).values()
        )
