"""The decode step of one kernel on random weights, checked against float64.

    python -m benchmarks.decode_step --gpus 2 --batch 1 16 --scales none block

Every rank draws the weights of all, for the reference. Keys beyond the context are NaN. For each
batch, phases of one layer are compared with contexts and windows around the sizes of chunks and
splits; then the whole model, or --layers of it. `taxfree tune --op decode_step` times a step,
`taxfree explain --op decode_step` its phases.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from benchmarks.commands import exit_code, positive
from taxfree.errors import WrongResult
from taxfree_check.decoders import in_fp8, part_of
from taxfree_kernels.decode_step.decoder import SCALED, Cache, Decoder, Layer, scales_of
from taxfree_kernels.decode_step.step import DecodeStep
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.fp8 import dequantised, quantised
from taxfree_tune import devices
from taxfree_tune.workers.group import WorkerGroup

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
    "qwen3-1.7b": Sizes(2048, 16, 8, 128, 6144, 151936, 28, 1e6, 1e-6, qk_norm=True),
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


def whole_model(sizes: Sizes, layers: int, dtype: torch.dtype, device: torch.device) -> Decoder:
    """A model with random weights, the same on all ranks."""
    generator = torch.Generator(device).manual_seed(5)
    q, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    hidden, wide = sizes.hidden, sizes.intermediate

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    def weight(*shape: int) -> torch.Tensor:
        return drawn(*shape).mul_(shape[-1] ** -0.5)

    def norm(size: int) -> torch.Tensor:
        return (1 + 0.1 * drawn(size).float()).to(dtype)

    def layer() -> Layer:
        more: dict[str, Any] = {}
        if sizes.bias:
            more |= {"q_bias": weight(q), "k_bias": weight(kv), "v_bias": weight(kv)}
        if sizes.qk_norm:
            more |= {"q_norm": norm(sizes.head_dim), "k_norm": norm(sizes.head_dim)}
        return Layer(
            norm(hidden), weight(q, hidden), weight(kv, hidden), weight(kv, hidden),
            weight(hidden, q), norm(hidden), weight(wide, hidden), weight(wide, hidden),
            weight(hidden, wide), **more,
        )  # fmt: skip

    powers = torch.arange(0, sizes.head_dim, 2, device=device).float() / sizes.head_dim
    return Decoder(
        tuple(layer() for _ in range(layers)), drawn(sizes.vocab, hidden), norm(hidden),
        weight(sizes.vocab, hidden), 1.0 / sizes.theta**powers, sizes.head_dim, sizes.eps,
    )  # fmt: skip


def sharded(whole: Decoder, world: int, scales: str = "none") -> list[Decoder]:
    """The ranks' parts of a model, perhaps with layers in fp8."""
    return [in_fp8(part_of(whole, rank, world), scales) for rank in range(world)]


def with_window(decoder: Decoder, window: int | None) -> Decoder:
    """A decoder all of whose layers see so many positions."""
    layers = tuple(dataclasses.replace(layer, window=window) for layer in decoder.layers)
    return dataclasses.replace(decoder, layers=layers)


def make_caches(
    sizes: Sizes, layers: int, contexts: Sequence[int], like: torch.Tensor, world: int
) -> list[Cache]:
    """The ranks' dense caches of sequences of these lengths, NaN behind them.

    Args:
        like: of the dtype, on the device.
    """
    generator = torch.Generator(like.device).manual_seed(2)
    shape = (len(contexts), sizes.kv_heads, max(contexts) + 8, sizes.head_dim)

    def states() -> torch.Tensor:
        made = torch.randn(shape, generator=generator, device=like.device, dtype=like.dtype)
        for sequence, length in enumerate(contexts):
            made[sequence, :, length:] = float("nan")
        return made

    def of_rank(whole: Sequence[torch.Tensor], rank: int) -> tuple[torch.Tensor, ...]:
        return tuple(each.chunk(world, 1)[rank].contiguous() for each in whole)

    keys, values = ([states() for _ in range(layers)] for _ in range(2))
    return [Cache(of_rank(keys, rank), of_rank(values, rank)) for rank in range(world)]


def paged(cache: Cache, page: int) -> Cache:
    """Dense keys and values as pages in a random order, of one that nobody owns and is NaN."""
    batch, heads, keys, dim = cache.keys[0].shape
    count = -(-keys // page)
    order = torch.randperm(batch * count, generator=torch.Generator().manual_seed(1)) + 1
    table = order.view(batch, count).int().to(cache.keys[0].device)

    def pages(dense: torch.Tensor) -> torch.Tensor:
        room = dense.new_full((batch * count + 1, page, heads, dim), float("nan"))
        whole = dense.new_full((batch, heads, count * page, dim), float("nan"))
        whole[:, :, :keys] = dense
        parts = whole.view(batch, heads, count, page, dim).permute(0, 2, 3, 1, 4)
        room[table.flatten().long()] = parts.flatten(0, 1)
        return room

    return Cache(tuple(map(pages, cache.keys)), tuple(map(pages, cache.values)), table)


def reference(
    parts: Sequence[tuple[Decoder, Cache]], tokens: torch.Tensor, positions: torch.Tensor,
    rounded_as: torch.dtype | None = None,
) -> tuple[torch.Tensor, list[Tensors]]:  # fmt: skip
    """float64 logits [batch, vocabulary], and by rank what the phases of the last layer leave.

    Weights in fp8 are what they stand for.

    Args:
        parts: of each rank. Of the caches, which are dense, what is before the positions is read.
        rounded_as: of which dtype what weights in fp8 multiply is when it is quantised; None: it
            is not.
    """
    first, _ = parts[0]
    dim, scales = first.head_dim, scales_of(first.layers[0])
    angles = positions[:, None, None] * first.inv_freq.double()
    turns = (angles.cos() * first.rope_scale, angles.sin() * first.rope_scale)
    cosine, sine = (torch.cat([turn, turn], -1) for turn in turns)
    phases: list[Tensors] = [{} for _ in parts]

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x if rounded_as is None else dequantised(*quantised(x.to(rounded_as), scales))

    def norm(x: torch.Tensor, weight: torch.Tensor, rounds: bool = False) -> torch.Tensor:
        scaled = x * weight.double()
        factor = torch.rsqrt(x.square().mean(-1, keepdim=True) + first.eps)
        return factor * (rounded(scaled) if rounds else scaled)

    def product(x: torch.Tensor, layer: Layer, name: str) -> torch.Tensor:
        weight: torch.Tensor = getattr(layer, name)
        if layer.scales:
            scale = layer.scales[SCALED.index(name)]
            return x @ dequantised(weight.t(), scale.t())
        return x @ weight.double().t()

    def heads(x: torch.Tensor, layer: Layer, name: str) -> torch.Tensor:
        y, bias = product(x, layer, name), getattr(layer, f"{name}_bias")
        return y if bias is None else y + bias.double()

    def turned(y: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        y = y if weight is None else norm(y, weight)
        low, high = y.chunk(2, -1)
        return y * cosine + torch.cat([-high, low], -1) * sine

    def attended(
        layer: Layer, q: torch.Tensor, news: Sequence[torch.Tensor], old: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        rows = []
        for sequence, length in enumerate(positions.tolist()):
            keys, values = (
                torch.cat([before[sequence, :, :length].double(), new[sequence, :, None]], 1)[
                    :, -(layer.window or length + 1) :
                ].repeat_interleave(q.shape[1] // new.shape[1], 0)
                for before, new in zip(old, news, strict=True)
            )
            weight = torch.softmax(torch.einsum("hd,hnd->hn", q[sequence], keys) * dim**-0.5, -1)
            rows.append(torch.einsum("hn,hnd->hd", weight, values).flatten())
        return torch.stack(rows)

    x = first.embedding[tokens].double()
    for at in range(len(first.layers)):
        normed = norm(x, first.layers[at].input_norm, rounds=True)
        for (decoder, cache), left in zip(parts, phases, strict=True):
            layer = decoder.layers[at]
            products = [heads(normed, layer, name) for name in "qkv"]
            q, k, v = (each.view(len(tokens), -1, dim) for each in products)
            q, k = turned(q, layer.q_norm), turned(k, layer.k_norm)
            left |= {"qkv": torch.cat(products, -1), "new key": k, "new value": v}
            left["attended"] = attended(layer, q, (k, v), (cache.keys[at], cache.values[at]))
            x = x + product(rounded(left["attended"]), layer, "o")
        normed = norm(x, first.layers[at].post_norm, rounds=True)
        for (decoder, _), left in zip(parts, phases, strict=True):
            layer = decoder.layers[at]
            gate, up = product(normed, layer, "gate"), product(normed, layer, "up")
            left["activated"] = torch.nn.functional.silu(gate) * up
            x = x + product(rounded(left["activated"]), layer, "down")
    normed = norm(x, first.norm)
    return torch.cat([normed @ decoder.head.double().t() for decoder, _ in parts], 1), phases


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


def phases_of(step: Any, cache: Cache, positions: torch.Tensor) -> Tensors:
    """What the phases of the last layer have left on a rank."""

    def at_end(states: torch.Tensor) -> torch.Tensor:
        ends, table = positions.tolist(), cache.block_table
        if table is None:
            return torch.stack([each[:, at] for each, at in zip(states, ends, strict=True)])
        page = states.shape[1]
        return torch.stack(
            [states[row[at // page], at % page] for row, at in zip(table, ends, strict=True)]
        )

    return {
        "qkv": step.buffers.qkv,
        "new key": at_end(cache.keys[-1]),
        "new value": at_end(cache.values[-1]),
        "attended": step.buffers.attended,
        "activated": step.buffers.activated,
        "logits": step.logits,
    }


def judged(
    step: Any, cache: Cache, parts: Sequence[tuple[Decoder, Cache]], tokens: torch.Tensor,
    positions: torch.Tensor, rank: int,
) -> tuple[dict[str, Any], dict[str, float], torch.Tensor]:  # fmt: skip
    """What a step has left and should have; the errors that it may have; all logits in float64.

    In fp8 these are 1.25 times the errors that quantised inputs alone make.

    Args:
        cache: of the step; of `parts` those before it.
    """
    decoder, _ = parts[rank]

    def wanted(rounded_as: torch.dtype | None) -> tuple[Tensors, torch.Tensor]:
        logits, phases = reference(parts, tokens, positions, rounded_as)
        return phases[rank] | {"logits": logits.chunk(len(parts), -1)[rank]}, logits

    exact, logits = wanted(None)
    bound = 0.02 * max(1.0, len(decoder.layers) / 4) ** 0.5
    bounds = dict.fromkeys(exact, bound)
    if decoder.layers[0].scales:
        rounded, _ = wanted(decoder.head.dtype)
        errors = {name: error_of(rounded[name], exact[name]) for name in exact}
        bounds = {name: max(bound, 1.25 * error) for name, error in errors.items()}
    found = phases_of(step, cache, positions)
    return {name: (found[name].clone(), exact[name]) for name in found}, bounds, logits


@dataclasses.dataclass(frozen=True)
class Asked:
    """A step that is checked.

    Args:
        model, layers: of `MODELS`, and how many of its layers.
        dtype, scales: of weights, and of those in fp8.
        contexts: of its sequences.
        window: of all layers; None for none.
        page: keys of a page of the cache; 0 for a dense one.
        config: of the kernel.
    """

    model: str
    layers: int
    dtype: str
    scales: str
    contexts: tuple[int, ...]
    window: int | None
    page: int
    config: dict[str, int]


@lru_cache(maxsize=1)
def _made(fabric: Fabric, model: str, layers: int, dtype: str, scales: str) -> list[Decoder]:
    """The ranks' parts of a model; kept from one case to the next."""
    whole = whole_model(MODELS[model], layers, getattr(torch, dtype), fabric.device)
    return sharded(whole, fabric.world_size, scales)


@torch.no_grad()
def check(fabric: Fabric, asked: Asked, repeats: int) -> tuple[bool, str]:
    """Whether a step is right on this rank, and repeats, with its errors; a task of the workers.

    Raises:
        PeerTimeout: a wait in the kernel exceeded its bound.
    """
    contexts, rank, world = asked.contexts, fabric.rank, fabric.world_size
    decoders = _made(fabric, asked.model, asked.layers, asked.dtype, asked.scales)
    decoders = [with_window(each, asked.window) for each in decoders]
    decoder, sizes = decoders[rank], MODELS[asked.model]
    tokens = torch.arange(1000, 1000 + len(contexts), device=fabric.device)
    positions = torch.tensor(contexts, dtype=torch.int32, device=fabric.device)
    caches = make_caches(sizes, asked.layers, contexts, decoder.head, world)
    cache = paged(caches[rank], asked.page) if asked.page else caches[rank]
    step = DecodeStep(decoder, cache, len(contexts), fabric, asked.config, logits=True)
    for name in ("qkv", "parts", "softmax", "attended", "activated", "x", "logits"):
        getattr(step.buffers, name).fill_(float("nan"))
    first = step(tokens, positions)
    fabric.synchronize()
    fabric.pool.check()
    parts = list(zip(decoders, caches, strict=True))
    pairs, bounds, wanted = judged(step, cache, parts, tokens, positions, rank)
    errors = {name: error_of(*pair) for name, pair in pairs.items()}
    same = 0
    for _ in range(repeats):
        step(tokens, positions)
        same += torch.equal(step.logits, pairs["logits"][0])
    wrong = [name for name, error in errors.items() if not error < bounds[name]]
    lines = [
        f"{asked}: {', '.join(f'{name} {error:.1e}' for name, error in errors.items())}; tokens "
        f"{first.tolist()} for {wanted.argmax(-1).tolist()}; {same} of {repeats} repeat",
        *(f"  {name:10s} {difference(*pairs[name])}" for name in wrong),
    ]
    return not wrong and same == repeats, "\n".join(lines)


def _check_all(options: argparse.Namespace) -> None:
    """Check all cases.

    Raises:
        WrongResult: at the first that is wrong on some rank.
    """
    fabric = devices.fabric_for("cuda")
    devices.require(fabric, options.gpus)
    with WorkerGroup(options.gpus, fabric, 256 << 20, timeout_s=2.0) as group:

        def require(scales: str, layers: int, contexts: list[int], window: int | None) -> None:
            for config in ({}, *options.config):
                asked = Asked(
                    options.model, layers, options.dtype, scales, tuple(contexts), window,
                    options.page, config,
                )  # fmt: skip
                outcomes = group.call(check, options.timeout, asked=asked, repeats=options.repeats)
                print(outcomes[0][1], flush=True)
                for rank, (is_right, said) in enumerate(outcomes):
                    if not is_right:
                        raise WrongResult(f"rank {rank}: {said}")

        for scales in options.scales:
            for batch in options.batch:
                for context, window in CASES if batch == 1 else CASES_OF_SEVERAL:
                    require(scales, 1, lengths(context, batch, spread=True), window)
            for batch in options.batch:
                layers = options.layers or MODELS[options.model].layers
                require(scales, layers, lengths(options.context, batch, spread=False), None)


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="llama-3.1-8b")
    parser.add_argument("--layers", type=positive, help="of the model; all of them by default")
    parser.add_argument("--batch", type=positive, nargs="+", default=[1])
    parser.add_argument("--context", type=positive, default=1024, help="of the whole model")
    parser.add_argument("--page", type=int, default=0, help="keys of a page of the cache")
    parser.add_argument("--gpus", type=positive, default=1)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument(
        "--scales", nargs="+", default=["none"], choices=("none", "channel", "block"),
        help="of weights in fp8; none: in --dtype",
    )  # fmt: skip
    parser.add_argument("--repeats", type=positive, default=20)
    parser.add_argument(
        "--config", action="append", type=json.loads, default=[], help="JSON; checked as well"
    )
    parser.add_argument("--timeout", type=float, default=300.0, help="of a case, in seconds")
    options = parser.parse_args()
    return exit_code(lambda: _check_all(options))


if __name__ == "__main__":
    from benchmarks import decode_step  # whose task has a module that workers find

    sys.exit(decode_step.main())
