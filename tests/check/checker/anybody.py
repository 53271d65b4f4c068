"""Small kernels of each convention of the field, right or broken in one known way.

All send a vector around a ring of ranks, in two slots: each rank stores into the inbox of the next
one and signals it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from taxfree_check.checker import World
from taxfree_check.checker.conventions import iris, triton_dist
from taxfree_check.checker.conventions.symm_mem import rendezvous

LANES = 16


@triton.jit
def _tables(
    x, inboxes, flags, out, rank, call,
    RANKS: tl.constexpr, LANES: tl.constexpr, BREAK: tl.constexpr,
):  # fmt: skip
    """Tables of pointers and Triton's own atomics."""
    lanes = tl.arange(0, LANES)
    peer = (rank + 1) % RANKS
    slot = (call % (1 if BREAK == "one slot" else 2)) * LANES + lanes
    flag = tl.load(flags + peer).to(tl.pointer_type(tl.int32))
    inbox = tl.load(inboxes + peer).to(tl.pointer_type(tl.float32))
    own_flag = tl.load(flags + rank).to(tl.pointer_type(tl.int32))
    if BREAK == "waits first":
        while tl.atomic_add(own_flag, 0, sem="acquire", scope="sys") < call + 1:
            pass
    if BREAK == "signal first":
        tl.atomic_xchg(flag, call + 1, sem="release", scope="sys")
    tl.store(inbox + slot, tl.load(x + lanes))
    if BREAK == "relaxed signal":
        tl.atomic_xchg(flag, call + 1, sem="relaxed", scope="sys")
    elif BREAK == "gpu scope":
        tl.atomic_xchg(flag, call + 1, sem="release", scope="gpu")
    elif BREAK != "signal first":
        tl.atomic_xchg(flag, call + 1, sem="release", scope="sys")
    if BREAK == "volatile poll":
        while tl.load(own_flag, volatile=True) < call + 1:
            pass
    elif BREAK == "relaxed poll":
        while tl.atomic_add(own_flag, 0, sem="relaxed", scope="sys") < call + 1:
            pass
    else:
        while tl.atomic_add(own_flag, 0, sem="acquire", scope="sys") < call + 1:
            pass
    own = tl.load(inboxes + rank).to(tl.pointer_type(tl.float32))
    tl.store(out + lanes, tl.load(own + slot))


@triton.jit
def _iris(
    x, inbox, flag, out, rank, call, heap_bases,
    RANKS: tl.constexpr, LANES: tl.constexpr, BREAK: tl.constexpr,
):  # fmt: skip
    """Iris' device functions; the consumer clears the flag."""
    lanes = tl.arange(0, LANES)
    peer = (rank + 1) % RANKS
    slot = call % 2 * LANES + lanes
    iris.put(x + lanes, inbox + slot, rank, peer, heap_bases)
    if BREAK == "default scope":
        iris.atomic_add(flag, 1, rank, peer, heap_bases)
    elif BREAK == "plain flag":
        iris.store(flag, call + 1, rank, peer, heap_bases)
    else:
        iris.atomic_add(flag, 1, rank, peer, heap_bases, sem="release", scope="sys")
    if BREAK == "plain flag":
        while iris.load(flag, rank, rank, heap_bases) != call + 1:
            pass
    else:
        want = call + 1
        while (
            iris.atomic_cas(flag, want, want, rank, rank, heap_bases, sem="acquire", scope="sys")
            < want
        ):
            pass
    tl.store(out + lanes, iris.load(inbox + slot, rank, rank, heap_bases))


@triton.jit
def _cas_barrier(pads, rank, RANKS: tl.constexpr, SEND: tl.constexpr, WAIT: tl.constexpr):
    """A barrier of all ranks: compare-and-swap on signal pads, which are clear again after it."""
    ranks = tl.arange(0, RANKS)
    pads = pads.to(tl.pointer_type(tl.uint64))
    theirs = tl.load(pads + ranks).to(tl.pointer_type(tl.uint32)) + rank
    ours = tl.load(pads + rank).to(tl.pointer_type(tl.uint32)) + ranks
    tl.debug_barrier()
    tl.inline_asm_elementwise(
        f"""
        {{
            .reg .u32   %seen;
            .reg .pred  %done;
            again:
                atom.global.{SEND}.sys.cas.b32 %seen, [$1], 0, 1;
                setp.eq.u32 %done, %seen, 0;
                @!%done bra again;
            mov.u32 $0, %seen;
        }}
        """,
        "=r, l", [theirs], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    tl.inline_asm_elementwise(
        f"""
        again: atom.global.sys.{WAIT}.cas.b32 $0, [$1], 1, 0;
        setp.ne.u32 %p, $0, 1;
        @%p bra again;
        """,
        "=r, l", [ours], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    tl.debug_barrier()


@triton.jit
def _symm_mem(
    x, buffers, pads, out, rank,
    RANKS: tl.constexpr, LANES: tl.constexpr, SEND: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """PyTorch's symmetric memory: addresses of tables, signal pads."""
    lanes = tl.arange(0, LANES)
    buffers = buffers.to(tl.pointer_type(tl.uint64))
    tl.store(tl.load(buffers + rank).to(tl.pointer_type(tl.float32)) + lanes, tl.load(x + lanes))
    _cas_barrier(pads, rank, RANKS, SEND, WAIT)
    peer = (rank + RANKS - 1) % RANKS
    tl.store(out + lanes, tl.load(tl.load(buffers + peer).to(tl.pointer_type(tl.float32)) + lanes))
    _cas_barrier(pads, rank, RANKS, "release", "acquire")


@triton.jit
def _ptx(
    x, inboxes, flags, out, rank, call,
    RANKS: tl.constexpr, LANES: tl.constexpr, SIGNAL: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Signals and waits in PTX."""
    lanes = tl.arange(0, LANES)
    peer = (rank + 1) % RANKS
    slot = call % 2 * LANES + lanes
    inbox = tl.load(inboxes + peer).to(tl.pointer_type(tl.float32))
    tl.store(inbox + slot, tl.load(x + lanes))
    flag = tl.load(flags + peer).to(tl.pointer_type(tl.int32))
    tl.inline_asm_elementwise(
        SIGNAL, "=r, l, r", [flag, call + 1], dtype=tl.int32, is_pure=False, pack=1
    )
    flag = tl.load(flags + rank).to(tl.pointer_type(tl.int32))
    tl.inline_asm_elementwise(
        WAIT, "=r, l, r", [flag, call + 1], dtype=tl.int32, is_pure=False, pack=1
    )
    own = tl.load(inboxes + rank).to(tl.pointer_type(tl.float32))
    tl.store(out + lanes, tl.load(own + slot))


@triton.jit
def _triton_dist(x, inbox, flag, out, call, LANES: tl.constexpr, SCOPE: tl.constexpr):
    """Triton-distributed's wait and notify."""
    rank = triton_dist.rank()
    peer = (rank + 1) % triton_dist.num_ranks()
    lanes = tl.arange(0, LANES)
    slot = call % 2 * LANES + lanes
    tl.store(triton_dist.symm_at(inbox, peer) + slot, tl.load(x + lanes))
    triton_dist.notify(flag, peer, signal=call + 1, sig_op="set", comm_scope="intra_node")
    token = triton_dist.wait(flag, 1, SCOPE, "acquire", waitValue=call + 1)
    inbox = triton_dist.consume_token(inbox, token)
    tl.store(out + lanes, tl.load(inbox + slot))


SIGNALS = {
    "release": "st.release.sys.global.u32 [$1], $2; mov.u32 $0, 0;",
    "red": "red.release.sys.global.add.u32 [$1], 1;",
    "atom": "atom.add.release.sys.global.u32 $0, [$1], 1;",
    "fence": "fence.acq_rel.sys; st.relaxed.sys.global.u32 [$1], $2;",
    "membar": "membar.sys; st.volatile.global.u32 [$1], $2;",
    "relaxed": "st.relaxed.sys.global.u32 [$1], $2;",
    "weak": "st.global.u32 [$1], $2;",
    "gpu": "st.release.gpu.global.u32 [$1], $2;",
    "gpu fence": "fence.acq_rel.gpu; st.relaxed.sys.global.u32 [$1], $2;",
    "multimem": "multimem.red.release.sys.global.add.u32 [$1], 1;",
    "tensor core": "mma.sync.aligned.m16n8k8 $0, $1, $2, $2;",
}
_LOOP = "again: {load}; setp.lt.s32 %p, $0, $2; @%p bra again; {after}"
WAITS = {
    "acquire": _LOOP.format(load="ld.acquire.sys.global.s32 $0, [$1]", after=""),
    "fence": _LOOP.format(load="ld.relaxed.sys.global.s32 $0, [$1]", after="fence.acq_rel.sys;"),
    "relaxed": _LOOP.format(load="ld.relaxed.sys.global.s32 $0, [$1]", after="bar.sync 0;"),
}


class _Ring:
    """What all of these have: inputs, outputs, and the check of the last call's results."""

    def __init__(self, world: World) -> None:
        ranks = range(world.ranks)
        self.xs = [torch.full((LANES,), float(rank)) for rank in ranks]
        self.outs = [torch.zeros(LANES) for _ in ranks]

    def check(self) -> None:
        for rank, out in enumerate(self.outs):
            assert (out == (rank - 1) % len(self.outs)).all(), f"rank {rank} got {out[0]}"


def tables(broken: str = "") -> Callable[[World], None]:
    return _through_tables(_tables, broken, num_warps=4)


def of_ptx(signal: str = "release", wait: str = "acquire") -> Callable[[World], None]:
    return _through_tables(_ptx, SIGNALS[signal], WAITS[wait])


def _through_tables(kernel: Any, *constants: str, **options: int) -> Callable[[World], None]:
    def run(world: World) -> None:
        ring = _Ring(world)
        inbox, flags = world.empty((2, LANES)), world.zeros((1,), torch.int32)

        def call(rank: int, number: int) -> None:
            kernel[(1,)](
                ring.xs[rank], inbox.bases, flags.bases, ring.outs[rank], rank, number,
                world.ranks, LANES, *constants, **options,
            )  # fmt: skip

        world.run(call, check=ring.check)

    return run


def of_iris(broken: str = "") -> Callable[[World], None]:
    def run(world: World) -> None:
        ring = _Ring(world)
        hosts = [iris.Iris(world, rank) for rank in range(world.ranks)]
        inboxes = [host.empty(2 * LANES) for host in hosts]
        flags = [host.zeros(1, dtype=torch.int32) for host in hosts]

        def call(rank: int, number: int) -> None:
            _iris[(1,)](
                ring.xs[rank], inboxes[rank], flags[rank], ring.outs[rank], rank, number,
                hosts[rank].get_heap_bases(), world.ranks, LANES, broken,
            )  # fmt: skip

        world.run(call, check=ring.check)

    return run


def of_symm_mem(send: str = "release", wait: str = "acquire") -> Callable[[World], None]:
    def run(world: World) -> None:
        ring = _Ring(world)
        buffer = world.empty((LANES,))

        def call(rank: int) -> None:
            handle = rendezvous(world, buffer.local(rank))
            _symm_mem[(1,)](
                ring.xs[rank], handle.buffer_ptrs_dev, handle.signal_pad_ptrs_dev,
                ring.outs[rank], rank, world.ranks, LANES, send, wait,
            )  # fmt: skip

        world.run(call, check=ring.check)

    return run


def of_triton_dist(scope: str = "sys") -> Callable[[World], None]:
    def run(world: World) -> None:
        ring = _Ring(world)
        inbox, flags = world.empty((2 * LANES,)), world.zeros((1,), torch.int32)

        def call(rank: int, number: int) -> None:
            _triton_dist[(1,)](
                ring.xs[rank], inbox.local(rank), flags.local(rank), ring.outs[rank], number,
                LANES, scope,
            )  # fmt: skip

        # It waits for one value, which a rank that is a call ahead would have overwritten.
        world.run(call, barrier=True, check=ring.check)

    return run
