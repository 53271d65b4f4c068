"""Models the library's time on hardware that is not here, for `explain --hardware` and for bounds.

A call is a sequence of pieces, each a kernel or one call of the collective library. Times are in
microseconds, sizes in bytes, for one rank of W::

    matmul      = start + max(2 ceil(M, 64) N K / flops, its bytes / memory) + split
    collective  = latency + steps of a ring * step + received / rate
    rate of sums: 1 / rate = 1 / link + 1 / ((W - 1) summed)
    copy        = start + 2 * bytes / copy

The vendor's matmul splits K where its tiles (of 128 x 64) fill less than half of the compute units,
and then adds the parts: `split`, else 0. An operation's module in ``cost`` defines the pieces of
the library's paths, and

    t_graph = the pieces + gap * (pieces - 1)
    t_eager = max(t_graph, host)

where the host takes a fixed time per call, plus a cost for each thing it does: launching a kernel
of ours, calling a PyTorch op or the collective library. Skew, power and noise are not modelled, nor
are variants with kernels of ours: their limit is the bound. The rates of H200 were fitted to
measured rows; other machines are assumed to reach the same fractions of their data sheets, with the
same overheads: they are not measured (docs/cost-model.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec

from taxfree.errors import UsageError
from taxfree_kernels.variant import Problem, op_of, operation_names
from taxfree_tune.cost.machines import MACHINES, Machine
from taxfree_tune.cost.pieces import CostModel, Piece
from taxfree_tune.measuring.bounds import Bounds, Peaks, bounds
from taxfree_tune.taxes import INSIDE, Account, Part, Tax


def machine(name: str) -> Machine:
    """A machine by name.

    Raises:
        UsageError: there is no model of it.
    """
    if name not in MACHINES:
        raise UsageError(f"no cost model for {name!r}", f"one of: {', '.join(MACHINES)}")
    return MACHINES[name]


@dataclass(frozen=True)
class Times:
    """One variant on one problem, modelled; microseconds per call.

    Args:
        pieces: of a call, in order.
        t_graph_us, t_eager_us: of a call.
    """

    pieces: tuple[Piece, ...]
    t_graph_us: float
    t_eager_us: float

    @property
    def kernels(self) -> int:
        """Of a call, collectives counted as one."""
        return len(self.pieces)


def times(machine: Machine, problem: Problem, variant: str) -> Times:
    """A variant's times.

    Raises:
        UsageError: there is no model of the variant.
    """
    op = op_of(problem)
    if variant not in modelled_variants(op):
        others = [name for name in operation_names() if modelled_variants(name)]
        raise UsageError(
            f"no cost model of {variant} of {op}",
            f"{op} has one of: {', '.join(modelled_variants(op))}"
            if op in others
            else f"operations that have one: {', '.join(others)}",
        )
    pieces = tuple(_model(op).variants[variant](machine, problem))
    graph = sum(piece.us for piece in pieces) + machine.gap_us * (len(pieces) - 1)
    host = machine.host_call_us + sum(piece.host_us for piece in pieces)
    return Times(pieces, graph, max(graph, host))


@cache
def _model(op: str) -> CostModel:
    """The formulas of an operation; none where `cost` has no module of its name."""
    module = f"taxfree_tune.cost.{op}"
    if find_spec(module) is None:
        return CostModel({})
    model: CostModel = import_module(module).COST
    return model


def modelled_variants(op: str) -> tuple[str, ...]:
    """The variants of an operation that have a model: the library's paths."""
    return tuple(_model(op).variants)


def vendor_us(machine: Machine, problem: Problem) -> float | None:
    """The vendor's kernel on what a rank computes itself; None where it is not modelled."""
    modelled_us = _model(op_of(problem)).vendor_us
    return modelled_us and modelled_us(machine, problem)


def bounds_of(machine: Machine, problem: Problem) -> Bounds:
    """The bounds of a problem at a machine's rates."""
    peaks = Peaks(machine.rate_of(problem), machine.memory_bytes_per_s, machine.link_bytes_per_s)
    return bounds(problem.cost, peaks, vendor_us(machine, problem))


def modelled(machine: Machine, problem: Problem, variant: str) -> Account:
    """The account of the taxes that a variant pays; each part says that it is modelled."""
    pieces = times(machine, problem, variant)
    limits = bounds_of(machine, problem)
    gaps = machine.gap_us * (len(pieces.pieces) - 1)
    parts = [
        _part("host", "launch", pieces.t_eager_us - pieces.t_graph_us, "host time beyond t_graph"),
        _part("gaps", "launch", gaps, f"{len(pieces.pieces) - 1} x {machine.gap_us:.1f} us"),
    ]
    collectives = [piece for piece in pieces.pieces if piece.kind == "collective"]
    copies = [piece for piece in pieces.pieces if piece.kind == "copy"]
    if collectives:
        exposed = max(0.0, limits.t_link_us - limits.t_floor_us)
        latency = sum(piece.latency_us for piece in collectives)
        transfer = sum(piece.us for piece in collectives) - latency - exposed
        bulk: Tax = "bulk synchronous"
        parts.append(_part("latency", bulk, latency, "of the collective"))
        parts.append(_part("transfer", bulk, transfer, "bytes to receive / rate"))
    if copies:
        size = round(sum(piece.memory_bytes for piece in copies))
        copied = sum(piece.us for piece in copies)
        parts.append(_part("copies", "locality", copied, "start + bytes / rate", size))
    return Account(
        0, pieces.t_eager_us, pieces.t_graph_us, limits.t_bound_us, tuple(parts), None,
        "" if collectives else INSIDE,
    )  # fmt: skip


def _part(name: str, tax: Tax, us: float, formula: str, memory_bytes: int = 0) -> Part:
    return Part(name, tax, us, None, f"modelled: {formula}", memory_bytes)
