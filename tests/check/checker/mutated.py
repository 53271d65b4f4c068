"""The mutated functions, the checks that should report each mutant, and harmless mutants."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

from taxfree_check.checker import MIXED, STEP, Violation, check_variant, steps
from taxfree_check.checker.check import WORLD_SIZES
from taxfree_kernels import copies
from taxfree_kernels.all_gather_matmul import (
    fused as gathered,
)
from taxfree_kernels.all_gather_matmul import (
    one_shot,
    overlap,
    pull,
    push,
    push_tma,
)
from taxfree_kernels.all_gather_matmul.paper import push_two_kernel
from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_kernels.decode_step import twin
from taxfree_kernels.device import packets, sync
from taxfree_kernels.embedding_all_to_all import push as embedding_push
from taxfree_kernels.flash_decode import exchange as decode_exchange
from taxfree_kernels.flash_decode import fine_wait, fused
from taxfree_kernels.flash_decode import plans as decode_plans
from taxfree_kernels.flash_decode.paper import gather, persistent
from taxfree_kernels.matmul_all_reduce import push as sum_push
from taxfree_kernels.matmul_all_reduce import push_in_place as sum_in_place
from taxfree_kernels.matmul_all_reduce import push_lamport as sum_push_lamport
from taxfree_kernels.matmul_all_reduce import push_two_shot as sum_push_two_shot
from taxfree_kernels.matmul_all_reduce import push_two_shot_lamport as sum_push_two_shot_lamport
from taxfree_kernels.matmul_reduce_scatter import one_shot as scatter_one_shot
from taxfree_kernels.matmul_reduce_scatter import overlap as scatter_overlap
from taxfree_kernels.matmul_reduce_scatter import push as scatter_push
from taxfree_kernels.matmul_reduce_scatter import push_lamport as scatter_push_lamport
from taxfree_kernels.reduction import fused as sum_fused
from taxfree_kernels.reduction import packets as sum_words
from taxfree_kernels.reduction import sums
from taxfree_kernels.stencil import copies as stencil_copies
from taxfree_kernels.stencil import launches as stencil_launches
from taxfree_kernels.stencil import norms as stencil_norms
from taxfree_kernels.stencil import persistent as stencil
from taxfree_kernels.stencil import pushed as stencil_pushed
from taxfree_kernels.stencil import words as stencil_words
from taxfree_kernels.stencil.problem import Stencil
from taxfree_kernels.variant import Problem
from tests.check.checker.mutate import Mutant, mutants


@dataclass(frozen=True)
class Group:
    """Device functions, and the variants of an operation whose checks should report mutants.

    Args:
        seeds: of schedules in which a mutant is looked for.
        by_turns: they exchange Lamport words, which carry no generation: it appears in reports
            only, so that another one changes nothing.
        of_words: functions, called by these, that are given the generation for reports only.
        problems: that a mutant is looked for in, too, beside the operation's tiny ones.
        alone: not in those.
    """

    op: str
    variants: tuple[str, ...]
    functions: tuple[Any, ...]
    seeds: range = range(14)
    by_turns: bool = False
    of_words: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
    alone: bool = False

    def mutants(self) -> list[Mutant]:
        found = mutants(self.functions)
        names = ("",) if self.by_turns else self.of_words
        return [
            each
            for each in found
            if not ("generation" in each.change and any(name in each.change for name in names))
        ]

    def find(self, mutant: Mutant, seeds: range | None = None) -> Violation | None:
        """The violation that a check reports with the mutant in place, by all seeds or some."""
        tried = (*([] if self.alone else [None]), *([self.problems] if self.problems else []))
        with mutant.installed():
            for variant, problems in product(self.variants, tried):
                violation = check_variant(self.op, variant, problems, seeds or self.seeds).violation
                if violation is not None:
                    return violation
        return None


_GATHER, _SUM, _SCATTER = "all_gather_matmul", "matmul_all_reduce", "matmul_reduce_scatter"
_DECODE = "flash_decode"
#: whose rows travel with scales
_SCALED = tuple(
    AllGatherMatmul(
        m=4, n=32, k=32, gather_dim=0, world_size=2, dtype="bfloat16", x_dtype="fp8", scales=scales
    )
    for scales in ("channel", "block")
)

#: after which ranks that are no neighbours have not heard of each other
_ONE_STEP = (Stencil(9, 4, steps=1, norm_every=1, world_size=3),)

GROUPS = {
    "sync": Group(
        _GATHER,
        ("push", "one_shot"),
        (
            sync.signal,
            sync.wait,
            sync.is_aborted,
            sync.running_generation,
            sync.leave,
            sync.arrive,
        ),
    ),
    "sync: words": Group(
        _SUM,
        ("push_in_place",),
        (packets.send, packets.receive, packets._count_late, packets._is_late),
    ),
    "sync: turns": Group(
        _SUM,
        ("push_two_shot_lamport", MIXED),
        (packets.running_turn, packets.empty_last_turn, packets.leave_turn, sync.count_out),
    ),
    "exchange": Group(
        _SUM,
        ("push", "two_shot"),
        (sync.signal_everybody, sync.wait_for_everybody, sync.wait_for_channels),
    ),
    "gather: send": Group(
        _GATHER,
        ("push",),
        (gathered.push_chunk, sync.signal_by_chiplet),
        problems=_SCALED,
    ),
    "gather: receive": Group(
        _GATHER,
        ("push", "pull", "push_tma"),
        (gathered.wait_for_rows, gathered.gathered_tile),
    ),
    "gather: push": Group(_GATHER, ("push",), (push._push, sync.running_slot)),
    "gather: push_tma": Group(
        _GATHER,
        ("push_tma",),
        (push_tma._push_tma, gathered.finish_tile),
        problems=_SCALED,
    ),
    "gather: pull": Group(_GATHER, ("pull",), (pull._pull,)),
    "gather: push_two_kernel": Group(
        _GATHER, ("push_two_kernel",), (push_two_kernel._send, sync.running_slot)
    ),
    "gather: one_shot": Group(_GATHER, ("one_shot",), (one_shot._gather,)),
    "gather: overlap": Group(
        _GATHER, ("overlap",), (copies._meet, copies._announce, overlap._await)
    ),
    "sum: push": Group(
        _SUM,
        ("push",),
        (
            sum_push._push,
            sum_fused.send_tile,
            sum_fused.announce_tile,
            sum_fused._together,
            sum_fused.total_of_tile,
            sum_fused.sum_and_normalise,
        ),
    ),
    "sum: push_in_place": Group(
        _SUM,
        ("push_in_place", MIXED),
        (sum_in_place._push_in_place, sum_words.sum_by_words),
    ),
    "sum: push_lamport": Group(
        _SUM, ("push_lamport", MIXED), (sum_push_lamport._push_lamport,), by_turns=True
    ),
    "sum: push_two_shot_lamport": Group(
        _SUM,
        ("push_two_shot_lamport", MIXED),
        (
            sum_push_two_shot_lamport._push_two_shot_lamport,
            sum_push_two_shot_lamport._normalise_row,
            sum_words.sum_of_lamport_words,
            sum_words.total_of_lamport_words,
        ),
        by_turns=True,
    ),
    # alone these would hold their protocol with one payload slot: they wait for everybody twice
    "sum: two_shot": Group(
        _SUM,
        ("overlap", "two_shot", MIXED),  # of the first, copies replace the senders
        (sums.two_shot, copies._meet, copies._finish),
        seeds=range(28),
    ),
    "sum: push_two_shot": Group(
        _SUM,
        ("push_two_shot", MIXED),
        (
            sum_push_two_shot._push_two_shot,
            sum_push_two_shot.send_to_owner,
            sum_push_two_shot.add_piece,
            sum_push_two_shot.copy_sum,
            sync.running_slot,
        ),
        seeds=range(90),
    ),
    "scatter: push": Group(
        _SCATTER,
        ("push",),
        (
            scatter_push._push,
            scatter_push.send_to_owners,
            scatter_push.add_piece,
            sync.running_slot,
        ),
    ),
    "scatter: push_lamport": Group(
        _SCATTER,
        ("push_lamport", MIXED),
        (scatter_push_lamport._push_lamport,),
        by_turns=True,
    ),
    # alone it would do without the odd generation that comes next; it is one of many that are drawn
    "scatter: overlap": Group(
        _SCATTER,
        ("overlap", MIXED),
        (copies._meet, copies._finish, scatter_overlap._add),
        seeds=range(28),
    ),
    "scatter: one_shot": Group(_SCATTER, ("one_shot",), (scatter_one_shot._one_shot,)),
    # alone they would hold their protocol with slots that have changed places
    "decode: fused": Group(
        _DECODE,
        ("fused", MIXED),
        (
            decode_plans._attend,
            fused._push_and_combine,
            decode_exchange.slot_of_parts,
            decode_exchange.merge_into_inboxes,
            decode_exchange.merge_and_push,
            decode_exchange.combine,
            decode_exchange.merge_into_words,
            decode_exchange._send_to_peers,
            decode_exchange.received_rows,
        ),
    ),
    "decode: gather": Group(
        _DECODE,
        ("gather", MIXED),
        (
            decode_plans._merge_splits,
            gather._gather,
            gather._copy_rows,
            decode_exchange.send_chunk,
        ),
    ),
    "decode: fine_wait": Group(
        _DECODE,
        ("fine_wait",),
        (fine_wait._send, fine_wait._combine, decode_exchange.wait_for_rows),
    ),
    "embedding: push": Group(
        "embedding_all_to_all",
        ("push", MIXED),
        (
            embedding_push._push,
            embedding_push._send,
            embedding_push._pool,
            embedding_push._take,
            embedding_push._arrived,
        ),
        of_words=("send", "receive", "_arrived"),
    ),
    "decode: persistent": Group(_DECODE, ("persistent", MIXED), (persistent._decode,)),
    "stencil: units": Group(
        "stencil",
        ("persistent",),
        (sync.count_units, sync.wait_for_units),
        by_turns=True,
    ),
    "stencil: persistent": Group(
        "stencil",
        ("persistent", MIXED),
        (
            stencil._persistent,
            stencil._wait_for_tiles,
            stencil_words.area_at,
            stencil_words._words_at,
            stencil_words.relax_at_sides,
            stencil_words.relax_beside,
            stencil_words._receive,
            stencil_words.send_edges,
            stencil_words.send_first,
            stencil_norms.finish,
        ),
        of_words=(
            "send",
            "receive",
            "relax_at_sides",
            "relax_beside",
            "send_edges",
            "send_first",
            "_wait_for_tiles",
            "wait_for_units",
        ),
        problems=_ONE_STEP,
    ),
    "stencil: pushed": Group(
        "stencil",
        ("pushed", MIXED),
        (stencil_pushed._send_first, stencil_pushed._step, stencil_pushed._finish),
        of_words=("send_edges", "relax_beside"),
        problems=_ONE_STEP,
    ),
    "stencil: copies": Group(
        "stencil",
        ("copies",),
        (stencil_launches._step, stencil_copies._finish_norms),
        problems=_ONE_STEP,
    ),
    "step": Group(
        STEP,
        ("twin",),
        (
            twin._area_of,
            twin._send,
            twin._add_sum,
            twin._empty,
            twin._best_of_ranks,
            twin._hand_on,
            twin._next_x,
            twin._attend,
            twin._compute,
            twin._decode_step,
        ),
        by_turns=True,
        problems=tuple(problem for world in WORLD_SIZES for problem in steps.tiny(world)),
        alone=True,  # fp8 changes no hand-off
    ),
}

_BY_TURNS = "Lamport words go by turns: the generation appears in reports only"
_ANOTHER_FLAG = (
    "sent and awaited alike: it still differs from all flags that calls have left in the slot"
)

#: groups, mutants, and why each is as right as the original, as long as no wait times out
HARMLESS = (
    (
        "sync",
        "wait: _poll: generation + 1",
        "the first poll only decides whether the loop is entered, which polls again",
    ),
    (
        "sync",
        "wait: _poll: generation - 1",
        "the last poll only acquires: the loop has seen the right generation",
    ),
    (
        "sync",
        "is_aborted: atomic_add: scope='sys' -> 'gpu'",
        "peers write the abort word only after a timeout",
    ),
    (
        "sync",
        "arrive: atomic_xchg: scope='gpu' -> 'cta'",
        "the last program in resets the counter, alone and before the next launch",
    ),
    ("gather: overlap", "_announce: signal: channel 0", "copies are told of on channel 0"),
    ("stencil: copies", "_step: wait: channel 0", "copies are told of on channel 0"),
    *(
        (group, "_finish: _spoil(...) deleted", "it stores after a timeout only")
        for group in ("scatter: overlap", "sum: two_shot")
    ),
    ("sum: push_in_place", "_push_in_place: sum_by_words: generation + 1", _ANOTHER_FLAG),
    ("sum: push_lamport", "_push_lamport: leave(...) deleted", _BY_TURNS),
    ("sum: push_two_shot_lamport", "_push_two_shot_lamport: leave(...) deleted", _BY_TURNS),
    ("scatter: push_lamport", "_push_lamport: leave(...) deleted", _BY_TURNS),
    ("step", "_decode_step: leave(...) deleted", _BY_TURNS),
    (
        "embedding: push",
        "_push: two slots of Lamport words",
        "who pools has waited for indices that were sent after the asking rank's previous call",
    ),
    (
        "stencil: persistent",
        "area_at: two slots of Lamport words",
        "turns are those of other operations, between whose calls a test finds it",
    ),
    *(
        ("decode: fused", f"merge_into_words: _send_to_peers: generation {sign} 1", _BY_TURNS)
        for _ in ("packed rows", "their sums and units")
        for sign in "-+"
    ),
)


def without_place(mutant: Mutant) -> str:
    """A mutant without its file and line."""
    return str(mutant).partition(" ")[2]
