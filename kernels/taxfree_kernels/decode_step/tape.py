"""The work of a step: phases of units, which programs claim in order, and where weights lie.

A unit of a matrix is 8 of its rows, with several sequences 32; of the gate and of the up projection
half as many of each. A unit of attention is a split of the keys of one sequence and KV
head. Units are numbered through all phases of all layers, then the head; a program waits for
activations of lower units only, and programs claim units in order, so the lowest unfinished unit
never waits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton.language as tl

from taxfree_kernels.decode_step.decoder import Cache, Decoder, Layer, scales_of, weights_of
from taxfree_kernels.errors import PlanError
from taxfree_kernels.variant import BLOCK

#: of a program in a layer; the head has the first two
EVENTS = (
    "x of qkv", "qkv", "counted", "waited", "attention", "counted", "waited", "o", "x of gate",
    "gate", "counted", "waited", "down",
)  # fmt: skip

CHUNK_ROWS, CHUNK_K = 8, 1024  # of a weight, in one stage of the ring, with one sequence
MOST_SEQUENCES = 16
LEAST_PAGE = 16  # keys

#: columns of the table of lines, one row a layer; the head follows in a row of its own
LINES = tl.constexpr(10)
LINE_Q, LINE_K, LINE_V, LINE_O, LINE_GATE, LINE_UP, LINE_DOWN, LINE_KEYS, LINE_VALUES = map(
    tl.constexpr, range(9)
)
WINDOW = tl.constexpr(9)
NO_WINDOW = 1 << 30
SPAN_BITS = tl.constexpr(30)  # of the number of a line in a span: coordinates of TMA are int32

#: columns of the table of addresses; the last norm is in a row of its own
VECTORS = tl.constexpr(7)
INPUT_NORM, POST_NORM, Q_BIAS, Q_NORM, K_NORM = map(tl.constexpr, (0, 1, 2, 5, 6))


class Model(NamedTuple):
    """The sizes of a rank's part of a model, and a step's schedule: ``MODEL: constexpr``.

    Args:
        QKV_ROWS: of q, k and v together.
        PAIRS: of a sequence and a KV head.
        KEYS: of a chunk.
        PAGE: keys of a page of the cache; 0 without pages.
        SCALES: who has a scale in a layer's weights in fp8, "channel" or "block"; "none" in 16
            bits. What multiplies them is quantised alike, for each token or 128 of its elements.
        STAGES: chunks of 16 KiB in shared memory.
        LIMIT: chunks that a program's loader has on their way: deep queues in memory delay
            barriers.
        SPLITS: units of attention for each program, about.
        DOWN_PARTS: units of the same rows of down, each of a part of K: who waits for the last unit
            of a phase idles once rings are full, and a ring is not much more than 8 long rows.
        OWNED: columns of the residual that a program owns, with several sequences.
        LOGITS: whether logits are stored, too.
        TRACE: whether the times of EVENTS are stored, too.
        LINE: bytes of a line, in which addresses of weights are given.
    """

    HIDDEN: int
    HEADS: int
    KV_HEADS: int
    HEAD_DIM: int
    INTERMEDIATE: int
    VOCAB: int
    EPS: float
    HAS_BIAS: bool
    HAS_QK_NORM: bool
    BATCH: int
    QKV_ROWS: int
    PAIRS: int
    KEYS: int
    PAGE: int
    SCALES: str = "none"
    STAGES: int = 0
    LIMIT: int = 0
    SPLITS: int = 0
    DOWN_PARTS: int = 0
    OWNED: int = 0
    LOGITS: bool = False
    TRACE: bool = False
    LINE: int = 0


def model_of(decoder: Decoder, cache: Cache, batch: int) -> Model:
    """The sizes of a rank's part, without a schedule.

    Raises:
        PlanError: the kernel does not support the model, with what is missing.
    """
    first = decoder.layers[0]
    dim = decoder.head_dim
    model = Model(
        HIDDEN=first.q.shape[1],
        HEADS=first.q.shape[0] // dim,
        KV_HEADS=first.k.shape[0] // dim,
        HEAD_DIM=dim,
        INTERMEDIATE=first.gate.shape[0],
        VOCAB=decoder.head.shape[0],
        EPS=decoder.eps,
        HAS_BIAS=first.q_bias is not None,
        HAS_QK_NORM=first.q_norm is not None,
        BATCH=batch,
        QKV_ROWS=sum(each.shape[0] for each in (first.q, first.k, first.v)),
        PAIRS=batch * (first.k.shape[0] // dim),
        KEYS=CHUNK_ROWS * CHUNK_K // dim,
        PAGE=0 if cache.block_table is None else cache.keys[0].shape[1],
        SCALES=scales_of(first),
    )
    reason = _unsupported_reason(model, decoder, cache)
    if reason is not None:
        raise PlanError(f"decode_step: {reason}")
    return model


def _unsupported_reason(model: Model, decoder: Decoder, cache: Cache) -> str | None:
    if model.BATCH > MOST_SEQUENCES:
        return f"{model.BATCH} sequences; at most {MOST_SEQUENCES} are supported"
    if model.HEAD_DIM not in (64, 128, 256):
        return f"heads of {model.HEAD_DIM} elements; 64, 128 and 256 are supported"
    if model.PAGE & (model.PAGE - 1) or 0 < model.PAGE < LEAST_PAGE:
        return f"pages of {model.PAGE} keys; powers of two from {LEAST_PAGE} on are supported"
    table = cache.block_table
    if table is not None and (table.dtype != torch.int32 or table.stride(1) != 1):
        return "a block table that is not int32 with rows of neighbours"
    least = 64 if model.SCALES == "none" else BLOCK
    for name in ("HIDDEN", "INTERMEDIATE"):
        if getattr(model, name) % least:
            return f"{name.lower()} size {getattr(model, name)} is no multiple of {least}"
    rows = CHUNK_ROWS if model.BATCH == 1 else 2 * CHUNK_ROWS
    if model.VOCAB % rows:
        return f"{model.VOCAB} rows of the head are no multiple of {rows}"
    for layer in decoder.layers:
        shapes = [each.shape for each in weights_of(layer)]
        if shapes != [each.shape for each in weights_of(decoder.layers[0])]:
            return "layers of different sizes"
        if (layer.q_bias is not None, layer.q_norm is not None) != (
            model.HAS_BIAS,
            model.HAS_QK_NORM,
        ):
            return "layers with and without biases or norms of queries"
        if (reason := _scales_unsupported_reason(layer, model.SCALES)) is not None:
            return reason
    dtypes = {each.dtype for each in (decoder.head, decoder.embedding)}
    if model.SCALES == "none":
        dtypes |= {each.dtype for layer in decoder.layers for each in weights_of(layer)}
    if len(dtypes | {each.dtype for each in (*cache.keys, *cache.values)}) > 1:
        return "weights and cache of different dtypes"
    if len({each.stride() for each in (*cache.keys, *cache.values)}) > 1:
        return "keys and values with different strides"
    return None


def _scales_unsupported_reason(layer: Layer, scales: str) -> str | None:
    if scales_of(layer) != scales:
        return "layers with scales of different kinds"
    if scales == "none":
        return None
    weights = weights_of(layer)
    if {each.dtype for each in weights} != {torch.float8_e4m3fn}:
        return "scales of weights that are not float8_e4m3fn"
    if any(size % BLOCK for each in weights for size in each.shape):
        return f"fp8 weights whose rows or columns on a rank are no multiples of {BLOCK}"
    for weight, scale in zip(weights, layer.scales, strict=True):
        rows, k = weight.shape
        shape = (rows, 1) if scales == "channel" else (rows // BLOCK, k // BLOCK)
        if (scale.shape, scale.dtype) != (shape, torch.float32) or not scale.is_contiguous():
            return f"scales {list(scale.shape)} of a weight {list(weight.shape)}, {scale.dtype}"
    return None


def states_of(cache: Cache) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Keys and values of each layer, [sequences or pages, kv_heads, keys, head_dim]."""
    if cache.block_table is None:
        return cache.keys, cache.values
    keys, values = (
        tuple(each.transpose(1, 2) for each in states) for states in (cache.keys, cache.values)
    )
    return keys, values


def words_of(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A weight [rows, k] as elements of 16 bits: of fp8 two are one."""
    return weight if weight.dtype == dtype else weight.view(dtype)


class Place(NamedTuple):
    """Memory at an address, of which a descriptor wants no more."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address


@dataclass(frozen=True)
class Lines:
    """The memory of all weights, keys and values as one run of lines from the lowest address on.

    One descriptor of a row length then reaches all matrices with such rows, wherever they lie: its
    first dimension counts lines, and its strides overlap. If they do not fit a span, spans of lines
    are a dimension before: a process with several GPUs has allocations terabytes apart.

    Args:
        table: int64 [layers + 1, LINES].
        size: bytes of a line.
        count: of lines.
    """

    origin: Place
    table: torch.Tensor
    size: int
    count: int

    @classmethod
    def of(cls, decoder: Decoder, cache: Cache) -> Lines:
        states = states_of(cache)
        rows: list[list[Any]] = [
            [*weights_of(layer), keys, values, layer.window or NO_WINDOW]
            for layer, keys, values in zip(decoder.layers, *states, strict=True)
        ]
        found = [each for row in rows for each in row[: WINDOW.value]] + [decoder.head]
        low = min(each.data_ptr() for each in found)
        # lines at which heads of the cache begin are counted, too: TMA reads zeros behind the last
        last = max(
            *(each.data_ptr() for each in found),
            *(each[-1, -1].data_ptr() for each in (*states[0], *states[1])),
        )
        item, strides = decoder.head.itemsize, states[0][0].stride()[:2]
        bits = 256  # the same kernel for most addresses; a span's stride is below 2**40 bytes
        for offset in (
            *(each.data_ptr() - low for each in found),
            *(stride * item for stride in strides),
        ):
            bits |= offset
        size = bits & -bits
        count = (last - low) // size + 1
        if low % 16 or size < 16:
            raise PlanError("decode_step: addresses of weights are no multiples of 16 bytes")
        table = [
            [(each.data_ptr() - low) // size for each in row[: WINDOW.value]] + row[WINDOW.value :]
            for row in rows
        ]
        table.append([(decoder.head.data_ptr() - low) // size] + [0] * (LINES.value - 1))
        device = decoder.head.device
        return cls(
            Place(decoder.head.dtype, low),
            torch.tensor(table, dtype=torch.int64, device=device),
            size,
            count,
        )

    @property
    def spans(self) -> int:
        return -(-self.count >> SPAN_BITS.value)

    def rows(
        self,
        kind: Any,
        matrices: Iterable[torch.Tensor],
        box: list[int],
        layout_of: Any,
        rows_first: bool = True,
    ) -> Any:
        """A descriptor of matrices [rows, k] of one row length and pitch.

        It is [line, row, k / 64, 64], or [span, line of the span, ...] of several spans.

        Args:
            box: [row, k / 64, 64].
            layout_of: from a whole box.
            rows_first: otherwise it is [line, k / 64, row, 64], and so is the box.

        Raises:
            PlanError: they have several.
        """
        shapes = {(each.shape[-1], each.stride(-2), each.stride(-1)) for each in matrices}
        if len(shapes) > 1:
            raise PlanError("decode_step: weights whose rows have different strides")
        ((k, pitch, element),) = shapes
        if element != 1 or pitch * self.origin.dtype.itemsize % 16:
            raise PlanError("decode_step: rows of weights begin at no multiple of 16 bytes")
        rows = max(each.shape[-2] for each in matrices)
        line, span = self.size // self.origin.dtype.itemsize, 1 << SPAN_BITS.value
        shape, strides = [min(self.count, span), rows, k // 64, 64], [line, pitch, 64, 1]
        box = [1, *box]
        if not rows_first:
            for each in (shape, strides, box):
                each[1], each[2] = each[2], each[1]
        if self.spans > 1:
            shape, strides, box = [self.spans, *shape], [span * line, *strides], [1, *box]
        return kind(self.origin, shape, strides, box, layout_of(box))


def addresses_of(decoder: Decoder) -> torch.Tensor:
    """int64 [layers + 1, VECTORS]: norms and biases of each layer; the last norm comes last."""
    rows = [
        [
            layer.input_norm,
            layer.post_norm,
            layer.q_bias,
            layer.k_bias,
            layer.v_bias,
            layer.q_norm,
            layer.k_norm,
        ]
        for layer in decoder.layers
    ]
    rows.append([decoder.norm] + [None] * (VECTORS.value - 1))
    addresses = [[0 if each is None else each.data_ptr() for each in row] for row in rows]
    if any(each % 16 for row in addresses for each in row):
        raise PlanError("decode_step: norms or biases begin at no multiple of 16 bytes")
    return torch.tensor(addresses, dtype=torch.int64, device=decoder.head.device)


def scale_addresses_of(decoder: Decoder) -> torch.Tensor | None:
    """int64 [layers, 7]: the scales of each weight, in the order of the table of lines."""
    rows = [[each.data_ptr() for each in layer.scales] for layer in decoder.layers]
    return torch.tensor(rows, dtype=torch.int64, device=decoder.head.device) if rows[0] else None
