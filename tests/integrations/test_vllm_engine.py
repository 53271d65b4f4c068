"""The plugin in the real vLLM, where that is installed: make test-vllm."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.ranks import PYTHON, ROOT, environment

vllm = pytest.importorskip("vllm", reason="vLLM is not installed")
FOLDER = ROOT / "integrations" / "vllm"
DEADLINE_S = 540.0


def on_gpus() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model of Llama's shape."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=128,
        initializer_range=0.2, dtype="bfloat16", pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


def plugin_folder(tmp_path: Path) -> Path:
    """What `pip install` of the plugin leaves: its entry point."""
    folder = tmp_path / "taxfree_vllm-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: taxfree-vllm\nVersion: 0\n")
    entry = "[vllm.general_plugins]\ntaxfree = taxfree_vllm:register\n"
    (folder / "entry_points.txt").write_text(entry)
    return tmp_path


def generated(model: Path, ranks: int, tmp_path: Path, **variables: str) -> tuple[list[str], str]:
    """The tokens of the example, and the report that it prints."""
    on_cpu = {
        "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(ranks))),
    }  # fmt: skip
    given = dict(environment(**({} if on_gpus() else on_cpu), **variables))
    given["PYTHONPATH"] = f"{FOLDER}:{plugin_folder(tmp_path)}:{given['PYTHONPATH']}"
    result = subprocess.run(
        [PYTHON, str(ROOT / "examples/vllm_generate.py"), str(model), str(ranks)],
        env=given, capture_output=True, text=True, timeout=DEADLINE_S,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    lines = result.stdout.splitlines()
    return [line for line in lines if line.startswith("tokens ")], result.stdout


def table(path: Path) -> Path:
    """Records by which `push` wins on the host, of the model's two row-parallel layers."""
    from taxfree_kernels.hardware import KNOWN
    from taxfree_kernels.matmul_all_reduce.problem import MatmulAllReduce
    from taxfree_tuning_db import Database
    from tests.taxfree.runtime_tasks import record_of

    with Database(path) as found:
        for m in (2, 16):
            for k in (64, 128):
                problem = MatmulAllReduce(m=m, n=128, k=k, dtype="bfloat16", world_size=2)
                found.put(record_of(SimpleNamespace(hardware=KNOWN["cpu"]), problem))
    return path


def test_the_installed_vllm_has_the_recorded_signatures() -> None:
    import json

    script = [sys.executable, str(FOLDER / "record_signatures.py")]
    folder = Path(vllm.__file__).parents[1]
    found = subprocess.run([*script, str(folder)], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    recorded: dict[str, Any] = json.loads((FOLDER / "signatures.json").read_text())
    for name in ("functions", "attributes", "imports", "constants"):
        assert json.loads(found.stdout)[name] == recorded[name]


@pytest.mark.timeout(1200)
def test_tokens_are_those_of_one_process(model: Path, tmp_path: Path) -> None:
    if on_gpus():
        import torch

        if torch.cuda.device_count() < 2:
            pytest.skip("needs 2 GPUs, 1 is there")
        variables = {"TAXFREE_LOG": str(tmp_path / "met.yaml")}  # no record: the library's path
    else:
        variables = {"TAXFREE_DB": str(table(tmp_path / "tuning.sqlite"))}
    (tmp_path / "alone").mkdir()
    alone, _ = generated(model, 1, tmp_path / "alone")
    together, said = generated(model, 2, tmp_path, TAXFREE_VLLM="1", **variables)
    assert together == alone
    assert len(alone) == 2
    layers, _, problems = said.partition("problem ")
    assert "matmul_all_reduce" in layers.partition("layer ")[2]
    assert on_gpus() or "exact" in problems


@pytest.mark.filterwarnings("default")  # of vLLM and what it imports
def test_vllm_takes_the_pass_and_its_cache_key(monkeypatch: pytest.MonkeyPatch) -> None:
    import copy

    import torch
    from torch.fx.experimental.proxy_tensor import make_fx
    from vllm import ir
    from vllm.compilation.passes.pass_manager import PostGradPassManager
    from vllm.config import CompilationConfig
    from vllm.platforms import current_platform

    monkeypatch.syspath_prepend(str(FOLDER))
    from taxfree_vllm.row_parallel import _groups, _key, _RmsNormPass

    config, ours = CompilationConfig(), _RmsNormPass()
    before = config.compute_hash()
    config.inductor_compile_config[current_platform.pass_key] = ours
    assert config.compute_hash() != before
    copy.deepcopy(config.inductor_compile_config)
    PostGradPassManager().add(ours)

    def model(x: Any, weight: Any, residual: Any, norm_weight: Any) -> Any:
        y = torch.ops.taxfree_vllm.row_parallel(x, weight, None, "tp:0")
        return ir.ops.fused_add_rms_norm(y, residual, norm_weight, 1e-6)

    tensors = [torch.empty(size).bfloat16() for size in ((3, 8), (16, 8), (3, 16), (16,))]
    graph = make_fx(model, tracing_mode="fake")(*tensors).graph
    served = SimpleNamespace(serves_all=lambda least, most: (least, most) == (1, 8))
    sizes = {_key(tensors[1], None, has_norm=True): served}
    monkeypatch.setitem(_groups, "tp:0", SimpleNamespace(sizes=sizes))
    assert ours.is_applicable_for_range(SimpleNamespace(start=1, end=8))
    ours(graph)
    graph.lint()
    (fused, *_) = [node for node in graph.nodes if node.op == "call_function"]
    assert fused.target is torch.ops.taxfree_vllm.row_parallel_rms_norm.default
    assert [str(each) for each in fused.args] == [
        "x_1", "weight_1", "None", "residual_1", "norm_weight_1", "1e-06", "tp:0",
    ]  # fmt: skip
