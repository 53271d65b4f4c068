"""The decode step of one kernel on random weights: checked against float64, then timed.

    python -m benchmarks.decode_step --layers 4 --batch 1 16 --context 1024 --gpus 2 --check

Weights are functions of a seed, so that every rank makes its part of them, and the reference makes
them again. Keys beyond the context are NaN. With --check, phases of one layer are compared first,
for each batch, and contexts and windows around the sizes of chunks and splits; what is wrong ends
the run before anything is timed. Times are of replays of a graph of one step; their yardstick is
how fast the largest of all weights is found, which reads them once. The parent ends ranks that take
too long.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from taxfree_kernels.decode_step import chunks, tape
from taxfree_kernels.decode_step.decoder import SCALED, Cache, Decoder, Layer
from taxfree_kernels.decode_step.step import DecodeStep
from taxfree_kernels.errors import PeerTimeout
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.fabric.open import open_fabric
from taxfree_kernels.fp8 import dequantised, quantised, quantised_weight

Tensors = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of a whole model."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    layers: int
    theta: float
    eps: float
    qk_norm: bool = False
    bias: bool = False


MODELS = {
    "llama-3.1-8b": Sizes(4096, 32, 8, 128, 14336, 128256, 32, 5e5, 1e-5),
    "llama-3.2-1b": Sizes(2048, 32, 8, 64, 8192, 128256, 16, 5e5, 1e-5),
    "llama-3.1-70b": Sizes(8192, 64, 8, 128, 28672, 128256, 80, 5e5, 1e-5),
    "qwen3-8b": Sizes(4096, 32, 8, 128, 12288, 151936, 36, 1e6, 1e-6, qk_norm=True),
    "qwen3-32b": Sizes(5120, 64, 8, 128, 25600, 151936, 64, 1e6, 1e-6, qk_norm=True),
    "qwen2.5-7b": Sizes(3584, 28, 4, 128, 18944, 152064, 28, 1e6, 1e-6, bias=True),
}


#: contexts and windows that are checked with one sequence, and with several
CASES = (
    *((each, None) for each in (0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 1023, 1024, 1025, 5000)),
    *((5, 1), (63, 10), (100, 10), (1023, 64), (1024, 65), (1025, 1000)),
)
CASES_OF_SEVERAL = ((0, None), (64, None), (1024, None), (5000, None), (100, 10), (1024, 65))


def lengths(context: int, batch: int, spread: bool) -> list[int]:
    """Contexts of all sequences: all about as long, or spread down to the batch's part of it."""
    if spread:
        return [context * (batch - each) // batch for each in range(batch)]
    return [max(0, context - each) for each in range(batch)]


class Weights:
    """Whole weights by name; each is made from its own seed.

    Args:
        scales: "channel" or "block": those of layers are in fp8, with such scales; or "none".
    """

    def __init__(
        self, sizes: Sizes, dtype: torch.dtype, device: torch.device, scales: str = "none"
    ) -> None:
        self.sizes, self.dtype, self.scales, self._device = sizes, dtype, scales, device
        q, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        hidden, wide = sizes.hidden, sizes.intermediate
        self.shapes: dict[str, tuple[int, ...]] = {
            "input_norm": (hidden,),
            "q": (q, hidden),
            "k": (kv, hidden),
            "v": (kv, hidden),
            "o": (hidden, q),
            "post_norm": (hidden,),
            "gate": (wide, hidden),
            "up": (wide, hidden),
            "down": (hidden, wide),
        }
        if sizes.bias:
            self.shapes |= {"q_bias": (q,), "k_bias": (kv,), "v_bias": (kv,)}
        if sizes.qk_norm:
            self.shapes |= {"q_norm": (sizes.head_dim,), "k_norm": (sizes.head_dim,)}
        self._others = {
            "embedding": (sizes.vocab, hidden),
            "head": (sizes.vocab, hidden),
            "norm": (hidden,),
        }

    def __call__(self, layer: int, name: str) -> torch.Tensor:
        """A weight; in float32 what one in fp8 stands for."""
        made = self._made(layer, name)
        if self.scales == "none" or name not in SCALED:
            return made
        return dequantised(*quantised_weight(made.t(), self.scales), torch.float32).t()

    def part(
        self, layer: int, name: str, rank: int, world: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A rank's part of a weight, and of its scales in fp8."""
        made = self._made(layer, name)
        if self.scales == "none" or name not in SCALED:
            return part_of(made, name, rank, world), None
        values, scale = (each.t() for each in quantised_weight(made.t(), self.scales))
        is_whole = self.scales == "channel" and name in ("o", "down")
        scale = scale if is_whole else part_of(scale, name, rank, world)
        return part_of(values, name, rank, world), scale.contiguous()

    def _made(self, layer: int, name: str) -> torch.Tensor:
        shape = (self.shapes | self._others)[name]
        seed = 1000 * (layer + 1) + sorted(self.shapes | self._others).index(name)
        made = self.random(seed, shape)
        if name == "embedding":
            return made
        if name.endswith("norm"):
            return (1 + 0.1 * made.float()).to(self.dtype)
        return made.mul_(shape[-1] ** -0.5)

    def random(self, seed: int, shape: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator(self._device).manual_seed(seed)
        return torch.randn(shape, generator=generator, device=self._device, dtype=self.dtype)


def part_of(weight: torch.Tensor, name: str, rank: int, world: int) -> torch.Tensor:
    """A rank's part of a whole weight."""
    if name in ("o", "down"):
        return weight.chunk(world, 1)[rank].contiguous()
    if name in ("q", "k", "v", "gate", "up", "head", "q_bias", "k_bias", "v_bias"):
        return weight.chunk(world, 0)[rank].clone()
    return weight


def make_decoder(sizes: Sizes, layers: int, weights: Weights, rank: int, world: int) -> Decoder:
    """A rank's part of a model."""

    def layer_of(number: int) -> Layer:
        parts = {each: weights.part(number, each, rank, world) for each in weights.shapes}
        scales = tuple(scale for _, scale in parts.values() if scale is not None)
        return Layer(**{each: weight for each, (weight, _) in parts.items()}, scales=scales)

    made = tuple(map(layer_of, range(layers)))
    device = made[0].q.device
    powers = torch.arange(0, sizes.head_dim, 2, device=device).float() / sizes.head_dim
    return Decoder(
        made,
        weights(-1, "embedding"),
        weights(-1, "norm"),
        part_of(weights(-1, "head"), "head", rank, world),
        1.0 / sizes.theta**powers,
        sizes.head_dim,
        sizes.eps,
        vocab_start=rank * (sizes.vocab // world),
    )


def make_cache(
    sizes: Sizes, layers: int, contexts: Sequence[int], weights: Weights, rank: int, world: int,
    page: int = 0,
) -> tuple[Cache, list[torch.Tensor]]:  # fmt: skip
    """A rank's cache of sequences of these lengths, and the whole keys and values, by layer.

    These are [2, batch, kv_heads, the longest, head_dim].

    Args:
        page: keys of a page; 0 for a dense cache.
    """
    batch, longest = len(contexts), max(contexts)
    shape = (2, batch, sizes.kv_heads, longest, sizes.head_dim)
    old = [weights.random(5_000_000 + layer, shape) for layer in range(layers)]
    room = old[0].new_empty(batch, sizes.kv_heads // world, 8, sizes.head_dim)
    both = [
        [torch.cat([part.chunk(world, 1)[rank], room], 2).contiguous() for part in each]
        for each in old
    ]
    for each in (part for layer in both for part in layer):
        for sequence, length in enumerate(contexts):
            each[sequence, :, length:] = float("nan")
    table = None
    if page:
        table, both = _paged(both, page)
    return Cache(tuple(each[0] for each in both), tuple(each[1] for each in both), table), old


def _paged(both: list[Any], page: int) -> tuple[torch.Tensor, list[Any]]:
    """Dense keys and values as pages in a random order, of one that nobody owns and is NaN."""
    batch, heads, keys, dim = both[0][0].shape
    count = -(-keys // page)
    order = torch.randperm(batch * count, generator=torch.Generator().manual_seed(1)) + 1
    table = order.view(batch, count).int().to(both[0][0].device)
    pages: list[list[torch.Tensor]] = []
    for layer in both:
        pages.append([])
        for each in layer:
            room = each.new_full((batch * count + 1, page, heads, dim), float("nan"))
            whole = each.new_full((batch, heads, count * page, dim), float("nan"))
            whole[:, :, :keys] = each
            parts = whole.view(batch, heads, count, page, dim).permute(0, 2, 3, 1, 4)
            room[table.flatten().long()] = parts.flatten(0, 1)
            pages[-1].append(room)
    return table, pages


def reference(
    sizes: Sizes, weights: Weights, layers: int, old: list[torch.Tensor], decoder: Decoder,
    tokens: torch.Tensor, contexts: Sequence[int], in_fp8_on: int = 0,
) -> tuple[torch.Tensor, Tensors]:  # fmt: skip
    """float64 logits [batch, vocab], and what the phases of the last layer leave.

    Args:
        in_fp8_on: ranks on which what weights in fp8 multiply is quantised, too; 0: it is not.
    """
    batch, dim = len(tokens), sizes.head_dim
    positions = torch.tensor(contexts, device=tokens.device)
    angles = (positions[:, None, None] * decoder.inv_freq).double()
    cosine, sine = (torch.cat([each, each], -1) for each in (angles.cos(), angles.sin()))
    phases: Tensors = {}

    def w(layer: int, name: str) -> torch.Tensor:
        return weights(layer, name).double()

    def in_fp8(x: torch.Tensor, parts: int) -> torch.Tensor:
        if not in_fp8_on:
            return x
        of_ranks = (each.to(weights.dtype) for each in x.chunk(parts, -1))
        return torch.cat([dequantised(*quantised(each, weights.scales)) for each in of_ranks], -1)

    def norm(x: torch.Tensor, weight: torch.Tensor, quantises: bool = False) -> torch.Tensor:
        scaled = in_fp8(x * weight, 1) if quantises else x * weight
        return torch.rsqrt(x.square().mean(-1, keepdim=True) + sizes.eps) * scaled

    def rotated(x: torch.Tensor) -> torch.Tensor:
        low, high = x.chunk(2, -1)
        return x * cosine + torch.cat([-high, low], -1) * sine

    x = decoder.embedding[tokens].double()
    for layer in range(layers):
        normed = norm(x, w(layer, "input_norm"), quantises=True)
        products = [normed @ w(layer, each).t() for each in "qkv"]
        if sizes.bias:
            products = [
                p + w(layer, f"{each}_bias") for p, each in zip(products, "qkv", strict=True)
            ]
        phases["qkv"] = torch.cat(products, -1)
        q, k, v = (each.view(batch, -1, dim) for each in products)
        if sizes.qk_norm:
            q, k = norm(q, w(layer, "q_norm")), norm(k, w(layer, "k_norm"))
        q, k = rotated(q), rotated(k)
        phases["new key"], phases["new value"] = k, v
        window = decoder.layers[layer].window
        attended = []
        for sequence, length in enumerate(contexts):
            keys, values = (
                torch.cat([before[sequence, :, :length].double(), new[sequence, :, None]], 1)[
                    :, -(window or length + 1) :
                ].repeat_interleave(sizes.heads // sizes.kv_heads, 0)
                for before, new in zip(old[layer], (k, v), strict=True)
            )
            weight = torch.softmax(torch.einsum("hd,hnd->hn", q[sequence], keys) * dim**-0.5, -1)
            attended.append(torch.einsum("hn,hnd->hd", weight, values).flatten())
        phases["attended"] = torch.stack(attended)
        x = x + in_fp8(phases["attended"], in_fp8_on) @ w(layer, "o").t()
        normed = norm(x, w(layer, "post_norm"), quantises=True)
        gate, up = normed @ w(layer, "gate").t(), normed @ w(layer, "up").t()
        phases["activated"] = torch.nn.functional.silu(gate) * up
        x = x + in_fp8(phases["activated"], in_fp8_on) @ w(layer, "down").t()
    normed = norm(x, weights(-1, "norm").double())
    head = weights(-1, "head")
    logits = [normed @ each.double().t() for each in head.chunk(16)]
    return torch.cat(logits, -1), phases


def error_of(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The relative error; NaN if a number is missing."""
    found, wanted = found.double().flatten(), wanted.double().flatten()
    return float((found - wanted).norm() / wanted.norm())


def difference(found: torch.Tensor, wanted: torch.Tensor) -> str:
    """One line: where numbers are missing or worst."""
    found, wanted = found.double().flatten(), wanted.double().flatten()
    missing = found.isnan()
    gap = torch.where(missing, 0.0, found - wanted)
    worst = int(gap.abs().argmax())
    line = f"worst at {worst}: {found[worst].item():.5g} for {wanted[worst].item():.5g}"
    off = (gap.abs() > 0.1 * wanted.abs().mean()).nonzero().flatten()
    if len(off):
        line += f"; {len(off)} of {len(found)} are off, from {off[0].item()} to {off[-1].item()}"
    if missing.any():
        at = missing.nonzero().flatten()
        line += f"; {len(at)} of {len(found)} NaN, from {at[0].item()} to {at[-1].item()}"
    return line


def phases_of(
    step: Any, cache: Cache, phases: Tensors, contexts: Sequence[int], rank: int, world: int
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """What the phases of the last layer have left on a rank, and what they should."""
    model = step.model
    heads = [model.HEADS * model.HEAD_DIM] + 2 * [model.KV_HEADS * model.HEAD_DIM]
    whole = phases["qkv"].split([each * world for each in heads], -1)
    qkv = torch.cat([each.chunk(world, -1)[rank] for each in whole], -1)
    new_key, new_value = (phases[each].chunk(world, 1)[rank] for each in ("new key", "new value"))
    attended, activated = (
        phases[each].chunk(world, -1)[rank] for each in ("attended", "activated")
    )

    def at_end(states: torch.Tensor) -> torch.Tensor:
        table = cache.block_table
        if table is None:
            return torch.stack([each[:, at] for each, at in zip(states, contexts, strict=True)])
        page = states.shape[1]
        return torch.stack(
            [states[row[at // page], at % page] for row, at in zip(table, contexts, strict=True)]
        )

    return {
        "qkv": (step.buffers.qkv, qkv),
        "new key": (at_end(cache.keys[-1]), new_key),
        "new value": (at_end(cache.values[-1]), new_value),
        "attended": (step.buffers.attended, attended),
        "activated": (step.buffers.activated, activated),
    }


def judged(
    step: Any, cache: Cache, logits: torch.Tensor, weights: Weights, old: list[torch.Tensor],
    decoder: Decoder, tokens: torch.Tensor, contexts: Sequence[int], rank: int, world: int,
) -> tuple[dict[str, Any], dict[str, float], torch.Tensor]:  # fmt: skip
    """What a step has left and should have; the errors that it may have; all logits in float64.

    In fp8 these are 1.25 times the errors that quantised inputs alone make.
    """
    given = (weights.sizes, weights, len(decoder.layers), old, decoder, tokens, contexts)

    def pairs(in_fp8_on: int) -> tuple[dict[str, Any], torch.Tensor]:
        wanted, phases = reference(*given, in_fp8_on=in_fp8_on)
        found = phases_of(step, cache, phases, contexts, rank, world)
        return found | {"logits": (logits, wanted.chunk(world, -1)[rank])}, wanted

    exact, wanted = pairs(0)
    bound = 0.02 * max(1.0, len(decoder.layers) / 4) ** 0.5
    bounds = dict.fromkeys(exact, bound)
    if weights.scales != "none":
        errors = {name: error_of(pair[1], exact[name][1]) for name, pair in pairs(world)[0].items()}
        bounds = {name: max(bound, 1.25 * error) for name, error in errors.items()}
    return exact, bounds, wanted


def say(rank: int, line: str) -> None:
    """Print a line on one rank."""
    if rank == 0:
        print(line, flush=True)


def await_end(step: Any, rank: int, seconds: float = 10.0) -> None:
    """Wait for the step; if it hangs, print how far it came, and end the process."""
    event = torch.cuda.Event()
    event.record()
    deadline = time.monotonic() + seconds
    while not event.query():
        if time.monotonic() > deadline:
            with torch.cuda.stream(torch.cuda.Stream()):
                words = step.buffers.counters.cpu().tolist()
            names = ("DONE", "LEFT", "CLAIMED", "FAILED")
            found = {name: words[getattr(chunks, name).value] for name in names}
            pairs = words[chunks.SPLITS_DONE.value :]
            print(f"rank {rank}: the step hangs: {found}, pairs {pairs}", flush=True)
            os._exit(3)
        time.sleep(0.001)


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of one run, after another one."""
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def timed(graphs: dict[str, torch.cuda.CUDAGraph], rounds: int, fabric: Fabric) -> dict[str, Any]:
    """Times of a replay, in us, after one more; in turns, from ranks that begin together."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    names = list(graphs)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            fabric.barrier()
            graphs[name].replay()
            begin.record()
            for _ in range(3):
                graphs[name].replay()
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end) * 1e3 / 3)
    return {
        name: {"median": statistics.median(each), "min": min(each), "samples": each}
        for name, each in times.items()
    }


def say_trace(times: torch.Tensor, rank: int) -> list[tuple[str, list[float]]]:
    """Print the mean time from each event of a layer to the next, and its spread over programs.

    Returns what it prints, in us: the first layer; others, their fastest and slowest program.

    Args:
        times: int64 [programs, layers + 1, EVENTS].
    """
    khz = getattr(torch.cuda.get_device_properties(0), "clock_rate", 1_980_000)
    us = times.double() / khz * 1e3
    steps = torch.cat([us[:, :-1].diff(dim=-1), (us[:, 1:, :1] - us[:, :-1, -1:])], -1)
    names = [*tape.EVENTS[1:], tape.EVENTS[0]]
    say(rank, f"us at {khz / 1e6:.2f} GHz, first layer, others, fastest and slowest program:")
    rows = []
    for index, name in enumerate(names):
        first, means = steps[:, 0, index].mean(), steps[:, 1:, index].mean(1)
        rows.append((name, [float(each) for each in (first, means.mean(), *means.aminmax())]))
    head = us[:, -1, 1] - us[:, -1, 0]
    rows.append(("head", [float(each) for each in (head.mean(), head.mean(), *head.aminmax())]))
    for name, each in rows:
        say(rank, f"  {name:10s} " + " ".join(f"{time:7.2f}" for time in each))
    return rows


def rank_main(rank: int, options: argparse.Namespace, folder: str) -> None:
    """One rank: check, then time."""
    world = options.gpus
    torch.cuda.set_device(rank)
    begin = time.monotonic()
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    fabric = open_fabric("cuda", None, 256 << 20, timeout_s=2.0)
    sizes = MODELS[options.model]
    layers = options.layers or sizes.layers
    device = torch.device("cuda", rank)
    say(rank, f"{torch.cuda.get_device_name()}, opened after {time.monotonic() - begin:.1f} s")

    def inputs(contexts: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.arange(1000, 1000 + len(contexts), device=device)
        return tokens, torch.tensor(contexts, dtype=torch.int32, device=device)

    def checked(
        decoder: Decoder, contexts: Sequence[int], repeats: int, config: dict[str, int]
    ) -> tuple[bool, Cache, Any]:
        """Whether a step is right and repeats; its cache; the step."""
        count, window = len(decoder.layers), decoder.layers[0].window
        tokens, positions = inputs(contexts)
        cache, old = make_cache(sizes, count, contexts, weights, rank, world, options.page)
        step = DecodeStep(decoder, cache, len(contexts), fabric, config, logits=True)
        for name in ("qkv", "parts", "softmax", "attended", "activated", "x", "logits"):
            getattr(step.buffers, name).fill_(float("nan"))
        first = step(tokens, positions)
        await_end(step, rank)
        try:
            fabric.pool.check()
        except PeerTimeout as error:
            print(f"rank {rank}: {error}", flush=True)
        logits = step.logits.clone()
        pairs, bounds, wanted = judged(
            step, cache, logits, weights, old, decoder, tokens, contexts, rank, world
        )
        errors = {name: error_of(*pair) for name, pair in pairs.items()}
        same = 0
        for _ in range(repeats):
            step(tokens, positions)
            same += torch.equal(step.logits, logits)
        right = all(error < bounds[name] for name, error in errors.items()) and same == repeats
        line = f"{count} layers, batch {len(contexts)}, context {contexts[0]}, window {window}, "
        line += f"config {config}, scales {weights.scales}: "
        line += ", ".join(f"{k} {error:.1e}" for k, error in errors.items())
        line += f"; tokens {first.tolist()} for {wanted.argmax(-1).tolist()}"
        line += f"; {same} of {repeats} repeat"
        say(rank, f"{line}; after {time.monotonic() - begin:.1f} s")
        if not right:
            print(f"rank {rank}: WRONG: {line}", flush=True)
            for name, pair in pairs.items():
                print(f"rank {rank}:   {name:10s} {difference(*pair)}", flush=True)
        return right, cache, step

    def stream() -> None:
        for each in matrices:
            each.view(torch.int32).amax()

    def timed_case(batch: int, context: int) -> tuple[bool, dict[str, Any]]:
        """Check and time the whole model."""
        contexts = lengths(context, batch, spread=False)
        right, cache, step = checked(decoder, contexts, options.repeats, {})
        states = tape.states_of(cache)[0][0]
        read = size + 2 * layers * sum(contexts) * states[0, :, 0].nbytes
        given = inputs(contexts)
        found: dict[str, Any] = {"batch": batch, "context": context, "scales": weights.scales}
        found |= {"bytes": read, "right": right}
        if options.trace:
            traced = DecodeStep(decoder, cache, batch, fabric, {}, trace=True)
            for _ in range(3):
                traced(*given)
            torch.cuda.synchronize()
            found["trace"] = say_trace(traced.buffers.times, rank)
        steps = {"step": step}
        for config in options.config:
            other = DecodeStep(decoder, cache, batch, fabric, config, logits=True)
            other(*given)
            error = error_of(other.logits, step.logits)
            say(rank, f"config {config}: logits are {error:.1e} from those of the first one")
            right &= error < 0.02
            steps[f"step {config}"] = other
        runs = {name: partial(each, *given) for name, each in steps.items()}
        graphs = {
            name: captured(run) for name, run in (runs | {"stream of weights": stream}).items()
        }
        times = timed(graphs, options.rounds, fabric)
        fabric.pool.check()
        rate = size / times["stream of weights"]["median"]
        for name, each in times.items():
            read_here = size if name == "stream of weights" else read
            each["GB/s"] = read_here / each["median"] / 1e3
            each["of stream"] = read_here / each["median"] / rate
            say(
                rank,
                f"batch {batch}, context {context}, scales {weights.scales}: "
                f"{name:40s} {each['median']:9.1f} us "
                f"(min {each['min']:.1f}), {each['GB/s']:.0f} GB/s, "
                f"{each['of stream']:.1%} of the stream",
            )
        return right, found | {"times": times}

    right = True
    results: dict[str, Any] = {"options": vars(options), "cases": []}
    for scales in options.scales:
        weights = Weights(sizes, getattr(torch, options.dtype), device, scales)
        if options.check:
            decoder = make_decoder(sizes, 1, weights, rank, world)
            for batch in options.batch:
                for context, window in CASES if batch == 1 else CASES_OF_SEVERAL:
                    layer = dataclasses.replace(decoder.layers[0], window=window)
                    one = dataclasses.replace(decoder, layers=(layer,))
                    for config in ({}, *options.config):
                        right &= checked(one, lengths(context, batch, spread=True), 3, config)[0]
            del decoder, layer, one
            torch.cuda.empty_cache()
        everyone = torch.tensor(int(right), device=device)
        dist.all_reduce(everyone, dist.ReduceOp.MIN)
        if not everyone:
            break
        decoder = make_decoder(sizes, layers, weights, rank, world)
        held = (vars(layer).values() for layer in decoder.layers)
        matrices = [each for layer in held for each in layer if isinstance(each, torch.Tensor)]
        matrices = [*(each for each in matrices if each.dim() == 2), decoder.head]
        size = sum(each.nbytes for each in matrices)
        for context in options.context:
            for batch in options.batch:
                was_right, case = timed_case(batch, context)
                right &= was_right
                results["cases"].append(case)
                torch.cuda.empty_cache()
    if rank == 0 and options.out:
        from taxfree_tune.measuring import environment

        results["environment"] = environment.record(fabric.name, fabric.hardware)
        Path(options.out).write_text(json.dumps(results, indent=1, default=str) + "\n")
    say(rank, f"{'right' if right else 'WRONG'}; done after {time.monotonic() - begin:.1f} s")
    fabric.close()
    dist.destroy_process_group()
    if not right:
        sys.exit(1)


def main() -> int:
    """Start the ranks, and end them if they take too long."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, help="of the model; all of them by default")
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--context", type=int, nargs="+", default=[1024])
    parser.add_argument("--page", type=int, default=0, help="keys of a page of the cache")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument(
        "--scales",
        nargs="+",
        default=["none"],
        choices=("none", "channel", "block"),
        help="of weights in fp8; none: in --dtype",
    )
    parser.add_argument("--check", action="store_true", help="one layer with many contexts first")
    parser.add_argument("--trace", action="store_true", help="where a step's time goes")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--config",
        action="append",
        type=json.loads,
        default=[],
        help="JSON; checked and timed as well",
    )
    parser.add_argument("--timeout", type=float, default=85.0, help="of all ranks, in seconds")
    parser.add_argument("--out", help="a JSON file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ranks = mp.spawn(rank_main, (options, folder), options.gpus, join=False)
        deadline = time.monotonic() + options.timeout
        try:
            while not ranks.join(max(0.1, min(1.0, deadline - time.monotonic()))):
                if time.monotonic() > deadline:
                    print(f"ranks have not ended after {options.timeout} s", flush=True)
                    return 2
        except Exception as error:
            print(error, flush=True)
            return 1
        finally:
            for each in ranks.processes:
                each.kill()
    return 0


if __name__ == "__main__":
    sys.exit(main())
