"""How users call an operation: each of its torch ops is a :class:`Signature`.

They are the ``SIGNATURES`` of ``signature.py`` in the operation's folder, where a scan finds them.
"""

from __future__ import annotations

import importlib
import importlib.util
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch

from taxfree_kernels.arguments import by_row, fixed
from taxfree_kernels.errors import PlanError
from taxfree_kernels.gradients import Gradients
from taxfree_kernels.variant import Problem, operation_names


@dataclass(frozen=True)
class Signature:
    """How calls of an operation are checked, looked up and run.

    The functions take the call's arguments after those named here: by name, so that ops with other
    arguments share them; but `inputs`, which runs in each call, by their places.

    Args:
        name: of the torch op, and of the runtime's method.
        schema: the arguments of the torch op, but for the group's name.
        sizes: (world_size) -> rows, or sequences and keys, as in `interpolated_fields`; negative
            rows if the tensors have other dimensions than they must have.
        fits: (fabric, rows) -> whether the sizes of the arguments fit together.
        problem: (fabric) -> the problem; raises :class:`PlanError` if the arguments do not fit.
        inputs: (on_device) -> what plans are called with, before the output; `on_device` makes a
            tensor of numbers.
        shape: (world_size, rows) -> that of the output.
        by_size: of an argument that differs in calls of other sizes, by its name: (argument) -> the
            properties that do not. All others are the same in all calls that are checked once.
        reusable: the input whose memory the output may take, by its place; None if there is none.
        library: (world_size, group_name) -> the result of PyTorch's own collectives, for code that
            was compiled with a runtime, and runs after its end. None: it must not.
        gradient: (context, gradient of the output) -> those of the first arguments, as in
            :mod:`.gradients`. The context's `saved_tensors` are the first arguments, its
            `arguments` all that are no tensors, the last the group's name; it also has the
            `world_size` and the `rank`. None: inputs must not require gradients.
        saved: how many of the first arguments `gradient` reads.
    """

    name: str
    schema: str
    sizes: Callable[..., tuple[int, ...]]
    fits: Callable[..., bool]
    problem: Callable[..., Problem]
    inputs: Callable[..., tuple[torch.Tensor | None, ...]]
    shape: Callable[..., tuple[int, ...]]
    by_size: Mapping[str, Callable[[Any], Any]]
    reusable: int | None = None
    library: Callable[..., torch.Tensor] | None = None
    gradient: Callable[..., Gradients] | None = None
    saved: int = 2

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the arguments."""
        return tuple(argument.split()[1] for argument in self.schema.split(", "))

    def named(self, arguments: Sequence[Any]) -> dict[str, Any]:
        """The arguments by name."""
        return dict(zip(self.names, arguments, strict=True))

    @cached_property
    def layout(self) -> Callable[..., tuple[Any, ...]]:
        """(arguments) -> the operation, and properties of the arguments that decide what runs.

        Each call makes it, so it is compiled for these arguments, as a dataclass its methods are.
        """
        parts = []
        for kind, name in (argument.split() for argument in self.schema.split(", ")):
            strides = "" if self.by_size.get(name) is by_row else f"{name}.stride(), "
            tensor = f"{name}.shape, {strides}{name}.dtype, {name}.device"
            tensors = {"Tensor": tensor, "Tensor?": f"None if {name} is None else ({tensor})"}
            parts.append(tensors.get(kind, name))
        code = f"lambda {', '.join(self.names)}: ({self.name!r}, {', '.join(parts)})"
        made: Callable[..., tuple[Any, ...]] = eval(code)
        return made

    def key(self, arguments: Sequence[Any]) -> tuple[Any, ...]:
        """As `layout`, but for sizes; calls with equal ones are checked once."""
        pairs = zip(self.names, arguments, strict=True)
        return (self.name, *[self.by_size.get(name, _itself)(value) for name, value in pairs])

    def dtype(self, arguments: Sequence[Any]) -> torch.dtype:
        """That of the output: the argument of this name, else that of the first argument."""
        of_first: torch.dtype = arguments[0].dtype
        return arguments[self.names.index("dtype")] if "dtype" in self.names else of_first

    @cached_property
    def over_fp8_wire(self) -> Signature:
        """That of partial sums which may travel in fp8; without gradients."""
        return replace(
            self,
            name=f"{self.name}_over_fp8_wire",
            problem=lambda fabric, **named: replace(self.problem(fabric, **named), fp8_wire=True),
            gradient=None,
        )

    @cached_property
    def numbers(self) -> tuple[tuple[int, str, type[Any], tuple[type[Any], ...]], ...]:
        """The arguments that are numbers: their place, name, type, and all types they may have."""
        numbers = []
        for index, argument in enumerate(self.schema.split(", ")):
            kind, name = argument.split()
            if kind.rstrip("?") in _NUMBERS:
                number = _NUMBERS[kind.rstrip("?")]
                numbers.append(
                    (index, name, number, (number, type(None))[: 1 + kind.endswith("?")])
                )
        return tuple(numbers)

    def normalized(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments, with numbers of all types as int or float, so that keys compare.

        Raises:
            PlanError: one of them is no such number, or no tensor where one is needed.
        """
        for argument, value in zip(self.schema.split(", "), arguments, strict=True):
            wanted, called = argument.split()
            if not isinstance(value, _MAY_BE.get(wanted, object)):
                raise PlanError(f"{called} must be a torch.Tensor, not {type(value).__name__}")
        for index, name, kind, allowed in self.numbers:
            if type(arguments[index]) not in allowed:
                number = _number(name, kind, arguments[index])
                arguments = (*arguments[:index], number, *arguments[index + 1 :])
        return arguments


def on_wire(signature: Signature, fp8_wire: bool) -> Signature:
    """That of a sum whose partial sums may travel in fp8, or must not."""
    return signature.over_fp8_wire if fp8_wire else signature


def _itself(argument: Any) -> Any:
    return fixed(argument) if isinstance(argument, torch.Tensor) else argument


_MAY_BE: dict[str, Any] = {"Tensor": torch.Tensor, "Tensor?": (torch.Tensor, type(None))}
_NUMBERS: dict[str, type[Any]] = {"int": int, "float": float}


def _number(name: str, kind: type[Any], value: Any) -> Any:
    try:
        return operator.index(value) if kind is int else float(value)
    except (TypeError, ValueError):
        article, example = ("an integer", 16) if kind is int else ("a number", 1e-6)
        raise PlanError(
            f"{name} is {value!r}, must be {article}", f"for example {name}={example}"
        ) from None


@cache
def signatures() -> dict[str, Signature]:
    """Those of all operations that can be called, by name."""
    by_name: dict[str, Signature] = {}
    for op in operation_names():
        module = f"taxfree_kernels.{op}.signature"
        if importlib.util.find_spec(module) is not None:
            by_name |= {
                signature.name: signature
                for signature in importlib.import_module(module).SIGNATURES
            }
    return by_name
