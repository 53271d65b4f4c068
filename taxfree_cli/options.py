"""The options that commands share, each declared once with its help."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import typer

from taxfree.errors import UsageError
from taxfree.problems import DTYPE_ALIASES, require_operation
from taxfree_cli.output import note
from taxfree_kernels.hardware import KNOWN, Hardware
from taxfree_kernels.variant import operation_names
from taxfree_tune.shapes import (
    ShapeRequest,
    expand,
    is_without_dtype,
    left_out,
    operations,
    parse_counts,
    parse_paths,
)
from taxfree_tuning_db import default_path

DEFAULT_OP = "all_gather_matmul"
#: given in place of an operation: a whole step of a model
STEP = "decode_step"
MODELLED_GPUS: tuple[int, ...] = (8,)  # world sizes without --gpus where nothing is measured

Op: TypeAlias = Annotated[
    str,
    typer.Option("--op", metavar="NAME", help="Operation.", autocompletion=operation_names),
]
OnlyOp: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--op", metavar="NAME", help="Only this operation.", autocompletion=operation_names
    ),
]
#: for commands that take shape files of several operations
OpOfShapes: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--op",
        metavar="NAME",
        help="Operation; without it, all operations of the shape files and of the model, else "
        f"{DEFAULT_OP}.",
        autocompletion=operation_names,
    ),
]
Shapes: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--shapes",
        metavar="SHAPE",
        help='Shapes, repeatable: "m=1,16 n=3584 k=8192", 1,16x3584x8192, a named set, or a YAML '
        "file, such as TAXFREE_LOG writes. `taxfree shapes` lists the sets.",
    ),
]
Model: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="Hugging Face config.json, which Transformers builds, or a name such as "
        "llama-3.1-70b (`taxfree shapes` lists them); what it runs is the shapes.",
    ),
]
Tp: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--tp",
        metavar="RANKS",
        min=1,
        help="Tensor-parallel size of the model; default: that of --gpus.",
    ),
]
Paths: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--path",
        metavar="PATHS",
        help="How the model runs, such as tp,sequence. tp: row-parallel layers sum, as under "
        "PyTorch, Transformers and vLLM; sequence: rows are gathered and scattered; attention: "
        "an engine calls it.",
        show_default="tp",
    ),
]
Training: TypeAlias = Annotated[
    bool, typer.Option("--training", help="With the problems of the model's backward.")
]
Layers: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--layers", metavar="COUNT", min=1, help="Of a whole model, or a decode_step; default: all."
    ),
]
Context: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--context", metavar="TOKENS", min=1, help="Tokens before a decode; 1024 by default."
    ),
]
Batch: TypeAlias = Annotated[
    int | None,
    typer.Option("--batch", metavar="COUNT", min=1, help="Sequences of a decode_step; 1."),
]
OnlyVariants: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--variant", metavar="NAME", help="Only this variant, beside the library; repeatable."
    ),
]
Gpus: TypeAlias = Annotated[
    str | None,
    typer.Option("--gpus", metavar="COUNTS", help="World sizes, such as 8 or 2,4,8."),
]
Dtype: TypeAlias = Annotated[
    Literal["fp16", "bf16", "float16", "bfloat16"] | None,
    typer.Option("--dtype", help="Dtype of shapes without one."),
]
_FabricName: TypeAlias = Literal["auto", "host", "cuda", "rocm"]
_FABRIC_HELP = "Symmetric memory between ranks; host needs no GPU."
Fabric: TypeAlias = Annotated[_FabricName, typer.Option("--fabric", help=_FABRIC_HELP)]
#: for commands that use it only when they measure
FabricIfMeasured: TypeAlias = Annotated[
    _FabricName | None, typer.Option("--fabric", help=f"{_FABRIC_HELP} Default: auto.")
]
Db: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--db",
        metavar="PATH",
        help="Tuning database; default: TAXFREE_DB, else in the user data folder.",
    ),
]
All: TypeAlias = Annotated[
    bool, typer.Option("--all", help="Show all that is known of each problem, not a map.")
]
Json: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print one JSON document instead of tables.")
]


def database_path(db: Path | None) -> Path:
    """The path of the database that a command uses."""
    return db or default_path()


def require_variants(op: str, names: Iterable[str]) -> None:
    """Check the names of an operation's variants; loads torch where there are any.

    Raises:
        UsageError: there is no such operation or variant; the hint lists the known ones.
    """
    require_operation(op)
    for name in names:
        from taxfree_kernels.variant import variants

        if name not in variants(op):
            raise UsageError(f"{op} has no variant {name!r}", f"one of: {', '.join(variants(op))}")


@dataclass(frozen=True)
class ShapeOptions:
    """The options on shapes, as they were given; None for those that were not."""

    op: str | None
    shapes: list[str] | None
    gpus: str | None
    dtype: str | None
    model: str | None = None
    tp: int | None = None
    paths: str | None = None
    is_training: bool = False

    def request(self, default_gpus: tuple[int, ...]) -> ShapeRequest:
        """The request of these options.

        Args:
            default_gpus: world sizes without `--gpus`.

        Raises:
            UsageError: `--gpus` is not a list of numbers, or differs from `--tp`, or `--path` or
                `--training` is given without a model.
        """
        if (self.paths or self.is_training) and not self.model:
            raise UsageError("--path and --training are of a model", "add --model")
        world_sizes = default_gpus if self.gpus is None else parse_counts(self.gpus)
        if self.tp is not None and self.gpus is not None and world_sizes != (self.tp,):
            raise UsageError(
                f"--tp {self.tp} and --gpus {self.gpus} differ",
                "--gpus alone splits the model over each",
            )
        op = self.op or (None if self.model else DEFAULT_OP)
        return ShapeRequest(
            tuple(self.shapes or ()),
            self.model,
            self.tp,
            world_sizes,
            self.dtype,
            op,
            allows_others=self.gpus is None,
            paths=parse_paths(self.paths or "tp"),
            is_training=self.is_training,
        )

    def ranks_of_model(self, default_gpus: tuple[int, ...]) -> int:
        """The number of ranks that a whole model is split over; see :meth:`request`.

        Raises:
            UsageError: there are several.
        """
        ranks, *others = self.request(default_gpus).world_sizes
        if others:
            raise UsageError(f"--gpus {self.gpus}: a model is split over one number", "--gpus 2")
        return ranks

    def operations(self, request: ShapeRequest, variants: Iterable[str] = ()) -> list[str]:
        """The operation of `--op`; without it those of the shapes and the model, else the default.

        Raises:
            UsageError: there is no such operation, one lacks a variant of `--variant`, a file is
                not a list of shapes, or the model's config is invalid.
        """
        ops = [self.op] if self.op is not None else operations(request, DEFAULT_OP)
        for op in ops:
            require_variants(op, variants)
        return ops

    def picks(self) -> Callable[[str, dict[str, Any]], bool]:
        """A test of recorded problems: what was given must hold, and all hold if nothing was.

        Raises:
            UsageError: the shapes, the counts or the operation are invalid.
        """
        world_sizes = () if self.gpus is None else parse_counts(self.gpus)
        if self.op is not None:
            require_operation(self.op)
        wanted = {}
        if self.shapes:
            request = self.request(world_sizes or MODELLED_GPUS)
            wanted = {
                op: [asdict(problem) for problem in expand(op, request)]
                for op in self.operations(request)
            }
        free = ("world_size",) * (not world_sizes) + ("dtype",) * (self.dtype is None)
        dtype = DTYPE_ALIASES.get(self.dtype or "", self.dtype)

        def identity(problem: dict[str, Any]) -> dict[str, Any]:
            return {name: value for name, value in problem.items() if name not in free}

        def is_picked(op: str, problem: dict[str, Any]) -> bool:
            return (
                self.op in (None, op)
                and (not world_sizes or problem["world_size"] in world_sizes)
                and dtype in (None, problem["dtype"])
                and (not self.shapes or identity(problem) in map(identity, wanted.get(op, ())))
            )

        return is_picked


def refuse(values: Mapping[str, object], why: str, hint: str) -> None:
    """Refuse options that were given to a command for which they are not.

    Raises:
        UsageError: naming the first.
    """
    name = next((name for name, value in values.items() if value), None)
    if name is not None:
        raise UsageError(f"{name} {why}", hint)


def note_left_out(request: ShapeRequest) -> None:
    """Say which layers of the model no operation serves, and why; and a dtype nobody named."""
    if is_without_dtype(request):
        note("the model's config says no dtype: float16 is listed; --dtype lists another")
    for op, reason in left_out(request):
        note(f"{op} leaves out {reason}")


def known_hardware(name: str) -> Hardware:
    """A GPU by the name of `--hardware`.

    Raises:
        UsageError: it is not known.
    """
    if name.lower() not in KNOWN:
        raise UsageError(f"unknown hardware {name!r}", f"one of: {', '.join(KNOWN)}")
    return KNOWN[name.lower()]
