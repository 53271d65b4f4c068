"""Inputs and the float64 reference of attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch

from taxfree_kernels.attention.baseline import library
from taxfree_kernels.attention.problem import Attention
from taxfree_kernels.fp8 import dequantised_cache, fp8_dtype
from taxfree_kernels.inputs import cache_in_fp8, random_rows
from taxfree_kernels.variant import Operation

_CHUNK_ELEMENTS = 1 << 26  # float64 logits of one head that the reference has at a time
#: What a query's dot product with its target key exceeds those with other keys by, on average:
#: their weights are then exactly 0 in float32, and the result is that key's value.
_MARGIN = 512


def make_inputs(
    problem: Attention, rank: int, seed: int, device: torch.device, integers: bool = False
) -> tuple[torch.Tensor | None, ...]:
    """The tensors of one rank.

    Random packed sequences have about the same length. Integer ones have all kinds of lengths, and
    one of them is empty if there are several.

    Returns:
        q [batch, length, q_heads, head_dim], k and v [batch, length, kv_heads, head_dim]; of packed
        sequences [length, ...];
        cu_seqlens int32 [batch + 1] of packed sequences, else None;
        scale: None for head_dim**-0.5; plans also take a float32 tensor [] in host memory;
        of keys and values in fp8 their scales, float32 [1] or [kv_heads].
    """
    own_seed = 1000 * seed + 10 * (rank + 1)
    lead = (problem.length,) if problem.packed else (problem.batch, problem.length)
    q, k, v = (
        random_rows(
            (*lead, heads, problem.head_dim), own_seed + which, device, problem.dtype, integers
        )
        for which, heads in enumerate((problem.q_heads, problem.kv_heads, problem.kv_heads))
    )
    starts = _starts(problem, own_seed, integers) if problem.packed else None
    if integers:
        q = _look_for_one_key_each(problem, own_seed, k, starts)
    scales: tuple[torch.Tensor, ...] = ()
    if problem.kv_scales != "none":
        (k, k_scale), (v, v_scale) = (
            cache_in_fp8(each, problem.kv_scales, fp8_dtype(device), integers, factor)
            for each, factor in ((k, 1), (v, 2))
        )
        scales = k_scale, v_scale
    on_device = None
    if starts is not None:
        on_device = torch.tensor(starts, dtype=torch.int32, device=device)
    return q, k, v, on_device, None, *scales


def reference(
    problem: Attention, rank: int, seed: int, device: torch.device, integers: bool = False
) -> torch.Tensor:
    """out float64 [batch, length, q_heads, head_dim], from the inputs of :func:`make_inputs`."""
    tensors: Any = make_inputs(problem, rank, seed, device, integers)
    q, k, v, starts, _, *scales = tensors
    if scales:
        k, v = (dequantised_cache(*each) for each in zip((k, v), scales, strict=True))
    return attention64(problem, q, k, v, starts)[0]


def empty_output(problem: Attention, device: torch.device) -> torch.Tensor:
    """out [batch, length, q_heads, head_dim], or [length, ...] if packed; uninitialised."""
    lead = (problem.length,) if problem.packed else (problem.batch, problem.length)
    size = (*lead, problem.q_heads, problem.head_dim)
    return torch.empty(size, dtype=getattr(torch, problem.dtype), device=device)


def attention64(
    problem: Attention,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor | None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in float64: of one head after the other, so that matmuls are large.

    Returns:
        out of the shape of q; log-sum-exps [..., q_heads], by natural logarithms.
    """
    out = q.new_zeros(q.shape, dtype=torch.float64)
    lse = q.new_zeros(q.shape[:-1], dtype=torch.float64)
    scale = problem.head_dim**-0.5 if scale is None else scale
    for sequence in _sequences(problem, starts):
        for head in range(problem.q_heads):
            of_group = head * problem.kv_heads // problem.q_heads
            keys, values = (cache[sequence][:, of_group].double() for cache in (k, v))
            length = len(keys)
            chunk = max(1, _CHUNK_ELEMENTS // max(1, length))
            for begin in range(0, length, chunk):
                end = min(begin + chunk, length)
                seen = end if problem.causal else length
                logits = q[sequence][begin:end, head].double() @ keys[:seen].t() * scale
                if problem.causal:
                    positions = torch.arange(seen, device=q.device)
                    logits.masked_fill_(positions[None, :] > positions[begin:end, None], -torch.inf)
                lse[sequence][begin:end, head] = torch.logsumexp(logits, -1)
                weights = torch.softmax(logits, -1)
                out[sequence][begin:end, head] = weights @ values[:seen]
    return out, lse


def _sequences(problem: Attention, starts: torch.Tensor | None) -> Iterator[int | slice]:
    """Where each sequence is, in the first dimension of q, k and v."""
    if starts is None:
        yield from range(problem.batch)
    else:
        yield from (slice(*bounds) for bounds in pairwise(starts.tolist()))


# -- what the inputs are made of ----------------------------------------------------------------


def _starts(problem: Attention, seed: int, integers: bool) -> list[int]:
    """First tokens of packed sequences, and the end of the last one."""
    if not integers:
        return [problem.length * number // problem.batch for number in range(problem.batch + 1)]
    generator = torch.Generator().manual_seed(seed)
    inner = torch.randint(
        0, problem.length + 1, (problem.batch - 1,), generator=generator, device="cpu"
    )
    if problem.batch > 2:
        inner[1] = inner[0]
    return [0, *sorted(inner.tolist()), problem.length]


def _look_for_one_key_each(
    problem: Attention, seed: int, k: torch.Tensor, starts: list[int] | None
) -> torch.Tensor:
    """Queries that each match one key that they see."""
    tokens, positions = problem.tokens, torch.arange(problem.tokens, device="cpu")
    if starts is None:
        first, count = (
            positions // problem.length * problem.length,
            torch.full_like(positions, problem.length),
        )
    else:
        bounds = torch.tensor(starts, device="cpu")
        sequence = torch.searchsorted(bounds, positions, right=True) - 1
        first = bounds[sequence]
        count = bounds[sequence + 1] - first
    if problem.causal:
        count = positions - first + 1
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand((problem.q_heads, tokens), generator=generator, device="cpu")
    target = (first + (drawn * count).long().clamp(max=count - 1)).to(k.device)
    heads = torch.arange(problem.q_heads, device=k.device) // (problem.q_heads // problem.kv_heads)
    codes = k.reshape(tokens, problem.kv_heads, problem.head_dim)[target.t(), heads]
    sharpness = 2 ** round(math.log2(_MARGIN / problem.head_dim**0.5))
    return (codes * sharpness).view(*k.shape[:-2], problem.q_heads, problem.head_dim)


def vendor_kernel(problem: Attention, device: torch.device) -> Callable[..., torch.Tensor] | None:
    """torch's fastest attention; None of packed sequences, for which it has none."""
    if problem.packed:
        return None

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any) -> torch.Tensor:
        if problem.kv_scales != "none":
            *_, k_scale, v_scale, _ = others
            k, v = (dequantised_cache(*each, q.dtype) for each in ((k, k_scale), (v, v_scale)))
        return library(problem, q, k, v, None)

    return attend


OPERATION = Operation(
    name="attention",
    problem=Attention,
    interpolated_fields=("batch", "length"),
    ignored_fields=("dtype",),
    make_inputs=make_inputs,
    reference=reference,
    empty_output=empty_output,
    family_fields=("q_heads", "kv_heads", "head_dim"),
    vendor_kernel=vendor_kernel,
)
