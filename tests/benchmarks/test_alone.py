"""What a rank does by itself, timed beside the vendor's matmul."""

from __future__ import annotations

from benchmarks import alone
from taxfree.measuring.trial import key
from taxfree.shapes import ShapeRequest, expand
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.variant import operation_shapes, variants


def test_rows_have_the_time_the_vendors_and_the_floor():
    problems = [operation_shapes(op).tiny(3)[0] for op in alone.SHAPES]
    for _, rows in alone.measure(problems, "host", repetitions=1):
        assert len({row["vendor_us"] for row in rows}) == 1
        assert all(row["median_us"] > 0 < row["floor_us"] for row in rows)
        assert all(variants(row["op"])[row["variant"]].fused for row in rows)


def test_the_usual_shapes_have_candidates():
    for op, shapes in alone.SHAPES.items():
        for problem in expand(op, ShapeRequest([shapes], world_sizes=(8,), dtype="bf16")):
            found = alone.seed_candidates(problem, KNOWN["h200"])
            assert found
            assert len(found) == len({key(each) for each in found})


def test_shapes_need_an_operation(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["alone", "--shapes", "m=16 n=64 k=64", "--fabric", "host"])
    assert alone.main() != 0
    assert "of one operation" in capsys.readouterr().err
