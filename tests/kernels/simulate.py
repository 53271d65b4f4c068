"""Runs decode_step's kernel in simulation; prints JSON: phase -> error over its bound, and others.

    python simulate.py BATCH RANKS PAGE WINDOW SCALES

SCALES is of weights in fp8, "none", or "heads": none, and 8 query heads to a KV head.
"tokens" is how far a chosen logit is from the largest, in deviations of the logits; the others are
counters and Lamport words that are left behind, and logits that a second launch changes.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from math import inf, isnan
from typing import Any

import torch

from benchmarks import decode_step as bench
from taxfree_check.cross_compile.record import GhostFabric
from taxfree_kernels import launch
from taxfree_kernels.decode_step.decoder import Cache, Decoder
from taxfree_kernels.decode_step.step import DecodeStep
from taxfree_kernels.device import peers
from taxfree_kernels.hardware import KNOWN
from tests.kernels import simulated

SIZES = bench.Sizes(
    hidden=576, heads=4, kv_heads=2, head_dim=64, intermediate=1152, vocab=96, layers=5,
    theta=1e4, eps=1e-5, qk_norm=True, bias=True,
)  # fmt: skip
PROGRAMS, LAYERS = 5, 3  # the first layer, one between, and the last
#: in fp8, of whole blocks on a rank
SIZES_IN_FP8 = dataclasses.replace(SIZES, hidden=640, heads=8, kv_heads=4, intermediate=1280)


class Fabric(GhostFabric):
    """One rank of a group in this process, with memory."""

    def __init__(self, rank: int, world: int) -> None:
        hardware = dataclasses.replace(KNOWN["h100"], compute_units=PROGRAMS)
        super().__init__(world, hardware, 64 << 20)
        self.rank, self.device = rank, torch.device("cpu")
        self._arena = torch.zeros(64 << 20, dtype=torch.uint8)
        self.heap = type(self.heap)(self._arena)
        self.heap_bases = torch.zeros(world, dtype=torch.int64)
        self.pool = type(self.pool)(self)

    def host_words(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int64)


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same at a multiple of 512 bytes, as GPUs have it."""
    block = torch.zeros(tensor.nbytes + 512, dtype=torch.uint8)
    first = -block.data_ptr() % 512
    place = block[first : first + tensor.nbytes].view(tensor.dtype)
    return place.view(tensor.shape).copy_(tensor)


def aligned_part(part: Decoder) -> Decoder:
    """A rank's part whose tensors are aligned."""
    layers = tuple(
        dataclasses.replace(
            layer, **{k: aligned(v) for k, v in vars(layer).items() if isinstance(v, torch.Tensor)}
        )
        for layer in part.layers
    )
    return dataclasses.replace(
        part, layers=layers, head=aligned(part.head), norm=aligned(part.norm)
    )


def aligned_cache(cache: Cache) -> Cache:
    """The same with aligned tensors."""
    keys, values = (tuple(map(aligned, each)) for each in (cache.keys, cache.values))
    return Cache(keys, values, cache.block_table)


def words_left(fabric: Fabric, turns: int) -> int:
    """Lamport words that are not empty, and that no later call would empty."""
    last = (turns - 1) % 3
    slots = fabric.pool.lamport_words.view(3, -1)
    used = int(fabric.pool.control[peers.USED.value + (turns - 1) % 2])
    dirty = (slots != -1).sum(1)
    dirty[last] = (slots[last, used:] != -1).sum()
    return int(dirty.sum())


def simulate(
    batch: int, world: int, page: int, window: int | None, scales: str
) -> dict[str, float]:
    """The errors of the worst rank and launch, of two."""
    kernel = simulated.adapt()  # before a step is made, which keeps constants of compiled kernels
    sizes = SIZES if scales in ("none", "heads") else SIZES_IN_FP8
    if scales == "heads":  # registers do not hold q
        sizes, scales = dataclasses.replace(SIZES, heads=16), "none"
    whole = bench.whole_model(sizes, LAYERS, torch.bfloat16, torch.device("cpu"))
    whole = bench.with_window(whole, window)
    contexts = [(37 * each) % 300 + 340 for each in range(batch)]
    fabrics = [Fabric(rank, world) for rank in range(world)]
    bases = torch.tensor([each._arena.data_ptr() for each in fabrics])
    dense = bench.make_caches(sizes, LAYERS, contexts, whole.head, world)
    decoders = list(map(aligned_part, bench.sharded(whole, world, scales)))
    steps, made = [], []
    for fabric in fabrics:
        fabric.heap_bases.copy_(bases)
        decoder, cache = decoders[fabric.rank], dense[fabric.rank]
        cache = aligned_cache(bench.paged(cache, page) if page else cache)
        config = {"STAGES": 4, "DOWN_PARTS": 2}
        steps.append(DecodeStep(decoder, cache, batch, fabric, config, logits=True))
        made.append(cache)
        vectors = [each for layer in decoder.layers for each in vars(layer).values()]
        vectors += [each for layer in decoder.layers for each in layer.scales]
        for each in (*vectors, decoder.head, decoder.norm, *cache.keys, *cache.values):
            if isinstance(each, torch.Tensor):
                simulated.memory.add(each)
        simulated.memory.add(fabric._arena)
    tokens, positions = torch.arange(100, 100 + batch) % sizes.vocab, torch.tensor(contexts).int()
    worst: dict[str, float] = {}
    logits: list[torch.Tensor] = []

    def note(name: str, error: float) -> None:
        worst[name] = max(worst.get(name, 0.0), inf if isnan(error) else error)

    for _ in range(2):
        launches: list[Any] = []
        chosen = []
        with launch.launching_through(lambda *each, to=launches: to.append(each)):
            for step in steps:
                for name in ("qkv", "parts", "softmax", "attended", "activated", "logits", "x"):
                    getattr(step.buffers, name).fill_(float("nan"))
                chosen.append(step(tokens, positions))
        simulated.run(
            kernel, [(args, tuple(each.constants.values())) for each, args in launches], PROGRAMS
        )
        for rank, step in enumerate(steps):
            parts = list(zip(decoders, dense, strict=True))
            pairs, bounds, wanted = bench.judged(step, made[rank], parts, tokens, positions, rank)
            for name, pair in pairs.items():
                note(name, bench.error_of(*pair) / bounds[name])
            near = wanted.gather(1, chosen[rank][:, None])[:, 0]
            note("tokens", float(((wanted.amax(1) - near) / wanted.std()).max()))
            note("counters", float(step.buffers.counters.abs().sum()))
        logits.append(torch.cat([step.logits for step in steps], 1).clone())
    note("changed", float((logits[0] != logits[1]).sum()))
    note("words", max(words_left(fabric, 2) for fabric in fabrics))
    return worst


if __name__ == "__main__":
    torch.set_num_threads(1)
    launch._compile = lambda kernel, args: None
    batch, ranks, page, window = map(int, sys.argv[1:5])
    print(json.dumps(simulate(batch, ranks, page, window or None, sys.argv[5])))
