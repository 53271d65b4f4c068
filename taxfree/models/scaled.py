"""Row-parallel layers of Transformers, and those of torchao, whose weight is in fp8.

A layer quantises its input as its class does, and runs the operation where the table has a variant
of ours: elsewhere its own forward has kernels of its own, which no library path here calls.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from taxfree._runtime.plans import BASELINE
from taxfree._runtime.runtime import Runtime, requires_grad
from taxfree_kernels.fp8 import fp8_dtype
from taxfree_kernels.matmul_all_reduce.problem import MatmulAllReduce
from taxfree_kernels.quantise import quantise
from taxfree_kernels.variant import BLOCK
from taxfree_kernels.vendor import multiplies_fp8

_DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
_SCALES_OF_CHANNELS = "weight_scale"


class _Scales(NamedTuple):
    """The scales of a layer.

    Args:
        kind: who has one; see :mod:`taxfree_kernels.fp8`.
        of_weight: as the operations take them.
        of_input: float32 [1], if it is static.
        most: [1], a larger input is clamped to it before its scale is found; None: any is kept.
    """

    kind: str
    of_weight: torch.Tensor
    of_input: torch.Tensor | None = None
    most: torch.Tensor | None = None


def is_fp8_layer(module: torch.nn.Module) -> bool:
    """Whether a module is of a class of Transformers whose weight is in fp8."""
    kind = type(module)
    return kind.__name__ in _SCALES and kind.__module__.startswith("transformers.integrations.")


def _weight(module: Any) -> Any:
    """This rank's weight, not a view of it: a class of its own may have none."""
    weight = module.weight
    return weight._local_tensor if isinstance(weight, DTensor) else weight


def is_float8_tensor(weight: Any) -> bool:
    """Whether a rank's weight is torchao's, which holds its elements and their scales."""
    kind = type(weight)
    return kind.__name__ == "Float8Tensor" and kind.__module__.startswith("torchao.")


def is_whole(module: torch.nn.Module, parameter: str) -> bool:
    """Whether all ranks need a parameter whole: the scales of output channels, behind a sum."""
    return is_fp8_layer(module) and parameter == _SCALES_OF_CHANNELS


def _of_blocks(module: Any) -> _Scales:
    scale, static = local(module.weight_scale_inv), module.activation_scale
    if module.block_size is None:
        return _Scales("tensor", scale.view(1), local(static).view(1))
    return _Scales("block", scale.contiguous().t())


def _of_channels(module: Any) -> _Scales:
    return _Scales("channel", local(module.weight_scale))


def _of_bounded_channels(module: Any) -> _Scales:
    return _Scales("channel", local(module.weight_scale).t(), most=local(module.input_scale_ub))


def _of_weight(module: Any) -> _Scales:
    weight = _weight(module)
    scale = weight.scale
    if scale.numel() == 1:
        return _Scales("tensor", scale.view(1))
    if weight.block_size[0] == 1:
        return _Scales("channel", scale.t())
    return _Scales("block", scale.contiguous().t())


_SCALES = {
    "Float8Tensor": _of_weight,
    "FP8Linear": _of_blocks,
    "CompressedTensorsFP8Linear": _of_channels,
    "FbgemmFp8Linear": _of_bounded_channels,
}


def step_unsupported_reason(module: Any) -> str | None:
    """Why a decode step does not compute what a layer does; None if it does."""
    kind = type(module).__name__
    if kind == "FbgemmFp8Linear":
        return "an upper bound of its inputs"
    if kind == "FP8Linear":
        if module.block_size is None or tuple(module.block_size) != (BLOCK, BLOCK):
            return f"scales of {module.block_size or 'tensors'}, not of blocks of {BLOCK} x {BLOCK}"
        if module.activation_scale is not None:
            return "a static scale"
    return None


def weight_scale(module: Any) -> torch.Tensor:
    """This rank's scales of a layer's weight, where they are: [rows, 1], or of [rows, k] blocks."""
    if type(module).__name__ == "FP8Linear":
        return local(module.weight_scale_inv).detach()
    return local(module.weight_scale).detach().view(-1, 1)


def local(tensor: Any) -> torch.Tensor:
    """This rank's part."""
    part: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part


def _class_of(module: Any) -> str:
    """The class that says what a layer's scales are."""
    weight = _weight(module)
    return type(weight if is_float8_tensor(weight) else module).__name__


def _elements(module: Any) -> torch.Tensor:
    """The weight [n, k], without its scales."""
    weight = _weight(module)
    elements: torch.Tensor = weight.qdata if is_float8_tensor(weight) else weight
    return elements


class Fp8Rowwise:
    """A row-parallel layer whose weight is in fp8.

    Args:
        module: the layer, whose weights may not be loaded yet.
        runtime: of its group.
    """

    def __init__(self, module: Any, runtime: Runtime) -> None:
        device = runtime._fabric.device
        self._module, self._runtime, self._kind = module, runtime, fp8_dtype(device)
        self._columns = module.in_features // runtime.world_size
        self.unsupported_reason = self._format_unsupported_reason()
        if self.unsupported_reason is None:
            kind = self._kind, torch.bfloat16, False, False, device
            modulo = module.out_features % BLOCK
            self._is_multiplied = multiplies_fp8(self._scales_kind(), self._columns, modulo, *kind)

    def _scales(self) -> _Scales:
        return _SCALES[_class_of(self._module)](self._module)

    def _scales_kind(self) -> str:
        kind = _class_of(self._module)
        if kind == "Float8Tensor":
            return self._scales().kind
        if kind != "FP8Linear":
            return "channel"
        return "tensor" if self._module.block_size is None else "block"

    def _weights_unsupported_reason(self) -> str | None:
        """Of torchao's, which says how the input is quantised."""
        weight = _weight(self._module)
        kind, how = self._scales_kind(), weight.act_quant_kwargs
        if how is None:
            return "the weight alone is in fp8"
        if how.hp_value_lb is not None or how.hp_value_ub is not None:
            return "the magnitudes of inputs are bounded"
        granularity = type(how.granularity).__name__
        if granularity != {"tensor": "PerTensor", "channel": "PerRow", "block": "PerBlock"}[kind]:
            return f"scales of the weight are of each {kind}, those of inputs are {granularity}"
        if getattr(weight, "act_quant_scale", None) is not None:
            return "the scale of inputs is static"
        if kind == "block" and (list(weight.block_size) != [BLOCK] * 2 or self._columns % BLOCK):
            return f"blocks of {list(weight.block_size)} in {self._columns} columns of a rank"
        return None

    def _format_unsupported_reason(self) -> str | None:
        if _class_of(self._module) == "Float8Tensor":
            return self._weights_unsupported_reason()
        if self._scales_kind() == "channel":
            return None
        is_static, sizes = self._module.activation_scale is not None, self._module.block_size
        if sizes is None:
            return None if is_static else "one scale of the weight, and none of the input"
        if tuple(sizes) != (BLOCK, BLOCK) or is_static:
            return f"blocks of {list(sizes)}" + ", a static scale" * is_static
        if self._columns % BLOCK:
            return f"{self._columns} columns of a rank are no whole blocks of {BLOCK}"
        return None

    def call_unsupported_reason(self, x: torch.Tensor) -> str | None:
        """The reason why the layer's own forward must run for this rank's or all columns."""
        weight, scales = _elements(self._module), self._scales()
        if x.dtype not in _DTYPES or x.dim() < 2:
            return f"the input is {str(x.dtype).removeprefix('torch.')}, of {x.dim()} dimensions"
        if weight.dtype != self._kind:
            return f"the weight is {weight.dtype}, the device multiplies {self._kind}"
        if scales.of_weight.dtype != torch.float32:
            return f"the scales of the weight are {scales.of_weight.dtype}"
        if requires_grad(x):
            return "the input requires a gradient"
        if torch.compiler.is_compiling():  # the table cannot be asked while a graph is traced
            return None if self._is_multiplied else "torch multiplies no such fp8"
        return None if self._has_record(x) else "no record"

    def _has_record(self, x: torch.Tensor) -> bool:
        runtime, module = self._runtime, self._module
        rows = x.numel() // x.shape[-1]
        if runtime._collecting or not rows:
            return True
        problem = MatmulAllReduce(
            m=rows, n=module.out_features, k=self._columns, dtype=_DTYPES[x.dtype],
            world_size=runtime.world_size, bias=self._fused_bias(x.dtype) is not None,
            x_dtype="fp8", scales=self._scales_kind(),
        )  # fmt: skip
        mode = "graph" if runtime._is_capturing() else "eager"
        return runtime.choice(problem).of(mode).variant != BASELINE

    def _fused_bias(self, dtype: torch.dtype) -> torch.Tensor | None:
        bias = self._module.bias
        return None if bias is None or bias.dtype != dtype else local(bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks of x [..., k] @ weight (+ bias), for this rank's columns."""
        module, scales = self._module, self._scales()
        rows, bias = x.flatten(0, -2), self._fused_bias(x.dtype)
        if scales.most is not None:
            rows = torch.clamp(rows, -scales.most.to(rows.dtype), scales.most.to(rows.dtype))
        values, x_scale = quantise(rows, scales.kind, scales.of_input)
        y = self._runtime.scaled_matmul_all_reduce(
            values, _elements(module).t(), x_scale, scales.of_weight, bias, dtype=x.dtype
        )
        if bias is None and module.bias is not None:
            y = y + local(module.bias)  # of another dtype
        return y.view(*x.shape[:-1], y.shape[1])
