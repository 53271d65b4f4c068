"""A stand-in for Iris: device functions on heaps at `heap_bases`, and a host that allocates there.

Signatures and semantics are those of Iris' own functions, in the version and the one before it that
``tests/kernels/iris_contract.json`` names. Copies by copy engines are refused.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import triton
import triton.language as tl

from taxfree_check.checker.conventions.iris_tiles import *  # noqa: F403
from taxfree_check.checker.conventions.iris_tiles import TileOperations
from taxfree_check.checker.ranks import Ranks, present
from taxfree_kernels.device.sync import interpreted_only


@interpreted_only
def _refuse_copy_engine() -> None:
    present().refuse("a copy engine, which moves memory beside the program")


@triton.jit
def _translate(pointer, from_rank, to_rank, heap_bases):
    """A rank's pointer as an address in another rank's heap."""
    offset = tl.cast(pointer, tl.int64) - tl.load(heap_bases + from_rank).to(tl.int64)
    address = tl.load(heap_bases + to_rank).to(tl.int64) + offset
    return tl.cast(address, pointer.dtype)


@triton.jit
def load(
    pointer, to_rank, from_rank, heap_bases,
    mask=None, other=None, cache_modifier=None, volatile=False, hint: tl.constexpr = None,
):  # fmt: skip
    """Load from the memory of `from_rank`."""
    there = _translate(pointer, to_rank, from_rank, heap_bases)
    return tl.load(there, mask=mask, other=other, volatile=volatile)


@triton.jit
def store(
    pointer, value, from_rank, to_rank, heap_bases,
    mask=None, hint: tl.constexpr = None, cache_modifier=None,
):  # fmt: skip
    """Store into the memory of `to_rank`."""
    tl.store(_translate(pointer, from_rank, to_rank, heap_bases), value, mask=mask)


@triton.jit
def copy(
    src_ptr, dst_ptr, from_rank, to_rank, cur_rank, heap_bases, mask=None, other=None,
    load_cache_modifier=None, store_cache_modifier=None, hint: tl.constexpr = None,
):  # fmt: skip
    """Copy from the memory of `from_rank` into that of `to_rank`."""
    source = _translate(src_ptr, cur_rank, from_rank, heap_bases)
    target = _translate(dst_ptr, cur_rank, to_rank, heap_bases)
    tl.store(target, tl.load(source, mask=mask, other=other), mask=mask)


@triton.jit
def get(
    from_ptr, to_ptr, from_rank, to_rank, heap_bases, mask=None, other=None,
    load_cache_modifier=None, store_cache_modifier=None, hint: tl.constexpr = None,
):  # fmt: skip
    """Copy from the memory of `to_rank` into that of `from_rank`, which is this rank."""
    source = _translate(from_ptr, from_rank, to_rank, heap_bases)
    tl.store(to_ptr, tl.load(source, mask=mask, other=other), mask=mask)


@triton.jit
def put(
    from_ptr, to_ptr, from_rank, to_rank, heap_bases, mask=None, other=None,
    load_cache_modifier=None, store_cache_modifier=None, hint: tl.constexpr = None,
    copy_engine_ctx=None, from_row_stride: tl.constexpr = 0, to_row_stride: tl.constexpr = 0,
    use_copy_engine: tl.constexpr = False, contiguous_copy: tl.constexpr = False,
    from_base_ptr=None, to_base_ptr=None,
):  # fmt: skip
    """Copy from this rank's memory into that of `to_rank`."""
    if use_copy_engine and contiguous_copy:
        _refuse_copy_engine()
    target = _translate(to_ptr, from_rank, to_rank, heap_bases)
    tl.store(target, tl.load(from_ptr, mask=mask, other=other), mask=mask)


@triton.jit
def atomic_cas(
    pointer, cmp, val, from_rank, to_rank, heap_bases,
    sem=None, scope=None, hint: tl.constexpr = None,
    copy_engine_ctx=None, use_copy_engine: tl.constexpr = False,
):  # fmt: skip
    """Compare and swap in the memory of `to_rank`."""
    if use_copy_engine:
        _refuse_copy_engine()
    there = _translate(pointer, from_rank, to_rank, heap_bases)
    return tl.atomic_cas(there, cmp, val, sem=sem, scope=scope)


@triton.jit
def atomic_add(
    pointer, val, from_rank, to_rank, heap_bases,
    mask=None, sem=None, scope=None, hint: tl.constexpr = None,
    copy_engine_ctx=None, use_copy_engine: tl.constexpr = False,
):  # fmt: skip
    """Add in the memory of `to_rank`."""
    if use_copy_engine:
        _refuse_copy_engine()
    there = _translate(pointer, from_rank, to_rank, heap_bases)
    return tl.atomic_add(there, val, mask=mask, sem=sem, scope=scope)


@triton.jit
def atomic_sub(
    pointer, val, from_rank, to_rank, heap_bases,
    mask=None, sem=None, scope=None, hint: tl.constexpr = None,
):  # fmt: skip
    """Subtract in the memory of `to_rank`."""
    there = _translate(pointer, from_rank, to_rank, heap_bases)
    return tl.atomic_add(there, -val, mask=mask, sem=sem, scope=scope)


@triton.jit
def atomic_xchg(
    pointer, val, from_rank, to_rank, heap_bases,
    mask=None, sem=None, scope=None, hint: tl.constexpr = None,
):  # fmt: skip
    """Exchange in the memory of `to_rank`."""
    there = _translate(pointer, from_rank, to_rank, heap_bases)
    return tl.atomic_xchg(there, val, mask=mask, sem=sem, scope=scope)


@triton.jit
def atomic_and(
    pointer, val, from_rank, to_rank, heap_bases,
    mask=None, sem=None, scope=None, hint: tl.constexpr = None,
):  # fmt: skip
    """And in the memory of `to_rank`."""
    there = _translate(pointer, from_rank, to_rank, heap_bases)
    return tl.atomic_and(there, val, mask=mask, sem=sem, scope=scope)


@triton.jit
def atomic_or(
    pointer, val, from_rank, to_rank, heap_bases,
    mask=None, sem=None, scope=None, hint: tl.constexpr = None,
):  # fmt: skip
    """Or in the memory of `to_rank`."""
    there = _translate(pointer, from_rank, to_rank, heap_bases)
    return tl.atomic_or(there, val, mask=mask, sem=sem, scope=scope)


@triton.jit
def atomic_xor(
    pointer, val, from_rank, to_rank, heap_bases,
    mask=None, sem=None, scope=None, hint: tl.constexpr = None,
):  # fmt: skip
    """Exclusive or in the memory of `to_rank`."""
    there = _translate(pointer, from_rank, to_rank, heap_bases)
    return tl.atomic_xor(there, val, mask=mask, sem=sem, scope=scope)


@triton.jit
def atomic_min(
    pointer, val, from_rank, to_rank, heap_bases,
    mask=None, sem=None, scope=None, hint: tl.constexpr = None,
):  # fmt: skip
    """Minimum in the memory of `to_rank`."""
    there = _translate(pointer, from_rank, to_rank, heap_bases)
    return tl.atomic_min(there, val, mask=mask, sem=sem, scope=scope)


@triton.jit
def atomic_max(
    pointer, val, from_rank, to_rank, heap_bases,
    mask=None, sem=None, scope=None, hint: tl.constexpr = None,
):  # fmt: skip
    """Maximum in the memory of `to_rank`."""
    there = _translate(pointer, from_rank, to_rank, heap_bases)
    return tl.atomic_max(there, val, mask=mask, sem=sem, scope=scope)


class Context(TileOperations):
    """A rank's view of all heaps, in a kernel: the device functions without ranks and bases.

    Args:
        rank, world_size: of this rank.
        heap_bases: addresses of all heaps.
    """

    def __init__(self, rank: Any, world_size: Any, heap_bases: Any) -> None:
        self.rank, self.world_size, self.heap_bases = rank, world_size, heap_bases

    @staticmethod
    @interpreted_only
    def initialize(
        context_tensor: Any, rank: Any, world_size: Any, tracing: bool = False
    ) -> Context:
        """Of what :meth:`Iris.get_device_context` returns."""
        return Context(rank, world_size, context_tensor + _FIRST_BASE)

    def load(
        self, pointer, from_rank, mask=None, other=None, cache_modifier=None, volatile=False,
        hint=None,
    ):  # fmt: skip
        """See the function :func:`load`."""
        return load(pointer, self.rank, from_rank, self.heap_bases, mask, other, None, volatile)

    def store(self, pointer, value, to_rank, mask=None, cache_modifier=None, hint=None):
        """See the function :func:`store`."""
        store(pointer, value, self.rank, to_rank, self.heap_bases, mask)

    def get(
        self, from_ptr, to_ptr, from_rank, mask=None, other=None, load_cache_modifier=None,
        store_cache_modifier=None, hint=None,
    ):  # fmt: skip
        """See the function :func:`get`."""
        get(from_ptr, to_ptr, self.rank, from_rank, self.heap_bases, mask, other)

    def put(
        self, from_ptr, to_ptr, to_rank, mask=None, other=None, load_cache_modifier=None,
        store_cache_modifier=None, hint=None,
    ):  # fmt: skip
        """See the function :func:`put`."""
        put(from_ptr, to_ptr, self.rank, to_rank, self.heap_bases, mask, other)

    def copy(
        self, src_ptr, dst_ptr, from_rank, to_rank, mask=None, other=None,
        load_cache_modifier=None, store_cache_modifier=None, hint=None,
    ):  # fmt: skip
        """See the function :func:`copy`."""
        copy(src_ptr, dst_ptr, from_rank, to_rank, self.rank, self.heap_bases, mask, other)

    def atomic_cas(self, pointer, cmp, val, to_rank, sem=None, scope=None, hint=None):
        """See the function :func:`atomic_cas`."""
        return atomic_cas(pointer, cmp, val, self.rank, to_rank, self.heap_bases, sem, scope)


def _method(function: Any) -> Any:
    """An atomic as a method of a context."""

    def atomic(self, pointer, val, to_rank, mask=None, sem=None, scope=None, hint=None):
        return function(pointer, val, self.rank, to_rank, self.heap_bases, mask, sem, scope)

    atomic.__doc__ = f"See the function :func:`{function.__name__}`."
    return atomic


for _function in (
    atomic_add, atomic_sub, atomic_xchg, atomic_and, atomic_or, atomic_xor, atomic_min, atomic_max,
):  # fmt: skip
    setattr(Context, _function.__name__, _method(_function))

DeviceContext = Context
_FIRST_BASE = 2  # of a context tensor: behind the rank and the number of ranks


class Iris:
    """The host of one rank of a world.

    Args:
        world: the world.
        rank: that of the running call when left out.
    """

    def __init__(self, world: Ranks, rank: int | None = None) -> None:
        self._world, self.cur_rank = world, world.rank if rank is None else rank
        self.num_ranks, self.device = world.ranks, torch.device("cpu")
        self._made, self._is_in_call = 0, False
        self.heap_bases = world.heap_bases.view(torch.uint64)

    def empty(self, *size: Any, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
        """A tensor in this rank's heap."""
        shape = torch.Size(size[0] if size and not isinstance(size[0], int) else size)
        kind = dtype or torch.get_default_dtype()
        self._made += 1
        name = f"Iris tensor {self._made}"
        block = self._world.allocate(self.cur_rank, shape.numel(), kind, name)
        if self._is_in_call:
            self.barrier()  # Iris' hosts map each other's new memory
        return block.view(shape)

    def zeros(self, *size: Any, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
        """Zeros in this rank's heap."""
        return self.empty(*size, dtype=dtype).zero_()

    def ones(self, *size: Any, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
        """Ones in this rank's heap."""
        return self.empty(*size, dtype=dtype).fill_(1)

    def full(
        self, size: Any, fill_value: float, *, dtype: torch.dtype | None = None, **_: Any
    ) -> torch.Tensor:
        """One value in this rank's heap."""
        return self.empty(size, dtype=dtype).fill_(fill_value)

    def randn(self, *size: Any, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
        """Normal numbers in this rank's heap."""
        return self.empty(*size, dtype=dtype).normal_()

    def randint(self, *bounds: Any, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
        """Whole numbers in this rank's heap: below, or from and below, bounds; then the size."""
        values = torch.randint(*bounds, dtype=dtype)
        return self.empty(values.shape, dtype=values.dtype).copy_(values)

    def zeros_like(self, like: torch.Tensor, **_: Any) -> torch.Tensor:
        """Zeros of another tensor's shape and dtype."""
        return self.zeros(like.shape, dtype=like.dtype)

    def arange(self, *bounds: Any, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
        """A range in this rank's heap."""
        values = torch.arange(*bounds, dtype=dtype)
        return self.empty(values.shape, dtype=values.dtype).copy_(values)

    def get_heap_bases(self) -> torch.Tensor:
        return self.heap_bases

    def get_device_context(self) -> torch.Tensor:
        """int64: the rank, the number of ranks, each heap's base, and 0: nothing is traced."""
        ranks = torch.tensor([self.cur_rank, self.num_ranks])
        return torch.cat([ranks, self._world.heap_bases, torch.zeros(1, dtype=torch.int64)])

    def get_rank(self) -> int:
        return self.cur_rank

    def get_num_ranks(self) -> int:
        return self.num_ranks

    def get_device(self) -> torch.device:
        return self.device

    def barrier(self, *_: Any, **__: Any) -> None:
        """A barrier of all hosts, with idle devices."""
        self._world.barrier()

    def broadcast(self, value: Any, src: int = 0) -> Any:
        """A value of one host, on all."""
        values = self._world.__dict__.setdefault("of_iris_hosts", {})
        values[self.cur_rank] = value
        self.barrier()
        sent = values[src]
        self.barrier()
        return sent

    @property
    def ops(self) -> Any:
        """Iris' operations, from where it is installed."""
        return importlib.import_module("iris.ops").OpsNamespace(self)

    def debug(self, message: str) -> None:
        """Nothing is logged: each schedule would say the same."""

    info = warning = error = log = debug


def iris(heap_size: int = 1 << 30, *_: Any, **__: Any) -> Iris:
    """The host of the rank whose call is running; with it all ranks allocate together."""
    host = Iris(present())
    host._is_in_call = True
    return host


def do_bench(
    fn: Any, barrier_fn: Any = lambda: None, preamble_fn: Any = lambda: None, *_: Any, **__: Any
) -> float:
    """Call a function once between barriers; how long that took means nothing here: 1 ms."""
    barrier_fn()
    preamble_fn()
    fn()
    barrier_fn()
    return 1.0


class TraceEvent:
    """Kinds of events: each is 0, for nothing is traced."""

    def __getattr__(self, name: str) -> int:
        return 0


def iris_launch(
    kernel: Any, grid: Any, *args: Any, algorithm: Any = None, rank: Any = None, dtype: Any = None,
    **options: Any,
) -> None:  # fmt: skip
    """Launch a kernel, and say so to nobody."""
    kernel[grid](*args, **options)
