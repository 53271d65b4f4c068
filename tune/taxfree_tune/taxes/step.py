"""The account of a decode step in one kernel: what its time is, by the clocks of its programs.

Warps that compute wait for what others hand on. Of each hand-off, the program that waits least was
the last to finish: its wait is the hand-off itself, and what the others wait longer is the tail of
the phase. The rest is work, which takes at least as long as its bytes at the rate of memory; keys
and weights also arrive while these warps wait, so work may be shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_WAITS = ("counted", "waited", "x of qkv", "x of gate")  # events that end one


@dataclass(frozen=True)
class StepAccount:
    """In microseconds, means over programs.

    Args:
        total_us: of a step, in a graph where there are graphs.
        bytes_us: weights and cache at the measured rate of memory.
        hand_offs_us, tails_us: see the module.
        phases: work of each phase in all layers, and of the head.
    """

    total_us: float
    bytes_us: float
    hand_offs_us: float
    tails_us: float
    phases: dict[str, float]

    @property
    def rest_us(self) -> float:
        """Before the first event and after the last: launch, embedding, largest logit."""
        return self.total_us - self.hand_offs_us - self.tails_us - sum(self.phases.values())


def account(
    times: torch.Tensor, events: Sequence[str], total_us: float, bytes_us: float, clock_ghz: float
) -> StepAccount:
    """The account of one step.

    Args:
        times: int64 [programs, layers + 1, events], cycles of each program's own clock; the head,
            behind the last layer, has the first two events.
        events: their names; see ``tape.EVENTS``.
        clock_ghz: of these cycles.
    """
    programs, rows, count = times.shape
    flat = times.reshape(programs, rows * count)[:, : (rows - 1) * count + 2].double()
    spans = (flat[:, 1:] - flat[:, :-1]) / (1e3 * clock_ghz)  # [programs, ends of spans]
    hand_offs = tails = 0.0
    phases: dict[str, float] = {}
    for index, span in enumerate(spans.unbind(1), 1):
        name = events[index % count]
        if name in _WAITS:
            least = float(span.min())
            hand_offs += least
            tails += float(span.mean()) - least
        else:
            name = "head" if index // count == rows - 1 else name
            phases[name] = phases.get(name, 0.0) + float(span.mean())
    return StepAccount(total_us, bytes_us, hand_offs, tails, phases)
