"""The first lines of the quickstart, run on two ranks as they are written."""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.ranks import ROOT, Ranks

PYTORCH, TRANSFORMERS, *_ = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs/quickstart.md").read_text(), re.DOTALL
)


def run_for_pytorch(fabric: Any) -> tuple[str, dict[str, Any]]:
    """What the lines print, and what a call behind them runs."""
    import torch
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )  # fmt: skip

    import taxfree
    from taxfree._runtime.runtime import runtime_of
    from taxfree.models import report
    from tests.models.meshes import new_mesh

    mesh, model = new_mesh(), torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    report.clear()
    with contextlib.redirect_stdout(io.StringIO()) as said:
        given = {"parallelize_module": parallelize_module}
        exec(PYTORCH, given | {"model": model, "mesh": mesh, "plan": plan})
    with runtime_of(mesh.get_group().group_name), torch.no_grad():
        model.bfloat16()(torch.ones(3, 8).bfloat16())
        return said.getvalue(), taxfree.report().layers


def run_for_transformers(fabric: Any, name: str) -> tuple[list[int], list[int], dict[str, Any]]:
    """Tokens of one process, those of the lines' model, and what it runs."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    import taxfree
    from taxfree.models import report
    from tests.models.test_transformers import make, tokens_of

    alone = make(fabric, "Llama", name)
    report.clear()
    given = {
        "AutoModelForCausalLM": AutoModelForCausalLM,
        "DistributedConfig": DistributedConfig,
        "name": name,
    }
    with mock.patch.dict(os.environ, WORLD_SIZE=str(fabric.world_size)):
        exec(TRANSFORMERS, given)
    return alone, tokens_of(given["model"]), taxfree.report().layers


def lines_of(block: str) -> int:
    return sum(map(bool, block.splitlines()))


def test_a_model_of_pytorch_takes_five_lines(ranks: Ranks) -> None:
    assert lines_of(PYTORCH) <= 5
    for said, layers in ranks.run(2, f"{__name__}:run_for_pytorch"):
        assert said.startswith("layer")
        assert layers == {"0": {"matmul": 1}, "1": {"matmul_all_reduce": 1}}


def test_a_model_of_transformers_takes_five_lines(ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    assert lines_of(TRANSFORMERS) <= 5
    for alone, found, layers in ranks.run(
        2, f"{__name__}:run_for_transformers", name=str(tmp_path)
    ):
        assert found == alone
        served = [ran for name, ran in layers.items() if name.startswith("rowwise ")]
        assert {what for ran in served for what in ran} == {"matmul_all_reduce"}
