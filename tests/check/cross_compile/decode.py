"""Compiles the kernel of decode_step; prints JSON: what kind -> kernel.

Kinds are a model and ranks; "apart" is added where the cache lies terabytes from the weights. An
argument limits them to one; or it is an architecture with chiplets, and the twin is compiled.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.decode_step import MODELS
from taxfree_check.cross_compile.compile import compile_launch
from taxfree_check.cross_compile.record import GhostFabric, Launch
from taxfree_kernels import launch
from taxfree_kernels.decode_step.decoder import Cache, Decoder, Layer
from taxfree_kernels.decode_step.step import DecodeStep
from taxfree_kernels.decode_step.twin import TwinStep
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.launch import launching_through

HARDWARE = KNOWN["h100"]
launches: list[Launch] = []
apart = 0
address = torch.Tensor.data_ptr
torch.Tensor.data_ptr = lambda self: address(self) + apart * (self.dim() == 4)


#: allocated one by one, tensors of a CPU may lie terabytes from one another
arena = torch.empty(1 << 30, dtype=torch.bfloat16)
used = -address(arena) // 2 % 256


def empty(*shape: int) -> torch.Tensor:
    """bfloat16, at a multiple of 512 bytes, as GPUs have it."""
    global used
    first, count = used, torch.Size(shape).numel()
    used += count + -count % 256
    return arena[first : first + count].view(shape)


def parts_of(name: str, world: int, batch: int, paged: bool) -> tuple[Decoder, Cache]:
    """One layer of a rank, and the head."""
    sizes = MODELS[name]
    dim, hidden, wide = sizes.head_dim, sizes.hidden, sizes.intermediate // world
    q, kv = sizes.heads * dim // world, sizes.kv_heads * dim // world
    layer = Layer(
        empty(hidden), empty(q, hidden), empty(kv, hidden), empty(kv, hidden), empty(hidden, q),
        empty(hidden), empty(wide, hidden), empty(wide, hidden), empty(hidden, wide),
    )  # fmt: skip
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
for kind, name, world, batch, distance in (
    ("llama-3.2-1b 1", "llama-3.2-1b", 1, 1, 0),
    ("llama-3.1-8b 2 apart", "llama-3.1-8b", 2, 1, 3 << 40),
    ("llama-3.2-1b 1, 5 sequences, pages", "llama-3.2-1b", 1, 5, 0),
    ("llama-3.1-8b 2, 16 sequences apart", "llama-3.1-8b", 2, 16, 3 << 40),
):
    if sys.argv[1:] not in ([], [kind]):
        continue
    apart, used = distance, -address(arena) // 2 % 256
    fabric: Any = GhostFabric(world, HARDWARE, 64 << 20)
    step = DecodeStep(*parts_of(name, world, batch, "pages" in kind), batch, fabric, {})
    found[kind] = asdict(compile_launch(launches.pop(), HARDWARE))
for kind, gpu, batch in (("gfx942", "mi300x", 1), ("gfx950", "mi350x", 8)):
    if sys.argv[1:] != [kind]:
        continue
    hardware = KNOWN[gpu]
    fabric = GhostFabric(2, hardware, 64 << 20)
    parts = parts_of("llama-3.1-8b", 2, batch, False)
    twin = TwinStep(*parts, batch, fabric, programs=hardware.compute_units, rows=8, keys=32)
    with launching_through(lambda kernel, args: launches.append(Launch(kernel, args))):
        twin.run()
    found[kind] = asdict(compile_launch(launches.pop(), hardware))
print(json.dumps(found))
