"""The examples, each on two ranks as a user starts it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ranks import PYTHON, ROOT, environment
from tests.sample import Sample


def start(name: str, *arguments: str, **variables: str) -> str:
    """What an example prints."""
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return said_by("-m", *command, str(ROOT / f"examples/{name}.py"), *arguments, **variables)


def said_by(*arguments: str, **variables: str) -> str:
    """What Python prints."""
    result = subprocess.run(
        [PYTHON, *arguments],
        env=environment(TRITON_INTERPRET="1", **variables),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def check_parallel(tmp_path: Path) -> None:
    """What the model met is tuned with one command, and its next start uses the record."""
    database, met = str(tmp_path / "tuning.sqlite"), str(tmp_path / "problems.yaml")
    said = start("parallel", TAXFREE_DB=database, TAXFREE_LOG=met)
    assert float(said.split("largest difference ")[1].split()[0]) < 0.01
    assert "matmul_all_reduce" in said
    assert "library" not in said.partition("problem")[0]
    assert "baseline" in said
    said_by("-m", "taxfree_cli.app", "tune", "--from", met, "--trials", "2", "--db", database)
    said = start("parallel", TAXFREE_DB=database)
    assert "exact" in said
    assert "baseline" not in said


def check_train(tmp_path: Path) -> None:
    said = start("train")
    losses = [float(line.split()[-1]) for line in said.splitlines() if line.startswith("step")]
    assert losses[-1] < 0.9 * losses[0]
    assert "matmul_reduce_scatter" in said


@pytest.mark.dealt("name")
@pytest.mark.parametrize("name", ["decode", "generate", "parallel", "ring", "train"])
def test_an_example_that_is_started_without_what_it_needs_says_how(name: str) -> None:
    if name in ("decode", "generate"):
        pytest.importorskip("transformers")
    command = [PYTHON, str(ROOT / f"examples/{name}.py")]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert "Traceback" not in result.stderr
    assert f"examples/{name}.py" in result.stdout + result.stderr


def save_llama(folder: Path) -> None:
    """A model with random weights."""
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: pip install '.[models]'"
    )
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def check_generate(tmp_path: Path) -> None:
    save_llama(tmp_path)
    said = start("generate", str(tmp_path))
    assert said.startswith("[1, 2, 3, 4, ")
    assert "rowwise Linear(64, 32)" in said


def check_decode(tmp_path: Path) -> None:
    """A step chooses the tokens of `generate`, but for ties, on two ranks and in one process."""
    save_llama(tmp_path)
    in_one = said_by(str(ROOT / "examples/decode.py"), str(tmp_path))
    for said in (start("decode", str(tmp_path)), in_one):
        tokens = [line.split(maxsplit=1)[1] for line in said.splitlines() if "[" in line]
        gaps = [float(line.split()[-4]) for line in said.splitlines() if "differs" in line]
        assert len(tokens) >= 4
        assert sum(tokens[i] != tokens[i + 1] for i in (0, 2)) == len(gaps)
        assert all(abs(gap) < 0.05 for gap in gaps)


def check_vllm_generate(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm runs this example")


def check_ring(tmp_path: Path) -> None:
    """The broken ring is found, and its report says how to mend it; the right one holds."""
    file = ROOT / "examples/ring.py"
    outcomes = [
        subprocess.run(
            [PYTHON, "-m", "taxfree_cli.app", "check", f"{file}::{name}", "--ranks", ranks],
            env=environment(),
            capture_output=True,
            text=True,
        )
        for name, ranks in (("ring", "2"), ("broken", "2"), ("ring", "4"))
    ]
    assert [outcome.returncode for outcome in outcomes] == [0, 4, 4]
    assert 'make the read at ring.py:39 an acquire: sem="acquire"' in outcomes[1].stdout
    assert "payload lifetime" in outcomes[2].stdout


CHECKS: dict[str, Callable[[Path], None]] = {
    "decode": check_decode,
    "generate": check_generate,
    "parallel": check_parallel,
    "ring": check_ring,
    "train": check_train,
    "vllm_generate": check_vllm_generate,
}


def test_every_example_has_a_check() -> None:
    assert sorted(CHECKS) == sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


def test_examples_run(sample: Sample, tmp_path: Path) -> None:
    for name in sample.one_of(list(CHECKS)):
        CHECKS[name](tmp_path)
