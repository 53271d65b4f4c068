"""Inputs and the float64 reference of matmul_all_reduce."""

from __future__ import annotations

import torch

from taxfree_kernels.fp8 import dequantised, fp8_dtype, quantised
from taxfree_kernels.inputs import make_factors, partial_matmul, random_tensor, sum_of_products
from taxfree_kernels.matmul_all_reduce.problem import MatmulAllReduce
from taxfree_kernels.reduction.fused import columns_of, parts_of
from taxfree_kernels.variant import Operation

_EPS = 1e-5
_ERROR_OF_FP8 = 16  # times that of 16 bits
_OUT_SCALE = 1 / 8  # where it is given


def _addends(
    problem: MatmulAllReduce, seed: int, device: torch.device, integers: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """bias [n] and residual [m, n], each None where the problem has none; the same on all ranks."""
    dtype, bias, residual = getattr(torch, problem.dtype), None, None
    if problem.bias:
        bias = random_tensor((problem.n,), seed + 2_000_000, device, dtype, integers)
    if problem.residual:
        size = (problem.m, problem.n)
        residual = random_tensor(size, seed + 3_000_000, device, dtype, integers)
    return bias, residual


def _norm_weight(problem: MatmulAllReduce, seed: int, device: torch.device) -> torch.Tensor:
    """[n], the same on all ranks; scaled so that the normalised sum is about as large as the sum.

    An error in either then shows in the norm of their joint error. One that is quantised is
    smaller, so that the error of fp8 does not hide others.
    """
    dtype = getattr(torch, problem.dtype)
    weight = random_tensor((problem.n,), seed + 4_000_000, device, dtype, integers=False)
    smaller = _ERROR_OF_FP8 if problem.is_quantised else 1
    return weight * (problem.k * problem.world_size) ** 0.5 / smaller


def _alike(columns: torch.Tensor, seed: int) -> torch.Tensor:
    """Replace every column of a tensor [..., n] by the first one or its negative, in place.

    Also applied to a sum [m, n] of such products and addends. All elements of a row then have the
    same magnitude, so the row normalises to the weights of its columns or their negatives: exactly,
    because the effect of eps and rsqrt is lost when the result is rounded.
    """
    size, device = tuple(columns.shape[-1:]), columns.device
    draws = random_tensor(size, seed + 5_000_000, device, torch.float32, integers=True)
    return columns.copy_(columns[..., :1].double() * torch.where(draws > 0, 1, -1))


def make_inputs(
    problem: MatmulAllReduce, rank: int, seed: int, device: torch.device, integers: bool = False
) -> tuple[torch.Tensor | None, ...]:
    """The tensors of one rank.

    Returns:
        x [m, k]; weight [k, n]; bias [n] or None; residual [m, n] or None;
        norm_weight [n] and eps float32 [1], or None and None; if it is given, the scale of the
        normalised sum, float32 [1]; in fp8 the scales of x and weight.
    """
    x, weight, *scales = make_factors(problem, rank, seed, device, integers)
    addends = _addends(problem, seed, device, integers)
    if not problem.rms_norm:
        return x, weight, *addends, None, None, *scales
    if integers:
        for columns in (weight, *addends):
            if columns is not None:
                _alike(columns, seed)
        if scales:
            scales[1].copy_(scales[1][..., :1].clone())
    eps = torch.full((1,), _EPS, dtype=torch.float32, device=device)
    norm = [_norm_weight(problem, seed, device), eps]
    if problem.out_scales == "tensor":
        norm.append(torch.full_like(eps, _OUT_SCALE))
    return x, weight, *addends, *norm, *scales


def reference(
    problem: MatmulAllReduce, rank: int, seed: int, device: torch.device, integers: bool = False
) -> torch.Tensor:
    """The result in float64, the same on all ranks, from the inputs of :func:`make_inputs`.

    [m, n], or [2, m, n] of the normalised sum and the sum. Of integers, a normalised sum that is
    quantised has been rounded as there.
    """
    total = sum_of_products(problem, seed, device, integers)
    for addend in _addends(problem, seed, device, integers):
        if addend is not None:
            total += addend.double()
    if not problem.rms_norm:
        return total
    if integers:
        _alike(total, seed)
    scale = torch.rsqrt(total.square().mean(1, keepdim=True) + _EPS)
    normed = total * scale * _norm_weight(problem, seed, device).double()
    if problem.is_quantised and integers:
        rounded, given = normed.to(getattr(torch, problem.dtype)), None
        if problem.out_scales == "tensor":
            given = torch.tensor([_OUT_SCALE], dtype=torch.float32, device=device)
        normed = dequantised(*quantised(rounded, problem.out_scales, given, fp8_dtype(device)))
    return torch.stack([normed, total])


def empty_output(problem: MatmulAllReduce, device: torch.device) -> torch.Tensor:
    """out [m, n], or [2, m, n] of the normalised sum and the sum; uninitialised.

    With a normalised sum in fp8: :class:`~taxfree_kernels.reduction.fused.OutputParts`.
    """
    size: tuple[int, ...] = (problem.m, problem.n)
    if problem.is_quantised:
        size = (problem.m, columns_of(problem.n, problem.out_scales))
    elif problem.rms_norm:
        size = (2, *size)
    return torch.empty(size, dtype=getattr(torch, problem.dtype), device=device)


def result(problem: MatmulAllReduce, out: torch.Tensor) -> torch.Tensor:
    """See :attr:`Operation.result`."""
    if not problem.is_quantised:
        return out
    given = None
    if problem.out_scales == "tensor":
        given = torch.tensor([_OUT_SCALE], dtype=torch.float32, device=out.device)
    parts = parts_of(out, problem.n, problem.out_scales, fp8_dtype(out.device), given)
    return torch.stack([dequantised(parts.values, parts.scale), parts.total.double()])


def first_variants(problem: MatmulAllReduce) -> tuple[str, ...]:
    """By the shipped tables of two, four and eight H200s, and two H100s."""
    words = ("push_two_shot_lamport", "push_two_shot_lamport_specialized")
    if problem.rms_norm and problem.m <= 64:  # in one kernel first
        return ("push", *words, "torch_symm_mem", "push_two_shot", "two_shot", "registered")
    if problem.m <= 16:
        few = ("push_lamport", "push_in_place", "torch_symm_mem", "push")
        return (*few, *words, "push_two_shot", "two_shot", "registered")
    if problem.m <= 256:
        return (*words, "push_two_shot", "torch_symm_mem", "two_shot", "push_in_place", "push")
    return ("push_two_shot", "push", "two_shot", "overlap")


OPERATION = Operation(
    name="matmul_all_reduce",
    problem=MatmulAllReduce,
    interpolated_fields=("m",),
    ignored_fields=("bias", "residual", "dtype", "out_scales"),
    make_inputs=make_inputs,
    reference=reference,
    empty_output=empty_output,
    result=result,
    first_variants=first_variants,
    family_fields=("n", "k"),
    vendor_kernel=partial_matmul,
)
