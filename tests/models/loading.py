"""Models of Transformers on ranks of tests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch


def parallel_model(fabric: Any, folder: str | Path, dtype: torch.dtype) -> Any:
    """A saved model, whose layers Transformers spreads over the fabric's ranks."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    world = fabric.world_size
    launcher = {}  # in whose absence a model stays on the CPU
    if fabric.device.type == "cuda":
        launcher = {"LOCAL_RANK": fabric.device.index, "RANK": fabric.rank, "WORLD_SIZE": world}
    with mock.patch.dict(os.environ, {name: str(value) for name, value in launcher.items()}):
        return AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            distributed_config=DistributedConfig(tp_size=world, tp_plan="auto"),
        ).eval()
