"""The comparison of local kernels: its wiring on the CPU, and FlashInfer's part with a stand-in."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import local_decode
from benchmarks.local_decode import Implementation, flashinfer_decode
from taxfree.errors import WorkerLost
from taxfree_cli.exits import ExitCode
from taxfree_kernels.flash_decode.operation import empty_output, make_inputs, reference
from taxfree_kernels.flash_decode.problem import FlashDecode
from taxfree_tune.measuring.bounds import Bounds, Peaks
from taxfree_tune.measuring.results import load, save
from taxfree_tune.measuring.timer import Timing
from tests.benchmarks.no_workers import NoWorkers

DENSE = FlashDecode(2, 4, 2, 16, 32, world_size=1)
PAGED = FlashDecode(2, 4, 2, 16, 32, page_size=16, world_size=1)


def test_ours_and_torchs_are_timed_and_the_rest_say_why_not(tmp_path, capsys):
    *_, results = local_decode.run("host", [DENSE, PAGED])
    assert {row.variant for row in results.rows if row.problem["page_size"] == 0} >= {
        "baseline",
        "splits",
        "torch_sdpa",
        "torch_flex",
    }
    assert {row.variant for row in results.rows if row.problem["page_size"]} == {
        "baseline",
        "splits",
    }
    assert all(row.relative_error < 0.01 for row in results.rows)
    assert [row.version is not None for row in results.rows] == [
        row.variant in ("baseline", "splits") for row in results.rows
    ]
    why = {each.variant: each.reason for each in results.skipped}
    assert why["flashinfer"].startswith("ModuleNotFoundError")
    save(results, tmp_path / "local.json")
    assert load(tmp_path / "local.json").rows == results.rows
    assert "of copy" in capsys.readouterr().out


def test_what_was_finished_is_kept_where_the_rest_was_not(tmp_path, monkeypatch, capsys):
    class OneProblem(NoWorkers):
        def call(self, *_, op, problem):
            if problem["page_size"]:
                raise WorkerLost("rank 0 died")
            timings = {"eager": Timing((1.0,), 0.0)}
            outcomes = [Implementation("baseline", {}, 0.001, timings)]
            return [(outcomes, Bounds(1.0, 1.0, None), Peaks(1.0, 1.0, 1.0))]

    monkeypatch.setattr(local_decode, "group_for", OneProblem)
    file = tmp_path / "local.json"
    monkeypatch.setattr("sys.argv", ["local_decode", "--fabric", "host", "--out", str(file)])
    assert local_decode.main() == ExitCode.PEER_LOST, capsys.readouterr().err
    assert [row.variant for row in load(file).rows] == ["baseline"]


class Wrapper:
    """FlashInfer's wrapper of a decode, by torch."""

    def __init__(self, workspace, kv_layout, use_tensor_cores):
        assert kv_layout == "NHD"

    def plan(self, indptr, indices, last_page_len, q_heads, kv_heads, head_dim, page_size, **types):
        self.pages = [indices[begin:end] for begin, end in pairwise(indptr)]
        assert (last_page_len == page_size).all()

    def run(self, q, caches, out):
        for sequence, pages in enumerate(self.pages):
            k, v = (cache[pages].flatten(0, 1).transpose(0, 1) for cache in caches)
            out[sequence] = scaled_dot_product_attention(
                q[sequence].unsqueeze(1), k, v, enable_gqa=True
            )[:, 0]
        return out


@pytest.mark.parametrize("problem", [DENSE, PAGED], ids=["dense", "paged"])
def test_flashinfer_sees_the_same_keys(problem):
    device = torch.device("cpu")
    bench = SimpleNamespace(
        problem=problem,
        fabric=SimpleNamespace(device=device),
        inputs=[make_inputs(problem, 0, seed, device) for seed in (1, 2)],
        outputs=[empty_output(problem, device) for _ in (1, 2)],
    )
    attend = flashinfer_decode(bench, SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=Wrapper))
    for step, seed in enumerate((1, 2, 1)):
        exact = reference(problem, 0, seed, device)
        assert (attend(step) - exact).abs().max() < 0.01
