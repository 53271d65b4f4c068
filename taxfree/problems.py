"""Derives the problem of a call from its tensors, and validates them.

One function per operation, with the arguments of the runtime's method of that name. All raise
:class:`UsageError` when the tensors do not fit together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from taxfree.errors import UsageError
from taxfree_kernels.errors import PlanError
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.problem import own_rows
from taxfree_kernels.variant import Problem, problem_class

_HINT = "the docstring of the runtime's method says what tensors must be"
_DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
_FLOAT32 = torch.finfo(torch.float32)
_KEYS_AT_ONCE = 128  # the largest block of keys that a kernel takes
_QUERIES_AT_ONCE = 256  # the largest block of queries
_LARGEST_SOFT_CAP = 65536.0  # beyond, too few digits of the kernels' tanh are left


def all_gather_matmul(
    fabric: Fabric,
    a_shard: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gather_dim: int,
    m: int | None,
) -> Problem:
    """See :meth:`taxfree.Runtime.all_gather_matmul`."""
    _require(a_shard.dim() == 2 and weight.dim() == 2, "a_shard and weight must be matrices")
    dtype = _common_dtype(fabric, a_shard=a_shard, weight=weight, bias=bias)
    _require(1 in weight.stride(), "neither stride of weight is 1")
    _require(gather_dim in (0, 1), f"gather_dim is {gather_dim!r}, must be 0 or 1")
    rows, columns = a_shard.shape
    k, n = weight.shape
    if gather_dim == 0:
        m = m if m is not None else rows * fabric.world_size
    else:
        columns *= fabric.world_size
        m = m if m is not None else rows
    _require(columns == k, f"the gathered A has {columns} columns, weight {k} rows")
    _require_row("bias", bias, n)
    problem = _problem(
        "all_gather_matmul", m=m, n=n, k=k, gather_dim=gather_dim, dtype=dtype,
        world_size=fabric.world_size, weight_layout=_layout(weight), bias=bias is not None,
    )  # fmt: skip
    own = own_rows(m, gather_dim, fabric.world_size, fabric.rank)
    _require(rows == own, f"a_shard has {rows} rows, rank {fabric.rank} of m={m} has {own}")
    return problem


def matmul_all_reduce(
    fabric: Fabric,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> Problem:
    """See :meth:`taxfree.Runtime.matmul_all_reduce`, and with a norm that of its RMSNorm."""
    _require(eps is None or _is_normal(eps), f"eps is {eps}, must be a positive float32")
    dtype = _common_dtype(
        fabric, x=x, weight=weight, norm_weight=norm_weight, bias=bias, residual=residual
    )
    m, k, n = _matmul_sizes(x, weight)
    _require_row("norm_weight", norm_weight, n)
    _require_row("bias", bias, n)
    _require(residual is None or residual.shape == (m, n), f"residual is not [{m}, {n}]")
    return _problem(
        "matmul_all_reduce", m=m, n=n, k=k, dtype=dtype, world_size=fabric.world_size,
        weight_layout=_layout(weight), bias=bias is not None, residual=residual is not None,
        rms_norm=norm_weight is not None,
    )  # fmt: skip


def matmul_reduce_scatter(
    fabric: Fabric, x: torch.Tensor, weight: torch.Tensor, scatter_dim: int
) -> Problem:
    """See :meth:`taxfree.Runtime.matmul_reduce_scatter`."""
    dtype = _common_dtype(fabric, x=x, weight=weight)
    m, k, n = _matmul_sizes(x, weight)
    return _problem(
        "matmul_reduce_scatter", m=m, n=n, k=k, scatter_dim=scatter_dim, dtype=dtype,
        world_size=fabric.world_size, weight_layout=_layout(weight),
    )  # fmt: skip


def flash_decode(
    fabric: Fabric,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_lens: torch.Tensor,
    block_table: torch.Tensor | None,
    scale: float | None,
    soft_cap: float | None,
    window: int | None,
) -> Problem:
    """See :meth:`taxfree.Runtime.flash_decode`."""
    _require(q.dim() == 3, "q is not [batch, q_heads, head_dim]")
    _require(k.dim() == 4 and v.dim() == 4, "k and v do not have 4 dimensions")
    _require(k.shape[:3] == v.shape[:3], f"k is {list(k.shape)}, v {list(v.shape)}")
    _require(k.shape[3] == q.shape[2], f"heads of k have {k.shape[3]} values, of q {q.shape[2]}")
    _require(k.stride(3) == 1 and v.stride(3) == 1, "the heads of k or v are not contiguous")
    dtype = _common_dtype(fabric, q=q, k=k, v=v)
    batch, capacity, page_size = q.shape[0], k.shape[1], 0
    _require_integers(fabric, "kv_lens", kv_lens, (fabric.world_size, batch))
    if block_table is not None:
        page_size = capacity
        _require(block_table.dim() == 2, "block_table is not [batch, pages]")
        capacity *= block_table.shape[1]
        _require_integers(fabric, "block_table", block_table, (batch, block_table.shape[1]))
    else:
        _require(k.shape[0] == batch, f"k has {k.shape[0]} sequences, q {batch}")
    for name, cache in (("k", k), ("v", v)):
        furthest = (cache.shape[2] - 1) * cache.stride(2)
        _require(furthest < 1 << 31, f"the heads of {name} are {cache.stride(2)} elements apart")
        # Kernels add these products of 32 bits to 64-bit addresses: of a page, or of a block of it.
        keys = page_size if page_size else min(cache.shape[1], _KEYS_AT_ONCE)
        furthest = (keys - 1) * cache.stride(1)
        _require(furthest < 1 << 31, f"the keys of {name} are {cache.stride(1)} elements apart")
    _require(scale is None or _is_normal(scale), f"scale is {scale}, must be a positive float32")
    _require(
        soft_cap is None or (_is_normal(soft_cap) and soft_cap <= _LARGEST_SOFT_CAP),
        f"soft_cap is {soft_cap}, must be positive and at most {_LARGEST_SOFT_CAP}",
    )
    _require(window is None or window > 0, f"window is {window}, must be positive")
    if window is not None and window >= fabric.world_size * capacity:
        window = None  # it leaves out no key
    return _problem(
        "flash_decode", batch=batch, q_heads=q.shape[1], kv_heads=k.shape[2], head_dim=q.shape[2],
        kv_len_per_rank=capacity, v_head_dim=v.shape[3], page_size=page_size,
        soft_cap=soft_cap is not None, window=window or 0, dtype=dtype,
        world_size=fabric.world_size,
    )  # fmt: skip


def attention(
    fabric: Fabric,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    causal: bool,
    scale: float | None,
) -> Problem:
    """See :meth:`taxfree.Runtime.attention`."""
    packed = cu_seqlens is not None
    shape = "[tokens, heads, head_dim]" if packed else "[batch, length, heads, head_dim]"
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _require(tensor.dim() == 4 - packed, f"{name} is {list(tensor.shape)}, must be {shape}")
        _require(tensor.stride(-1) == 1, f"the heads of {name} are not contiguous")
        # Kernels multiply the tokens of a block by this in 32 bits.
        _require(
            (_QUERIES_AT_ONCE - 1) * tensor.stride(-3) < 1 << 31,
            f"the tokens of {name} are {tensor.stride(-3)} elements apart",
        )
    _require(k.shape == v.shape, f"k is {list(k.shape)}, v {list(v.shape)}")
    _require(
        k.shape[:-2] == q.shape[:-2] and k.shape[-1] == q.shape[-1],
        f"q is {list(q.shape)}, k {list(k.shape)}: only the number of heads may differ",
    )
    dtype = _common_dtype(fabric, q=q, k=k, v=v)
    batch = q.shape[0]
    if cu_seqlens is not None:
        _require(cu_seqlens.dim() == 1 and len(cu_seqlens) > 0, "cu_seqlens is not [batch + 1]")
        _require_integers(fabric, "cu_seqlens", cu_seqlens, (len(cu_seqlens),))
        batch = len(cu_seqlens) - 1
    _require(scale is None or _is_normal(scale), f"scale is {scale}, must be a positive float32")
    return _problem(
        "attention", batch=batch, length=q.shape[-3], q_heads=q.shape[-2], kv_heads=k.shape[-2],
        head_dim=q.shape[-1], causal=causal, packed=packed, dtype=dtype,
        world_size=fabric.world_size,
    )  # fmt: skip


def _is_normal(number: float) -> bool:
    """Whether a number is positive and neither too small nor too large for float32."""
    return bool(_FLOAT32.tiny <= number <= _FLOAT32.max)


def _require_row(name: str, row: torch.Tensor | None, n: int) -> None:
    _require(
        row is None or (row.shape == (n,) and row.is_contiguous()),
        f"{name} is not a contiguous [{n}]",
    )


def _matmul_sizes(x: torch.Tensor, weight: torch.Tensor) -> tuple[int, int, int]:
    """Check that x is [m, k] and weight [k, n], and return m, k and n."""
    _require(x.dim() == 2 and weight.dim() == 2, "x and weight must be matrices")
    _require(1 in weight.stride(), "neither stride of weight is 1")
    (m, k), (rows, n) = x.shape, weight.shape
    _require(k == rows, f"x has {k} columns, weight {rows} rows")
    return m, k, n


def require_output(
    out: torch.Tensor,
    shape: tuple[int, ...],
    like: torch.Tensor,
    inputs: Sequence[torch.Tensor | None],
    residual: torch.Tensor | None,
) -> None:
    """Check the caller's output tensor: kernels rely on its shape, and on memory of its own.

    Args:
        like: a tensor of the dtype and on the device that it must have.
        residual: the input that may be the output, or the last part of it.
    """
    require_like(out, shape, like)
    begin, end = _extent(out)
    for tensor in inputs:
        if tensor is None or tensor.device != out.device:
            continue
        first, last = _extent(tensor)
        if first >= end or begin >= last:
            continue
        is_residual = tensor is residual and tensor.is_contiguous() and last == end
        _require(
            is_residual and last - first == out.nbytes // (out.dim() - 1),
            "out overlaps an input in memory; only a contiguous residual may be the output",
        )


def require_like(out: torch.Tensor, shape: tuple[int, ...], like: torch.Tensor) -> None:
    """Check the caller's output tensor, but for overlaps; arguments as of `require_output`."""
    _require(out.shape == shape and out.is_contiguous(), f"out is not a contiguous {list(shape)}")
    _require(out.dtype == like.dtype, f"out is {out.dtype}, the result {like.dtype}")
    _require(out.device == like.device, f"out is on {out.device}, the inputs on {like.device}")


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The first address of a tensor, and that after its last element."""
    begin = tensor.data_ptr()
    if tensor.numel() == 0:
        return begin, begin
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return begin, begin + (last + 1) * tensor.itemsize


def _problem(op: str, **fields: Any) -> Problem:
    try:
        problem: Problem = problem_class(op)(**fields)
    except PlanError as error:
        raise UsageError(error.message, error.hint or _HINT) from error
    return problem


def _require_integers(
    fabric: Fabric, name: str, tensor: torch.Tensor, shape: tuple[int, ...]
) -> None:
    wanted = f"int32 {list(shape)} on {fabric.device}, contiguous"
    holds = (
        tensor.shape == shape
        and tensor.dtype == torch.int32
        and tensor.device == fabric.device
        and tensor.is_contiguous()
    )
    _require(holds, f"{name} is {tensor.dtype} {list(tensor.shape)}, must be {wanted}")


def _layout(weight: torch.Tensor) -> str:
    """Which dimension of a [K, N] weight is contiguous, as problems name it."""
    return "nk" if weight.stride(0) == 1 else "kn"


def _common_dtype(fabric: Fabric, **tensors: torch.Tensor | None) -> str:
    """The name of the dtype these tensors must share; all must be on the fabric's device."""
    given = [(name, tensor) for name, tensor in tensors.items() if tensor is not None]
    first_name, first = given[0]
    _require(first.dtype in _DTYPES, f"{first_name} is {first.dtype}, not float16 or bfloat16")
    for name, tensor in given:
        _require(tensor.dtype == first.dtype, f"{name} is {tensor.dtype}, {first_name} not")
        _require(
            tensor.device == fabric.device,
            f"{name} is on {tensor.device}, the fabric on {fabric.device}",
        )
    return _DTYPES[first.dtype]


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise UsageError(message, _HINT)
