"""What a call takes: the sum of a variant's pieces, and the account of its taxes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from taxfree.cost_model.decode import FLASH_DECODE
from taxfree.cost_model.gather import ALL_GATHER_MATMUL
from taxfree.cost_model.machines import Machine
from taxfree.cost_model.pieces import Config, Formula, Piece, vendor_us
from taxfree.cost_model.sums import MATMUL_ALL_REDUCE, MATMUL_REDUCE_SCATTER
from taxfree.errors import UsageError
from taxfree.measuring.bounds import Bounds, Peaks, bounds
from taxfree.taxes import INSIDE, Account, Part, Tax
from taxfree_kernels.variant import op_of

FORMULAS: dict[str, dict[str, Formula]] = {
    "all_gather_matmul": ALL_GATHER_MATMUL,
    "matmul_all_reduce": MATMUL_ALL_REDUCE,
    "matmul_reduce_scatter": MATMUL_REDUCE_SCATTER,
    "flash_decode": FLASH_DECODE,
}


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
        return sum(piece.kernels for piece in self.pieces)


def times(machine: Machine, problem: Any, variant: str, config: Config) -> Times:
    """A variant's times.

    Args:
        config: the variant's meta-parameters.

    Raises:
        UsageError: there is no model of the variant.
    """
    op = op_of(problem)
    if variant not in modelled_variants(op):
        raise UsageError(
            f"no cost model of {variant} of {op}",
            f"{op} has one of: {', '.join(modelled_variants(op))}",
        )
    pieces = tuple(FORMULAS[op][variant](machine, problem, config))
    graph = sum(piece.us for piece in pieces) + machine.gap_us * (len(pieces) - 1)
    host = machine.host_call_us + sum(piece.host_us for piece in pieces)
    return Times(pieces, graph, max(graph, host))


def modelled_variants(op: str) -> tuple[str, ...]:
    """The variants of an operation that have a model."""
    return tuple(FORMULAS.get(op, ()))


def bounds_of(machine: Machine, problem: Any) -> Bounds:
    """The bounds of a problem at a machine's rates."""
    peaks = Peaks(machine.flops_per_s, machine.memory_bytes_per_s, machine.link_bytes_per_s)
    return bounds(problem.cost, peaks, vendor_us(machine, problem))


@dataclass(frozen=True)
class Modelled:
    """A modelled account, and the kernels of a call."""

    account: Account
    kernels: int


def modelled(machine: Machine, problem: Any, variant: str, config: Config) -> Modelled:
    """The account of the taxes that a variant pays; each part says that it is modelled."""
    found = times(machine, problem, variant, config)
    limits = bounds_of(machine, problem)
    gaps = machine.gap_us * (len(found.pieces) - 1)
    parts = [
        _part("host", "launch", found.t_eager_us - found.t_graph_us, "host time beyond t_graph"),
        _part("gaps", "launch", gaps, f"{len(found.pieces) - 1} x {machine.gap_us:.1f} us"),
    ]
    collectives = [piece for piece in found.pieces if piece.kind == "collective"]
    copies = [piece for piece in found.pieces if piece.kind == "copy"]
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
    account = Account(
        0, found.t_eager_us, found.t_graph_us, limits.t_bound_us, tuple(parts), None,
        "" if collectives else INSIDE,
    )  # fmt: skip
    return Modelled(account, found.kernels)


def _part(name: str, tax: Tax, us: float, formula: str, memory_bytes: int = 0) -> Part:
    return Part(name, tax, us, None, f"modelled: {formula}", memory_bytes)
