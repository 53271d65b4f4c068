"""The model benchmark: all paths choose the same tokens, and its record says what ran."""

from __future__ import annotations

import json

import pytest

from benchmarks import model
from benchmarks.llama import Sizes
from benchmarks.model_ranks import PathResult, Phase
from taxfree.errors import WrongResult
from taxfree_cli.exits import ExitCode
from taxfree_tune.measuring.timer import Timing

CONFIG = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 127, "num_hidden_layers": 3, "rms_norm_eps": 1e-6,
    "rope_theta": 500000.0, "torch_dtype": "bfloat16",
}  # fmt: skip
PHASE = Phase("decode", 2, 5)


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


@pytest.mark.timeout(900)
def test_all_paths_choose_the_same_tokens(tmp_path, config, capsys):
    file = tmp_path / "host.json"
    options = ["--fabric", "host", "--gpus", "2", "--model", str(config), "--layers", "1"]
    options += ["--prompts", "6", "--batches", "2", "--context", "5", "--winner", "push"]
    options += ["--paths", "one process,torch eager,taxfree eager,torch micro-pipeline"]
    options += ["--out", str(file)]
    assert model.main(options) == 0, capsys.readouterr().err
    assert "nothing is timed" in capsys.readouterr().out
    record = json.loads(file.read_text())
    assert record["environment"]["fabric"] == "host"
    assert (record["timed"], record["model"]["layers"], record["model"]["vocabulary"]) == (
        False, 1, 128,
    )  # fmt: skip
    rows = {(row["phase"]["name"], row["path"]): row for row in record["rows"]}
    for phase, count in (("prefill", 1), ("decode", 8)):
        alone, ours = rows[phase, "one process"], rows[phase, "taxfree eager"]
        assert ours["tokens"] == alone["tokens"] == rows[phase, "torch eager"]["tokens"]
        assert sum(map(len, ours["tokens"])) == count
        assert ours["same_tokens"] == alone["same_tokens"] == count
        assert ours["largest_gap"] == 0
        assert 0 < ours["relative_error"] < 0.02
        assert list(ours["ran"]["blocks.0.mlp.down"]) == ["matmul_all_reduce"]
        assert "needs GPUs" in rows[phase, "torch micro-pipeline"]["skipped"]
        assert not any("us" in name for name in ours)
    assert {kind for kinds in record["problems"].values() for kind in kinds} == {"exact"}
    assert sum(sum(kinds.values()) for kinds in record["problems"].values()) == 2 * (1 + 4)


def test_timed_paths_run_pytorchs_reference(ranks):
    sizes = Sizes(32, 64, 4, 2, 8, 1, 128)
    paths = ["torch eager", "taxfree eager"]
    arguments = {"sizes": sizes, "dtype": "float16", "phases": [PHASE], "paths": paths}
    for (found,), problems in ranks.run(
        2, "benchmarks.model_ranks:measure", **arguments, records=[], repetitions=2
    ):
        assert [each.path for each in found] == paths
        assert [each.same_tokens for each in found] == [8, 8]
        assert all(len(each.timings["eager"].samples_us) == 2 for each in found)
        assert all(0 < each.relative_error < 0.01 for each in found)
        assert len(list(model.rows_of(PHASE, found))) == 2
        assert any("k=32" in problem for problem in problems)


def result(path, error=0.01, **times):
    timings = {mode: Timing((us,), 0.0) for mode, us in times.items()}
    return PathResult(path, timings, [[1, 2]], 2, relative_error=error)


def test_rates_and_speedups_are_those_of_the_fastest_of_pytorch():
    found = [result("torch eager", eager=400.0), result("torch compiled", eager=300.0, graph=200.0)]
    *_, row = model.rows_of(PHASE, [*found, result("taxfree compiled", graph=100.0)])
    assert (row["mode"], row["speedup"], row["tokens_per_s"]) == ("graph", 2.0, 20000.0)
    assert "20000 tokens/s x2.00  2 of 2 tokens" in model.line_of(row)


def test_a_path_that_is_less_exact_is_an_error():
    with pytest.raises(WrongResult, match=r"taxfree eager, .* relative error 0\.02"):
        list(model.rows_of(PHASE, [result("torch eager"), result("taxfree eager", error=0.02)]))


def test_sizes_come_from_the_config(config):
    sizes, dtype = model.sizes_of(config, None, 2)
    assert sizes == Sizes(32, 64, 4, 2, 8, 3, 128, 500000.0, 1e-6)
    assert dtype == "bfloat16"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gpus", "4"], "kv_heads 2 do not divide over 4 ranks"),
        (["--gpus", "2", "--paths", "taxfree eager"], "'one process' is not the first"),
        (["--gpus", "2", "--paths", "one process,tea"], "these are no paths"),
    ],
)
def test_what_cannot_run_is_an_error_of_the_user(config, capsys, options, said):
    code = model.main(["--fabric", "host", "--model", str(config), *options])
    assert code == ExitCode.USAGE
    assert said in capsys.readouterr().err
