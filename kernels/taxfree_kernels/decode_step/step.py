"""A decode step, prepared once: its tables, memory and kernel."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from taxfree_kernels.decode_step import attend, chunks, persistent, sums, tape
from taxfree_kernels.decode_step.decoder import Cache, Decoder
from taxfree_kernels.device.peers import Group
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.launch import Kernel, compiling

_OTHER_SHARED = 6144  # barriers, claims, and what reductions need


class DecodeStep:
    """All layers of a decoder for one token of each sequence, in one launch; collective.

    Args:
        decoder, cache: this rank's parts; they are read, and the cache is written, in place.
        batch: number of sequences.
        fabric: this rank's.
        config: STAGES, LIMIT, SPLITS, DOWN_PARTS, see ``tape.Model``; missing
            ones are those of :func:`seed_config`.
        logits: whether :attr:`logits` are stored.
        trace: whether times of events are stored in ``buffers.times``.

    Attributes:
        logits: float32 [batch, vocabulary of this rank] of the last call.

    Raises:
        PlanError: the kernel does not support the model, with what is missing.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: Cache,
        batch: int,
        fabric: Fabric,
        config: Mapping[str, int],
        logits: bool = False,
        trace: bool = False,
    ) -> None:
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        self._held = decoder, cache
        model = tape.model_of(decoder, cache, batch)
        device, dtype = decoder.head.device, decoder.head.dtype
        programs, world = fabric.hardware.compute_units, fabric.world_size
        lines = tape.Lines.of(decoder, cache)
        config = {**seed_config(model, fabric.hardware.shared_memory, world), **config}
        owned = _owned(model.HIDDEN, programs)
        schedule = {"OWNED": owned, "LOGITS": logits, "TRACE": trace, "LINE": lines.size}
        self.model = model = tape.Model(**{**model._asdict(), **schedule, **config})

        element = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[dtype]

        def layout_of(box: list[int]) -> Any:
            return gl.NVMMASharedLayout.get_default_for(box, element)

        def descriptor(matrices: Any, box: list[int], rows_first: bool = True) -> Any:
            return lines.rows(TensorDescriptor, matrices, box, layout_of, rows_first)

        is_fp8 = model.SCALES != "none"

        def inputs(matrix: torch.Tensor, has_groups: bool = is_fp8) -> Any:
            k, box = matrix.shape[1], [8, chunks.sequences(batch), 64]
            shape, strides = [k // 64, batch, 64], [64, k, 1]
            if has_groups:
                shape, strides, box = [k // 128, 2, *shape[1:]], [128, *strides], [8, 1, *box[1:]]
            return TensorDescriptor(matrix, shape, strides, box, layout_of(box))

        def in_words(matrices: Iterable[torch.Tensor]) -> list[torch.Tensor]:
            return [tape.words_of(each, dtype) for each in matrices]

        layers, dim = decoder.layers, model.HEAD_DIM
        keys, values = tape.states_of(cache)
        rows = ([4, 16, 64], True) if batch == 1 else ([16, 8, 64], False)
        of_hidden = [weight for each in layers for weight in (each.q, each.k, each.v)]
        of_hidden += [weight for each in layers for weight in (each.gate, each.up)]
        if not is_fp8:
            of_hidden.append(decoder.head)
        descriptors = (
            descriptor(in_words(of_hidden), *rows),
            descriptor(in_words(each.o for each in layers), *rows),
            descriptor(in_words(each.down for each in layers), *rows),
            descriptor(
                [*keys, *values], [chunks.keys_of_box(model.KEYS, model.PAGE), 1, 64], False
            ),
        )

        def empty(*shape: int, of: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(shape, dtype=of, device=device)

        def tops(count: int) -> torch.Tensor | None:
            return empty(batch, count) if model.SCALES == "channel" and batch > 1 else None

        splits = math.ceil(programs * model.SPLITS / model.PAIRS) + 1
        owners = math.ceil(model.HIDDEN / owned)
        words, used = sums.words_of(model, model.DOWN_PARTS, world)
        inbox, stride_slot = fabric.pool.lamport_slots(words)
        group = model.HEADS // model.KV_HEADS
        self.buffers = persistent.Buffers(
            lines=lines.table,
            vectors=tape.addresses_of(decoder),
            table=lines.table if cache.block_table is None else cache.block_table,
            embedding=decoder.embedding,
            inv_freq=decoder.inv_freq,
            logits=empty(batch, model.VOCAB if logits else 1),
            qkv=empty(batch, model.QKV_ROWS),
            parts=empty(model.PAIRS * splits * group * dim),
            softmax=empty(model.PAIRS * splits * group * 2),
            attended=empty(batch, model.HEADS * dim, of=dtype),
            activated=empty(batch, model.INTERMEDIATE, of=dtype),
            x=empty(batch, model.HIDDEN, of=dtype),
            squares=empty(batch, owners),
            scales=tape.scale_addresses_of(decoder),
            x_tops=tops(owners),
            attended_tops=tops(model.KV_HEADS),
            activated_tops=tops(2 * model.INTERMEDIATE // chunks.rows_of_unit(batch)),
            best=torch.full((batch,), -(1 << 63), dtype=torch.int64, device=device),
            counters=torch.zeros(
                chunks.SPLITS_DONE.value + model.PAIRS, dtype=torch.int32, device=device
            ),
            inbox=inbox,
            times=empty(programs, len(layers) + 1, len(tape.EVENTS), of=torch.int64),
            control_ptr=fabric.pool.control,
            heap_bases=fabric.heap_bases,
        )
        windows = [each.window or tape.NO_WINDOW for each in layers]
        strides = [each * dtype.itemsize // lines.size for each in keys[0].stride()[:2]]
        last_args = (
            *descriptors,
            *(
                inputs(each)
                for each in (self.buffers.x, self.buffers.attended, self.buffers.activated)
            ),
            descriptor([decoder.head], *rows) if is_fp8 else None,
            inputs(self.buffers.x, False) if is_fp8 else None,
            self.buffers,
            lines.origin.address,
            decoder.rope_scale,
            keys[0].stride(2),
            len(layers),
            max(windows, default=tape.NO_WINDOW),
            *strides,
            0 if cache.block_table is None else cache.block_table.stride(0),
            fabric.rank,
            decoder.vocab_start,
            stride_slot,
            used,
        )
        self._kernel = Kernel(
            persistent.decode_step,
            programs,
            {"GROUP": Group(world, fabric.backend), "MODEL": model},
            {
                "num_warps": chunks.WARPS.value,
                "maxnreg": 168,
                "enable_fp_fusion": True,
                "launch_cooperative_grid": True,
            },
            last_args,
        )
        self._fabric = fabric
        tokens = torch.zeros(batch, dtype=torch.int64, device=device)
        with compiling():  # so that no rank waits in the kernel for another's compiler
            self(tokens, tokens.int())
        fabric.barrier()

    @property
    def logits(self) -> torch.Tensor:
        return self.buffers.logits

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Process one token of each sequence; returns the tokens with the largest logits, int64.

        All ranks get the same. The kernel reads the arguments where they lie: a replay of a
        captured graph reads them anew.

        Args:
            tokens: int64 [batch].
            positions: int32 [batch], of these tokens in their sequences: keys before are read.

        Raises:
            PeerTimeout: an earlier call has lost a peer.
        """
        self._fabric.pool.check()
        next_tokens = tokens.new_empty(tokens.shape)
        self._kernel(tokens.contiguous(), positions.contiguous(), next_tokens)
        return next_tokens


def seed_config(model: tape.Model, shared_memory: int, world: int) -> dict[str, int]:
    """The config that is tried first: as many stages as there is room for."""
    queries = model.HEADS // model.KV_HEADS
    of_attention = attend.room_of(queries, model.BATCH)
    of_attention += 2 * attend.groups(model.HEAD_DIM) * attend.rows_of_heads(queries)
    wide = chunks.words_in(model.INTERMEDIATE, model.SCALES)
    if model.BATCH == 1:
        parts = 1 + (wide > 8 * tape.CHUNK_K)
        width = sums.width_of(model.HIDDEN, world * parts)
        of_heads = model.HEADS * model.HEAD_DIM
        staging = math.ceil(model.HIDDEN / width) * width * 2
        staging += 2 * sums.staged_elements(model.HIDDEN, of_heads, model.INTERMEDIATE, width)
    else:
        parts = math.ceil(wide / (4 * tape.CHUNK_K))
        parts = min(parts, sums.most_parts(model, world))
        staging = 2 * 1024 * chunks.sequences(model.BATCH)
    room = shared_memory - _OTHER_SHARED - 4 * of_attention - staging
    stages = min(12, room // chunks.CHUNK_BYTES.value)
    # of long rows more on their way pay: 980 us against 1006 with 5120 columns on two H100s
    limit = 2 if model.HIDDEN <= 4096 else 3
    return {"STAGES": stages, "LIMIT": limit, "SPLITS": 1, "DOWN_PARTS": parts}


def _owned(hidden: int, programs: int) -> int:
    """Columns of the residual that a program owns: a power of two, so that all have an owner."""
    return max(32, 1 << (math.ceil(hidden / programs) - 1).bit_length())
