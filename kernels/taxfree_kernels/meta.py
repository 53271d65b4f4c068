"""Tensors with shapes but without memory, to compile an operation or to record its launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from taxfree_kernels.fp8 import DTYPES, dtype_of
from taxfree_kernels.variant import Problem, op_of, operation

META = torch.device("meta")


def meta_tensors(
    problem: Problem, rank: int = 0, architecture: str = ""
) -> tuple[torch.Tensor | None, ...]:
    """The arguments of a plan on a rank: the operation's inputs, then the output.

    Args:
        architecture: for which fp8 is of the kind that it multiplies.
    """
    op = operation(op_of(problem))
    with _WithoutMemory():
        cpu = torch.device("cpu")
        tensors = *op.make_inputs(problem, rank, 0, cpu), op.empty_output(problem, cpu)
    kind = dtype_of(architecture)
    return tuple(
        tensor if tensor is None or tensor.dtype not in DTYPES else tensor.to(kind)
        for tensor in tensors
    )


class _WithoutMemory(TorchFunctionMode):
    """In this mode, factories make tensors without memory; random functions fill nothing."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = META
            kwargs.pop("generator", None)
        return func(*args, **kwargs)
