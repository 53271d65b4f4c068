"""The plugin of vLLM on a stand-in with vLLM's recorded signatures, on two ranks."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.ranks import PYTHON, ROOT, Ranks, environment

FOLDER = ROOT / "integrations" / "vllm"
N, K, RECORDED_ROWS = 32, 16, 4


def opened(database: str, **config: Any) -> Any:
    """The plugin with no layer yet, on this database, and the stand-in's configuration."""
    from taxfree.models import report
    from tests.integrations.vllm_stand_in import ENGINE, plugin

    module = plugin()
    for group in module._groups.values():
        group.runtime.close()
    module._groups.clear()
    report.clear()
    report._runtimes.clear()  # those of other tests
    os.environ["TAXFREE_DB"] = database
    return module, ENGINE.configure(**config)


def layer(**options: Any) -> Any:
    """A row-parallel layer, made as a model of vLLM makes it."""
    from tests.integrations import vllm_stand_in
    from tests.integrations.vllm_stand_in import RowParallelLinear

    torch.manual_seed(torch.distributed.get_rank())
    given = {"bias": False, "params_dtype": torch.bfloat16} | options
    if isinstance(given.get("quant_config"), str):
        given["quant_config"] = getattr(vllm_stand_in, given["quant_config"])
    made = RowParallelLinear(K * torch.distributed.get_world_size(), N, **given)
    if hasattr(made.quant_method, "process_weights_after_loading"):
        made.quant_method.process_weights_after_loading(made)
    return made


def weight_of(made: Any) -> torch.Tensor:
    """[n, k]; of one in fp8 what it stands for."""
    from tests.integrations.vllm_stand_in import Fp8LinearMethod, dequantised_weight

    is_fp8 = isinstance(made.quant_method, Fp8LinearMethod)
    return dequantised_weight(made) if is_fp8 else made.weight


def call(
    fabric: Any, database: str, options: dict[str, Any], shape: tuple[int, ...], **config: Any
) -> Any:
    """The relative error against float64, what was returned besides, the report, the most rows."""
    import taxfree

    module, _ = opened(database, **config)
    made = layer(**options)
    torch.manual_seed(5 + fabric.rank)
    x = torch.randn(*shape, K).bfloat16()
    given = made(x)
    y, bias = given if isinstance(given, tuple) else (given, None)
    expected = x.double() @ weight_of(made).t().double()
    torch.distributed.all_reduce(expected)
    if made.bias is not None and not made.skip_bias_add:
        expected += made.bias
    error = float((y.double() - expected).norm() / expected.norm())
    most = [size.max_rows for size in module._group().sizes.values()]
    return error, bias is not None, type(given) is tuple, taxfree.report(), most


def tune_and_call(fabric: Any, database: str) -> Any:
    """As `call`, of a size that has no record until the environment lets it be tuned."""
    from tests.tune.test_autotune import few_trials, without_records

    variables = {"TAXFREE_AUTOTUNE": "10m", "TAXFREE_DB": database}
    with without_records(), few_trials(), mock.patch.dict(os.environ, variables):
        error, *_, report, most = call(fabric, database, {}, (4,), most_rows=4)
    return error, report, most


def compile_norm(
    fabric: Any, database: str, rows: int, most: int | None = None, quant_config: str | None = None
) -> Any:
    """Whether compiled code with the plugin's pass is right, its ops, the report, cache keys.

    Args:
        most: the largest number of rows that it is compiled for; None for the same.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch import config as functorch_config
    from torch._functorch.aot_autograd import make_boxed_func

    import taxfree

    _, config = opened(database, mode=3)
    made = layer(quant_config=quant_config)
    (installed,) = config.compilation_config.inductor_compile_config.values()
    torch.manual_seed(7)
    residual, weight = torch.randn(rows, N).bfloat16(), torch.rand(N).bfloat16() + 0.5
    x = torch.randn(rows, K).bfloat16()
    targets: list[str] = []

    def fused(graph_module: Any, inputs: Any) -> Any:
        assert installed.is_applicable_for_range(SimpleNamespace(start=rows, end=most or rows))
        installed(graph_module.graph)
        graph_module.recompile()
        targets.extend(
            str(node.target)
            for node in graph_module.graph.nodes
            if node.op == "call_function" and "getitem" not in str(node.target)
        )
        return make_boxed_func(graph_module.forward)

    def model(x: torch.Tensor, residual: torch.Tensor) -> Any:
        y, _ = made(x)
        return torch.ops.vllm_ir.fused_add_rms_norm(y, residual, weight, 1e-6)

    torch.compiler.reset()
    with torch.no_grad(), functorch_config.patch(error_on_custom_op_aliasing=True):
        expected = model(x, residual)
        found = torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=fused))(
            x, residual
        )
    is_right = [
        torch.allclose(a.float(), b.float(), rtol=0.03, atol=0.03)
        for a, b in zip(found, expected, strict=True)
    ]
    keys = [installed.uuid()]
    layer(bias=True)
    keys.append(installed.uuid())
    return is_right, targets, taxfree.report(), keys


def refuse_fp8(fabric: Any, database: str) -> Any:
    """The report of layers in fp8 that are not served, or not as vLLM has laid them out."""
    import taxfree
    from tests.integrations.vllm_stand_in import ChannelsLinearMethod, Fp8LinearMethod

    opened(database)
    x = torch.randn(2, K).bfloat16()
    for kind, attribute, value in (
        (Fp8LinearMethod, "weight_scale_inv", torch.ones(1, 1, dtype=torch.bfloat16)),
        (Fp8LinearMethod, "weight_block_size", [64, 64]),
        (ChannelsLinearMethod, "weight_scale", torch.ones(1)),
        (ChannelsLinearMethod, "input_scale_ub", torch.ones(1)),
    ):
        made = layer(quant_config=kind, prefix="layers.3.down_proj")
        if attribute in made._parameters:
            del made._parameters[attribute]
        setattr(made, attribute, value)
        made.quant_method.apply = lambda layer, x, bias: x.new_zeros(len(x), N)
        made(x)
    return taxfree.report().layers


def refuse(fabric: Any, database: str) -> Any:
    """The report of layers that are not served."""
    import taxfree
    from tests.integrations.vllm_stand_in import QuantizedLinearMethod

    opened(database)
    x = torch.randn(2, K)
    name = "model.layers.7.mlp.down_proj"
    layer(quant_config=QuantizedLinearMethod, prefix=name)(x.bfloat16())
    layer(params_dtype=torch.float32)(x)
    layer(reduce_results=False)(x.bfloat16())
    layer(disable_tp=True)
    layer(bias=True)(x.bfloat16())
    opened_layers = taxfree.report().layers
    opened(database, use_ubatching=True)
    layer()(x.bfloat16())
    return opened_layers, taxfree.report().layers


@pytest.fixture
def database(tmp_path: Path) -> str:
    """A table with records of the layer, with and without RMSNorm, by which `push` wins."""
    from taxfree_kernels.hardware import KNOWN
    from taxfree_kernels.matmul_all_reduce.problem import MatmulAllReduce
    from taxfree_kernels.variant import SCALES
    from taxfree_tuning_db import Database
    from tests.taxfree.runtime_tasks import record_of

    path = tmp_path / "tuning.sqlite"
    kinds = [{}, *({"x_dtype": "fp8", "scales": scales} for scales in SCALES)]
    with Database(path) as found:
        for has_norm, kind in itertools.product((False, True), kinds):
            problem = MatmulAllReduce(
                m=RECORDED_ROWS, n=N, k=K, dtype="bfloat16", world_size=2,
                residual=has_norm, rms_norm=has_norm, **kind,
            )  # fmt: skip
            found.put(record_of(SimpleNamespace(hardware=KNOWN["cpu"]), problem))
    return str(path)


def run(ranks: Ranks, task: str, **arguments: Any) -> list[Any]:
    return ranks.run(2, f"{__name__}:{task}", **arguments)


NAME = f"RowParallelLinear({K}, {N})"


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({}, (RECORDED_ROWS,)),
        ({"bias": True}, (1, 3)),
        ({"bias": True, "skip_bias_add": True}, (RECORDED_ROWS,)),
        ({"return_bias": False}, (RECORDED_ROWS - 1,)),
    ],
)
def test_a_layer_with_a_record_runs_the_fused_variant(
    ranks: Ranks, database: str, options: dict[str, Any], shape: tuple[int, ...]
) -> None:
    arguments = {"database": database, "options": options, "shape": shape}
    for error, has_bias, is_pair, report, _ in run(ranks, "call", **arguments):
        assert error < 0.01
        assert has_bias == options.get("skip_bias_add", False)
        assert is_pair == options.get("return_bias", True)
        assert report.layers == {NAME: {"matmul_all_reduce": 1}}
        ((problem, kinds),) = report.problems.items()
        assert kinds in ({"exact": 1}, {"neighbour": 1})
        assert ("bias=True" in problem) == (options.get("bias", False) and not has_bias)


def test_rows_without_a_record_run_vllms_own_all_reduce(ranks: Ranks, database: str) -> None:
    for error, *_, report, most in run(ranks, "call", database=database, options={}, shape=(20,)):
        assert error < 0.01
        assert most == [2 * RECORDED_ROWS]
        assert report.layers == {
            NAME: {"matmul_all_reduce": 0, "library: no record of so many rows": 1}
        }
        assert report.problems == {}


@pytest.mark.parametrize("kind", ["Fp8LinearMethod", "ChannelsLinearMethod", "TensorLinearMethod"])
@pytest.mark.parametrize("rows", [RECORDED_ROWS, 20])
def test_a_layer_in_fp8_is_served_or_multiplied_by_vllm(
    ranks: Ranks, database: str, kind: str, rows: int
) -> None:
    """With scales of blocks, of channels, and of tensors; vLLM multiplies rows without a record."""
    options = {"quant_config": kind, "bias": True}
    arguments = {"database": database, "options": options, "shape": (rows,)}
    for error, *_, report, most in run(ranks, "call", **arguments):
        assert error < 0.05
        assert most == [2 * RECORDED_ROWS]
        ran = "matmul_all_reduce" if rows == RECORDED_ROWS else "library: no record of so many rows"
        assert report.layers[NAME][ran] == 1
        assert all("fp8" in problem for problem in report.problems), report.problems


def test_layers_in_fp8_that_are_laid_out_otherwise_run_vllms_own_forward(
    ranks: Ranks, database: str
) -> None:
    name = "layers.*.down_proj"
    for layers in run(ranks, "refuse_fp8", database=database):
        assert layers[NAME] == {"matmul_all_reduce": 0} | {
            f"library: {why}: {name}": 1
            for why in (
                "vLLM has laid out its weight for a kernel of its own",
                "scales of blocks of [64, 64]",
                "one scale of its weight, and none of its input",
                "its inputs are bounded",
            )
        }


def test_a_layer_without_a_record_runs_vllms_own_forward(ranks: Ranks, tmp_path: Path) -> None:
    none = str(tmp_path / "none.sqlite")
    for error, *_, report, most in run(ranks, "call", database=none, options={}, shape=(4,)):
        assert error < 0.01
        assert most == [0]
        assert report.layers == {NAME: {"library: no record": 1}}


def test_a_layer_may_be_tuned_when_it_is_made(ranks: Ranks, tmp_path: Path) -> None:
    none = str(tmp_path / "none.sqlite")
    for error, report, most in run(ranks, "tune_and_call", database=none):
        assert error < 0.01
        assert most == [4]
        assert report.layers == {NAME: {"matmul_all_reduce": 1}}
        assert list(report.problems.values()) == [{"exact": 1}]


@pytest.mark.dealt("most")
@pytest.mark.parametrize("most", [RECORDED_ROWS, 2 * RECORDED_ROWS, 20])
def test_compiled_code_takes_the_rms_norm_along_where_records_serve_all_its_rows(
    ranks: Ranks, database: str, most: int
) -> None:
    for is_right, targets, report, keys in run(
        ranks, "compile_norm", database=database, rows=RECORDED_ROWS, most=most
    ):
        assert is_right == [True, True]
        ran = report.layers[NAME]
        if most == 20:
            assert targets == [
                "taxfree_vllm.row_parallel.default",
                "vllm_ir.fused_add_rms_norm.default",
            ]
            assert ran == {"matmul_all_reduce": 2}
        else:
            norm = "taxfree_vllm.row_parallel_rms_norm.default"
            assert targets == [norm, *["aten.select.int"] * 2]
            assert ran == {"matmul_all_reduce": 1, "matmul_all_reduce_rms_norm": 1}
            assert any("rms_norm=True" in each for each in report.problems)
        assert len(set(keys)) == 2  # another layer has other records
        assert all(key.startswith("taxfree 0.") for key in keys)


def test_compiled_code_takes_the_rms_norm_behind_a_layer_in_fp8_along(
    ranks: Ranks, database: str
) -> None:
    arguments = {"database": database, "rows": RECORDED_ROWS, "quant_config": "Fp8LinearMethod"}
    for is_right, targets, _, _ in run(ranks, "compile_norm", **arguments):
        assert is_right == [True, True]
        assert targets[0] == "taxfree_vllm.row_parallel_rms_norm.default"


def test_the_cache_key_changes_with_the_table(ranks: Ranks, database: str, tmp_path: Path) -> None:
    from taxfree_tuning_db import Database

    arguments = {"rows": RECORDED_ROWS, "database": database}
    before = run(ranks, "compile_norm", **arguments)[0][3][0]
    assert run(ranks, "compile_norm", **arguments)[1][3][0] == before
    with Database(database) as found:
        found.delete([each.key for each in found.records() if each.problem["rms_norm"]])
    assert run(ranks, "compile_norm", **arguments)[0][3][0] != before


def test_what_is_not_served_runs_vllms_own_forward_and_is_counted(
    ranks: Ranks, database: str
) -> None:
    for layers, overlapping in run(ranks, "refuse", database=database):
        assert layers == {
            NAME: {
                "library: quantized, QuantizedLinearMethod: model.layers.*.mlp.down_proj": 1,
                "library: float32": 1,
                "library: its sums are reduced elsewhere": 1,
                "matmul_all_reduce": 1,
            }
        }
        assert overlapping == {NAME: {"library: two batches overlap": 1}}


def test_the_plugin_uses_public_names_alone() -> None:
    import taxfree

    source = (FOLDER / "taxfree_vllm" / "row_parallel.py").read_text()
    assert re.findall(r"^(?:from|import) (taxfree\S*)", source, re.MULTILINE) == ["taxfree"]
    assert set(re.findall(r"\btaxfree\.(\w+)\b", source)) <= set(taxfree.__all__)


def test_the_plugin_is_found_by_vllm_and_off_by_default() -> None:
    from tests.integrations.vllm_stand_in import RECORDED

    project = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]
    group = RECORDED["constants"]["vllm.plugins:DEFAULT_PLUGINS_GROUP"]
    assert project["entry-points"] == {group: {"taxfree": "taxfree_vllm:register"}}
    script = (
        "import sys, taxfree_vllm as p; p.register(); print({*sys.modules} & {'vllm', 'torch'})"
    )
    said = subprocess.run(
        [PYTHON, "-c", script], cwd=FOLDER, env=environment(), capture_output=True, text=True
    )
    assert said.stdout.strip() == "set()", said.stderr
