"""Operations, problems, variants and plans, for the tuner, the dispatcher and the reports.

An operation is a mathematical contract, a problem its dimensions, a variant one way to compute it,
and a plan a variant made on a fabric for one problem and config; it is called once it is ready. A
variant is a module in the operation's folder, or below, that defines ``VARIANT``; it is discovered
there, without a registry.
"""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeVar

from taxfree_kernels.errors import PlanError
from taxfree_kernels.hardware import Hardware, fp8_of

if TYPE_CHECKING:
    import torch

    from taxfree_kernels.fabric.base import Fabric
    from taxfree_kernels.launch import Kernel, Launcher

Config = Mapping[str, Any]
Space = Mapping[str, tuple[Any, ...]]
_P = TypeVar("_P", bound="Problem")

DTYPES = ("float16", "bfloat16")
LEAST_HEAD_DIM, MOST_HEAD_DIM = 16, 256
ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
#: of partial sums on their way
WIRE_BYTES = ITEM_BYTES | {"fp8": 1}
#: of fp8 operands: who has a scale; see :mod:`taxfree_kernels.fp8`
SCALES = ("tensor", "channel", "block")
#: the same of keys and values
KV_SCALES = ("tensor", "head")
BLOCK = 128  # elements that share a scale, along a dimension
#: relative, of the norm of partial sums that travel in fp8; theirs is 0.028, an element's to 0.0625
ERROR_OF_FP8_WIRE = 2.0**-5
LEAST_SCALE = 2.0**-126  # so that of zeros: the smallest normal float32


def groups_of(k: int, scales: str) -> int:
    """Scales of a token of k elements in fp8: none of its own where a tensor has one."""
    return {"channel": 1, "block": -(-k // BLOCK)}.get(scales, 0)


@dataclass(frozen=True)
class Cost:
    """The work of one call on one rank; it does not depend on the variant.

    Args:
        flops: floating-point operations.
        memory_bytes: of device memory, each input read once and each output written once.
        link_bytes: that this rank has to receive from its peers.
    """

    flops: int
    memory_bytes: int
    link_bytes: int


class Problem(ABC):
    """Dimensions of an operation. Each subclass is a frozen dataclass that imports no torch."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    world_size: int
    dtype: str

    if TYPE_CHECKING:

        def __init__(self, *dimensions: Any, **named: Any) -> None: ...

    @property
    @abstractmethod
    def cost(self) -> Cost:
        """The work per call of the slowest rank."""

    @property
    @abstractmethod
    def slot_bytes(self) -> int:
        """Symmetric memory that a call of any variant needs in one payload slot."""

    def _require(self, *sizes: str, dtypes: Sequence[str] = DTYPES) -> None:
        """Check that these sizes are positive, and the fields that all problems have."""
        for name in (*sizes, "world_size"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} is {getattr(self, name)}, must be at least 1")
        if self.dtype not in dtypes:
            raise PlanError(f"dtype {self.dtype} is not one of {', '.join(dtypes)}")

    @property
    def permitted_error(self) -> float:
        """What callers permit besides the library's error, relative to the result's norm."""
        return 0.0

    def for_rows(self, first: int, last: int) -> SizeRange:
        """This problem for each number of rows from `first` to `last`, for ``Runtime.prepare``.

        For attention, rows are sequences.
        """
        return SizeRange(self, first, last)


class MatmulProblem(Problem):
    """A matmul [m, k] @ [k, n] before or after a collective.

    Attributes:
        x_dtype: that of x and of the weight: "same" as all tensors, or "fp8".
        scales: who has a scale in fp8, one of ``SCALES``; else "none".
        fast_accumulation: whether fp8 products are added as the device's matrix instructions do,
            over all of k: faster, and on Hopper with about 14 bits. Else see docs/fp8.md.

    Raises:
        PlanError: on impossible dimensions.
    """

    m: int
    n: int
    k: int
    weight_layout: str
    x_dtype: str = "same"
    scales: str = "none"
    fast_accumulation: bool = False

    @property
    def is_fp8(self) -> bool:
        """Whether x and the weight are in fp8, with scales."""
        return self.x_dtype == "fp8"

    def factor_dtype(self, architecture: str) -> str:
        """The dtype of x and of the weight on an architecture, as torch names it."""
        return fp8_of(architecture) if self.is_fp8 else self.dtype

    @property
    def factor_bytes(self) -> int:
        """Bytes of an element of x and of the weight."""
        return 1 if self.is_fp8 else ITEM_BYTES[self.dtype]

    @property
    def scale_bytes(self) -> int:
        """Bytes of all scales of x and of the weight."""
        groups = -(-self.k // BLOCK)
        counts = {
            "tensor": 2,
            "channel": self.m + self.n,
            "block": groups * (self.m + -(-self.n // BLOCK)),
        }
        return 4 * counts.get(self.scales, 0)

    def __post_init__(self) -> None:
        self._require("m", "n", "k")
        if self.weight_layout not in ("nk", "kn"):
            raise PlanError(f"weight_layout is {self.weight_layout!r}, must be 'nk' or 'kn'")
        if self.x_dtype not in ("same", "fp8"):
            raise PlanError(f"x_dtype is {self.x_dtype!r}, must be 'same' or 'fp8'")
        scales = SCALES if self.is_fp8 else ("none",)
        if self.scales not in scales:
            raise PlanError(
                f"scales is {self.scales!r}, with x_dtype {self.x_dtype} one of {', '.join(scales)}"
            )
        if self.is_fp8 and self.weight_layout != "nk":
            raise PlanError("matrix instructions read fp8 weights whose k is contiguous")
        if self.fast_accumulation and self.scales not in ("tensor", "channel"):
            raise PlanError(
                "fast_accumulation adds fp8 products before they are scaled",
                "scales of tensors or channels; those of blocks are applied block by block",
            )


class HeadsProblem(Problem):
    """Attention; each kv head serves q_heads / kv_heads query heads.

    Attributes:
        kv_scales: who has a scale in keys and values in fp8: "tensor", or "head" for each kv head;
            "none" if they have the dtype of the queries.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    kv_scales: str = "none"

    @property
    def kv_bytes(self) -> int:
        """Bytes of an element of keys and values."""
        return ITEM_BYTES[self.dtype] if self.kv_scales == "none" else 1

    def _require(self, *sizes: str, head_dims: Sequence[str] = ("head_dim",)) -> None:
        super()._require(*sizes, "q_heads", "kv_heads")
        if self.kv_scales not in ("none", *KV_SCALES):
            allowed = ", ".join(("none", *KV_SCALES))
            raise PlanError(f"kv_scales is {self.kv_scales!r}, must be one of {allowed}")
        for name in head_dims:
            if not LEAST_HEAD_DIM <= getattr(self, name) <= MOST_HEAD_DIM:
                between = f"from {LEAST_HEAD_DIM} to {MOST_HEAD_DIM}"
                raise PlanError(f"{name} is {getattr(self, name)}, must be {between}")
        if self.q_heads % self.kv_heads:
            raise PlanError(
                f"q_heads={self.q_heads} is not divisible by kv_heads={self.kv_heads}",
                "each kv head serves the same number of query heads",
            )


class PartialSum(MatmulProblem):
    """A matmul in which each rank computes a partial sum.

    Attributes:
        bias, residual, rms_norm: whether the sum is finished with these.
        out_scales: who has a scale in the normalised sum, if it is quantised to fp8: one of
            ``SCALES``, where that of "tensor" is given; else "none".
        fp8_wire: whether partial sums may travel in fp8, see docs/fp8.md.
        scatter_dim: the dimension of the sum that ranks split, if they do.
    """

    WIDE_ELEMENTS: ClassVar[int]  # of the largest sum whose parts may travel as float32

    bias: bool = False
    residual: bool = False
    rms_norm: bool = False
    out_scales: str = "none"
    fp8_wire: bool = False
    scatter_dim: int = 0

    @property
    def elements(self) -> int:
        """Elements of the whole sum, and of each rank's partial sum."""
        return self.m * self.n

    @property
    def permitted_error(self) -> float:
        return ERROR_OF_FP8_WIRE * self.fp8_wire

    @property
    @abstractmethod
    def kept_elements(self) -> int:
        """Elements of the rank's result."""

    @property
    def wires(self) -> tuple[str, ...]:
        """The types in which partial sums may be sent."""
        wide = ("float32",) if self.elements <= self.WIDE_ELEMENTS else ()
        return (self.dtype, *wide)


def own_rows(m: int, shard_dim: int, world_size: int, rank: int) -> int:
    """Rows of a rank's shard that are below M; see :class:`Sharded`."""
    if shard_dim == 1:
        return m
    full = -(-m // world_size)
    return max(0, min(m - rank * full, full))


class Sharded(MatmulProblem):
    """A matmul in which each rank holds a shard of A, or keeps a shard of the result.

    Shards of rows are equal, but those at the end of a ragged M have fewer rows or none.
    """

    @property
    @abstractmethod
    def shard_dim(self) -> int:
        """The dimension that the ranks split: 0 (rows) or 1 (columns)."""

    @property
    def shard_rows(self) -> int:
        """Rows of a full shard."""
        return self.m if self.shard_dim == 1 else -(-self.m // self.world_size)

    @property
    @abstractmethod
    def shard_columns(self) -> int:
        """Columns of a shard."""

    def rows_of(self, rank: int) -> int:
        """Rows of the shard of `rank` that are below M."""
        return own_rows(self.m, self.shard_dim, self.world_size, rank)


@dataclass(frozen=True)
class Step:
    """A part of a call; parts run one after another.

    Args:
        name: the name in reports.
        kind: "producer" of the data that is sent; "collective"; "copy", which a fused kernel does
            not need; "consumer" of the gathered data; "fused": communicates and computes together.
        run: launches it.
        latency_probe: launches the same collective on the least data it accepts; None if there is
            none.
        reads: the intermediate that a consumer reads; None for other kinds.
        memory_bytes: bytes that a copy reads and writes, or a consumer reads of the intermediate.
    """

    name: str
    kind: Literal["producer", "collective", "copy", "consumer", "fused"]
    run: Callable[[], Any]
    latency_probe: Callable[[], Any] | None = None
    reads: torch.Tensor | None = None
    memory_bytes: int = 0


class Plan(ABC):
    """A variant made for one fabric, for a problem and for the same problem with fewer rows.

    The size of a call (rows, or sequences) is read from its tensors. Constants of kernels depend on
    the problem, run-time arguments on the call. Making a plan calls no peer and takes its scratch
    memory from the fabric's workspace. It is called through :class:`Ready` alone, once all ranks
    have made it.
    """

    #: kernels that one call of the problem's size launches, collectives counted as one.
    launches: int = 1

    def connect(self) -> None:  # noqa: B027  most have nothing to do
        """Set up with all peers, once, before the first call; collective.

        Raises:
            PlanError: this machine does not support it.
        """

    @property
    def connects(self) -> bool:
        """Whether it has something to set up with its peers."""
        return type(self).connect is not Plan.connect

    def kernels(self, size: int) -> tuple[Kernel, ...]:
        """The kernels of this package that a call of this size launches."""
        return ()

    def compile(
        self, size: int, *tensors: torch.Tensor | None, launcher: Launcher | None = None
    ) -> None:
        """Compile what a call of this size, on such tensors, launches; run nothing, call no peer.

        A plan without kernels of this package is not run: it may need its peers to be connected.

        Args:
            launcher: gets each kernel in place of the compiler.
        """
        from taxfree_kernels.launch import compiling, launching_through  # they import triton

        if self.kernels(size):
            with compiling() if launcher is None else launching_through(launcher):
                self.run(*tensors)

    @abstractmethod
    def run(self, *tensors: torch.Tensor | None) -> torch.Tensor:
        """Run on the operation's inputs; the last argument is the output, which is returned.

        It does not synchronise with the host, and can be captured in a graph.
        """

    def steps(self, *tensors: torch.Tensor | None) -> list[Step]:
        """The parts of a call on these tensors, in order, so that reports can time each."""
        return [Step("kernel", "fused", lambda: self.run(*tensors))]


class Ready:
    """A plan that can be called, because it is connected; see ``taxfree._runtime.ready``.

    Args:
        plan: made on all ranks; connected here, which is collective if it :attr:`Plan.connects`.
    """

    def __init__(self, plan: Plan) -> None:
        plan.connect()
        self.plan = plan
        self.launches, self.steps, self.run = plan.launches, plan.steps, plan.run

    def __call__(self, *tensors: torch.Tensor | None) -> torch.Tensor:
        """Run on the operation's inputs; the last argument is the output, which is returned."""
        return self.run(*tensors)


class Variant:
    """One way to compute an operation."""

    #: its name in tables, configs and the command line: that of its module
    name: ClassVar[str]

    #: of its plans: made of a problem, a fabric and a config
    plan_class: ClassVar[type[Plan]]

    #: raised, with the reason beside it, by a change after which other configs may be the fastest.
    #: Measurements name it: those of another version are transferred like those of a neighbour.
    version: ClassVar[int] = 1

    #: whether it overlaps communication with computation and calls no collective, so that a single
    #: rank can compile its plans. False for library paths and for our stand-alone collectives.
    fused: ClassVar[bool] = True

    #: whether it runs the library's kernels and collectives; gains are over the fastest of these.
    is_library: ClassVar[bool] = False

    #: whether copy engines move what it sends: a call is a launch for each copy and its signal.
    copies: ClassVar[bool] = False

    #: whether it serves ranks of several nodes; the kernels of fused variants cannot.
    spans_nodes: ClassVar[bool] = False

    #: whether a search tries it without being asked by name. False for the paper's steps that are
    #: the fastest nowhere, which are kept to show the gain of each: the folders ``paper``.
    searched: ClassVar[bool] = True

    #: whether programs of a launch wait for any others of it, so that all must run at the same
    #: time: the launch is cooperative. Others only wait for programs with lower ids.
    co_resident: ClassVar[bool] = False

    #: payload slots that calls alternate between; the checker runs until the first is reused.
    slots: ClassVar[int] = 2

    def __init_subclass__(cls) -> None:
        if "name" not in cls.__dict__:
            cls.name = cls.__module__.rpartition(".")[2]

    def unsupported_reason(self, problem: Problem, hardware: Hardware) -> str | None:
        """The reason why this variant cannot serve `problem` on `hardware`, or None."""
        return None

    def space(self, problem: Any, hardware: Hardware) -> Space:
        """Meta-parameter -> values to search. A variant without any has one config, ``{}``."""
        return {}

    def seed_configs(self, problem: Any, hardware: Hardware) -> list[dict[str, Any]]:
        """Configs that are tried first; the first one is the default for an untuned problem."""
        return [{name: values[0] for name, values in self.space(problem, hardware).items()}]

    def illegal_reason(self, problem: Any, hardware: Hardware, config: Config) -> str | None:
        """The reason not to compile `config` for `problem`, or None."""
        return None

    def serves_several_weights(self, problem: Problem) -> bool:
        """Whether the record of `problem` also serves calls of several weights, by this variant.

        Other variants cannot run such calls, so the tuner times the fastest of these in its finals.
        """
        return False

    def signals(self, problem: Problem, config: Config) -> Signals | None:
        """The signals of a call, for accounts; None where a variant does not state them."""
        return None

    def plan(self, problem: Problem, fabric: Fabric, config: Config) -> Plan:
        """Make a plan; calls no peer.

        Raises:
            PlanError: the fabric or its heap cannot hold it.
        """
        return self.plan_class(problem, fabric, config)  # type: ignore[call-arg]


class Signals(NamedTuple):
    """The programs of a rank that send to peers in a call, and its releases at system scope.

    Args:
        programs: number of programs that have something to signal.
        releases: number of signals, each to one rank or to all; fewer if programs share them.
    """

    programs: int
    releases: int


@dataclass(frozen=True)
class Operation:
    """A mathematical contract, with the inputs and the reference to test any variant of it.

    Args:
        name: the name of the folder.
        problem: the frozen dataclass of its dimensions.
        interpolated_fields: problem fields in which a record may differ and still serve.
        make_inputs: (problem, rank, seed, device, integers) -> the rank's tensors; small integers
            give results that are exact in any order of summation.
        reference: (problem, rank, seed, device, integers) -> the rank's result in float64.
        empty_output: (problem, device) -> an uninitialised output.
        result: (problem, output) -> what is compared with the reference: the output itself, or a
            tensor of its own made of it.
        ignored_fields: fields that rarely change which config is fastest; a record may differ in
            them and still serve. The dtype is one: both 16-bit types multiply at the same rate.
        family_fields: sizes in which results may differ and still tell the library's fastest path.
        first_variants: (problem) -> names of variants that win on such problems, in graphs or in
            eager calls, most promising first; a search begins with them.
        shared: how many of the first inputs timed calls share, because a call reads a small part of
            them, and another part with other inputs: embedding tables.
        vendor_kernel: (problem, device) -> a function of the inputs and the output that runs the
            vendor's kernel alone, on data that need not be exchanged; or None if the vendor has
            none for the problem.
    """

    name: str
    problem: type[Problem]
    interpolated_fields: tuple[str, ...]
    make_inputs: Callable[..., tuple[torch.Tensor | None, ...]]
    reference: Callable[..., torch.Tensor]
    empty_output: Callable[..., torch.Tensor]
    result: Callable[..., torch.Tensor] = lambda problem, out: out
    ignored_fields: tuple[str, ...] = ()
    family_fields: tuple[str, ...] = ()
    first_variants: Callable[..., Sequence[str]] = lambda problem: ()
    shared: int = 0
    vendor_kernel: Callable[..., Callable[..., torch.Tensor] | None] | None = None


@dataclass(frozen=True)
class Shapes:
    """Shapes of an operation that have names, and problems that checks run on.

    Args:
        tiny: world size -> problems that, together, execute every synchronising line, including
            shards without rows, several tiles, and a K that is no multiple of a block.
        aligned: problems to compile: few rows, many rows, the other layouts. All rows start at
            multiples of 16 bytes, so that accesses can be wide.
        ragged: more problems to compile, whose rows do not start at such multiples.
        smallest: problems for which compilers specialise arguments to the constant 1.
        shorthand: the fields of `1x2x3`, in order.
        sets: named sets, each a list of shapes as users write them.
        scaling: named sets that depend on the number of ranks: world size -> shapes.
        model_role: what the operation does in a tensor-parallel model: sum what row-parallel layers
            compute, gather rows before a layer or scatter them behind it, attend to a cache that is
            sharded by sequence, or let prompts attend.
        model_axes: fields that a model's config does not determine.
    """

    tiny: Callable[[int], Sequence[Problem]]
    aligned: tuple[Problem, ...]
    ragged: tuple[Problem, ...] = ()
    smallest: tuple[Problem, ...] = ()
    shorthand: tuple[str, ...] = ()
    sets: Mapping[str, Sequence[str]] = field(default_factory=dict)
    scaling: Mapping[str, Callable[[int], list[str]]] = field(default_factory=dict)
    model_role: Literal["sum", "gather_rows", "scatter_rows", "decode", "prompt"] | None = None
    model_axes: str = ""


def operation_names() -> list[str]:
    """Names of all operations: the folders of this package that define problems."""
    package = importlib.import_module("taxfree_kernels")
    return sorted(
        problems.parent.name
        for root in package.__path__
        for problems in Path(root).glob("*/problem.py")
    )


@cache
def problem_class(op: str) -> type[Problem]:
    """The dataclass of an operation's problems; imports no torch.

    Raises:
        PlanError: there is no such operation.
    """
    if op not in operation_names():
        raise PlanError(f"unknown op {op!r}", f"one of: {', '.join(operation_names())}")
    problem: type[Problem] = importlib.import_module(f"taxfree_kernels.{op}.problem").PROBLEM
    return problem


def operation_shapes(op: str) -> Shapes:
    """The shapes of an operation; imports no torch.

    Raises:
        PlanError: there is no such operation.
    """
    problem_class(op)
    shapes: Shapes = importlib.import_module(f"taxfree_kernels.{op}.shapes").SHAPES
    return shapes


@dataclass(frozen=True)
class SizeRange:
    """A problem of several sizes, to be planned at once.

    Args:
        problem: of any size.
        first, last: rows, or sequences; None for the problem's own.
    """

    problem: Problem
    first: int | None = None
    last: int | None = None

    def __post_init__(self) -> None:
        first, last = self.bounds
        if not 0 <= first <= last:
            raise PlanError(f"sizes from {first} to {last}", "give 0 <= first <= last")

    @property
    def bounds(self) -> tuple[int, int]:
        """The first and the last size; size 0 needs no plan."""
        size: int = getattr(self.problem, operation(op_of(self.problem)).interpolated_fields[0])
        first = size if self.first is None else self.first
        last = size if self.last is None else self.last
        return (first, last)


def resized(problem: _P, **sizes: int) -> _P:
    """The same problem with another size, without validation."""
    other = object.__new__(type(problem))
    other.__dict__.update(problem.__dict__, **sizes)
    return other


def op_of(problem: Problem) -> str:
    """The operation that a problem belongs to: the folder that defines its class."""
    return type(problem).__module__.split(".")[-2]


@cache
def operation(op: str) -> Operation:
    """An operation by name.

    Raises:
        PlanError: there is no such operation.
    """
    problem_class(op)
    loaded: Operation = importlib.import_module(f"taxfree_kernels.{op}.operation").OPERATION
    return loaded


@cache
def variants(op: str) -> Mapping[str, Variant]:
    """All variants of an operation, ``baseline`` first, then by name."""
    problem_class(op)
    by_name = {variant.name: variant for variant in _discover(f"taxfree_kernels.{op}")}
    return dict(sorted(by_name.items(), key=lambda item: (item[0] != "baseline", item[0])))


def is_library(op: str, name: str) -> bool:
    """Whether a variant of an operation is the library's; one that no longer exists is not."""
    variant = variants(op).get(name)
    return variant is not None and variant.is_library


def unsupported_reason(variant: Variant, problem: Problem, hardware: Hardware) -> str | None:
    """The reason why a variant cannot serve a problem on the ranks' devices and nodes, or None."""
    if hardware.nodes > 1 and not (variant.spans_nodes or variant.name == "baseline"):
        return "its ranks must be on one node"
    return variant.unsupported_reason(problem, hardware)


def _discover(package: str) -> Iterator[Variant]:
    path = importlib.import_module(package).__path__
    for module in pkgutil.walk_packages(path, f"{package}."):
        variant = getattr(importlib.import_module(module.name), "VARIANT", None)
        if variant is not None:
            if variant.name != module.name.rpartition(".")[2]:
                raise TypeError(f"{module.name}: VARIANT has the name {variant.name!r}")
            yield variant
