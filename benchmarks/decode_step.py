"""The decode step of one kernel on random weights, checked against float64.

    python -m benchmarks.decode_step --gpus 2 --batch 1 16 --scales none block

Weights are functions of a seed, so that every rank makes its part of them, and the reference makes
them again. Keys beyond the context are NaN. For each batch, phases of one layer are compared with
contexts and windows around the sizes of chunks and splits; then the whole model, or --layers of it.
`taxfree tune --op decode_step` times a step, `taxfree explain --op decode_step` its phases.
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
from taxfree_kernels.decode_step.decoder import SCALED, Cache, Decoder, Layer
from taxfree_kernels.decode_step.step import DecodeStep
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.fp8 import dequantised, quantised, quantised_weight
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
        tensors: dict[str, Any] = {each: weight for each, (weight, _) in parts.items()}
        return Layer(**tensors, scales=scales)

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
def _made(
    fabric: Fabric, model: str, layers: int, dtype: str, scales: str
) -> tuple[Weights, Decoder]:
    """Weights, and a rank's part of the model; kept from one case to the next."""
    weights = Weights(MODELS[model], getattr(torch, dtype), fabric.device, scales)
    return weights, make_decoder(MODELS[model], layers, weights, fabric.rank, fabric.world_size)


@torch.no_grad()
def check(fabric: Fabric, asked: Asked, repeats: int) -> tuple[bool, str]:
    """Whether a step is right on this rank, and repeats, with its errors; a task of the workers.

    Raises:
        PeerTimeout: a wait in the kernel exceeded its bound.
    """
    contexts, rank, world = asked.contexts, fabric.rank, fabric.world_size
    weights, decoder = _made(fabric, asked.model, asked.layers, asked.dtype, asked.scales)
    layers = tuple(dataclasses.replace(each, window=asked.window) for each in decoder.layers)
    decoder = dataclasses.replace(decoder, layers=layers)
    tokens = torch.arange(1000, 1000 + len(contexts), device=fabric.device)
    positions = torch.tensor(contexts, dtype=torch.int32, device=fabric.device)
    cache, old = make_cache(weights.sizes, asked.layers, contexts, weights, rank, world, asked.page)
    step = DecodeStep(decoder, cache, len(contexts), fabric, asked.config, logits=True)
    for name in ("qkv", "parts", "softmax", "attended", "activated", "x", "logits"):
        getattr(step.buffers, name).fill_(float("nan"))
    first = step(tokens, positions)
    fabric.synchronize()
    fabric.pool.check()
    logits = step.logits.clone()
    pairs, bounds, wanted = judged(
        step, cache, logits, weights, old, decoder, tokens, contexts, rank, world
    )
    errors = {name: error_of(*pair) for name, pair in pairs.items()}
    same = 0
    for _ in range(repeats):
        step(tokens, positions)
        same += torch.equal(step.logits, logits)
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
