"""Runs the Gluon kernel of decode_step on a CPU, as its source says, without layouts.

Its device functions are called as Python functions on blocks that are tensors. A coroutine stands
for each warp partition of each program of each rank, and others may go on where it waits or touches
global memory; TMA copies, barriers of shared memory, polls and atomics do what hardware's do. So
indices, phases, counts and the protocol are executed; not executed are layouts, fences, and the
order in which hardware makes stores visible.
"""

from __future__ import annotations

import bisect
import builtins
import operator
from collections.abc import Callable
from math import prod
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from greenlet import getcurrent, greenlet

_TYPES = {
    "int8": torch.int8, "int16": torch.int16, "int32": torch.int32, "int64": torch.int64,
    "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
    "float8e4nv": torch.float8_e4m3fn,
}  # fmt: skip


class Memory:
    """Blocks of memory by address; whatever a kernel reads or writes must lie in one."""

    def __init__(self) -> None:
        self._blocks: list[tuple[int, torch.Tensor]] = []  # by address

    def add(self, tensor: torch.Tensor) -> None:
        """Let kernels use a tensor's memory."""
        storage = tensor.untyped_storage()
        known = dict(self._blocks)
        if storage.data_ptr() not in known:
            known[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._blocks = sorted(known.items(), key=operator.itemgetter(0))

    def _block_at(self, address: int, dtype: torch.dtype) -> tuple[int, torch.Tensor]:
        """Where the block begins that an address lies in, and its elements."""
        at = bisect.bisect(self._blocks, address, key=operator.itemgetter(0)) - 1
        assert at >= 0, f"nothing lies at {address}"
        begin, block = self._blocks[at]
        whole = len(block) - len(block) % dtype.itemsize
        return begin, block[:whole].view(dtype)

    def elements(self, address: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
        """The block that has all addresses, and their numbers in it."""
        begin, block = self._block_at(int(address.min()), dtype)
        offset = address - begin
        assert not (offset & (dtype.itemsize - 1)).any()
        at = offset >> (dtype.itemsize.bit_length() - 1)
        if int(at.max()) >= len(block):
            raise IndexError(f"element {int(at.max())} of a block of {len(block)}")
        return block, at

    def tensor(self, address: int, dtype: torch.dtype, shape: Any, strides: Any) -> torch.Tensor:
        """What lies from an address on."""
        begin, block = self._block_at(address, dtype)
        first, rest = divmod(address - begin, dtype.itemsize)
        assert rest == 0
        return block[first:].as_strided(shape, strides)

    def load(self, address: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The elements at addresses, which may lie in several blocks."""
        try:
            block, at = self.elements(address, dtype)
            return block[at].clone()  # a scalar is a view
        except IndexError:
            found = torch.empty(address.shape, dtype=dtype)
            for part in self._by_block(address):
                found[part] = self.load(address[part], dtype)
            return found

    def store(self, address: torch.Tensor, value: torch.Tensor) -> None:
        try:
            block, at = self.elements(address, value.dtype)
            block[at.flatten()] = value.flatten()
        except IndexError:
            for part in self._by_block(address):
                self.store(address[part], value[part])

    def _by_block(self, address: torch.Tensor) -> list[torch.Tensor]:
        """Which of the addresses lie in one of several blocks."""
        begins = torch.tensor([begin for begin, _ in self._blocks])
        which = torch.bucketize(address, begins, right=True)
        every = which.unique()
        assert len(every) > 1, "an address beyond a block"
        return [which == each for each in every]


memory = Memory()


def _raw(value: Any) -> Any:
    return value.value if isinstance(value, (Block, _Constant)) else value


class _Constant(int):
    """An integer with the attribute that Triton's constants have."""

    @property
    def value(self) -> int:
        return int(self)


class Block:
    """A block of values, or of addresses; scalars have no dimensions."""

    def __init__(self, value: torch.Tensor, element: Any = None) -> None:
        self.value, self._element = value, element

    @property
    def dtype(self) -> Any:
        return self._element or self.value.dtype

    @property
    def type(self) -> Any:
        return SimpleNamespace(layout=None)

    @property
    def shape(self) -> Any:
        return tuple(self.value.shape)

    @property
    def numel(self) -> int:
        return self.value.numel()

    def __bool__(self) -> bool:
        return bool(self.value)

    def __neg__(self) -> Block:
        return Block(-self.value)

    def __getitem__(self, index: Any) -> Block:
        return Block(self.value[index], self._element)

    def to(self, dtype: Any, bitcast: bool = False) -> Block:
        return Block(self.value.view(dtype) if bitcast else self.value.to(dtype))

    def reshape(self, shape: Any) -> Block:
        return Block(self.value.reshape(shape))

    def permute(self, order: Any) -> Block:
        return Block(self.value.permute(order))

    def broadcast_to(self, shape: Any) -> Block:
        return Block(self.value.expand(shape))


class _Pointers(SimpleNamespace):
    """The type of pointers to elements of a dtype."""

    def __init__(self, of: torch.dtype) -> None:
        super().__init__(element_ty=of)


def _binary(operation: Any, is_swapped: bool) -> Any:
    def call(self: Block, other: Any) -> Block:
        a, b = self.value, _raw(other)
        if self._element is not None:
            size = self._element.element_ty.itemsize
            b = b.to(torch.int64) * size if isinstance(b, torch.Tensor) else b * size
        return Block(operation(b, a) if is_swapped else operation(a, b), self._element)

    return call


for _name in ("add", "sub", "mul", "floordiv", "mod", "truediv", "and", "or", "xor", "lshift",
              "rshift", "lt", "le", "gt", "ge", "eq", "ne"):  # fmt: skip
    _function = getattr(operator, f"{_name}_" if _name in ("and", "or") else _name)
    setattr(Block, f"__{_name}__", _binary(_function, False))
    setattr(Block, f"__r{_name}__", _binary(_function, True))
Block.__hash__ = object.__hash__  # type: ignore[method-assign]


def _block(value: Any) -> torch.Tensor:
    value = _raw(value)
    return value if isinstance(value, torch.Tensor) else torch.tensor(value)


# ---- global memory ----------------------------------------------------------------------------


def _load(pointer: Block, mask: Any = None, other: Any = 0, **_: Any) -> Block:
    element, address = pointer.dtype.element_ty, pointer.value
    if mask is None:
        return Block(memory.load(address, element))
    there = _block(mask).expand(torch.broadcast_shapes(_block(mask).shape, address.shape))
    found = torch.full(there.shape, _raw(other), dtype=element)
    if there.any():
        found[there] = memory.load(address.expand(there.shape)[there], element)
    return Block(found)


def _store(pointer: Block, value: Any, mask: Any = None, **_: Any) -> None:
    element, address = pointer.dtype.element_ty, pointer.value
    shape = torch.broadcast_shapes(address.shape, _block(value).shape)
    values = _block(value).to(element).expand(shape)
    if mask is None:
        assert address.expand(shape).unique().numel() == values.numel()
        memory.store(address.expand(shape), values)
        return
    there = _block(mask).expand(shape)
    if there.any():
        memory.store(address.expand(shape)[there], values[there])


def _atomic(combine: Any) -> Any:
    def call(pointer: Block, value: Any, mask: Any = None, **_: Any) -> Block:
        old = _load(pointer, mask)
        _store(pointer, combine(old.value, _block(value)), mask)
        return Block(old.value.clone())

    return _in_turns(call)


def _in_turns(access: Callable[..., Any]) -> Callable[..., Any]:
    """Before an access of global memory others may go on."""

    def call(*args: Any, **named: Any) -> Any:
        _until(lambda: True)
        return access(*args, **named)

    return call


# ---- shared memory ----------------------------------------------------------------------------


class Shared:
    """A part of shared memory."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value, self.dtype, self.shape = value, value.dtype, value.shape

    def index(self, at: Any) -> Shared:
        assert 0 <= int(_raw(at)) < len(self.value)
        return Shared(self.value[int(_raw(at))])

    def slice(self, begin: int, length: int) -> Shared:
        return Shared(self.value[begin : begin + length])

    def permute(self, order: Any) -> Shared:
        return Shared(self.value.permute(order))

    def load(self, layout: Any) -> Block:
        return Block(self.value.clone())

    def store(self, block: Block) -> None:
        assert self.value.shape == block.value.shape
        self.value.copy_(block.value)


class Barrier:
    """A barrier of shared memory: phases of arrivals and bytes."""

    def __init__(self) -> None:
        self._phase = self._pending = self._count = self._bytes = 0

    def init(self, count: int) -> None:
        self._count = self._pending = count

    def change(self, arrivals: int, size: int) -> None:
        assert self._pending >= arrivals
        self._pending -= arrivals
        self._bytes += size
        if self._pending == 0 and self._bytes == 0:
            self._pending = self._count
            self._phase += 1

    def wait(self, parity: Any, pred: Any = True) -> None:
        if bool(_raw(pred)):
            _until(lambda: self._phase % 2 != int(_raw(parity)))


class Barriers:
    """Several of them."""

    def __init__(self, count: int) -> None:
        self._all = [Barrier() for _ in range(count)]

    def index(self, at: Any) -> Barrier:
        return self._all[int(_raw(at))]


def _until(is_done: Callable[[], bool]) -> None:
    """Let others go on until something holds."""
    getcurrent().parent.switch(is_done)


def _allocate(element: torch.dtype, shape: Any, layout: Any) -> Any:
    if layout == "barrier":
        return Barriers(shape[0])
    return Shared(torch.full(shape, -1 if element == torch.int32 else float("nan"), dtype=element))


def _reinterpreted(block: Shared, shape: Any, layout: Any, dtype: Any = None) -> Shared:
    sizes = list(map(int, shape))
    return Shared(block.value.view(dtype or block.dtype).view(-1)[: prod(sizes)].view(sizes))


def _load_box(desc: Any, coordinates: Any, full: Barrier, to: Shared, **_: Any) -> None:
    """Copy a box; what lies outside of the tensor is zero."""
    assert list(to.value.shape) == list(desc.block_shape)
    begins = [int(_raw(each)) for each in coordinates]
    assert min(begins) >= 0
    sides = zip(desc.block_shape, desc.shape, begins, strict=True)
    shape = [max(0, min(side, whole - at)) for side, whole, at in sides]
    to.value.zero_()
    if 0 not in shape:
        first = sum(map(operator.mul, begins, desc.strides)) * to.value.itemsize
        found = memory.tensor(desc.base.data_ptr() + first, to.value.dtype, shape, desc.strides)
        to.value[[slice(side) for side in shape]] = found
    full.change(0, -to.value.nbytes)


# ---- Triton's and Gluon's names -----------------------------------------------------------------


class _Anything:
    """Layouts, which no function here looks at."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self


def _dot(a: Block, b: Block, acc: Block) -> Block:
    return Block(acc.value + a.value.float() @ b.value.float())


def _where(condition: Any, a: Any, b: Any) -> Block:
    value = torch.where(_block(condition), _raw(a), _raw(b))
    return Block(value, getattr(a, "_element", None))


def _cast(value: Any, dtype: Any) -> Block:
    if isinstance(dtype, _Pointers):
        return Block(_block(value).to(torch.int64), dtype)
    return Block(_block(value).to(dtype))


def _reduce(function: Any) -> Any:
    return lambda block, axis=None: Block(function(block.value, axis))


def _specialize(partitions: Any, warps: Any, registers: Any) -> None:
    (own, others) = partitions[0], partitions[1:]
    begun = [_run.begin(getcurrent().program, *each) for each in others]
    own[0](*own[1])
    _until(lambda: all(each.dead for each in begun))


def _language() -> SimpleNamespace:
    value = lambda function: lambda *args: Block(function(*map(_block, args)))  # noqa: E731
    layouts = _Anything()
    return SimpleNamespace(
        **_TYPES, constexpr=int, BlockedLayout=layouts, SliceLayout=layouts,
        SwizzledSharedLayout=layouts, NVMMASharedLayout=layouts, DotOperandLayout=layouts,
        NVMMADistributedLayout=layouts,
        pointer_type=_Pointers, program_id=lambda axis: Block(torch.tensor(getcurrent().program)),
        num_programs=lambda axis: Block(torch.tensor(_run.programs)),
        to_tensor=lambda scalar: Block(torch.tensor(int(_raw(scalar)))),
        arange=lambda begin, end, layout=None: Block(torch.arange(begin, end, dtype=torch.int32)),
        zeros=lambda shape, dtype, layout=None: Block(torch.zeros(shape, dtype=dtype)),
        full=lambda shape, fill, dtype, layout=None: Block(
            torch.full(list(shape), int(_raw(fill)) if dtype in (torch.int32, torch.int64)
                       else _raw(fill), dtype=dtype)),
        load=_in_turns(_load), store=_in_turns(_store), where=_where, cast=_cast,
        multiple_of=lambda block, _: block,
        atomic_add=_atomic(lambda old, new: old + new), atomic_xchg=_atomic(lambda old, new: new),
        atomic_max=_atomic(torch.maximum), maximum=value(torch.maximum),
        minimum=value(torch.minimum), exp=value(torch.exp), exp2=value(torch.exp2),
        rsqrt=value(torch.rsqrt), floor=value(torch.floor), sum=_reduce(
            lambda block, axis: block.sum() if axis is None else block.sum(axis)),
        max=_reduce(lambda block, axis: block.amax(axis)), cdiv=lambda a, b: (a + b - 1) // b,
        split=lambda block: (Block(block.value[..., 0]), Block(block.value[..., 1])),
        convert_layout=lambda block, layout, assert_trivial=False: block,
        reshape=lambda block, shape: block.reshape(shape),
        static_range=lambda *ends: map(_Constant, builtins.range(*map(int, ends))),
        allocate_shared_memory=_allocate, warp_specialize=_specialize,
        debug_barrier=lambda: None, num_warps=lambda: 8,
    )  # fmt: skip


def _range(*ends: Any) -> Any:
    return (Block(torch.tensor(at)) for at in range(*(int(_raw(each)) for each in ends)))


def _unpack_e4m3(words: Block) -> tuple[Block, Block]:
    values = words.value.contiguous().view(torch.float8_e4m3fn).float()
    return Block(values[..., 0::2]), Block(values[..., 1::2])


def _pack_e4m3(first: Block, second: Block) -> Block:
    both = torch.stack((first.value, second.value), -1).to(torch.float8_e4m3fn)
    return Block(both.view(torch.int16)[..., 0])


class _Joined(Shared):
    """Halves [2, 8, N, 64] as [8, 128, N]."""

    def permute(self, order: Any) -> Shared:
        halves = self.value.permute(1, 0, 3, 2)
        return Shared(halves.reshape(8, 128, halves.shape[-1]))


def _wait_for_units(counters: Block, count: Any, control: Block) -> None:
    from taxfree_kernels.decode_step.chunks import DONE

    _until(lambda: int(_load(counters + int(DONE)).value) >= int(_raw(count)))


def _receive(words: Block, source: Any, mask: Block, inbox: Any, PACK: Any, GROUP: Any) -> Block:
    from taxfree_kernels.device.peers import EMPTY

    seen = _where(mask, _load(words), 0)
    late = seen.value == int(EMPTY)
    address = words.value.expand(late.shape)[late]

    def is_there() -> bool:
        seen.value[late] = memory.load(address, torch.int32)
        return not bool((seen.value[late] == int(EMPTY)).any())

    if late.any():
        _until(is_there)
    return seen


def _rotary(position: Any, inv_freq: Block, scale: float, d: Block, DIM: int) -> Any:
    angle = position.to(torch.float32).value * _load(inv_freq + d % (DIM // 2)).value
    return Block(angle.cos() * scale), Block(angle.sin() * scale)


def _translate(ptr: Block, peers: Any, peer: Any) -> Block:
    bases = [int(_load(peers.heap_bases + each).value) for each in (peer, peers.rank)]
    return Block(ptr.value + bases[0] - bases[1], ptr.dtype)


class _Run:
    """The coroutines of a launch on all ranks; which goes on is drawn, the same each time."""

    def __init__(self, programs: int) -> None:
        self.programs, self._hub, self._order = programs, getcurrent(), Random(0)
        self._waiting: list[tuple[greenlet, Callable[[], bool]]] = []

    def begin(self, program: int, function: Any, args: Any) -> greenlet:
        made = greenlet(lambda: function(*args), self._hub)
        made.program = program
        self._waiting.append((made, lambda: True))
        return made

    def finish(self) -> None:
        while self._waiting:
            turns, self._waiting = self._waiting, []
            self._order.shuffle(turns)
            went_on = False
            for each, is_due in turns:
                if is_due():
                    is_due, went_on = each.switch(), True
                if not each.dead:
                    self._waiting.append((each, is_due))
            assert went_on, f"{len(turns)} waits in vain"


_run = _Run(0)


def _plain(value: Any) -> Any:
    """What Triton's constant holds."""
    inner = value.value if type(value).__name__ == "constexpr" else value
    return _Constant(inner) if type(inner) is int else inner


def adapt() -> Any:
    """Make the kernel's modules Python's; for processes that compile no kernel. The kernel."""
    from taxfree_kernels.decode_step import attend, chunks, persistent, rows, scaled, sums, tape
    from taxfree_kernels.device import packets, peers, specialized, sync

    language = _language()
    barrier = SimpleNamespace(
        MBarrierLayout=lambda: "barrier",
        init=lambda barrier, count: barrier.init(count),
        expect=lambda barrier, size: barrier.change(1, int(size)),
        arrive=lambda barrier, count: barrier.change(count, 0),
        wait=lambda barrier, parity, pred=True: barrier.wait(parity, pred),
    )
    names = {
        "gl": language, "tl": language, "mbarrier": barrier, "mma_v2": _dot, "range": _range,
        "load_box": _load_box, "reinterpreted": _reinterpreted, "receive": _receive,
        "wait_for_units": _wait_for_units, "_rotary": _rotary, "translate": _translate,
        "hand_back": lambda stage, pipe: pipe.empty.index(stage).change(1, 0),
        "before_tma_loads": lambda GROUP: None, "fence_stage": lambda: None,
        "rolled": lambda end: end,
        "joined_halves": lambda inputs, N, layout: _Joined(inputs.value),
        "divided": lambda value, divisor: Block(value.value / _block(divisor[0])),
        "unpack_e4m3": _unpack_e4m3, "pack_e4m3": _pack_e4m3,
    }  # fmt: skip
    own = (tape, chunks, sums, rows, scaled, attend, persistent)
    for module in (*own, peers, packets, sync, specialized):
        for name, value in list(vars(module).items()):
            if hasattr(value, "fn") and not isinstance(value, type):
                function = value.fn
                function.__defaults__ = tuple(map(_plain, function.__defaults__ or ()))
                setattr(module, name, function)
            elif type(value).__name__ == "constexpr":
                setattr(module, name, _plain(value))
            elif hasattr(value, "__wrapped__"):
                setattr(module, name, value.__wrapped__)
        for name, value in names.items():
            if name in vars(module) or name == "range":
                setattr(module, name, value)
    return persistent.decode_step


def _argument(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        memory.add(value)
        return Block(torch.tensor(value.data_ptr()), _Pointers(value.dtype))
    if isinstance(value, tuple):
        made = map(_argument, value)
        return type(value)(*made) if hasattr(value, "_fields") else tuple(made)
    if type(value) is int:
        return Block(torch.tensor(value))
    if hasattr(value, "block_shape"):
        element = value.base.dtype
        return SimpleNamespace(dtype=element, layout=None, **{
            each: getattr(value, each) for each in ("base", "shape", "strides", "block_shape")
        })  # fmt: skip
    return value


def run(kernel: Any, launches: list[Any], programs: int) -> None:
    """Run a launch of each rank, with so many programs each.

    Args:
        launches: the arguments and the constants of each rank's.
    """
    global _run
    _run = _Run(programs)
    for args, constants in launches:
        for program in range(programs):
            _run.begin(program, kernel, [*map(_argument, args), *constants])
    _run.finish()
