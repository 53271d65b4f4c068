"""A stand-in for the parts of Triton-distributed's language that are no SIMT code.

`wait`, `notify`, `consume_token` and `symm_at` on a world's symmetric memory, barriers of threads,
fences, and `libshmem_device`'s puts of blocks, signals and waits. Thread ids are 0: a program is
one actor here, so code that gives work to threads by their ids is not simulated.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from taxfree_check.checker.ranks import present
from taxfree_kernels.device.sync import interpreted_only

_SIGNAL_SET, _SIGNAL_ADD = tl.constexpr(9), tl.constexpr(10)
#: in the order of their numbers
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "EQ": operator.eq,
    "NE": operator.ne,
    "GT": operator.gt,
    "LE": operator.le,
    "LT": operator.lt,
    "GE": operator.ge,
}


@interpreted_only
def _shifted(pointer: Any, rank: Any) -> Any:
    """A pointer into this rank's heap, in that of `rank`."""
    world = present()
    bases = world.heap_bases.numpy().astype("uint64")
    shift = bases[int(rank)] - bases[world.rank]
    return tl.tensor(TensorHandle(pointer.handle.data + shift, pointer.handle.dtype), pointer.type)


@interpreted_only
def rank(axis: int = -1) -> Any:
    """This rank."""
    return present().rank


@interpreted_only
def num_ranks(axis: int = -1) -> Any:
    """The number of ranks."""
    return present().ranks


@triton.jit
def symm_at(ptr, rank):
    """The address of `rank`'s copy of what `ptr` points to."""
    return _shifted(ptr, rank)


@triton.jit
def wait(barrierPtrs, numBarriers, scope: tl.constexpr, semantic: tl.constexpr, waitValue=1):
    """Wait until each of a few words holds a value."""
    for index in range(numBarriers):
        while tl.atomic_add(barrierPtrs + index, 0, sem=semantic, scope=scope) != waitValue:
            pass
    return 0


@triton.jit
def consume_token(value, token):
    """The value, after a wait."""
    return value


@triton.jit
def notify(
    ptr, rank, signal=1, sig_op: tl.constexpr = "set", comm_scope: tl.constexpr = "inter_node"
):
    """Release a word of a rank, at the scope of the place where it is."""
    there = symm_at(ptr, rank)
    SCOPE: tl.constexpr = "gpu" if comm_scope == "gpu" else "sys"
    if sig_op == "set":
        tl.atomic_xchg(there, signal, sem="release", scope=SCOPE)
    else:
        tl.atomic_add(there, signal, sem="release", scope=SCOPE)


@triton.jit
def fence():
    """Order this rank's messages to each other rank."""
    tl.inline_asm_elementwise("fence.acq_rel.sys;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def quiet():
    """Complete this rank's messages."""
    fence()


@interpreted_only
def _compares(seen: Any, how: Any, value: Any) -> Any:
    """Whether a value compares so with another."""
    return list(_COMPARISONS.values())[int(how)](seen, value)


@interpreted_only
def _bytes(pointer: Any, count: Any) -> Any:
    """A block of pointers to `count` bytes, as elements of the pointer's type; the last repeats."""
    size = pointer.dtype.element_ty.primitive_bitwidth // 8
    length = -(-int(count) // size)
    lanes = np.minimum(np.arange(triton.next_power_of_2(length)), length - 1)
    places = pointer.handle.data.ravel()[0] + (lanes * size).astype(np.uint64)
    kind = tl.block_type(pointer.dtype, [len(places)])
    return tl.tensor(TensorHandle(places, pointer.dtype), kind)


@triton.jit
def putmem_block(dest, source, nbytes, pe):
    """Copy bytes into the memory of `pe`; only a fence orders later signals after it."""
    tl.store(_bytes(symm_at(dest, pe), nbytes), tl.load(_bytes(source, nbytes)))


@triton.jit
def signal_op(sig_addr, signal, sig_op: tl.constexpr, pe):
    """Set or add to a word of `pe`."""
    if sig_op == _SIGNAL_SET:
        tl.atomic_xchg(symm_at(sig_addr, pe), signal, sem="relaxed", scope="sys")
    else:
        tl.atomic_add(symm_at(sig_addr, pe), signal, sem="relaxed", scope="sys")


@triton.jit
def putmem_signal_block(dest, source, nbytes, sig_addr, signal, sig_op: tl.constexpr, pe):
    """Copy bytes into the memory of `pe`, then signal that they are there."""
    putmem_block(dest, source, nbytes, pe)
    fence()
    signal_op(sig_addr, signal, sig_op, pe)


@triton.jit
def signal_wait_until(sig_addr, cmp_: tl.constexpr, cmp_val):
    """Wait until a word of this rank compares so with a value, and acquire it."""
    seen = tl.atomic_add(sig_addr, 0, sem="acquire", scope="sys")
    while not _compares(seen, cmp_, cmp_val):
        seen = tl.atomic_add(sig_addr, 0, sem="acquire", scope="sys")
    return seen


@triton.jit
def tid(axis):
    """The thread's id."""
    return 0


@triton.jit
def syncthreads():
    """A barrier of the program's threads."""
    tl.debug_barrier()


def _module(name: str, **members: Any) -> ModuleType:
    made = ModuleType(name)
    made.__dict__.update(members)
    return made


def _jit(function: Any = None, **_: Any) -> Any:
    """``triton_dist.jit``: ``triton.jit``, whose options are the compiler's."""
    return triton.jit if function is None else triton.jit(function)


def modules() -> dict[str, ModuleType]:
    """The stand-in's modules by name."""
    shmem = {
        "fence": fence,
        "quiet": quiet,
        "putmem_block": putmem_block,
        "putmem_nbi_block": putmem_block,
        "putmem_signal_block": putmem_signal_block,
        "putmem_signal_nbi_block": putmem_signal_block,
        "signal_op": signal_op,
        "signal_wait_until": signal_wait_until,
        "NVSHMEM_SIGNAL_SET": _SIGNAL_SET,
        "NVSHMEM_SIGNAL_ADD": _SIGNAL_ADD,
    }
    shmem |= {
        f"NVSHMEM_CMP_{name}": tl.constexpr(number) for number, name in enumerate(_COMPARISONS)
    }
    threads = {"tid": tid, "__syncthreads": syncthreads}
    language = {
        "rank": rank,
        "num_ranks": num_ranks,
        "symm_at": symm_at,
        "wait": wait,
        "consume_token": consume_token,
        "notify": notify,
    }
    top = "triton_dist"
    made = {
        top: _module(top, jit=_jit),
        f"{top}.language": _module(f"{top}.language", **language),
        f"{top}.language.extra": _module(f"{top}.language.extra"),
        f"{top}.language.extra.libshmem_device": _module("libshmem_device", **shmem),
        f"{top}.language.extra.language_extra": _module("language_extra", **threads),
        f"{top}.language.extra.cuda": _module(f"{top}.language.extra.cuda"),
        f"{top}.language.extra.cuda.language_extra": _module("language_extra", **threads),
    }
    for name, module in made.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(made[parent], child, module)
            made[parent].__path__ = []
    return made
