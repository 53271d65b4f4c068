"""`taxfree shapes`."""

from __future__ import annotations

import json
import sys

from taxfree_tune.built import built_model


def test_without_arguments_it_lists_the_named_sets(cli):
    outcome = cli("shapes")
    for name in ("paper", "large", "demo"):
        assert name in outcome.out
    assert json.loads(cli("shapes", "--json").out)["sets"].keys() == {"paper", "large", "demo"}


def test_a_narrow_terminal_shows_problems_as_one_types_them(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    first, *others = cli("shapes", "--model", "llama-3.1-8b").out.splitlines()
    assert first.startswith("matmul_all_reduce m=1,4,16,64,256,1024,4096,16384 n=4096 k=512")
    assert max(map(len, others)) <= 80


def test_a_config_without_a_dtype_is_said_to_be_listed_in_one(cli, tmp_path):
    config = {
        "model_type": "llama", "num_hidden_layers": 1, "vocab_size": 64,
        "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = ("shapes", "--model", tmp_path, "--tp", 2)
    assert "says no dtype: float16 is listed" in cli(*asked).err
    assert "no dtype" not in cli(*asked, "--dtype", "bf16").err
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    assert "no dtype" not in cli(*asked).err


def test_it_expands_shapes_for_each_world_size(cli):
    outcome = cli("shapes", "--shapes", "16x64x64", "--gpus", "2,4", "--dtype", "bf16", "--json")
    problems = json.loads(outcome.out)["problems"]
    assert [problem["world_size"] for problem in problems] == [2, 4]
    assert {problem["dtype"] for problem in problems} == {"bfloat16"}


def test_it_takes_all_operations_that_a_file_names(cli, tmp_path):
    path = tmp_path / "shapes.yaml"
    path.write_text(
        "- {op: matmul_all_reduce, m: 2, n: 8, k: 8, calls: 3}\n"
        "- {m: 1, n: 8, k: 8}\n"
        "- {op: matmul_all_reduce, m: 4, n: 8, k: 8, calls: 1}\n"
    )
    found = json.loads(cli("shapes", "--shapes", path, "--json").out)["problems"]
    assert [(each["op"], each["m"]) for each in found] == [
        ("matmul_all_reduce", 2), ("matmul_all_reduce", 4), ("all_gather_matmul", 1),
    ]  # fmt: skip
    assert "residual" in cli("shapes", "--shapes", path, "--op", "matmul_all_reduce").out


def test_it_reads_a_model(cli, tmp_path):
    config = {
        "model_type": "llama", "num_hidden_layers": 1, "vocab_size": 32000,
        "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))

    def listed(*options):
        outcome = cli("shapes", "--model", tmp_path, "--tp", 8, *options, "--json")
        problems = json.loads(outcome.out)["problems"]
        return {(each["op"], each.get("n"), each.get("k")) for each in problems}

    sums = {("matmul_all_reduce", 8192, 1024), ("matmul_all_reduce", 8192, 3584)}
    assert listed() == sums
    assert listed("--training") - sums == {("matmul_all_reduce", 8192, 4000)}
    everything = listed("--path", "attention,sequence,tp")
    assert {("all_gather_matmul", 3072, 8192), ("all_gather_matmul", 7168, 8192)} < everything
    assert len({op for op, *_ in everything}) == 5


def test_it_knows_models_and_says_what_they_leave_out(cli):
    outcome = cli("shapes", "--model", "mixtral-8x7b", "--tp", 8)
    assert "matmul_all_reduce leaves out 8 routed experts" in outcome.err
    skipped = json.loads(cli("shapes", "--model", "mixtral-8x7b", "--json").out)["skipped"]
    assert {each["op"] for each in skipped} == {"matmul_all_reduce"}
    assert "mixtral-8x7b" in json.loads(cli("shapes", "--json").out)["models"]


def test_a_config_needs_transformers_and_a_name_does_not(cli, tmp_path, monkeypatch):
    built_model.cache_clear()
    monkeypatch.setitem(sys.modules, "transformers.utils", None)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    refused = cli("shapes", "--model", tmp_path, "--tp", 2)
    assert "is read by Transformers, which is not installed" in refused.err
    assert "taxfree[models]" in refused.err
    assert "llama-3.1-8b" in refused.err
    assert json.loads(cli("shapes", "--model", "llama-3.1-8b", "--json").out)["problems"]
