"""A decode step of a whole model, which a generate loop calls."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import dropwhile
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu

from taxfree._runtime.aside import aside
from taxfree._runtime.collectives import Failure, attempt
from taxfree._runtime.runtime import Runtime, most_saved, runtime_of
from taxfree._runtime.startup import init
from taxfree.errors import NoRecord, UsageError
from taxfree.models import report
from taxfree.models.decoders import decoder_of, group_of
from taxfree.models.step_records import StepChoice, choose, problem_of
from taxfree_kernels.decode_step.decoder import (
    SCALED,
    Cache,
    Decoder,
    Layer,
    scales_of,
    weights_of,
)
from taxfree_kernels.errors import FabricUnavailable
from taxfree_kernels.fabric.heap import arena_bytes
from taxfree_kernels.fp8 import product
from taxfree_kernels.quantise import quantise
from taxfree_kernels.variant import BLOCK, LEAST_HEAD_DIM, MOST_HEAD_DIM
from taxfree_kernels.vendor import all_gather, multiplies_fp8, scaled_mm

#: a factor of a product, and its scales in fp8
_Factor = tuple[torch.Tensor, torch.Tensor | None]
_OF_OPERATIONS = (torch.float16, torch.bfloat16)
_LOCAL_SLOT_BYTES = 8 << 20  # of attention: 64 sequences with 64 heads of 256 values
_TOKEN = 0x7FFFFFFF  # bits of a token in the numbers of `best_of`
_local_runtimes: weakref.WeakValueDictionary[Any, Runtime] = weakref.WeakValueDictionary()


def decode_step(
    model: torch.nn.Module | Decoder,
    batch: int = 1,
    capacity: int = 0,
    *,
    cache: Any = None,
    group: dist.ProcessGroup | None = None,
) -> ModelStep:
    """A step of a decoder that reads the model's weights where they are; collective.

    Args:
        model: a Llama, Mistral, Qwen2 or Qwen3 of Transformers, on one device, or loaded with
            ``tp_plan="auto"``.
        batch: sequences.
        capacity: tokens of each sequence, for a cache that the step allocates.
        cache: in place of `batch` and `capacity`, a StaticCache of Transformers that has taken a
            prompt, or a ``Cache``; the step uses its tensors.
        group: the ranks of a model whose parameters are no DTensors but each rank's own parts.

    Raises:
        UsageError: a step does not compute what the model does, or the cache does not fit it; the
            message says what is missing.
    """
    if isinstance(model, torch.nn.Module):
        group = group or group_of(model)
    world_size = 1 if group is None else dist.get_world_size(group)
    rank = 0 if group is None else dist.get_rank(group)
    decoder = model if isinstance(model, Decoder) else decoder_of(model, rank, world_size)
    if cache is None:
        cache = _allocated(decoder, batch, capacity)
    elif not isinstance(cache, Cache):
        cache = _taken(cache)
    _require_fit(decoder, cache)
    return ModelStep(decoder, cache, None if world_size == 1 else group)


class ModelStep:
    """A step: ``next_tokens = step(tokens, positions)``. Made by :func:`taxfree.decode_step`.

    A call does not wait for the device: after an eager one it can be captured in a CUDA graph. Its
    replays read `tokens` and `positions` anew. Under tensor parallelism all ranks call.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: Cache,
        group: dist.ProcessGroup | None,
        choice: StepChoice | None = None,
    ) -> None:
        self.decoder, self.cache, self._group = decoder, cache, group
        table = cache.block_table
        self.batch: int = len(cache.keys[0] if table is None else table)
        #: tokens of a sequence that the cache has room for
        self.capacity: int = (
            min(keys.shape[2] for keys in cache.keys)
            if table is None
            else table.shape[1] * cache.keys[0].shape[1]
        )
        self._logits: torch.Tensor | None = None
        self._runtime: Runtime | None = None
        self._local: Runtime | None = None
        self._kernel: Any = None
        self._choice = choice
        reason = self._unsupported_reason()
        why = self._choice.why if self._choice is not None else ""
        #: what runs, and why
        self.ran: str = f"operations: {reason}" if reason is not None else "one kernel"
        if reason is None and why:
            self.ran += f": {why}"
        first = decoder.layers[0]
        self._scales = scales_of(first)
        self._has_scaled_mm = self._scales != "none" and all(
            multiplies_fp8(
                self._scales, weight.shape[1], len(weight) % BLOCK, weight.dtype,
                decoder.embedding.dtype, has_bias, False, weight.device,
            )
            for weight in weights_of(first)
            for has_bias in {False, first.q_bias is not None}
        )  # fmt: skip
        self._sequences = torch.arange(self.batch, device=decoder.embedding.device)
        #: of q, k and v, their biases, and of gate and up: one matrix where a model holds them so
        self._joint = [
            (
                _joined(layer.q, layer.k, layer.v),
                _joined(layer.q_bias, layer.k_bias, layer.v_bias),
                _joined(layer.gate, layer.up),
            )
            for layer in decoder.layers
        ]
        self._taken = {name: self._taken_along(name) for name in ("o", "down")}
        self._next_norms = [layer.input_norm for layer in decoder.layers[1:]] + [decoder.norm]
        self._parts: tuple[Callable[..., Any], ...] = self._begun, self._behind_layer, best_of
        if decoder.embedding.is_cuda:  # one by one: equal layers share their code
            self._parts = tuple(map(_compiled, self._parts))

    def _unsupported_reason(self) -> str | None:
        """Open runtimes, and make the kernel; the reason why it does not serve; collective."""
        decoder, group = self.decoder, self._group
        if self._choice is not None and self._choice.way == "library":
            return self._choice.why
        if decoder.embedding.dtype not in _OF_OPERATIONS:
            return str(decoder.embedding.dtype).removeprefix("torch.")
        if not dist.is_initialized():
            return "there is no process group"
        self._runtime = None if group is None else _runtime(group)
        if LEAST_HEAD_DIM <= decoder.head_dim <= MOST_HEAD_DIM:
            self._local = _local_runtime()
        elif group is None:
            return f"heads of {decoder.head_dim} values"
        if (runtime := self._runtime or self._local) is None:
            return "no fabric serves here"
        fabric = runtime._fabric
        if self._choice is None:
            problem = problem_of(decoder, self.batch, self.capacity, fabric.world_size)
            self._choice = choose(problem, runtime._dispatcher, fabric.hardware)
        if self._choice.way != "kernel":
            return self._choice.why
        config, is_interpreted = self._choice.config, fabric.backend == "interpreter"

        def check() -> None:  # to make the kernel is collective: all must know of one that cannot
            if is_interpreted:
                return
            from taxfree_kernels.decode_step import tape  # needs a Triton with Gluon

            tape.model_of(decoder, self.cache, self.batch)
            tape.addresses_of(decoder)
            tape.Lines.of(decoder, self.cache)

        def make() -> Any:
            if is_interpreted:
                from taxfree_kernels.decode_step.twin import TwinStep

                return TwinStep(decoder, self.cache, self.batch, fabric, config)
            from taxfree_kernels.decode_step.step import DecodeStep

            return DecodeStep(decoder, self.cache, self.batch, fabric, config, logits=True)

        made: Any = None
        steps: tuple[Callable[[], Any], ...] = (check, make)
        for step in steps:
            (made,) = attempt(fabric.group, [partial(aside, fabric.device, step)])
            if isinstance(made, Failure):
                return made.why
        self._kernel = made
        return None

    @torch.no_grad()
    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The tokens with the largest logits, behind these ones.

        Args:
            tokens: int64 [batch], on the model's device.
            positions: int32 [batch], each less than `capacity`: where the tokens stand. Their keys
                and values go there in the cache; those before must be there.

        Returns:
            int64 [batch], the same on all ranks; of equal logits the first.

        Raises:
            UsageError: the tensors are of other shapes or dtypes.
        """
        for name, given, dtype in (
            ("tokens", tokens, torch.int64), ("positions", positions, torch.int32),
        ):  # fmt: skip
            if given.shape != (self.batch,) or given.dtype != dtype:
                raise UsageError(
                    f"{name} are {given.dtype} {list(given.shape)}, not {dtype} [{self.batch}]",
                    "a step takes one token of each sequence",
                )
        report.count("decode_step", self.ran)
        runtime = self._runtime or self._local
        if self._kernel is None or runtime is None:
            self._logits = self.run_operations(tokens, positions)
            return self._largest(self._logits)
        with runtime._launching():
            found: torch.Tensor = self._kernel(tokens, positions)
        self._logits = self._kernel.logits
        return found

    @property
    def logits(self) -> torch.Tensor:
        """Those of the last call, [batch, vocabulary]; collective.

        They are of the model's dtype; those of the kernel are float32.

        Raises:
            UsageError: there was no call.
        """
        if self._logits is None:
            raise UsageError("there are no logits before the first call", "call the step")
        if self._group is None:
            return self._logits
        ranks, vocab = dist.get_world_size(self._group), len(self.decoder.embedding)
        own = self._logits.new_zeros(self.batch, -(-vocab // ranks))
        own[:, : self._logits.shape[1]] = self._logits  # the last rank has fewer
        everyone = own.new_empty(ranks, *own.shape)
        all_gather(everyone.flatten(0, 1), own, self._group)
        return everyone.movedim(0, 1).flatten(1)[:, :vocab]

    def take(self, cache: Any) -> int:
        """Copy the keys and values of a prompt.

        Args:
            cache: a DynamicCache of Transformers, such as a model that is called with a prompt
                returns.

        Returns:
            The number of tokens that it has taken.

        Raises:
            UsageError: the prompt does not fit.
        """
        length = int(cache.get_seq_length())
        if self.cache.block_table is not None:
            raise UsageError("the step has pages", "write the prompt's keys and values into them")
        for layer, *ours in zip(cache.layers, *self._tensors(), strict=True):
            kept = layer.keys.shape[2]  # of a window only the last ones
            if not kept <= length <= self.capacity or len(layer.keys) != self.batch:
                raise UsageError(
                    f"a prompt of {len(layer.keys)} sequences of {length} tokens does not fit into "
                    f"a cache of {self.batch} of {self.capacity}",
                    "give decode_step its batch and capacity, or a StaticCache as cache",
                )
            for own, theirs in zip(ours, (layer.keys, layer.values), strict=True):
                own[:, :, length - kept : length] = theirs
        return length

    def _tensors(self) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        return self.cache.keys, self.cache.values

    # -- by operations -----------------------------------------------------------------------

    def run_operations(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The step up to this rank's logits, [batch, its part of the vocabulary], by operations.

        On GPUs its parts are compiled code: the first call compiles.
        """
        begun, behind_layer, _ = self._parts
        normalised, x, turns, index, lengths, masks = begun(tokens, positions)
        for layer, joint, keys, values, next_norm in zip(
            self.decoder.layers, self._joint, *self._tensors(), self._next_norms, strict=True
        ):
            seen = lengths, masks.get(self._sees(layer, keys))
            normalised, x = behind_layer(
                layer, joint, keys, values, next_norm, normalised, x, turns, index, seen
            )
        return linear(normalised, self.decoder.head)

    def _begun(self, tokens: torch.Tensor, positions: torch.Tensor) -> tuple[Any, ...]:
        """What the first layer takes, and what all of them do."""
        decoder = self.decoder
        x = embedding(tokens, decoder.embedding)
        normalised = self._normalised(x, decoder.layers[0].input_norm)
        masks = {}
        if self._local is None:
            sights = {
                self._sees(*each) for each in zip(decoder.layers, self.cache.keys, strict=True)
            }
            masks = {each: _mask(positions, *each) for each in sights}
        lengths = (positions + 1)[None]  # of one rank, as flash_decode takes them
        index = self._index(positions.long())
        return normalised, x, self._turns(positions), index, lengths, masks

    def _sees(self, layer: Layer, keys: torch.Tensor) -> tuple[int, int | None]:
        """The keys of a sequence in a layer's cache, and the window."""
        return self.capacity if self.cache.block_table is not None else keys.shape[2], layer.window

    def _behind_layer(
        self,
        layer: Layer,
        joint: tuple[torch.Tensor | None, ...],
        keys: torch.Tensor,
        values: torch.Tensor,
        next_norm: torch.Tensor,
        normalised: torch.Tensor,
        x: torch.Tensor,
        turns: tuple[torch.Tensor, torch.Tensor],
        index: tuple[Any, ...],
        seen: tuple[torch.Tensor, torch.Tensor | None],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the next layer takes: normalised, and as it is."""
        q, k, v = self._projected(layer, joint[:2], normalised, turns)
        keys[index], values[index] = k, v
        y = self._attended(q, keys, values, layer.window, *seen)
        normalised, x = self._added(y, "o", layer, x, layer.post_norm)
        gate, up = self._products(normalised, layer, ("gate", "up"), (None, None), joint[2], None)
        return self._added(silu(gate) * up, "down", layer, x, next_norm)

    def _normalised(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight.shape, weight, self.decoder.eps)

    def _turns(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines of rotary, [batch, 1, 2, head_dim / 2]."""
        angles = positions[:, None, None, None] * self.decoder.inv_freq
        cos, sin = angles.cos(), angles.sin() * self.decoder.rope_scale
        cos = (cos * self.decoder.rope_scale).to(self.decoder.embedding.dtype)
        return cos, torch.cat((-sin, sin), dim=2).to(cos.dtype)

    def _projected(
        self,
        layer: Layer,
        joint: tuple[torch.Tensor | None, ...],
        x: torch.Tensor,
        turns: tuple[torch.Tensor, torch.Tensor],
    ) -> Iterator[torch.Tensor]:
        """q, k and v of a layer, [batch, heads, head_dim] each."""
        cos, sin = turns
        biases = layer.q_bias, layer.k_bias, layer.v_bias
        products = self._products(x, layer, ("q", "k", "v"), biases, *joint)
        for y, norm, is_turned in zip(
            products, (layer.q_norm, layer.k_norm, None), (True, True, False), strict=True
        ):
            y = y.unflatten(1, (-1, self.decoder.head_dim))
            if norm is not None:
                y = self._normalised(y, norm)
            if is_turned:
                halves = y.unflatten(2, (2, -1))
                y = torch.addcmul(halves * cos, halves.flip(2), sin).flatten(2)
            yield y

    def _index(self, positions: torch.Tensor) -> tuple[Any, ...]:
        """The index of these positions in keys or values: of [batch, heads, head_dim]."""
        table = self.cache.block_table
        if table is None:
            return self._sequences, slice(None), positions
        page_size = self.cache.keys[0].shape[1]
        return table[self._sequences, positions // page_size].long(), positions % page_size

    def _attended(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        window: int | None,
        lengths: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention of each sequence's token, [batch, heads * head_dim]."""
        table = self.cache.block_table
        if self._local is not None:
            if table is None:
                keys, values = keys.transpose(1, 2), values.transpose(1, 2)
            y = self._local.flash_decode(q, keys, values, lengths, table, window=window)
            return y.flatten(1)
        if table is not None:
            keys, values = (
                pages[table.long()].flatten(1, 2).transpose(1, 2) for pages in (keys, values)
            )
        y = scaled_dot_product_attention(q[:, :, None], keys, values, mask, enable_gqa=True)
        return y.flatten(1)

    def _inputs(self, x: torch.Tensor) -> _Factor:
        """What products of a layer read of x: in fp8, if its weights are."""
        return (x, None) if self._scales == "none" else quantise(x, self._scales)

    def _products(
        self,
        x: torch.Tensor,
        layer: Layer,
        names: tuple[str, ...],
        biases: tuple[torch.Tensor | None, ...],
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> Sequence[torch.Tensor]:
        """Products of x with weights of a layer, by one matmul where `weight` is all of them."""
        if weight is not None and (bias is not None or biases[0] is None):
            product = linear(x, weight, bias)
            sizes = [len(getattr(layer, each)) for each in names]
            return torch.split(product, sizes, 1)
        inputs = self._inputs(x)
        return [
            self._product(inputs, _scaled(layer, name), each)
            for name, each in zip(names, biases, strict=True)
        ]

    def _product(
        self, inputs: _Factor, weight: _Factor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """inputs @ weight^T (+ bias), [batch, rows] of the model's dtype."""
        (x, x_scale), (rows, scale) = inputs, weight
        if x_scale is None or scale is None:
            return linear(x, rows, bias)
        dtype = self.decoder.embedding.dtype
        if self._has_scaled_mm:
            y = x.new_empty(len(x), len(rows), dtype=dtype)
            factors = (x, rows.t(), bias, x_scale, scale.t())
            return scaled_mm(y, *factors, self._scales, is_fast=False)
        y = product(x, x_scale, rows.t(), scale.t())
        return (y if bias is None else y + bias).to(dtype)

    def _taken_along(self, name: str) -> str:
        """What the sum behind a weight takes along: "norm", with the residual, or that alone.

        It is what a compiled layer's sum takes: what records say saves the most time.
        """
        runtime, layer = self._runtime, self.decoder.layers[0]
        if runtime is None or self._kernel is not None or self._scales != "none":
            return "norm"
        rows = getattr(layer, name)
        given = rows.new_empty(self.batch, rows.shape[1]), rows.t(), None
        x = rows.new_empty(self.batch, len(rows))
        calls: dict[str, tuple[Any, ...]] = {
            "norm": (
                "matmul_all_reduce_rms_norm", *given, x, layer.post_norm, self.decoder.eps
            ),
            "residual": ("matmul_all_reduce", *given, x),
            "nothing": ("matmul_all_reduce", *given, None),
        }  # fmt: skip
        try:
            names = list(dropwhile(lambda each: runtime._runs_library(*calls[each]), calls))
        except (NoRecord, UsageError):  # the call raises it
            return "norm"
        if not names:
            return "nothing"
        times = [runtime._measured_us(*calls[each]) for each in names]
        return names[most_saved(times, names[0] == "norm")]

    def _added(
        self, y: torch.Tensor, name: str, layer: Layer, x: torch.Tensor, norm: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """y @ weight^T, summed over the ranks, + x: normalised, and as it is."""
        weight, taken = _scaled(layer, name), self._taken[name]
        inputs, (rows, scale) = self._inputs(y), weight
        (values, of_values), eps = inputs, self.decoder.eps
        if self._runtime is not None and of_values is not None and scale is not None:
            return self._runtime.scaled_matmul_all_reduce_rms_norm(
                values, rows.t(), of_values, scale.t(), norm, residual=x, eps=eps, dtype=x.dtype
            )
        if self._runtime is not None and taken == "norm":
            return self._runtime.matmul_all_reduce_rms_norm(y, rows.t(), norm, residual=x, eps=eps)
        if self._runtime is not None:
            residual = x if taken == "residual" else None
            y = self._runtime.matmul_all_reduce(y, rows.t(), residual=residual)
            x = y if taken == "residual" else x + y
            return self._normalised(x, norm), x
        y = self._product(inputs, weight)
        if self._group is not None:
            dist.all_reduce(y, group=self._group)
        x = x + y
        return self._normalised(x, norm), x

    def _largest(self, logits: torch.Tensor) -> torch.Tensor:
        best: torch.Tensor = self._parts[-1](logits, self.decoder.vocab_start)
        if self._group is not None:
            dist.all_reduce(best, dist.ReduceOp.MAX, group=self._group)
        return ~best & _TOKEN


def _compiled(part: Callable[..., Any]) -> Callable[..., Any]:
    """A part of one step, compiled: of a code object, which others would share, Dynamo keeps 8."""
    function = getattr(part, "__func__", part)
    own: Any = FunctionType(function.__code__.replace(), function.__globals__)
    if isinstance(part, MethodType):
        own = MethodType(own, part.__self__)
    compiled: Callable[..., Any] = torch.compile(own, dynamic=False, fullgraph=True)
    return compiled


def best_of(logits: torch.Tensor, first: int) -> torch.Tensor:
    """The largest logit of each row and its token, as one number, int64 [batch].

    Numbers are ordered as the logits are, NaN above all, and of equal ones as tokens, the lowest
    first: so the largest number of all ranks has the token, as ``~number & _TOKEN``.

    Args:
        logits: float [batch, tokens of this rank].
        first: the first of these tokens.
    """
    bits = logits.float().view(torch.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    bits = torch.where(bits == -1, 0, bits)  # -0.0 equals 0.0
    bits = torch.where(logits.isnan(), 0x7FFFFFFF, bits)
    tokens = torch.arange(first, first + logits.shape[1], device=logits.device)
    return ((bits.long() << 32) | (_TOKEN - tokens)).amax(dim=1)


def _scaled(layer: Layer, name: str) -> _Factor:
    """A weight, and its scales in fp8."""
    return getattr(layer, name), layer.scales[SCALED.index(name)] if layer.scales else None


def _joined(*parts: torch.Tensor | None) -> torch.Tensor | None:
    """All rows as one tensor, if each part lies right behind the one before it."""
    first, end = parts[0], None
    for part in parts:
        if part is None or first is None or not part.is_contiguous():
            return None
        if end not in (None, part.data_ptr()) or part.shape[1:] != first.shape[1:]:
            return None
        if part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        end = part.data_ptr() + part.nbytes
    assert first is not None
    rows = sum(len(part) for part in parts if part is not None)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def _mask(positions: torch.Tensor, keys: int, window: int | None) -> torch.Tensor:
    """Which keys each sequence's token sees, [batch, 1, 1, keys]."""
    last = positions[:, None, None, None]
    each = torch.arange(keys, device=last.device)
    return each <= last if window is None else (each <= last) & (each > last - window)


def _allocated(decoder: Decoder, batch: int, capacity: int) -> Cache:
    """A dense cache."""
    if batch < 1 or capacity < 1:
        raise UsageError(
            f"batch is {batch}, capacity {capacity}", "give the sequences, and tokens of each"
        )
    keys, values = (
        tuple(
            decoder.embedding.new_zeros(
                batch, len(layer.k) // decoder.head_dim, capacity, decoder.head_dim
            )
            for layer in decoder.layers
        )
        for _ in range(2)
    )
    return Cache(keys, values)


def _taken(cache: Any) -> Cache:
    """The tensors of a StaticCache."""
    layers = cache.layers
    for layer in layers:
        if getattr(layer, "max_cache_len", None) is None:
            raise UsageError(f"the cache has a {type(layer).__name__}", "give a StaticCache")
        if layer.keys is None:
            raise UsageError("the cache is empty", "call the model with it and a prompt before")
        if layer.get_seq_length() > layer.keys.shape[2]:
            raise UsageError(
                "the cache has dropped the first tokens, which left the window",
                "let decode_step allocate one, and copy the prompt with its take",
            )
    return Cache(tuple(each.keys for each in layers), tuple(each.values for each in layers))


def _require_fit(decoder: Decoder, cache: Cache) -> None:
    """Refuse a cache with other layers, heads or a dtype than the decoder."""
    dtype = decoder.embedding.dtype
    heads_at = 1 if cache.block_table is None else 2
    found = [(keys.shape[heads_at], keys.shape[3], keys.dtype) for keys in cache.keys]
    heads = (len(layer.k) // decoder.head_dim for layer in decoder.layers)
    wanted = [(count, decoder.head_dim, dtype) for count in heads]
    if found != wanted:
        raise UsageError(
            f"the cache has {_described(found)}, the model {_described(wanted)}",
            "give a cache of this model",
        )


def _described(layers: list[tuple[int, int, torch.dtype]]) -> str:
    heads, head_dim, dtype = layers[0]
    return f"{len(layers)} layers of {heads} heads of {head_dim}, {dtype}"


def _runtime(group: dist.ProcessGroup) -> Runtime | None:
    """The group's runtime, opened if there is none; None where no fabric serves; collective."""
    try:
        return runtime_of(group.group_name)
    except UsageError:
        return _opened(group)


def _local_runtime() -> Runtime | None:
    """The runtime for this rank's own attention, which all steps share; as `_runtime`."""
    everyone = dist.group.WORLD
    local = _local_runtimes.get(everyone)
    if local is None or local.is_closed:
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        # Without static_cache: compiled code may compute lengths right before attention.
        local = _opened(alone, heap_bytes=arena_bytes(_LOCAL_SLOT_BYTES))
        if local is not None:
            _local_runtimes[everyone] = local
    return local


def _opened(group: dist.ProcessGroup, **options: Any) -> Runtime | None:
    try:
        found = init(group, **options)
    except FabricUnavailable:
        return None
    report.include(found)
    return found
