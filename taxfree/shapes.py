"""Turns shapes, as users write them, into problems.

A shape is a list of words: at most one bare word, which is a named set or the operation's
shorthand, then `field=value` words. Values separated by commas are combined with each other::

    m=1,16,64 n=3584 k=8192        1,16,64x3584x8192 gather_dim=0        paper dtype=bf16

The fields are those of the operation's problem, so a new operation works without changes here; its
shorthand, named sets and shapes of a model's config are one more entry in `_CONVENTIONS`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeAlias, get_type_hints

import yaml

from taxfree.errors import UsageError
from taxfree_kernels.errors import PlanError
from taxfree_kernels.variant import operation_names, problem_class

Value: TypeAlias = int | str
Axes: TypeAlias = Mapping[str, Sequence[Value]]

EXAMPLE = 'for example --shapes "m=1,16 n=3584 k=8192", --shapes 1,16x3584x8192, --shapes paper'
MODEL_SET = "model"
DEFAULT_SET = "paper"
INTERPRETED_SET = "demo"  # the default on a CPU, where the paper's shapes would take hours
DTYPE_ALIASES = {"fp16": "float16", "bf16": "bfloat16"}

_ALWAYS_SAID = ("dtype", "world_size")
_DIRECTIONS = ("gather_dim", "scatter_dim")
_FLAGS = {"0": False, "false": False, "no": False, "1": True, "true": True, "yes": True}
_LARGEST = 2**31 - 1
_MOST_PROBLEMS = 10_000
_LISTED_WORLD_SIZES = (1, 2, 4, 8)
_MODEL_ROWS = "1,16,64,256,1024,4096"
_CONFIG_HINT = "give the config.json of a Hugging Face decoder model"


@dataclass(frozen=True)
class FieldSpec:
    """How one field of a problem is written.

    Args:
        kind: `int`, `bool` or `str`.
        default: the value of a field that is left out; `MISSING` where it must be given.
    """

    kind: type
    default: object

    @property
    def required(self) -> bool:
        """Whether it must be given."""
        return self.default is MISSING


@dataclass(frozen=True)
class ShapeRequest:
    """What the user asked for.

    Args:
        shapes: each a shape, a named set or a YAML file.
        model: a Hugging Face config, or the folder it is in; defines the named set `model`.
        tp: ranks over which the model is split; without it, each of `world_sizes`.
        world_sizes: for shapes that do not say.
        dtype: for shapes that do not say.
    """

    shapes: Sequence[str] = ()
    model: Path | None = None
    tp: int | None = None
    world_sizes: Sequence[int] = (1,)
    dtype: str | None = None


@dataclass(frozen=True)
class Choice:
    """The problems to work on, and why these.

    Args:
        problems: of the operation's problem class.
        note: one line for the user if they were not requested explicitly; else empty.
    """

    problems: list[Any]
    note: str = ""


@dataclass(frozen=True)
class _Model:
    """The dimensions of a model that its matmuls are made of."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class _Conventions:
    """What people call the shapes of one operation.

    Args:
        shorthand: the fields of `1x2x3`, in order.
        sets: named sets, each a list of shapes.
        scaling: named sets that depend on the number of ranks: world size -> shapes.
        of_model: (model, tp) -> shapes, without `model_axes`.
        model_axes: fields that a model's config does not determine.
    """

    shorthand: tuple[str, ...] = ()
    sets: Mapping[str, Sequence[str]] = field(default_factory=dict)
    scaling: Mapping[str, Callable[[int], list[str]]] = field(default_factory=dict)
    of_model: Callable[[_Model, int], list[str]] | None = None
    model_axes: str = f"m={_MODEL_ROWS}"


@dataclass(frozen=True)
class _Shape:
    """A parsed shape and the text it came from, for messages."""

    text: str
    axes: Axes


def parse_counts(text: str) -> tuple[int, ...]:
    """Return the world sizes that a list such as `2,4,8` names.

    Raises:
        UsageError: it is not a list of positive integers.
    """
    counts = [_integer(part) for part in text.split(",")]
    if any(count is None or count < 1 for count in counts):
        raise UsageError(f"{_quoted(text)} is no number of GPUs", "for example --gpus 8, 2,4,8")
    return tuple(dict.fromkeys(count for count in counts if count is not None))


def require_operation(op: str) -> None:
    """Check the name of an operation.

    Raises:
        UsageError: there is no such operation; the hint names those that there are.
    """
    known = operation_names()
    if op not in known:
        raise UsageError(f"there is no operation {_quoted(op)}", f"one of: {', '.join(known)}")


def field_specs(problem: type[Any]) -> dict[str, FieldSpec]:
    """Return how the fields of a problem dataclass are written."""
    types = get_type_hints(problem)
    return {each.name: FieldSpec(types[each.name], each.default) for each in fields(problem)}


def recorded_problem(op: str, problem: Mapping[str, Any]) -> Any | None:
    """Return the problem that a record was made for; None if it no longer exists as such.

    Args:
        op: the operation of the record, perhaps one of another version of taxfree.
        problem: the record's fields.
    """
    if op not in operation_names():
        return None
    specs = field_specs(problem_class(op))
    if problem.keys() != specs.keys():
        return None
    if any(type(problem[name]) is not spec.kind for name, spec in specs.items()):
        return None
    try:
        return problem_class(op)(**problem)
    except PlanError:
        return None


def written(op: str, problem: Mapping[str, Any]) -> str:
    """Return a problem as one would type it: without fields that hold the default of their class.

    The dtype and the world size are always said. So is a flash_decode's `v_head_dim`, since it
    never holds its default, which stands for `head_dim`.

    Args:
        op: the operation.
        problem: its fields; a recorded one may have others than today's.
    """
    specs = field_specs(problem_class(op)) if op in operation_names() else {}
    names = [*(name for name in specs if name in problem), *sorted(problem.keys() - specs.keys())]
    said = [
        name
        for name in names
        if name in _ALWAYS_SAID or name not in specs or problem[name] != specs[name].default
    ]
    return " ".join(f"{name}={problem[name]}" for name in said)


def heading(op: str, problem: Mapping[str, Any]) -> str:
    """As `written`, for a table or picture, but always with the direction, where these differ."""
    directions = {name: problem[name] for name in _DIRECTIONS if name in problem}
    others = {name: value for name, value in problem.items() if name not in directions}
    said = [f"{name}={value}" for name, value in directions.items()]
    return " ".join([*said, written(op, others)])


def named_sets(op: str) -> dict[str, list[str]]:
    """Return the named sets of an operation, each as the shapes it stands for.

    Raises:
        UsageError: there is no such operation.
    """
    fixed = {name: list(shapes) for name, shapes in _conventions(op).sets.items()}
    return fixed | _scaling_sets(op, _LISTED_WORLD_SIZES)


def _scaling_sets(op: str, world_sizes: Sequence[int]) -> dict[str, list[str]]:
    return {
        name: [f"{shape} world_size={ranks}" for ranks in world_sizes for shape in of_ranks(ranks)]
        for name, of_ranks in _conventions(op).scaling.items()
    }


def choose(
    op: str,
    request: ShapeRequest,
    recorded: Callable[[], Iterable[Mapping[str, Any]]],
    default: str = DEFAULT_SET,
) -> Choice:
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
        return Choice(expand(op, request))
    found = [recorded_problem(op, fields) for fields in recorded()]
    known = [each for each in found if each is not None and is_wanted(each, request)]
    known = list(dict.fromkeys(known))  # a problem may be tuned here, and shipped
    if known:
        note = f"no --shapes: taking the {len(known)} that the database holds for this hardware"
        return Choice(known, note)
    note = f"no --shapes, and the database holds none for this hardware: taking {default!r}"
    return Choice(_problems(op, request, [default]), note)


def expand(op: str, request: ShapeRequest) -> list[Any]:
    """Return the problems that a request names, in its order and each once.

    Raises:
        UsageError: a shape, a file or a model's config makes no sense; the message quotes what.
    """
    return _problems(op, request, request.shapes or ([MODEL_SET] if request.model else []))


def _problems(op: str, request: ShapeRequest, arguments: Sequence[str]) -> list[Any]:
    sets = {
        **_conventions(op).sets,
        **_scaling_sets(op, request.world_sizes),
        **_model_set(op, request),
    }
    parser = _Parser(op, sets)
    shapes = [shape for argument in arguments for shape in parser.shapes(argument)]
    if not shapes:
        raise UsageError("no shapes are given", EXAMPLE)
    unsaid = {"world_size": request.world_sizes} | _dtype_axis(request)
    _check_count(unsaid, shapes)
    found = [problem for shape in shapes for problem in parser.problems(shape, unsaid)]
    return list(dict.fromkeys(found))


def _dtype_axis(request: ShapeRequest) -> dict[str, Sequence[Value]]:
    return {"dtype": [DTYPE_ALIASES.get(request.dtype, request.dtype)]} if request.dtype else {}


def _check_count(unsaid: Axes, shapes: Iterable[_Shape]) -> None:
    count = sum(math.prod(map(len, {**unsaid, **shape.axes}.values())) for shape in shapes)
    if count > _MOST_PROBLEMS:
        raise UsageError(
            f"these shapes are {count} problems, more than {_MOST_PROBLEMS}",
            "lists are combined with each other: give several --shapes instead",
        )


def is_wanted(problem: Any, request: ShapeRequest) -> bool:
    """Whether a recorded problem is of a world size and a type that were asked for."""
    axes = {"world_size": request.world_sizes} | _dtype_axis(request)
    return all(getattr(problem, name) in values for name, values in axes.items())


class _Parser:
    """Reads the shapes of one operation.

    Args:
        op: the operation.
        sets: the named sets it may refer to.
    """

    def __init__(self, op: str, sets: Mapping[str, Sequence[str]]) -> None:
        self._sets = sets
        self._shorthand = _conventions(op).shorthand
        self._problem = problem_class(op)
        self._fields = field_specs(self._problem)

    def shapes(self, argument: str) -> list[_Shape]:
        """Parse one argument: a YAML file or a shape."""
        if not argument.strip():
            raise UsageError("a shape is empty", EXAMPLE)
        if not argument.endswith((".yaml", ".yml")):
            return self._words(argument)
        texts = _yaml_shapes(Path(argument))
        return [shape for text in texts for shape in self._words(text)]

    def problems(self, shape: _Shape, unsaid: Axes) -> list[Any]:
        """Combine the lists of a shape.

        Args:
            shape: the shape.
            unsaid: values of fields that it may leave out.
        """
        axes = {**unsaid, **shape.axes}
        required = [name for name, spec in self._fields.items() if spec.required]
        if missing := [name for name in required if name not in axes]:
            raise _bad(shape.text, f"lacks {', '.join(missing)}")
        try:
            return [self._problem(**combined) for combined in _combinations(axes)]
        except PlanError as error:
            raise _bad(shape.text, error.message, error.hint or EXAMPLE) from error

    def _words(self, text: str) -> list[_Shape]:
        first, *others = text.split()
        if "=" in first:
            return [_Shape(text, self._assignments(text, [first, *others]))]
        own = self._assignments(text, others)
        if first in self._sets:
            return [
                _Shape(text, self._assignments(each, each.split()) | own)
                for each in self._sets[first]
            ]
        return [_Shape(text, self._short(text, first) | own)]

    def _assignments(self, text: str, words: Iterable[str]) -> dict[str, Sequence[Value]]:
        axes: dict[str, Sequence[Value]] = {}
        for word in words:
            name, equals, values = word.partition("=")
            name = name.lower()
            if not equals:
                raise _bad(text, f"{_quoted(word)} is not field=value")
            if name not in self._fields:
                raise _bad(text, f"no field {_quoted(name)}", f"fields: {', '.join(self._fields)}")
            if name in axes:
                raise _bad(text, f"{name} is given twice", f"write lists as {name}=1,2")
            axes[name] = self._values(text, name, values)
        return axes

    def _short(self, text: str, word: str) -> dict[str, Sequence[Value]]:
        parts = word.split("x")
        if len(parts) != len(self._shorthand) or not re.fullmatch(r"[0-9,x]+", word):
            raise self._unknown(text, word)
        return {
            name: self._values(text, name, part)
            for name, part in zip(self._shorthand, parts, strict=True)
        }

    def _values(self, text: str, name: str, values: str) -> list[Value]:
        return [self._value(text, name, value) for value in values.split(",")]

    def _value(self, text: str, name: str, value: str) -> Value:
        read, wanted = _READERS[self._fields[name].kind]
        parsed = read(value)
        if parsed is None:
            raise _bad(text, f"{name}={_quoted(value)} is not {wanted}")
        return parsed

    def _unknown(self, text: str, word: str) -> UsageError:
        if word == MODEL_SET:
            return _bad(text, "there is no model", "name its config: --model path/to/config.json")
        if close := get_close_matches(word, self._sets, n=1):
            return _bad(text, f"no set or shape {_quoted(word)}", f"did you mean {close[0]!r}?")
        short = "x".join(name.upper() for name in self._shorthand)
        known = f"sets: {', '.join(self._sets)}; " if self._sets else ""
        return _bad(
            text, f"no set or shape {_quoted(word)}", f"{known}shorthand: {short or 'none'}"
        )


def _combinations(axes: Axes) -> list[dict[str, Value]]:
    """All combinations, the first field varying slowest."""
    combined: list[dict[str, Value]] = [{}]
    for name, values in axes.items():
        combined = [{**each, name: value} for each in combined for value in values]
    return combined


def _integer(text: str) -> int | None:
    # int() also takes signs, underscores, spaces and the digits of other scripts
    if not re.fullmatch(r"[0-9]{1,10}", text):
        return None
    number = int(text)
    return number if number <= _LARGEST else None


def _flag(text: str) -> bool | None:
    return _FLAGS.get(text.lower())


def _word(text: str) -> str | None:
    return DTYPE_ALIASES.get(text, text) or None


_READERS: Mapping[type, tuple[Callable[[str], Value | None], str]] = {
    int: (_integer, f"an integer up to {_LARGEST}"),
    bool: (_flag, "0 or 1"),
    str: (_word, "a word"),
}


def _quoted(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


def _bad(text: str, why: str, hint: str = EXAMPLE) -> UsageError:
    return UsageError(f"shape {_quoted(text)}: {why}", hint)


# -- files --


def _read(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{what} {_quoted(str(path))} cannot be read: {error.strerror}", "check the path"
        ) from error
    except ValueError as error:  # not UTF-8, or no path at all
        raise UsageError(f"{what} {_quoted(str(path))} is not text", "check the path") from error


def _yaml_shapes(path: Path) -> list[str]:
    """Return the entries of a YAML list of shapes as text; mappings are written out."""
    name = _quoted(str(path))
    hint = 'a list of shapes: - "m=1,16 n=3584 k=8192", or - {m: [1, 16], n: 3584, k: 8192}'
    try:
        # The base loader leaves scalars as text: the parser decides what they are.
        document = yaml.load(_read(path, "shape file"), Loader=yaml.BaseLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"shape file {name} is not YAML", hint) from error
    if not isinstance(document, list) or not document:
        raise UsageError(f"shape file {name} is not a list of shapes", hint)
    return [_entry_text(name, entry, hint) for entry in document]


def _entry_text(name: str, entry: object, hint: str) -> str:
    if isinstance(entry, str) and entry.strip():
        return entry
    if not isinstance(entry, dict) or not entry:
        raise UsageError(f"shape file {name}: an entry is not a shape", hint)
    return " ".join(f"{key}={_values_text(name, value, hint)}" for key, value in entry.items())


def _values_text(name: str, value: object, hint: str) -> str:
    values = value if isinstance(value, list) else [value]
    texts = [each for each in values if isinstance(each, str)]
    # What is nested is not shown either: a few aliases can stand for gigabytes of text.
    if len(texts) < len(values):
        raise UsageError(f"shape file {name}: an entry is nested too deeply", hint)
    return ",".join(texts)


# -- models --


def _model_set(op: str, request: ShapeRequest) -> dict[str, Sequence[str]]:
    if request.model is None:
        if request.tp is not None:
            raise UsageError("--tp says how a model is split, and there is none", "add --model")
        return {}
    of_model = _conventions(op).of_model
    if of_model is None:
        raise UsageError(f"no shapes of {op} are taken from a model", "use --shapes")
    config = _model_config(request.model)
    model = _model(request.model, config)
    dtype = "" if request.dtype else _model_dtype(config)
    splits = request.world_sizes if request.tp is None else [request.tp]
    axes = _conventions(op).model_axes
    return {
        MODEL_SET: [
            f"{axes} {shape} world_size={split}{dtype}"
            for split in splits
            for shape in of_model(model, split)
        ]
    }


def _model_config(path: Path) -> Mapping[str, Any]:
    if path.is_dir():
        path = path / "config.json"
    try:
        config = json.loads(_read(path, "model config"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"model config {_quoted(str(path))} is not JSON", _CONFIG_HINT) from error
    if not isinstance(config, dict):
        raise UsageError(f"model config {_quoted(str(path))} is not an object", _CONFIG_HINT)
    # A multimodal model keeps its decoder's dimensions one level down.
    text_config = config.get("text_config")
    return text_config if isinstance(text_config, dict) else config


def _model(path: Path, config: Mapping[str, Any]) -> _Model:
    def dimension(name: str, default: int | None = None) -> int:
        value = config.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST:
            raise UsageError(
                f"model config {_quoted(str(path))}: {name} is {_quoted(str(value))}", _CONFIG_HINT
            )
        return value

    heads = dimension("num_attention_heads")
    hidden = dimension("hidden_size")
    return _Model(
        hidden=hidden,
        intermediate=dimension("intermediate_size"),
        heads=heads,
        kv_heads=dimension("num_key_value_heads", heads),
        head_dim=dimension("head_dim", max(1, hidden // heads)),
    )


def _model_dtype(config: Mapping[str, Any]) -> str:
    dtype = config.get("dtype", config.get("torch_dtype"))
    return f" dtype={dtype}" if dtype in DTYPE_ALIASES.values() else ""


def _column_parallel(model: _Model, tp: int) -> list[str]:
    """The fused QKV projection and the fused gate and up projection, one rank's columns of each.

    With more ranks than kv heads, each kv head is held by several ranks.
    """
    _require_split(model, tp)
    qkv = (model.heads // tp + 2 * max(1, model.kv_heads // tp)) * model.head_dim
    gate_up = 2 * model.intermediate // tp
    return [f"n={columns} k={model.hidden}" for columns in (qkv, gate_up)]


def _row_parallel(model: _Model, tp: int) -> list[str]:
    """The attention's output projection and the down projection, one rank's rows of each."""
    _require_split(model, tp)
    heads, down = model.heads // tp * model.head_dim, model.intermediate // tp
    return [f"n={model.hidden} k={rows}" for rows in (heads, down)]


def _require_split(model: _Model, tp: int) -> None:
    for name, count in (
        ("num_attention_heads", model.heads),
        ("intermediate_size", model.intermediate),
    ):
        if count % tp:
            raise UsageError(
                f"{name} {count} of the model does not split over {tp} ranks", "try another --tp"
            )


def _sequence_parallel(model: _Model, tp: int) -> list[str]:
    """All heads on every rank: the sequences are what is split."""
    return [f"q_heads={model.heads} kv_heads={model.kv_heads} head_dim={model.head_dim}"]


# -- operations --

_PAPER_HEADS = "q_heads=96 kv_heads=12 head_dim=128"


def _strong(ranks: int) -> list[str]:
    """As many keys in all, however many ranks they are spread over."""
    lengths = ",".join(str(-(-total // ranks)) for total in (1 << 17, 1 << 20))
    return [f"batch=1 kv_len_per_rank={lengths} {_PAPER_HEADS}"]


_CONVENTIONS: Mapping[str, _Conventions] = {
    "all_gather_matmul": _Conventions(
        shorthand=("m", "n", "k"),
        sets={
            "paper": ["m=1,2,4,8,16,32,64,128,256,512,1024 n=3584 k=8192 gather_dim=1"],
            "large": [
                "m=4096,8192,16384 n=3584 k=8192 gather_dim=0",
                "m=4096,8192,16384 n=11008 k=4096 gather_dim=0",
            ],
            # small enough for the interpreter; the last is ragged
            "demo": ["m=16 n=64 k=64", "m=32 n=64 k=128", "m=13 n=40 k=72"],
        },
        of_model=_column_parallel,
    ),
    "matmul_all_reduce": _Conventions(
        shorthand=("m", "n", "k"),
        sets={
            "paper": ["m=1,16,64,128,256,512,1024 n=8192 k=1024,3584"],
            "decode": ["m=1,16,64 n=8192 k=1024,3584"],
            "large": ["m=2048,4096,8192 n=8192 k=1024,3584"],
            # small enough for the interpreter; the last is ragged
            "demo": ["m=16 n=64 k=32", "m=32 n=64 k=64", "m=13 n=40 k=24 bias=1 residual=1"],
        },
        of_model=_row_parallel,
    ),
    "matmul_reduce_scatter": _Conventions(
        shorthand=("m", "n", "k"),
        sets={
            # down projections of 70B, 72B and 8B models over 8 ranks
            "paper": [
                "m=64,256,1024,4096 n=8192 k=3584,3696",
                "m=64,256,1024,4096 n=4096 k=1792",
            ],
            "large": ["m=8192,16384 n=8192 k=3584"],
            "demo": ["m=16 n=64 k=32", "m=32 n=64 k=64 scatter_dim=1", "m=13 n=40 k=24"],
        },
        of_model=_row_parallel,
    ),
    "flash_decode": _Conventions(
        shorthand=("batch", "kv_len_per_rank", "q_heads", "kv_heads", "head_dim"),
        sets={
            "paper": [
                "batch=1 kv_len_per_rank=8192,16384,32768,65536,131072,262144,524288 "
                + _PAPER_HEADS
            ],
            "batches": [f"batch=4,8,16 kv_len_per_rank=8192,32768 {_PAPER_HEADS}"],
            "paged": [f"batch=1,8 kv_len_per_rank=8192 page_size=1,16,64 {_PAPER_HEADS}"],
            # small enough for the interpreter
            "demo": [
                "batch=1 kv_len_per_rank=128 q_heads=8 kv_heads=2 head_dim=64",
                "batch=2 kv_len_per_rank=70 q_heads=4 kv_heads=1 head_dim=64 page_size=16",
            ],
        },
        scaling={"strong": _strong},
        of_model=_sequence_parallel,
        model_axes="batch=1,4,16 kv_len_per_rank=8192,32768,131072",
    ),
}


def _conventions(op: str) -> _Conventions:
    require_operation(op)
    return _CONVENTIONS.get(op, _Conventions())
