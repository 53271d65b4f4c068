"""One kernel: indices go to the owners of their rows, who pool and push; who asked takes them in.

Removes the barrier between indices, look-up and pooled rows, the launches, and two trips of pooled
rows through memory. A rank that owns whole tables writes its own samples' rows into the output.
Where tables are sharded by rows, every owner pushes its part of each pooled row, this rank's
included, in the output's dtype; who asked adds them in rank order.

Protocol. Three lists of programs, in this order: senders, which send a share of the indices, of
where bags begin and of weights to an owner, signal it, and never wait; poolers, which wait for all
shares of a source, look up and pool a chunk of its bags, push them and signal on the chunk's
channel; takers, which wait for a chunk. So programs wait only for programs of lower ids, on any
rank. Each rank sends to every peer, and has poolers for each, also where a rank owns no table: in
every call every rank hears from every peer, hence two slots suffice
(:class:`taxfree_kernels.fabric.heap.Pool`). With `WORDS`, pooled rows are Lamport words in slots of
their own, and their drain and signal are left out. The count of pooled rows does not depend on the
indices, so takers wait for every word; and since the indices' signals make up the full exchange,
three slots of words suffice.

A bag that is out of order, or holds an index that is no row, pools to NaN: kernels cannot raise.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from taxfree_kernels.device import packets, sync
from taxfree_kernels.device.peers import EMPTY, LAMPORT_SLOT_BYTES, Group, Memory, translate
from taxfree_kernels.device.sync import gdc_wait
from taxfree_kernels.device.tiles import copy, select
from taxfree_kernels.embedding_all_to_all.problem import EmbeddingAllToAll
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.launch import Kernel, compile_options, pdl_options
from taxfree_kernels.spaces import distinct, pdl_space, power_of_2, up_to, within
from taxfree_kernels.variant import Config, Plan, Signals, Space, Variant, resized

_INDICES_AT_ONCE = tl.constexpr(1024)  # by a sender, or weights
_OFFSETS_AT_ONCE = tl.constexpr(128)  # a word a thread: a table's do not begin at 16 bytes
_NAN = EMPTY  # as one 32-bit or two 16-bit floats


class Tables(NamedTuple):
    """The constants of the tables: ``TABLES: tl.constexpr``.

    Args:
        COUNT: of all ranks.
        MOST: of a rank.
        ROWS: of a table, as far as a rank holds it.
        WORDS: of a row.
        BAG: indices of a bag for which there is room.
        BY_ROWS: whether ranks hold rows of each table; else whole tables.
        MEAN, WEIGHTED: see :class:`EmbeddingAllToAll`.
    """

    COUNT: int
    MOST: int
    ROWS: int
    WORDS: int
    BAG: int
    BY_ROWS: bool
    MEAN: bool
    WEIGHTED: bool


class Work(NamedTuple):
    """The constants of how programs share a call: ``WORK: tl.constexpr``.

    Args:
        SENDERS: programs that send to a peer.
        CHUNKS: programs that pool a source's bags, and that take in an owner's rows.
        BAGS: pooled at a time.
        AHEAD: indices of each bag whose rows are loaded together.
        WORDS: whether pooled rows are Lamport words.
    """

    SENDERS: int
    CHUNKS: int
    BAGS: int
    AHEAD: int
    WORDS: bool


class Bags(NamedTuple):
    """A rank's bags: pointers to int32 indices and offsets, and to bits of float32 weights."""

    indices_ptr: Any
    offsets_ptr: Any
    weights_ptr: Any


# -- words of rows --


@triton.jit
def floats_of(words, ELEMENT: tl.constexpr):
    """float32: the lower and the upper element of each word; the same twice if it holds one."""
    if ELEMENT.primitive_bitwidth == 32:
        low = words.to(ELEMENT, bitcast=True)
        high = low
    else:
        low = (words & 0xFFFF).to(tl.uint16).to(ELEMENT, bitcast=True).to(tl.float32)
        high = ((words >> 16) & 0xFFFF).to(tl.uint16).to(ELEMENT, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def words_of(low, high, ELEMENT: tl.constexpr):
    """int32: the reverse of :func:`floats_of`, with rounding."""
    if ELEMENT.primitive_bitwidth == 32:
        words = low.to(tl.int32, bitcast=True)
    else:
        lower = low.to(ELEMENT).to(tl.uint16, bitcast=True).to(tl.int32)
        upper = high.to(ELEMENT).to(tl.uint16, bitcast=True).to(tl.int32)
        words = lower | (upper << 16)
    return words


# -- who owns what --


@triton.jit
def tables_of(rank, GROUP: tl.constexpr, TABLES: tl.constexpr):
    """The first table of which a rank holds rows, and their number."""
    first, count = rank * 0, rank * 0 + TABLES.COUNT
    if not TABLES.BY_ROWS:
        first = TABLES.COUNT * rank // GROUP.WORLD
        count = TABLES.COUNT * (rank + 1) // GROUP.WORLD - first
    return first, count


@triton.jit
def bags_of(block_ptr, batch, TABLES: tl.constexpr):
    """What a source sent: its bags of this rank's tables, in its block of a slot."""
    capacity = batch * TABLES.BAG
    weights_ptr = block_ptr + TABLES.MOST * capacity
    offsets_ptr = weights_ptr
    if TABLES.WEIGHTED:
        offsets_ptr += TABLES.MOST * capacity
    return Bags(block_ptr, offsets_ptr, weights_ptr)


@triton.jit
def chunk_of(chunk, owner, batch, GROUP: tl.constexpr, TABLES: tl.constexpr, WORK: tl.constexpr):
    """The owner's first table, and the bags [begin, end) of its tables that a chunk holds."""
    first, count = tables_of(owner, GROUP, TABLES)
    bags = count * batch
    size = tl.cdiv(tl.cdiv(bags, WORK.CHUNKS), WORK.BAGS) * WORK.BAGS
    return first, min(chunk * size, bags), min((chunk + 1) * size, bags)


# -- roles --


@triton.jit
def _send(
    program, bags, slot_ptr, stride_source, batch, peers, GROUP: tl.constexpr,
    TABLES: tl.constexpr, WORK: tl.constexpr,
):  # fmt: skip
    """Send a share of this rank's bags to an owner; returns the channel, and who is signalled."""
    owner = (peers.rank + 1 + program % (GROUP.WORLD - 1)) % GROUP.WORLD
    share = program // (GROUP.WORLD - 1)
    first, count = tables_of(owner, GROUP, TABLES)
    block_ptr = slot_ptr + peers.rank.to(tl.int64) * stride_source
    target = bags_of(translate(block_ptr, peers, owner), batch, TABLES)
    capacity = batch * TABLES.BAG
    words, begin = count * capacity, first * capacity
    _send_share(target.indices_ptr, bags.indices_ptr + begin, words, share, _INDICES_AT_ONCE, WORK)
    if TABLES.WEIGHTED:
        _send_share(
            target.weights_ptr, bags.weights_ptr + begin, words, share, _INDICES_AT_ONCE, WORK
        )
    words, begin = count * (batch + 1), first * (batch + 1)
    _send_share(target.offsets_ptr, bags.offsets_ptr + begin, words, share, _OFFSETS_AT_ONCE, WORK)
    return share, owner


@triton.jit
def _send_share(target_ptr, source_ptr, words, share, AT_ONCE: tl.constexpr, WORK: tl.constexpr):
    size = tl.cdiv(tl.cdiv(words, WORK.SENDERS), 4) * 4  # shares begin at multiples of 16 bytes
    copy(target_ptr, source_ptr, share * size, min((share + 1) * size, words), AT_ONCE)


@triton.jit
def _pool(
    program, own_bags, weight_ptr, out_ptr, slot_ptr, stride_source, pooled_ptr, batch, peers,
    GROUP: tl.constexpr, TABLES: tl.constexpr, WORK: tl.constexpr,
):  # fmt: skip
    """Pool a chunk of a source's bags, and push them; returns the channel, and who is signalled."""
    source = (peers.rank + 1 + program % GROUP.WORLD) % GROUP.WORLD
    chunk = program // GROUP.WORLD
    first, begin, end = chunk_of(chunk, peers.rank, batch, GROUP, TABLES, WORK)
    capacity = batch * TABLES.BAG
    is_own = source == peers.rank
    arrived = peers.rank >= 0
    if not is_own:
        share = tl.arange(0, triton.next_power_of_2(WORK.SENDERS))
        arrived = sync.wait(peers, share, share * 0 + source, GROUP, mask=share < WORK.SENDERS)
    sent = bags_of(slot_ptr + source.to(tl.int64) * stride_source, batch, TABLES)
    bags = Bags(
        select(is_own, own_bags.indices_ptr + first * capacity, sent.indices_ptr, 4),
        select(is_own, own_bags.offsets_ptr + first * (batch + 1), sent.offsets_ptr, 4),
        select(is_own, own_bags.weights_ptr + first * capacity, sent.weights_ptr, 4),
    )
    if TABLES.BY_ROWS:
        pooled_ptr += peers.rank.to(tl.int64) * batch * TABLES.COUNT * TABLES.WORDS
    target_ptr = translate(pooled_ptr, peers, source)
    ELEMENT: tl.constexpr = out_ptr.dtype.element_ty
    column = tl.arange(0, triton.next_power_of_2(TABLES.WORDS))
    for bag_begin in range(begin, end, WORK.BAGS):
        bag = bag_begin + tl.arange(0, WORK.BAGS)
        low, high = _pooled(
            bag, bag < end, bags, weight_ptr, column, batch, peers.rank, ELEMENT, GROUP, TABLES,
            WORK,
        )  # fmt: skip
        words = tl.where(arrived, words_of(low, high, ELEMENT), _NAN)
        at, mask = _places(bag, end, first, column, batch, TABLES)
        if is_own & (not TABLES.BY_ROWS):
            tl.store(tl.cast(out_ptr, tl.pointer_type(tl.int32)) + at, words, mask=mask)
        elif WORK.WORDS:
            packets.send(peers, target_ptr + at, words, source, mask=mask)
        else:
            tl.store(target_ptr + at, words, mask=mask)
    return WORK.SENDERS + chunk, source


@triton.jit
def _places(bag, end, first, column, batch, TABLES: tl.constexpr):
    """Words of bags' pooled rows in the output, and whether they exist; all lie in the output."""
    mask = (bag < end)[:, None] & (column < TABLES.WORDS)[None, :]
    bag = tl.minimum(bag, end - 1)
    if column.shape[0] > TABLES.WORDS:
        column = tl.minimum(column, TABLES.WORDS - 1)
    row = bag % batch * TABLES.COUNT + first + bag // batch
    return row[:, None] * TABLES.WORDS + column[None, :], mask


@triton.jit
def _pooled(
    bag, bag_mask, bags, weight_ptr, column, batch, rank, ELEMENT: tl.constexpr,
    GROUP: tl.constexpr, TABLES: tl.constexpr, WORK: tl.constexpr,
):  # fmt: skip
    """float32 [BAGS, words], twice: the lower and the upper elements of pooled rows."""
    capacity = batch * TABLES.BAG
    table = bag // batch
    offsets_ptr = bags.offsets_ptr + table * (batch + 1) + bag % batch
    begin = tl.load(offsets_ptr, mask=bag_mask, other=0)
    end = tl.load(offsets_ptr + 1, mask=bag_mask, other=0)
    is_wrong = (begin < 0) | (end < begin) | (end > capacity)
    length = tl.where(is_wrong, 0, end - begin)
    low = tl.zeros((WORK.BAGS, column.shape[0]), tl.float32)
    high = low
    first_row = rank * TABLES.ROWS if TABLES.BY_ROWS else 0
    last_row = TABLES.ROWS * (GROUP.WORLD if TABLES.BY_ROWS else 1) - 1
    table_ptr = tl.cast(weight_ptr, tl.pointer_type(tl.int32))
    for done in range(0, tl.max(length, 0), WORK.AHEAD):
        for ahead in tl.static_range(WORK.AHEAD):
            is_index = done + ahead < length
            at = table * capacity + begin + done + ahead
            row = tl.load(bags.indices_ptr + at, mask=is_index, other=0)
            is_wrong = is_wrong | (is_index & ((row < 0) | (row > last_row)))
            row -= first_row
            is_own = is_index & (row >= 0) & (row < TABLES.ROWS)
            row_ptr = table_ptr + (table * TABLES.ROWS + row).to(tl.int64) * TABLES.WORDS
            mask = is_own[:, None] & (column < TABLES.WORDS)[None, :]
            words = tl.load(row_ptr[:, None] + column[None, :], mask=mask, other=0)
            more_low, more_high = floats_of(words, ELEMENT)
            if TABLES.WEIGHTED:
                bits = tl.load(bags.weights_ptr + at, mask=is_own, other=0)
                weight = bits.to(tl.float32, bitcast=True)[:, None]
                more_low, more_high = more_low * weight, more_high * weight
            low += more_low
            high += more_high
    if TABLES.MEAN:
        count = tl.maximum(length, 1).to(tl.float32)[:, None]
        low, high = tl.div_rn(low, count), tl.div_rn(high, count)
    is_wrong = is_wrong[:, None]
    return tl.where(is_wrong, float("nan"), low), tl.where(is_wrong, float("nan"), high)


@triton.jit
def _take(
    program, out_ptr, pooled_ptr, batch, peers, GROUP: tl.constexpr, TABLES: tl.constexpr,
    WORK: tl.constexpr,
):  # fmt: skip
    """Take in a chunk of pooled rows: of one owner, or the sum of all owners' parts."""
    chunk, owner = program, peers.rank
    if not TABLES.BY_ROWS:
        chunk = program // (GROUP.WORLD - 1)
        owner = (peers.rank + 1 + program % (GROUP.WORLD - 1)) % GROUP.WORLD
    first, begin, end = chunk_of(chunk, owner, batch, GROUP, TABLES, WORK)
    signalled = peers.rank >= 0
    if not WORK.WORDS:
        if TABLES.BY_ROWS:
            signalled = sync.wait_for_everybody(peers, WORK.SENDERS + chunk, GROUP)
        else:
            signalled = sync.wait(peers, WORK.SENDERS + chunk, owner, GROUP)
    ELEMENT: tl.constexpr = out_ptr.dtype.element_ty
    stride_part = batch * TABLES.COUNT * TABLES.WORDS
    column = tl.arange(0, triton.next_power_of_2(TABLES.WORDS))
    for bag_begin in range(begin, end, WORK.BAGS):
        bag = bag_begin + tl.arange(0, WORK.BAGS)
        at, mask = _places(bag, end, first, column, batch, TABLES)
        if TABLES.BY_ROWS:
            low = tl.zeros((WORK.BAGS, column.shape[0]), tl.float32)
            high, arrived = low, signalled
            for source in tl.static_range(GROUP.WORLD):
                part_ptr = pooled_ptr + source * stride_part
                sender = tl.full((), source, tl.int32)
                words, came = _arrived(part_ptr + at, mask, sender, peers, GROUP, WORK)
                more_low, more_high = floats_of(words, ELEMENT)
                low += more_low
                high += more_high
                arrived = arrived & came
            words = words_of(low, high, ELEMENT)
        else:
            words, came = _arrived(pooled_ptr + at, mask, owner, peers, GROUP, WORK)
            arrived = signalled & came
        words = tl.where(arrived, words, _NAN)
        tl.store(tl.cast(out_ptr, tl.pointer_type(tl.int32)) + at, words, mask=mask)


@triton.jit
def _arrived(ptrs, mask, source, peers, GROUP: tl.constexpr, WORK: tl.constexpr):
    """Words of pooled rows, and whether they have arrived if no signal says so."""
    if WORK.WORDS:
        words, came = packets.receive(peers, ptrs, source, GROUP, mask=mask)
    else:
        words, came = tl.load(ptrs, mask=mask, other=0), peers.rank >= 0
    return words, came


@triton.jit(do_not_specialize=["rank", "quads", "batch"])
def _push(
    weight_ptr, indices_ptr, offsets_ptr, weights_ptr, out_ptr,  # of a call
    memory, words_ptr, stride_words, rank,  # of the fabric
    quads, batch,  # of the size
    GROUP: tl.constexpr, TABLES: tl.constexpr, WORK: tl.constexpr,
):  # fmt: skip
    """See the module.

    Args:
        weights_ptr: bits of float32; anything where TABLES are not WEIGHTED.
        memory: its slots hold a block of `quads` * 16 bytes from each rank, then pooled rows
            unless these are words.
        words_ptr: int32, the first slot of Lamport words, `stride_words` to the next.
    """
    gdc_wait(GROUP)
    program = tl.program_id(0)
    peers, slot_ptr = sync.running_slot(memory, rank)
    stride_source = 4 * quads  # so that compilers know it
    pooled_ptr = slot_ptr + GROUP.WORLD * stride_source
    if WORK.WORDS:
        turn = packets.running_turn(memory.control_ptr)
        pooled_ptr = tl.multiple_of(words_ptr + turn % 3 * stride_words, 16)
    bags = Bags(indices_ptr, offsets_ptr, weights_ptr)
    senders = WORK.SENDERS * (GROUP.WORLD - 1)
    poolers = WORK.CHUNKS * GROUP.WORLD
    if program < senders + poolers:
        if program < senders:
            channel, peer = _send(
                program, bags, slot_ptr, stride_source, batch, peers, GROUP, TABLES, WORK
            )
        else:
            channel, peer = _pool(
                program - senders, bags, weight_ptr, out_ptr, slot_ptr, stride_source, pooled_ptr,
                batch, peers, GROUP, TABLES, WORK,
            )  # fmt: skip
        if (program < senders) | (not WORK.WORDS):
            sync.signal(peers, channel, peer, GROUP)
    else:
        taker = program - senders - poolers
        if WORK.WORDS:
            parts = GROUP.WORLD if TABLES.BY_ROWS else 1
            packets.empty_last_turn(
                memory.control_ptr, words_ptr, stride_words, turn,
                parts * batch * TABLES.COUNT * TABLES.WORDS, taker,
                tl.num_programs(0) - senders - poolers,
            )  # fmt: skip
        _take(taker, out_ptr, pooled_ptr, batch, peers, GROUP, TABLES, WORK)
    if WORK.WORDS:
        packets.leave_turn(memory.control_ptr)
    sync.leave(memory.control_ptr)


class PushPlan(Plan):
    """One launch."""

    def __init__(self, problem: EmbeddingAllToAll, fabric: Fabric, config: Config) -> None:
        self._problem, world = problem, problem.world_size
        work = Work(*(config[name] for name in Work._fields))
        sent = world * problem.request_words
        pool = fabric.pool
        words = pool.lamport_slots(problem.pooled_words) if work.WORDS else (None, 0)
        slots = pool.slots(sent + (0 if work.WORDS else problem.pooled_words), torch.int32)
        memory = Memory(*slots, pool.control, None, None, fabric.heap_bases)
        self._of_fabric = (memory, *words, fabric.rank)
        takers = work.CHUNKS * (1 if problem.shard_dim == 1 else world - 1)
        self._grid = work.SENDERS * (world - 1) + work.CHUNKS * world + takers
        self._kernel = Kernel(
            _push,
            grid=self._grid,
            constants={
                "GROUP": Group(world, fabric.backend),
                "TABLES": Tables(
                    problem.tables, problem.most_tables, problem.rows, problem.row_words,
                    problem.bag, problem.shard_dim == 1, problem.mode == "mean", problem.weighted,
                ),
                "WORK": work,
            },
            options=compile_options(fabric.backend, config) | pdl_options(config),
        )  # fmt: skip
        self._sized = fabric.workspace.by_size(self._of_size)

    def _of_size(self, batch: int) -> Kernel:
        quads = resized(self._problem, batch=batch).request_words // 4
        return self._kernel.resized(self._grid, (*self._of_fabric, quads, batch))

    def kernels(self, size: int) -> tuple[Kernel, ...]:
        return (self._sized[size],)

    def run(self, *tensors: Any) -> torch.Tensor:
        weight, indices, offsets, weights, out = tensors
        bits = indices if weights is None else weights.view(torch.int32)
        self._sized[len(out)](weight, indices, offsets, bits, out)
        return out


_MOST_WORDS = 64  # of a tile, a thread, with those that are loaded ahead
_LATENCY_BYTES = 1 << 20  # of pooled rows, up to which words come first


class Push(Variant):
    """Senders, poolers and takers in one kernel."""

    plan_class = PushPlan
    slots = 3

    def unsupported_reason(self, problem: EmbeddingAllToAll, hardware: Hardware) -> str | None:
        if problem.world_size == 1:
            return "one rank has no peers"
        if not self.seed_configs(problem, hardware):
            return "a row fits no program"
        return None

    def space(self, problem: EmbeddingAllToAll, hardware: Hardware) -> Space:
        ahead = up_to(power_of_2(problem.bag, 1), (1, 2, 4, 8))
        if hardware.backend == "interpreter":
            return {
                "SENDERS": (1, 2), "CHUNKS": (1, 2), "BAGS": (2, 4), "AHEAD": ahead[:2],
                "WORDS": (False, True),
            }  # fmt: skip
        space: dict[str, tuple[Any, ...]] = {
            "SENDERS": (1, 2, 4, 8, 16),
            # with senders, as many as there are channels
            "CHUNKS": up_to(problem.most_tables * problem.batch, (1, 8, 16, 32, 64, 128, 240)),
            "BAGS": (1, 2, 4, 8, 16, 32, 64),
            "AHEAD": ahead,
            "WORDS": (False, True),
            "num_warps": (2, 4, 8),
            **pdl_space(hardware),
        }
        return space | ({"waves_per_eu": (0, 1, 2)} if hardware.backend == "hip" else {})

    def seed_configs(self, problem: EmbeddingAllToAll, hardware: Hardware) -> list[dict[str, Any]]:
        bags = problem.most_tables * problem.batch
        sent = problem.most_tables * problem.capacity
        space = self.space(problem, hardware)
        words_first = 4 * problem.pooled_words <= _LATENCY_BYTES
        ahead = min(problem.bag, 4)
        loaded = ahead * (1 + (problem.shard_dim == 1))  # rows of a bag at once
        tile = min(32, 64 // loaded, bags // 64)
        guesses = [
            {
                "SENDERS": sent // 4096, "CHUNKS": min(bags // max(each, 1), 128), "BAGS": each,
                "AHEAD": ahead, "WORDS": words, "num_warps": 4,
            }
            for words in (words_first, not words_first)
            for each in (tile, 2 * tile, tile // 2)
        ]  # fmt: skip
        configs = distinct([within(space, guess) for guess in guesses])
        return [each for each in configs if not self.illegal_reason(problem, hardware, each)]

    def illegal_reason(
        self, problem: EmbeddingAllToAll, hardware: Hardware, config: Config
    ) -> str | None:
        if config["WORDS"] and 4 * problem.pooled_words > LAMPORT_SLOT_BYTES:
            return "more words than a slot holds"
        if hardware.backend == "interpreter":
            return None
        tile = config["BAGS"] * power_of_2(problem.row_words, 1)
        threads = config["num_warps"] * hardware.warp_size
        if tile * config["AHEAD"] > _MOST_WORDS * threads:
            return f"{tile} words of rows, {config['AHEAD']} at a time"
        return None

    def signals(self, problem: EmbeddingAllToAll, config: Config) -> Signals | None:
        senders = config["SENDERS"] * (problem.world_size - 1)
        count = senders + (0 if config["WORDS"] else config["CHUNKS"] * problem.world_size)
        return Signals(count, count)


VARIANT = Push()
