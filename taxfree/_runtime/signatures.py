"""The operations of a runtime: each is a :class:`Signature`, and a method of the runtime."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from taxfree import problems
from taxfree.errors import UsageError
from taxfree_kernels.attention.output import elements_with_lse
from taxfree_kernels.problem import own_rows
from taxfree_kernels.variant import Problem


@dataclass(frozen=True)
class Signature:
    """How calls of an operation are checked, looked up and run.

    The functions take the call's arguments, in the order of the schema, after those named here.

    Args:
        name: of the runtime's method and of the torch op.
        schema: the arguments of the torch op, but for the group's name.
        layout: () -> the operation, and properties of the arguments that decide what runs. It takes
            no tensor apart, because it is made in each call.
        key: () -> the same, but for sizes; calls with equal ones are checked once.
        sizes: (world_size) -> rows, or sequences and keys, as in `interpolated_fields`; negative
            rows if the tensors have other dimensions than they must have.
        fits: (fabric, rows) -> whether the sizes of the arguments fit together.
        problem: (fabric) -> the problem; raises :class:`UsageError` if the arguments do not fit.
        inputs: (on_device) -> what plans are called with, before the output; `on_device` makes a
            tensor of numbers.
        shape: (world_size, rows) -> that of the output.
        reusable: the input whose memory the output may take, by its place; None if there is none.
    """

    name: str
    schema: str
    layout: Callable[..., tuple[Any, ...]]
    key: Callable[..., tuple[Any, ...]]
    sizes: Callable[..., tuple[int, ...]]
    fits: Callable[..., bool]
    problem: Callable[..., Problem]
    inputs: Callable[..., tuple[torch.Tensor | None, ...]]
    shape: Callable[..., tuple[int, ...]]
    reusable: int | None = None

    @cached_property
    def numbers(self) -> tuple[tuple[int, str, type[Any], tuple[type[Any], ...]], ...]:
        """The arguments that are numbers: their place, name, type, and all types they may have."""
        found = []
        for at, argument in enumerate(self.schema.split(", ")):
            kind, name = argument.split()
            if kind.rstrip("?") in _NUMBERS:
                number = _NUMBERS[kind.rstrip("?")]
                found.append((at, name, number, (number, type(None))[: 1 + kind.endswith("?")]))
        return tuple(found)

    def normalized(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments, with numbers of all types as int or float, so that keys compare."""
        for at, name, kind, allowed in self.numbers:
            if type(arguments[at]) not in allowed:
                number = _number(name, kind, arguments[at])
                arguments = (*arguments[:at], number, *arguments[at + 1 :])
        return arguments


_NUMBERS: dict[str, type[Any]] = {"int": int, "float": float}


def _number(name: str, kind: type[Any], value: Any) -> Any:
    try:
        return operator.index(value) if kind is int else float(value)
    except (TypeError, ValueError):
        article, example = ("an integer", 16) if kind is int else ("a number", 1e-6)
        raise UsageError(
            f"{name} is {value!r}, must be {article}", f"for example {name}={example}"
        ) from None


# -- parts of keys and inputs --


def _fixed(tensor: torch.Tensor | None) -> Any:
    """The properties of a tensor that is the same in calls of all sizes."""
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _by_sequence(tensor: torch.Tensor | None) -> Any:
    """As `_fixed`, for a tensor of which each sequence has a part."""
    if tensor is None:
        return None
    return tensor.shape[1:], tensor.stride(), tensor.dtype, tensor.device


def _by_row(tensor: torch.Tensor | None) -> Any:
    """As `_fixed`, for a tensor with any strides and any rows: `aligned` copies it if need be."""
    return None if tensor is None else (tensor.shape[1:], tensor.dtype, tensor.device)


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, contiguous and aligned to 16 bytes; a copy if it is not."""
    if tensor.is_contiguous():
        return tensor.clone() if tensor.data_ptr() % 16 else tensor
    return tensor.contiguous()


def _rows(matrix: torch.Tensor) -> int:
    return matrix.shape[0] if matrix.dim() == 2 else -1


# -- operations --

ALL_GATHER_MATMUL = Signature(
    "all_gather_matmul",
    "Tensor a_shard, Tensor weight, Tensor? bias, int gather_dim, int? m",
    layout=lambda a, weight, bias, gather_dim, m: (
        "all_gather_matmul", a.shape, a.dtype, a.device, weight.shape, weight.stride(),
        weight.dtype, weight.device, None if bias is None else _fixed(bias), gather_dim, m,
    ),
    key=lambda a, weight, bias, gather_dim, _: (
        _by_row(a), _fixed(weight), _fixed(bias), gather_dim,
    ),
    sizes=lambda world_size, a, weight, bias, gather_dim, m: (
        m if m is not None else _rows(a) * (1 if gather_dim == 1 else world_size),
    ),
    fits=lambda fabric, m, a, weight, bias, gather_dim, _: (
        _rows(a) == own_rows(m, gather_dim, fabric.world_size, fabric.rank)
    ),
    problem=problems.all_gather_matmul,
    inputs=lambda _, a, weight, bias, *others: (aligned(a), weight, bias),
    shape=lambda _, m, a, weight, *others: (m, weight.shape[-1]),
)  # fmt: skip

MATMUL_ALL_REDUCE = Signature(
    "matmul_all_reduce",
    "Tensor x, Tensor weight, Tensor? bias, Tensor? residual",
    layout=lambda x, weight, bias, residual, norm_weight=None, eps=None: (
        "matmul_all_reduce", x.shape, x.dtype, x.device, weight.shape, weight.stride(),
        weight.dtype, weight.device, None if bias is None else _fixed(bias),
        None if residual is None else (residual.shape, residual.dtype, residual.device),
        None if norm_weight is None else _fixed(norm_weight), eps,
    ),
    key=lambda x, weight, bias, residual, norm_weight=None, eps=None: (
        _by_row(x), _fixed(weight), _fixed(bias), _by_row(residual), _fixed(norm_weight), eps,
    ),
    sizes=lambda _, x, *others: (_rows(x),),
    fits=lambda _, m, x, weight, bias, residual, *norm: residual is None or residual.shape[0] == m,
    problem=problems.matmul_all_reduce,
    inputs=lambda on_device, x, weight, bias, residual, norm_weight=None, eps=None: (
        aligned(x), weight, bias, None if residual is None else aligned(residual), norm_weight,
        None if eps is None else on_device(eps),
    ),
    shape=lambda _, m, x, weight, *others: (m, weight.shape[-1]),
    reusable=3,
)  # fmt: skip

MATMUL_ALL_REDUCE_RMS_NORM = dataclasses.replace(
    MATMUL_ALL_REDUCE,
    name="matmul_all_reduce_rms_norm",
    schema=f"{MATMUL_ALL_REDUCE.schema}, Tensor norm_weight, float eps",
    shape=lambda _, m, x, weight, *others: (2, m, weight.shape[-1]),
)

MATMUL_REDUCE_SCATTER = Signature(
    "matmul_reduce_scatter",
    "Tensor x, Tensor weight, int scatter_dim",
    layout=lambda x, weight, scatter_dim: (
        "matmul_reduce_scatter", x.shape, x.dtype, x.device, weight.shape, weight.stride(),
        weight.dtype, weight.device, scatter_dim,
    ),
    key=lambda x, weight, scatter_dim: (_by_row(x), _fixed(weight), scatter_dim),
    sizes=lambda _, x, *others: (_rows(x),),
    fits=lambda *_: True,
    problem=problems.matmul_reduce_scatter,
    inputs=lambda _, x, weight, scatter_dim: (aligned(x), weight),
    shape=lambda world_size, m, x, weight, scatter_dim: (
        (m, weight.shape[-1] // world_size)
        if scatter_dim == 1
        else (-(-m // world_size), weight.shape[-1])
    ),
)  # fmt: skip

FLASH_DECODE = Signature(
    "flash_decode",
    "Tensor q, Tensor k, Tensor v, Tensor kv_lens, Tensor? block_table, float? scale, "
    "float? soft_cap, int? window",
    layout=lambda q, k, v, kv_lens, table, scale, soft_cap, window: (
        "flash_decode", q.shape, q.dtype, q.device, k.shape, k.stride(), k.dtype, k.device,
        v.shape, v.stride(), v.dtype, v.device,
        kv_lens.shape, kv_lens.is_contiguous(), kv_lens.dtype, kv_lens.device,
        None if table is None else (*_fixed(table), table.is_contiguous()),
        scale, soft_cap, window,
    ),
    key=lambda q, k, v, kv_lens, table, *numbers: (
        _by_row(q), _by_sequence(k), _by_sequence(v), kv_lens.dtype, kv_lens.device,
        _by_sequence(table), numbers,
    ),
    sizes=lambda _, q, k, v, kv_lens, table, *numbers: (
        q.shape[0] if q.dim() == 3 else -1,
        k.shape[1] if table is None else k.shape[1] * table.shape[1],
    ),
    fits=lambda fabric, batch, q, k, v, kv_lens, table, *numbers: (
        kv_lens.shape == (fabric.world_size, batch)
        and kv_lens.is_contiguous()
        and (k if table is None else table).shape[0] == batch
        and v.shape[0] == k.shape[0]
        and (table is None or table.is_contiguous())
    ),
    problem=problems.flash_decode,
    inputs=lambda on_device, q, k, v, kv_lens, table, scale, soft_cap, window: (
        aligned(q), k, v, kv_lens, table,
        None
        if scale is None and soft_cap is None
        else on_device(scale or q.shape[2] ** -0.5, soft_cap or 0.0),
    ),
    shape=lambda _, batch, q, k, v, *others: (batch, q.shape[1], v.shape[3]),
)  # fmt: skip

ATTENTION = Signature(
    "attention",
    "Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens, bool causal, float? scale",
    layout=lambda q, k, v, cu_seqlens, causal, scale: (
        "attention", q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype,
        k.device, v.shape, v.stride(), v.dtype, v.device,
        None if cu_seqlens is None else (*_fixed(cu_seqlens), cu_seqlens.is_contiguous()),
        causal, scale,
    ),
    key=lambda q, k, v, cu_seqlens, causal, scale: (
        _by_sequence(q), _by_sequence(k), _by_sequence(v), causal, scale,
        None if cu_seqlens is None else (q.shape[:1], cu_seqlens.dtype, cu_seqlens.device),
    ),
    sizes=lambda _, q, k, v, cu_seqlens, *others: (
        (*q.shape[:2], -1)[:2]
        if cu_seqlens is None
        else (cu_seqlens.numel() - 1, *q.shape[:1])
    ),
    fits=lambda fabric, batch, q, k, v, cu_seqlens, *others: (
        q.shape[:1] == k.shape[:1] == v.shape[:1]
        and (cu_seqlens is None or (cu_seqlens.dim() == 1 and cu_seqlens.is_contiguous()))
    ),
    problem=problems.attention,
    inputs=lambda _, q, k, v, cu_seqlens, causal, scale: (
        q, k, v, cu_seqlens,
        None if scale is None else torch.tensor(scale, dtype=torch.float32, device="cpu"),
    ),
    shape=lambda _, batch, q, *others: q.shape,
)  # fmt: skip

ATTENTION_LSE = dataclasses.replace(
    ATTENTION,
    name="attention_lse",
    layout=lambda *arguments: ("attention_lse", *ATTENTION.layout(*arguments)),
    shape=lambda _, batch, q, *others: (elements_with_lse(q),),
)

SIGNATURES = (
    ATTENTION,
    ATTENTION_LSE,
    ALL_GATHER_MATMUL,
    MATMUL_ALL_REDUCE,
    MATMUL_ALL_REDUCE_RMS_NORM,
    MATMUL_REDUCE_SCATTER,
    FLASH_DECODE,
)
