"""What compiled code knows: a wave's state as one array, and instructions as records of numbers.

The state is an array of uint32: the vector registers, 64 lanes each, then the scalar registers and
the condition code. Records name its words by their index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum
from functools import partial
from typing import Any

import numpy as np
from numba import njit

#: a function that is compiled; floats follow IEEE 754, also where they are divided by 0
compiled = partial(njit, error_model="numpy")

VECTORS = 512  # rows of 64 lanes; row 256 is the first accumulator
SCALARS = 64 * VECTORS  # the word of s0
STATE_WORDS = SCALARS + 192
#: numbers of special scalar registers; the last two are no registers of the machine: the condition
#: code, and whether conversions to fp8 clamp (FP16_OVFL)
VCC, M0, EXEC, SCC, CLAMPS = 106, 124, 126, 128, 129


class Form(IntEnum):
    """How an instruction is executed."""

    PYTHON = 0  # by a function that is not compiled
    NOTHING = 1
    VECTOR = 2
    LANE = 3  # a word moves between a lane and a scalar register
    SCALAR = 4
    SAVE_EXEC = 5
    BRANCH = 6
    WAIT = 7


class Kind(IntEnum):
    """Where the value of a source is."""

    CONSTANT = 0
    SCALAR = 1
    SCALAR_PAIR = 2
    VECTOR = 3
    VECTOR_PAIR = 4


def numbered(names: Iterable[str], module: str) -> Any:
    """Operations of a module, as numbers that compiled code compares."""
    return IntEnum("Operation", list(names), module=module)


def tabulated(
    signature: str, table: str, operations: Any, names: Mapping[str, Any]
) -> Callable[..., Any]:
    """A function, to be compiled, that returns the expression of its first argument, an operation.

    Args:
        signature: of the function.
        table: lines of names of operations and their expression. A line without names is a
            statement for all that follow.
        operations: the numbers of names.
        names: what expressions refer to.
    """
    lines = [f"def {signature}:"]
    for line in table.strip().splitlines():
        named, _, expression = line.strip().rpartition(": ")
        lines += [
            f"    if operation == {operations[name]:d}: return {expression}"
            for name in named.split()
        ]
        lines += [] if named else [f"    {expression}"]
    made = dict(names)
    exec("\n".join(lines), made)
    function: Callable[..., Any] = made[signature.partition("(")[0]]
    return function


def _numbers(names: str) -> list[tuple[str, Any]]:
    return [(name, np.int64) for name in names.split()]


#: `at` is the value of a constant, or the word of the state, of a vector that of lane 0. Of what is
#: there, `shift` and `mask` take a part, and `flip` changes bits; then a half becomes a float32.
SOURCE = np.dtype(_numbers("kind at shift mask flip is_half"))
#: `out` is the word that takes the result, of a vector that of lane 0, or -1; `mask` and `shift`
#: say what is kept of the result, and where it goes. `bits` is the first of two words that take a
#: bit of each lane, or -1.
PART = np.dtype([*_numbers("out is_wide mask shift bits"), ("sources", SOURCE, 4)])
#: `target` is where a branch goes. A wait leaves `vector` and `local` operations in flight. `lanes`
#: and `by` say which lane the first source comes from (DPP). Only the lanes of `on` are written;
#: one whose source has no lane gets 0 with `gives_zero`, else it is not written. `count` parts are
#: used; all read before one writes.
INSTRUCTION = np.dtype([
    *_numbers("form operation target vector local lanes by on gives_zero count"),
    ("parts", PART, 2),
])  # fmt: skip

Row = Any  # an instruction: a record
