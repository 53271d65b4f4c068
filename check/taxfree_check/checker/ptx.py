"""Inline PTX, interpreted from its text: each lane is a thread that runs the instructions.

Loads, stores, atomics and fences go to the watch with their semantics and scopes; barriers between
the threads of a program do nothing, because a program is one actor. What is not known is refused by
name. Instructions of AMD's GPUs only wait for the program's own stores, or read clocks.
"""

from __future__ import annotations

import ctypes
import operator
import re
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

from taxfree_check.checker.clocks import Scope
from taxfree_check.checker.watch import CHANGES, NO_CHANGE, Change, Watch

_MOST_STEPS = 100_000  # of one lane; a loop without memory accesses runs into it
_WITHOUT_EFFECT = re.compile(
    r"fence[.]proxy|bar[.]|barrier[.]|s_waitcnt|s_nop|s_sleep|s_barrier|s_memrealtime|s_memtime"
    r"|v_mov_b32|prefetch|discard|applypriority"
)
_SEMANTICS = ("relaxed", "acquire", "release", "acq_rel")
_SCOPES: dict[str, Scope] = {
    "cta": "cta",
    "cluster": "cta",
    "gpu": "gpu",
    "gl": "gpu",
    "sys": "sys",
}
_INTEGERS = {1: ctypes.c_uint8, 2: ctypes.c_uint16, 4: ctypes.c_uint32, 8: ctypes.c_uint64}
_FLOATS = {"f16": "e", "f32": "f", "f64": "d", "bf16": ""}
_PAIRS = ("f16x2", "bf16x2")
_TYPE = re.compile(r"[bus](8|16|32|64)|b?f(16|32|64)(x2)?|pred")
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt,
    "ge": operator.ge, "lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge,
}  # fmt: skip
_ARITHMETIC: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("mov", "cvt", "cvta"), lambda a: a), "neg": operator.neg, "not": operator.inv,
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "mad": lambda a, b, c: a * b + c,
    "and": operator.and_, "or": operator.or_, "xor": operator.xor, "shl": operator.lshift,
    "shr": operator.rshift, "min": min, "max": max,
}  # fmt: skip
_ATOMICS = {name: _ARITHMETIC[name] for name in ("add", "and", "or", "xor", "min", "max")} | {
    "exch": lambda _, b: b,
    "inc": lambda a, b: 0 if a >= b else a + 1,
    "dec": lambda a, b: b if a == 0 or a > b else a - 1,
}


class Unknown(Exception):
    """An instruction that cannot be interpreted."""


@dataclass(frozen=True)
class _Instruction:
    text: str
    guard: str  # a predicate, with "!" before it if negated; "" for none
    name: str
    modifiers: tuple[str, ...]
    operands: tuple[str, ...]

    @property
    def type(self) -> str:
        """The last type that it names."""
        return next(
            (modifier for modifier in reversed(self.modifiers) if _TYPE.fullmatch(modifier)), "b32"
        )


@cache
def _parse(assembly: str) -> tuple[tuple[_Instruction, ...], dict[str, int]]:
    """Instructions, and the labels that point to them."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", assembly, flags=re.S)
    instructions: list[_Instruction] = []
    labels: dict[str, int] = {}
    separators = r"[;\n]" if ";" not in text else r";"
    # Braces of blocks stand alone; those of vectors follow a comma or a space inside operands.
    text = re.sub(
        r"(^|[;:\n])(\s*)([{}])", r"\1\2", re.sub(r"(^|[;:\n])(\s*)([{}])", r"\1\2", text)
    )
    for statement in re.split(separators, text):
        statement = statement.strip().strip("{}" if "," not in statement else "").strip()
        while label := re.match(r"([$%\w]+)\s*:(?!:)\s*", statement):
            labels[label[1]] = len(instructions)
            statement = statement[label.end() :].strip("{ \t\n")
        if not statement or statement.startswith("."):
            continue
        guarded = re.match(r"@(!*)\s*([%\w]+)\s+", statement)
        rest = statement[guarded.end() :] if guarded else statement
        guard = ("!" * (len(guarded[1]) % 2) + guarded[2]) if guarded else ""
        opcode, _, operands = rest.partition(" ")
        opcode, *tail = re.split(r"\s", opcode, maxsplit=1)
        name, *modifiers = re.split(r"[.]+", opcode.replace("::", "_"))
        split = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", " ".join([*tail, operands]))
        instruction = " ".join(statement.split())
        instructions.append(_Instruction(instruction, guard, name, tuple(modifiers), tuple(split)))
    return tuple(instructions), labels


def run_assembly(
    watch: Watch, assembly: str, constraints: str, values: Sequence[Any], types: Sequence[Any]
) -> Any:
    """Run inline assembly on all lanes; the results as the builder's."""
    kinds = [constraint.strip() for constraint in constraints.split(",") if constraint.strip()]
    outputs = sum(kind.startswith("=") for kind in kinds)
    shape = np.broadcast_shapes(*(np.shape(value.data) for value in values)) if values else (1,)
    inputs = [np.broadcast_to(_bits(value.data), shape).ravel() for value in values]
    results = np.zeros((outputs, int(np.prod(shape))), np.uint64)
    try:
        for lane in range(results.shape[1]):
            operands = {
                f"${outputs + index}": int(operand[lane]) for index, operand in enumerate(inputs)
            }
            thread = _Thread(watch, operands)
            thread.run(*_parse(assembly))
            for index in range(outputs):
                results[index, lane] = thread.registers.get(f"${index}", 0) & (2**64 - 1)
    except Unknown as error:
        watch.refuse(str(error))
    return _Results(
        [
            _as_type(result.reshape(shape), kind)
            for result, kind in zip(results, types, strict=False)
        ]
    )


class _Results:
    """Results of inline assembly, as the builder gives them."""

    def __init__(self, handles: list[Any]) -> None:
        self._handles = handles

    def get_result(self, index: int) -> Any:
        return self._handles[index]


def _bits(data: np.ndarray) -> np.ndarray:
    """The bit patterns of values, uint64."""
    data = np.ascontiguousarray(data)
    return data.view(f"u{data.itemsize}").astype(np.uint64)


def _as_type(bits: np.ndarray, kind: Any) -> Any:
    scalar = kind.scalar
    wanted = np.dtype(np.uint64) if scalar.is_ptr() else np.dtype(interpreter._get_np_dtype(kind))
    data = bits.astype(f"u{wanted.itemsize}").view(wanted)
    return TensorHandle(data, scalar)


class _Thread:
    """One lane: its registers, and the instructions that it runs."""

    def __init__(self, watch: Watch, registers: dict[str, int]) -> None:
        self._watch, self.registers = watch, registers

    def run(self, instructions: Sequence[_Instruction], labels: dict[str, int]) -> None:
        index = steps = 0
        while index < len(instructions):
            steps += 1
            if steps > _MOST_STEPS:
                raise Unknown(f"{instructions[index].text}: a loop that no memory access ends")
            instruction = instructions[index]
            index += 1
            guard = instruction.guard
            if guard and bool(self._value(guard.lstrip("!"), "b32")) == guard.startswith("!"):
                continue
            if instruction.name == "bra":
                index = labels[instruction.operands[0]]
            elif instruction.name in ("ret", "exit"):
                return
            else:
                self._step(instruction)

    def _step(self, instruction: _Instruction) -> None:
        name, modifiers, text = instruction.name, instruction.modifiers, instruction.text
        if name in ("ld", "st", "atom", "red"):
            if not {"shared", "local", "param", "const"}.isdisjoint(modifiers):
                raise Unknown(f"{text}: only global memory can be interpreted")
            getattr(self, f"_{name}")(instruction)
        elif (name == "fence" and "proxy" not in modifiers) or name == "membar":
            named = [modifier for modifier in modifiers if modifier in _SCOPES]
            self._watch.on_fence(_SCOPES[named[0]] if named else "gpu")
        elif name == "nanosleep":
            self._watch.pause()
        elif name == "griddepcontrol":
            if "wait" in modifiers:
                self._watch.on_gdc_wait()
            else:
                self._watch.on_launch_dependents()
        elif _WITHOUT_EFFECT.match(text):
            return
        elif name == "setp":
            target, *operands = instruction.operands
            one, other = (self._typed(operand, instruction.type) for operand in operands)
            self.registers[target] = int(_COMPARISONS[modifiers[0]](one, other))
        elif name == "selp":
            target, one, other, which = instruction.operands
            chosen = one if self._value(which, "b32") else other
            self.registers[target] = self._value(chosen, instruction.type)
        elif name in _ARITHMETIC and not (name == "mul" and "hi" in modifiers):
            self._compute(instruction)
        else:
            raise Unknown(f"{text}: this instruction cannot be interpreted")

    def _compute(self, instruction: _Instruction) -> None:
        target, *operands = instruction.operands
        name, kind, modifiers = instruction.name, instruction.type, instruction.modifiers
        if name == "mov" and "{" in target + operands[0]:
            self._split(target, operands[0], kind)
            return
        if name == "mov" and {"v2", "v4"} & set(modifiers):
            for component in "xyzw":
                self.registers[f"{target}.{component}"] = self._value(operands[0], kind)
            return
        if name == "cvt" and "f" in "".join(
            modifier for modifier in modifiers if _TYPE.fullmatch(modifier)
        ):
            raise Unknown(f"{instruction.text}: conversions of floats cannot be interpreted")
        function = _ARITHMETIC[name]
        if kind in _PAIRS:
            single = kind.removesuffix("x2")
            halves = [
                [_decode(self._value(operand, "b32") >> shift, single) for operand in operands]
                for shift in (0, 16)
            ]
            low, high = (_encode(function(*half), single) for half in halves)
            self.registers[target] = high << 16 | low
            return
        # `cvt` names the type of its result first, and that of its operand last.
        types = [modifier for modifier in modifiers if _TYPE.fullmatch(modifier)]
        values = [self._typed(operand, kind) for operand in operands]
        wanted = types[0] if name == "cvt" and types else kind
        if "wide" in modifiers:
            wanted = f"{kind[0]}{2 * int(kind[1:])}"
        self.registers[target] = _encode(function(*values), wanted)

    def _split(self, target: str, source: str, kind: str) -> None:
        """Move between a register and a vector of its parts."""
        parts = re.findall(r"[^\s,{}]+", target if target.startswith("{") else source)
        width = int(kind[1:]) // len(parts)
        if target.startswith("{"):
            value = self._value(source, kind)
            for index, part in enumerate(parts):
                self.registers[part] = value >> (index * width) & (2**width - 1)
        else:
            values = [self._value(part, f"b{width}") & (2**width - 1) for part in parts]
            self.registers[target] = sum(
                element << (index * width) for index, element in enumerate(values)
            )

    # -- memory -----------------------------------------------------------------------------------

    def _ld(self, instruction: _Instruction) -> None:
        target, operand = instruction.operands
        targets = re.findall(r"[^\s,{}]+", target)
        addresses, size = self._addresses(operand, instruction.type, len(targets))
        with self._access(instruction, addresses, size, writes=False):
            for register, address in zip(targets, addresses, strict=True):
                self.registers[register] = _INTEGERS[size].from_address(address).value

    def _st(self, instruction: _Instruction) -> None:
        operand, source = instruction.operands
        sources = re.findall(r"[^\s,{}]+", source)
        addresses, size = self._addresses(operand, instruction.type, len(sources))
        values = [self._value(source, instruction.type) for source in sources]
        with self._access(instruction, addresses, size, writes=True):
            for value, address in zip(values, addresses, strict=True):
                _INTEGERS[size].from_address(address).value = value & (2 ** (8 * size) - 1)

    def _access(
        self, instruction: _Instruction, addresses: list[int], size: int, *, writes: bool
    ) -> AbstractContextManager[None]:
        """Tell the watch of a load or store, which happens in the context that this returns."""
        sem, scope = _ordering(instruction, "")
        where = np.array(addresses, np.uint64)
        if sem:
            change = CHANGES if writes else NO_CHANGE
            return self._watch.on_atomic(
                where, size, sem, scope, reads=not writes, change=lambda: change
            )
        self._watch.on_plain(where, size, writes=writes)
        return nullcontext()

    def _atom(self, instruction: _Instruction) -> None:
        target, *rest = instruction.operands
        self.registers[target] = self._modify(instruction, rest)

    def _red(self, instruction: _Instruction) -> None:
        self._modify(instruction, list(instruction.operands))

    def _modify(self, instruction: _Instruction, operands: list[str]) -> int:
        """Run an atomic; the old value."""
        operand, *sources = operands
        kind = instruction.type
        operation = next(
            (
                modifier
                for modifier in instruction.modifiers
                if modifier in _ATOMICS or modifier == "cas"
            ),
            None,
        )
        if operation is None or kind in _PAIRS:
            raise Unknown(f"{instruction.text}: this atomic cannot be interpreted")
        (address,), size = self._addresses(operand, kind, 1)
        values = [self._typed(operand, kind) for operand in sources]
        word = _INTEGERS[size].from_address(address)

        def result() -> int:
            old = _decode(word.value, kind)
            if operation == "cas":
                return _encode(values[1] if old == values[0] else old, kind)
            return _encode(_ATOMICS[operation](old, values[0]), kind)

        def change() -> Change:
            if operation == "cas":
                changes = result() != word.value
                return Change(changes, changes)
            is_poll = operation in ("add", "or", "xor") and not values[0]
            return NO_CHANGE if is_poll else Change(True, result() != word.value)

        sem, scope = _ordering(instruction, "relaxed")
        what = f"{operation} {values}".encode()
        where = np.array([address], np.uint64)
        with self._watch.on_atomic(where, size, sem, scope, what=what, change=change):
            old, word.value = word.value, result()
        return old

    def _addresses(self, text: str, kind: str, count: int) -> tuple[list[int], int]:
        """The addresses of consecutive elements, and the bytes of one."""
        parts = [part.strip() for part in text.strip("[] ").split("+")]
        first = sum(self._value(part, "b64") for part in parts)
        size = int(re.sub(r"\D", "", kind)) // 8
        if size not in _INTEGERS:
            raise Unknown(f"accesses of {size} bytes cannot be interpreted")
        return [first + index * size for index in range(count)], size

    # -- values -----------------------------------------------------------------------------------

    def _typed(self, operand: str, kind: str) -> Any:
        return _decode(self._value(operand, kind), kind)

    def _value(self, operand: str, kind: str) -> int:
        """The bit pattern of an operand."""
        if operand.startswith("%") and operand in _SPECIAL:
            return _SPECIAL[operand](self._watch)
        if re.match(r"-?\d", operand):
            if floating := re.fullmatch(r"0[fFdD]([0-9a-fA-F]+)", operand):
                return int(floating[1], 16)
            if "." in operand:
                return _encode(float(operand), kind)
            return int(operand.rstrip("U"), 0)
        return self.registers.get(operand, 0)


def _ordering(instruction: _Instruction, default: str) -> tuple[str, Scope]:
    """Semantics and scope; no semantics for a weak access."""
    modifiers = instruction.modifiers
    if "volatile" in modifiers or "mmio" in modifiers:
        return "relaxed", "sys"
    sem = next((modifier for modifier in modifiers if modifier in _SEMANTICS), default)
    scope: Scope = next((_SCOPES[modifier] for modifier in modifiers if modifier in _SCOPES), "gpu")
    return sem, scope


def _decode(bits: int, kind: str) -> Any:
    """The value of a bit pattern."""
    if kind == "bf16":
        return struct.unpack("f", (bits % 2**16 << 16).to_bytes(4, "little"))[0]
    if kind in _FLOATS:
        size = int(kind[1:]) // 8
        return struct.unpack(_FLOATS[kind], (bits % 2 ** (8 * size)).to_bytes(size, "little"))[0]
    if kind == "pred":
        return bits
    width = int(re.sub(r"\D", "", kind))
    bits %= 2**width
    return bits - 2**width if kind.startswith("s") and bits >> (width - 1) else bits


def _encode(value: Any, kind: str) -> int:
    """The bit pattern of a value."""
    if kind == "bf16":  # round to nearest, ties to even
        wide = int.from_bytes(struct.pack("f", value), "little")
        return (wide + 0x7FFF + (wide >> 16 & 1)) >> 16 & 0xFFFF
    if kind in _FLOATS:
        return int.from_bytes(struct.pack(_FLOATS[kind], value), "little")
    if kind == "pred":
        return int(value)
    return int(value) % 2 ** int(re.sub(r"\D", "", kind))


def _index(axis: int, watch: Watch) -> int:
    return int(interpreter.interpreter_builder.grid_idx[axis])


def _size(axis: int, watch: Watch) -> int:
    return int(watch.launch.grid[axis])


#: Special registers of the program's first thread.
_SPECIAL: dict[str, Callable[[Watch], int]] = {
    "%ntid.x": lambda watch: 32 * watch.launch.request.warps,
    "%ntid.y": lambda watch: 1,
    "%ntid.z": lambda watch: 1,
    "%globaltimer": lambda watch: time.monotonic_ns(),
    "%clock64": lambda watch: time.monotonic_ns(),
    "%clock": lambda watch: time.monotonic_ns() % 2**32,
}
_SPECIAL |= {
    name: lambda watch: 0
    for name in ("%tid.x", "%tid.y", "%tid.z", "%laneid", "%warpid", "%smid", "%cluster_ctarank")
}
for _axis, _letter in enumerate("xyz"):
    _SPECIAL[f"%ctaid.{_letter}"] = partial(_index, _axis)
    _SPECIAL[f"%nctaid.{_letter}"] = partial(_size, _axis)
