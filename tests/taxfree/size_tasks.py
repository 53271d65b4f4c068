"""What the tests of sizes run on ranks."""

from __future__ import annotations

import gc
import random
import resource
from typing import Any

import torch

from taxfree.runtime import Runtime
from taxfree_kernels.variant import Plan, op_of, operation, resized, variants
from tests.taxfree.records import record_of


def tensors_of(fabric: Any, problem: Any, seed: int) -> tuple[Any, torch.Tensor]:
    """Inputs whose results are exact, and the result."""
    found = operation(op_of(problem))
    inputs = found.make_inputs(problem, fabric.rank, seed, fabric.device, integers=True)
    expected = found.reference(problem, fabric.rank, seed, fabric.device, integers=True)
    return inputs, expected.to(getattr(torch, problem.dtype))
