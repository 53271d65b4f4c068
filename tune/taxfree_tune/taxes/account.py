"""The account of one rank: parts, the tax that each belongs to, and the residual."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Tax: TypeAlias = Literal["launch", "bulk synchronous", "locality", "graph penalty"]

TAXES: tuple[Tax, ...] = ("launch", "bulk synchronous", "locality", "graph penalty")
INSIDE = "what happens inside the kernels is in the residual"
NO_GRAPHS = "no graphs on this fabric: launches are in the residual"
NO_ACCOUNT = "no account"
ALLOWED = 0.1  # of t_eager, for the residual and for any negative part


@dataclass(frozen=True)
class Part:
    """A part of the time of a call.

    Args:
        name, tax: what it is, and the tax it belongs to.
        us: microseconds per call, the median over repetitions.
        iqr_us: distance of its quartiles; None where it is modelled.
        method: how it was found, in one line.
        memory_bytes: moved for it; 0 where no bytes belong to it.
    """

    name: str
    tax: Tax
    us: float
    iqr_us: float | None
    method: str
    memory_bytes: int = 0


@dataclass(frozen=True)
class Account:
    """The parts of one rank's time; all in microseconds per call.

    Args:
        rank: the rank.
        t_eager_us, t_graph_us, t_eager_iqr_us: of the rank, and the spread of its eager calls.
        t_bound_us: of the problem.
        parts: of the taxes, in order.
        residual_iqr_us: spread of the residual; None where it is modelled.
        unsplit: why taxes have no parts; empty if they have.
        no_account: why the parts do not add up to anything that can be believed; empty if they do.
        kernel_us: the share of the residual observed to be kernels' work beyond the bound; None if
            nothing was observed.
    """

    rank: int
    t_eager_us: float
    t_graph_us: float | None
    t_bound_us: float
    parts: tuple[Part, ...]
    residual_iqr_us: float | None
    unsplit: str = ""
    kernel_us: float | None = None
    t_eager_iqr_us: float | None = None
    no_account: str = ""

    def tax_us(self, tax: Tax) -> float | None:
        """The sum of a tax's parts; None where it has none."""
        parts = [part.us for part in self.parts if part.tax == tax]
        return sum(parts) if parts else None

    @property
    def residual_us(self) -> float:
        """Time beyond bound and taxes: kernel inefficiency, and what cannot be attributed."""
        return self.t_eager_us - self.t_bound_us - sum(part.us for part in self.parts)

    @property
    def unexplained_us(self) -> float | None:
        """The residual without the observed kernel work; None if nothing was observed."""
        return None if self.kernel_us is None else self.residual_us - self.kernel_us

    def problems(self) -> list[str]:
        """Reasons that the account is not closed, one line each."""
        if self.no_account:
            return [self.no_account]
        allowed = ALLOWED * self.t_eager_us
        wrong = [
            f"{part.name} is negative: {part.us:.1f} us"
            for part in self.parts
            if part.us < -allowed
        ]
        if abs(self.residual_us) > allowed:
            share = self.residual_us / self.t_eager_us
            text = f"the residual is {share:z.0%} of t_eager"
            if self.kernel_us is not None:
                kernels = self.kernel_us / self.t_eager_us
                text += f": kernel work {kernels:z.0%}, unexplained {share - kernels:z.0%}"
            wrong.append(text)
        return wrong

    def is_below_bound(self) -> bool:
        """Whether a time is less than the bound: then one of the two is wrong."""
        times = (self.t_eager_us, self.t_graph_us)
        return any(time is not None and time < self.t_bound_us for time in times)

    def to_json(self) -> dict[str, Any]:
        names = {"launch": "launch_us", "bulk synchronous": "bulk_synchronous_us"}
        names |= {"locality": "locality_us", "graph penalty": "graph_penalty_us"}
        return {
            "rank": self.rank,
            "t_eager_us": self.t_eager_us,
            "t_eager_iqr_us": self.t_eager_iqr_us,
            "t_graph_us": self.t_graph_us,
            "no_account": self.no_account,
            "t_bound_us": self.t_bound_us,
            **{names[tax]: self.tax_us(tax) for tax in TAXES},
            "residual_us": self.residual_us,
            "residual_iqr_us": self.residual_iqr_us,
            "kernel_us": self.kernel_us,
            "unexplained_us": self.unexplained_us,
            "parts": [dataclasses.asdict(part) for part in self.parts],
        }


def slowest(accounts: Sequence[Account]) -> Account:
    """The account of the rank whose eager calls take longest."""
    return max(accounts, key=lambda account: account.t_eager_us)


def stacked(row: Mapping[str, Any]) -> dict[str, float]:
    """The parts of an account as the parts of a bar, the lowest first, in microseconds.

    Args:
        row: of `explain --json`. The residual of the bar is without the observed kernel work. What
            is no account is one part.
    """
    if row.get("no_account"):
        return {NO_ACCOUNT: row["t_eager_us"]}
    kernels = row.get("kernel_us") or 0.0
    return {
        "bound": row["t_bound_us"],
        "kernel work": kernels,
        "residual": row["residual_us"] - kernels,
        "locality": row["locality_us"] or 0.0,
        "bulk synchronous": row["bulk_synchronous_us"] or 0.0,
        "launch": row["launch_us"] or 0.0,
        "graph penalty": row["graph_penalty_us"] or 0.0,
    }
