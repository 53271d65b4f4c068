"""Compares bf16 and fp8 in the interpreter with torch, bit for bit.

Prints {check: values that differ}.

Run as a process with TRITON_INTERPRET=1: it serves whatever Triton its path leads to.
"""

from __future__ import annotations

import json
import sys

import torch
import triton
import triton.language as tl

from taxfree_kernels.interpreter import correct_types, hasten


@triton.jit
def _cast(source_ptr, target_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(target_ptr + at, tl.load(source_ptr + at).to(target_ptr.dtype.element_ty))


@triton.jit
def _arithmetic(a_ptr, b_ptr, out_ptr, OP: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    a, b = tl.load(a_ptr + at).to(tl.float32), tl.load(b_ptr + at).to(tl.float32)
    if OP == "add":
        result = a + b
    elif OP == "mul":
        result = a * b
    else:
        result = a / b
    tl.store(out_ptr + at, result.to(tl.bfloat16))


@triton.jit
def _dot(a_ptr, b_ptr, c_ptr, out_ptr, SIZE: tl.constexpr):
    rows, cols = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    at = rows * SIZE + cols
    acc = tl.load(c_ptr + at)
    tl.store(out_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at), acc))


def differing(found: torch.Tensor, wanted: torch.Tensor) -> int:
    """Values that are neither equal bit for bit nor both NaN."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[found.element_size()]
    are_nan = found.float().isnan() & wanted.float().isnan()
    same = (found.view(words) == wanted.view(words)) | are_nan
    return int((~same).sum())


def cast(source: torch.Tensor, dtype: torch.dtype) -> int:
    size = triton.next_power_of_2(source.numel())
    padded = torch.zeros(size, dtype=source.dtype)
    padded[: source.numel()] = source
    found = torch.empty(size, dtype=dtype)
    _cast[(1,)](padded, found, SIZE=size)
    return differing(found, padded.to(dtype))


def dot(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(c)
    _dot[(1,)](a, b, c, out, SIZE=a.shape[0])
    return out


def bits(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return values.to({2: torch.int16, 4: torch.int32}[dtype.itemsize]).view(dtype)


def main() -> None:
    for _ in range(2):  # a second time changes nothing
        correct_types()
        hasten()
    torch.manual_seed(0)
    bf16, fp32, fp16 = torch.bfloat16, torch.float32, torch.float16
    every = bits(torch.arange(-(1 << 15), 1 << 15), bf16)
    words = torch.randint(-(1 << 31), 1 << 31, (1 << 16,))
    upper = torch.arange(0, 1 << 16) << 16
    upper = torch.where(upper >= 1 << 31, upper - (1 << 32), upper)
    ties = [bits(upper + low, fp32) for low in (0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 3.4e38, 1e-45])
    a, b = torch.randn(1 << 14).to(bf16), torch.randn(1 << 14).to(bf16)
    out = torch.empty_like(a)
    checks = {
        "up, all patterns": cast(every, fp32),
        "down, random words": cast(bits(words, fp32), bf16),
        "down, ties and their neighbours": sum(cast(each, bf16) for each in ties),
        "down, special values": cast(special, bf16),
        "down from fp16, all patterns": cast(bits(torch.arange(-(1 << 15), 1 << 15), fp16), bf16),
        "down from int32": cast(words.to(torch.int32), bf16),
        "down to fp16": cast(every, fp16),
        "fp32 to fp16 is left alone": cast(torch.randn(1 << 14), fp16),
    }
    for name, wanted in (("add", a + b), ("mul", a * b), ("div", a / b)):
        _arithmetic[(1,)](a, b, out, OP=name, SIZE=a.numel())
        checks[f"{name} through fp32"] = differing(out, wanted)
    checks |= dots(bf16) | dots(fp16)
    fnuz = () if triton.__version__ < "3.8" else (torch.float8_e4m3fnuz,)  # unknown before
    for kind in (torch.float8_e4m3fn, *fnuz):
        checks |= dots(kind) | eights(kind)
    print(json.dumps({"triton": triton.__version__, "checks": checks}))


def eights(dtype: torch.dtype) -> dict[str, int]:
    every = torch.arange(256, dtype=torch.uint8).view(dtype)
    values = every.float().nan_to_num().sort().values
    ties = (values[1:] + values[:-1]) / 2
    near = [torch.nextafter(ties, torch.full_like(ties, end)) for end in (-1e9, 1e9)]
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e9, 1e-45])
    wide = torch.cat([torch.randn(1 << 12), 200 * torch.randn(1 << 12), ties, *near, special])
    return {
        f"{dtype} up": sum(cast(every, to) for to in (torch.float32, torch.float16)),
        f"{dtype} up to bf16": cast(every, torch.bfloat16),
        f"{dtype} down": cast(wide, dtype),
        f"{dtype} down from bf16": cast(wide.bfloat16(), dtype),
    }


def dots(dtype: torch.dtype) -> dict[str, int]:
    size = (32, 32)
    whole = [torch.randint(-8, 9, size).float() for _ in range(3)]
    exact = dot(whole[0].to(dtype), whole[1].to(dtype), whole[2])
    # With a diagonal there is one product per value: nothing depends on the order of summation.
    diagonal, dense = torch.diag(torch.randn(32)).to(dtype), torch.randn(size).to(dtype)
    single = dot(diagonal, dense, torch.zeros(size))
    a, b, c = torch.randn(size).to(dtype), torch.randn(size).to(dtype), torch.randn(size)
    error = (dot(a, b, c).double() - (a.double() @ b.double() + c)).abs().max()
    return {
        f"{dtype} dot of integers": differing(exact, whole[0] @ whole[1] + whole[2]),
        f"{dtype} dot of single products": differing(single, diagonal.float() @ dense.float()),
        f"{dtype} dot accumulates in fp32": int(error > 2e-5),
    }


if __name__ == "__main__":
    sys.exit(main())
