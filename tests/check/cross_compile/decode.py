"""Compiles the kernel of decode_step; prints JSON: what kind -> kernel.

Kinds are a model and ranks; "apart" is added where the cache lies terabytes from the weights,
"channel" or "block" where weights are fp8 with such scales. An argument limits them to one; or it
is an architecture with chiplets, perhaps with scales, and the twin is compiled.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from typing import Any

import torch

from benchmarks.decode_step import MODELS
from taxfree_check.cross_compile.compile import compile_launch
from taxfree_check.cross_compile.record import GhostFabric, Launch
from taxfree_kernels import launch
from taxfree_kernels.decode_step.decoder import Cache, Decoder, Layer
from taxfree_kernels.decode_step.step import DecodeStep
from taxfree_kernels.decode_step.twin import TwinStep
from taxfree_kernels.fp8 import dtype_of
from taxfree_kernels.hardware import KNOWN, Hardware
from taxfree_kernels.launch import launching_through

HARDWARE = KNOWN["h100"]
launches: list[Launch] = []
apart = 0
address = torch.Tensor.data_ptr
torch.Tensor.data_ptr = lambda self: address(self) + apart * (self.dim() == 4)


#: allocated one by one, tensors of a CPU may lie terabytes from one another
arena = torch.empty(1 << 30, dtype=torch.bfloat16)
used = -address(arena) // 2 % 256


def empty(*shape: int, of: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor at a multiple of 512 bytes, as GPUs have it."""
    global used
    first, count = used, torch.Size(shape).numel() * of.itemsize // 2
    used += count + -count % 256
    return arena[first : first + count].view(of).view(shape)


def in_fp8(layer: Layer, scales: str, element: torch.dtype) -> Layer:
    """The same sizes in fp8."""
    names = ("q", "k", "v", "o", "gate", "up", "down")
    shapes = {name: getattr(layer, name).shape for name in names}
    of = [(n, 1) if scales == "channel" else (n // 128, k // 128) for n, k in shapes.values()]
    weights = {name: empty(*each, of=element) for name, each in shapes.items()}
    return replace(layer, **weights, scales=tuple(empty(*each, of=torch.float32) for each in of))


def parts_of(
    name: str, world: int, batch: int, paged: bool, scales: str, hardware: Hardware = HARDWARE
) -> tuple[Decoder, Cache]:
    """One layer of a rank, and the head."""
    sizes = MODELS[name]
    dim, hidden, wide = sizes.head_dim, sizes.hidden, sizes.intermediate // world
    q, kv = sizes.heads * dim // world, sizes.kv_heads * dim // world
    layer = Layer(
        empty(hidden), empty(q, hidden), empty(kv, hidden), empty(kv, hidden), empty(hidden, q),
        empty(hidden), empty(wide, hidden), empty(wide, hidden), empty(hidden, wide),
    )  # fmt: skip
    if scales != "none":
        layer = in_fp8(layer, scales, dtype_of(hardware.architecture))
    shape = (
        (batch * 64, 16, sizes.kv_heads // world, dim)
        if paged
        else (batch, sizes.kv_heads // world, 1024, dim)
    )
    keys, values = (empty(*shape) for _ in range(2))
    table = torch.zeros(batch, 64, dtype=torch.int32) if paged else None
    head = empty(sizes.vocab // world, hidden)
    frequencies = torch.empty(dim // 2)
    decoder = Decoder((layer,), head, empty(hidden), head, frequencies, dim, sizes.eps)
    return decoder, Cache((keys,), (values,), table)


launch._compile = lambda kernel, args: launches.append(Launch(kernel, args))
found = {}
for kind, name, world, batch, distance, scales in (
    ("llama-3.2-1b 1", "llama-3.2-1b", 1, 1, 0, "none"),
    ("qwen3-1.7b 1", "qwen3-1.7b", 1, 1, 0, "none"),  # two heads share keys
    ("llama-3.1-8b 2 apart", "llama-3.1-8b", 2, 1, 3 << 40, "none"),
    ("llama-3.2-1b 1, 5 sequences, pages", "llama-3.2-1b", 1, 5, 0, "none"),
    ("llama-3.1-8b 2, 16 sequences apart", "llama-3.1-8b", 2, 16, 3 << 40, "none"),
    ("llama-3.1-8b 2, channel", "llama-3.1-8b", 2, 1, 0, "channel"),
    ("llama-3.1-8b 2 apart, block", "llama-3.1-8b", 2, 1, 3 << 40, "block"),
    ("llama-3.1-8b 2, 16 sequences apart, channel", "llama-3.1-8b", 2, 16, 3 << 40, "channel"),
    ("llama-3.1-8b 2, 16 sequences, block", "llama-3.1-8b", 2, 16, 0, "block"),
):
    if sys.argv[1:] not in ([], [kind]):
        continue
    apart, used = distance, -address(arena) // 2 % 256
    fabric: Any = GhostFabric(world, HARDWARE, 64 << 20)
    parts = parts_of(name, world, batch, "pages" in kind, scales)
    step = DecodeStep(*parts, batch, fabric, {})
    found[kind] = asdict(compile_launch(launches.pop(), HARDWARE))
for kind, gpu, batch, scales in (
    ("gfx942", "mi300x", 1, "none"), ("gfx950", "mi350x", 8, "none"),
    ("gfx942 channel", "mi300x", 1, "channel"), ("gfx950 block", "mi350x", 8, "block"),
):  # fmt: skip
    if sys.argv[1:] != [kind]:
        continue
    hardware = KNOWN[gpu]
    fabric = GhostFabric(2, hardware, 64 << 20)
    parts = parts_of("llama-3.1-8b", 2, batch, False, scales, hardware)
    twin = TwinStep(*parts, batch, fabric, programs=hardware.compute_units, rows=8, keys=32)
    with launching_through(lambda kernel, args: launches.append(Launch(kernel, args))):
        twin.run()
    found[kind] = asdict(compile_launch(launches.pop(), hardware))
print(json.dumps(found))
