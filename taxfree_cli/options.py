"""The options that commands share, each declared once with its help."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import typer

from taxfree.errors import UsageError
from taxfree.shapes import ShapeRequest, operations, parse_counts, require_operation
from taxfree_kernels.variant import operation_names
from taxfree_tuning_db import default_path

DEFAULT_OP = "all_gather_matmul"
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
        help="Operation; without it, all operations of the shape files.",
        show_default=DEFAULT_OP,
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
    Path | None,
    typer.Option(
        "--model",
        metavar="PATH",
        help="Hugging Face config; its matmuls are the shapes.",
    ),
]
Tp: TypeAlias = Annotated[
    int | None,
    typer.Option("--tp", metavar="RANKS", min=1, help="Tensor-parallel size of the model."),
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
    _FabricName | None, typer.Option("--fabric", help=_FABRIC_HELP, show_default="auto")
]
Db: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--db",
        metavar="PATH",
        help="Tuning database; default: TAXFREE_DB, else in the user data folder.",
    ),
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


def shape_request(
    shapes: list[str] | None,
    model: Path | None,
    tp: int | None,
    gpus: str | None,
    dtype: str | None,
    *,
    default_gpus: tuple[int, ...],
    op: str | None = None,
) -> ShapeRequest:
    """Return the request of the options on shapes.

    Args:
        shapes, model, tp, gpus, dtype: values of the options.
        default_gpus: world sizes without `--gpus`.
        op: of shapes without an operation; None for that of the command.

    Raises:
        UsageError: `--gpus` is not a list of numbers, or differs from `--tp`.
    """
    world_sizes = default_gpus if gpus is None else parse_counts(gpus)
    if tp is not None and gpus is not None and world_sizes != (tp,):
        raise UsageError(
            f"--tp {tp} and --gpus {gpus} differ", "--gpus alone splits the model over each"
        )
    return ShapeRequest(tuple(shapes or ()), model, tp, world_sizes, dtype, op)


def operations_of(
    op: str | None, shapes: list[str] | None, variants: Iterable[str] = ()
) -> list[str]:
    """The operation of `--op`; without it those of the shape files in `--shapes`, else the default.

    Raises:
        UsageError: there is no such operation, one lacks a variant of `--variant`, or a file is not
            a list of shapes.
    """
    ops = [op] if op is not None else operations(shapes or (), DEFAULT_OP) or [DEFAULT_OP]
    for each in ops:
        require_variants(each, variants)
    return ops
