"""The shapes that a user asks for, and their problems."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from taxfree.errors import UsageError
from taxfree.problems import DTYPE_ALIASES, field_specs, quoted, recorded_problem, require_operation
from taxfree_kernels.variant import Problem, operation_names, operation_shapes, problem_class
from taxfree_tune.shapes.models import (
    PATHS,
    ModelPath,
    Role,
    left_out_layers,
    load_model,
    split_layers,
)
from taxfree_tune.shapes.parser import (
    MODEL_SET,
    Axes,
    Parser,
    Shape,
    ShapeEntry,
    Value,
    entries,
    example,
)
from taxfree_tune.shapes.text import integer

DEFAULT_SET = "paper"
INTERPRETED_SET = "demo"  # the default on a CPU, where the paper's shapes would take hours

_MOST_PROBLEMS = 10_000


@dataclass(frozen=True)
class ShapeRequest:
    """The shapes that a user asked for.

    Args:
        shapes: each a shape, a named set or a YAML file.
        model: a Hugging Face config, the folder it is in, or the name of a known model; defines
            the named set `model`.
        tp: ranks over which the model is split; without it, each of `world_sizes`.
        world_sizes: for shapes that do not say.
        dtype: for shapes that do not say.
        op: the operation of shapes that do not say; None for any that is asked for. Shapes of the
            set `model` are then of the operations of `paths` that have the fields they name, else
            of all that have them.
        paths: how the model comes to run the operations.
        is_training: whether the model's set has the problems of the backward, too.
        allows_others: whether shapes may say another world size than `world_sizes`.
    """

    shapes: Sequence[str] = ()
    model: str | Path | None = None
    tp: int | None = None
    world_sizes: Sequence[int] = (1,)
    dtype: str | None = None
    op: str | None = None
    allows_others: bool = True
    paths: Sequence[ModelPath] = ("tp",)
    is_training: bool = False


@dataclass(frozen=True)
class ChosenProblems:
    """The problems to work on, and why these.

    Args:
        problems: of the operation's problem class.
        note: one line for the user if they were not requested explicitly; else empty.
    """

    problems: list[Problem]
    note: str = ""


def parse_counts(text: str) -> tuple[int, ...]:
    """Return the world sizes that a list such as `2,4,8` names.

    Raises:
        UsageError: it is not a list of positive integers.
    """
    counts = [integer(part) for part in text.split(",")]
    if any(count is None or count < 1 for count in counts):
        raise UsageError(f"{quoted(text)} is not a number of GPUs", "for example --gpus 8, 2,4,8")
    return tuple(dict.fromkeys(count for count in counts if count is not None))


def parse_paths(text: str) -> tuple[ModelPath, ...]:
    """Return the paths that a list such as `tp,sequence` names.

    Raises:
        UsageError: there is no such path.
    """
    named = dict.fromkeys(text.split(","))
    for path in named:
        if path not in PATHS:
            raise UsageError(f"{quoted(path)} is no path of a model", f"one of: {', '.join(PATHS)}")
    return tuple(path for path in PATHS if path in named)


def choose(
    op: str,
    request: ShapeRequest,
    recorded: Callable[[], Iterable[Mapping[str, Any]]],
    default: str = DEFAULT_SET,
) -> ChosenProblems:
    """Return the problems that were asked for; else those already measured; else a named set.

    Args:
        op: the operation.
        request: what the user asked for.
        recorded: gives the problems of the operation's records for this hardware; called only
            where nothing was asked for.
        default: the set to fall back on.

    Raises:
        UsageError: as for `expand`.
    """
    if request.shapes or request.model or request.tp:
        return ChosenProblems(expand(op, request))
    recorded_problems = [recorded_problem(op, fields) for fields in recorded()]
    taken = [
        problem
        for problem in recorded_problems
        if problem is not None and is_wanted(problem, request)
    ]
    taken = list(dict.fromkeys(taken))  # a problem may be tuned here, and shipped
    if taken:
        note = f"no --shapes: taking the {len(taken)} that the database holds for this hardware"
        return ChosenProblems(taken, note)
    note = f"no --shapes, and the database holds none for this hardware: taking {default!r}"
    return ChosenProblems(_problems(op, request, [default]), note)


def operations(request: ShapeRequest, default: str) -> list[str]:
    """Return the operations that a request is of, in the order of their first shapes.

    Args:
        default: the operation of shapes that do not say, except of the set `model`, which is of all
            operations with layers of the model.

    Raises:
        UsageError: a shape is empty, a file is not a list of shapes, or a model's config makes no
            sense.
    """
    named: list[str] = []
    for argument in _arguments(request):
        for entry in entries(argument, request.op):
            if entry.op is not None or request.op is not None or not _is_of_model(entry, request):
                named.append(entry.op or request.op or default)
                continue
            asked = _operations_of_model(entry, request)
            named += [op for op in asked if _model_set(op, request)[MODEL_SET]] or asked
    return list(dict.fromkeys(named)) or [default]


def is_without_dtype(request: ShapeRequest) -> bool:
    """Whether nobody says the dtype of a request's model, so that it is the default of a shape."""
    return not (request.model is None or request.dtype or load_model(request.model).dtype)


def left_out(request: ShapeRequest) -> list[tuple[str, str]]:
    """Return (operation, reason) for each kind of layer of a request's model that it cannot serve.

    Raises:
        UsageError: the model's config is invalid.
    """
    if request.op is not None:
        return _left_out(request, [request.op])
    named = [entry for argument in _arguments(request) for entry in entries(argument, request.op)]
    asked = (
        _operations_of_model(entry, request) for entry in named if _is_of_model(entry, request)
    )
    return _left_out(request, {*itertools.chain.from_iterable(asked)})


def _left_out(request: ShapeRequest, operations: Collection[str]) -> list[tuple[str, str]]:
    if request.model is None:
        return []
    model = load_model(request.model)
    return [
        (op, reason)
        for op, role in _roles().items()
        if op in operations
        for reason in left_out_layers(role, model, request.dtype is not None, request.is_training)
    ]


def expand(op: str, request: ShapeRequest) -> list[Problem]:
    """Return the problems of an operation that a request names, in its order and each once.

    Raises:
        UsageError: a shape, a file or a model's config is invalid; the message quotes it.
    """
    return _problems(op, request, _arguments(request))


def is_wanted(problem: Problem, request: ShapeRequest) -> bool:
    """Whether a recorded problem is of a world size and a type that were asked for."""
    axes = {"world_size": request.world_sizes} | _dtype_axis(request)
    return all(getattr(problem, name) in values for name, values in axes.items())


def _problems(op: str, request: ShapeRequest, arguments: Sequence[str]) -> list[Problem]:
    require_operation(op)
    sets = {
        **operation_shapes(op).sets,
        **scaling_sets(op, request.world_sizes),
        **_model_set(op, request),
    }
    parser = Parser(op, sets)
    named = [
        (entry.op or request.op or op, entry.text)
        for argument in arguments
        for entry in entries(argument, request.op)
        if request.op is not None
        or not _is_of_model(entry, request)
        or op in _operations_with_fields(entry)
    ]
    if not named:
        raise UsageError("no shapes are given", example(op))
    shapes = [shape for of, text in named if of == op for shape in parser.shapes(text)]
    if not shapes and any(of == op for of, _ in named):  # the model's set alone may be empty
        why = "; ".join(reason for _, reason in _left_out(request, [op]))
        raise UsageError(
            f"{op} serves no layer of the model: {why or 'it has none'}", _what_lists(op, request)
        )
    if not shapes:
        others = ", ".join(dict.fromkeys(of for of, _ in named))
        raise UsageError(f"none of the shapes is of {op}", f"they are of {others}: give that --op")
    unsaid = {"world_size": request.world_sizes} | _dtype_axis(request)
    _check_count(unsaid, shapes)
    problems = [problem for shape in shapes for problem in parser.problems(shape, unsaid)]
    counts = {problem.world_size for problem in problems} - {*request.world_sizes}
    if counts and not request.allows_others:
        raise UsageError(
            f"a shape is of world_size={min(counts)}, and --gpus is another",
            "give only one of the two",
        )
    return list(dict.fromkeys(problems))


def _what_lists(op: str, request: ShapeRequest) -> str:
    """What to give for a model of which an operation serves nothing."""
    if request.dtype is None and _model_set(op, replace(request, dtype="bf16"))[MODEL_SET]:
        return "--dtype bf16 lists its layers in that type"
    serving = {role for of, role in _roles().items() if _model_set(of, request)[MODEL_SET]}
    paths = [path for path, roles in PATHS.items() if serving.intersection(roles)]
    if not paths:
        return "no operation serves a layer of this model"
    return f"`taxfree shapes --model` with --path {','.join(paths)} lists what others serve"


def _arguments(request: ShapeRequest) -> Sequence[str]:
    return request.shapes or ([MODEL_SET] if request.model else [])


def _is_of_model(entry: ShapeEntry, request: ShapeRequest) -> bool:
    return request.model is not None and entry.text.split()[0] == MODEL_SET


def _roles() -> dict[str, Role]:
    """The operations of models -> what they do there."""
    roles = {op: operation_shapes(op).model_role for op in operation_names()}
    return {op: role for op, role in roles.items() if role is not None}


def _operations_of_paths(request: ShapeRequest) -> list[str]:
    wanted = {role for path in request.paths for role in PATHS[path]}
    return [op for op, role in _roles().items() if role in wanted]


def _operations_of_model(entry: ShapeEntry, request: ShapeRequest) -> list[str]:
    """Operations of the paths with all fields that a shape names; else all that have them."""
    of_paths, having = _operations_of_paths(request), _operations_with_fields(entry)
    return [op for op in having if op in of_paths] or having


def _operations_with_fields(entry: ShapeEntry) -> list[str]:
    """Operations of models with all fields that a shape names; all where none has them."""
    named = {word.partition("=")[0].lower() for word in entry.text.split()[1:]}
    ops = [*_roles()]
    return [op for op in ops if named <= field_specs(problem_class(op)).keys()] or ops


def _dtype_axis(request: ShapeRequest) -> dict[str, Sequence[Value]]:
    return {"dtype": [DTYPE_ALIASES.get(request.dtype, request.dtype)]} if request.dtype else {}


def _check_count(unsaid: Axes, shapes: Iterable[Shape]) -> None:
    count = sum(math.prod(map(len, {**unsaid, **shape.axes}.values())) for shape in shapes)
    if count > _MOST_PROBLEMS:
        raise UsageError(
            f"these shapes are {count} problems, more than {_MOST_PROBLEMS}",
            "lists are combined with each other: give several --shapes instead",
        )


def _model_set(op: str, request: ShapeRequest) -> dict[str, Sequence[str]]:
    if request.model is None:
        if request.tp is not None:
            raise UsageError("--tp says how a model is split, and there is none", "add --model")
        return {}
    named = operation_shapes(op)
    if named.model_role is None:
        raise UsageError(f"no shapes of {op} are taken from a model", "use --shapes")
    model = load_model(request.model)
    own_dtype = None if request.dtype else model.dtype
    axes = named.model_axes + (f" dtype={own_dtype}" if own_dtype else "")
    splits = request.world_sizes if request.tp is None else [request.tp]
    fields = field_specs(problem_class(op))
    return {
        MODEL_SET: [
            f"{axes} {_words(layer, fields)} world_size={split}"
            for split in splits
            for layer in split_layers(
                named.model_role, model, split, request.is_training, request.dtype is not None
            )
        ]
    }


def _words(layer: Mapping[str, int | str], fields: Collection[str]) -> str:
    """A layer as the words of a shape; a bias that the operation does not add is left out."""
    return " ".join(f"{name}={value}" for name, value in layer.items() if name in fields)


_LISTED_WORLD_SIZES = (1, 2, 4, 8)


def named_sets(op: str) -> dict[str, list[str]]:
    """Return the named sets of an operation, each as the shapes it stands for.

    Raises:
        UsageError: there is no such operation.
    """
    require_operation(op)
    fixed = {name: list(shapes) for name, shapes in operation_shapes(op).sets.items()}
    return fixed | scaling_sets(op, _LISTED_WORLD_SIZES)


def scaling_sets(op: str, world_sizes: Sequence[int]) -> dict[str, list[str]]:
    """The named sets that depend on the number of ranks, for each of `world_sizes`."""
    return {
        name: [f"{shape} world_size={ranks}" for ranks in world_sizes for shape in of_ranks(ranks)]
        for name, of_ranks in operation_shapes(op).scaling.items()
    }
