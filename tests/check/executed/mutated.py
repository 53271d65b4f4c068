"""The mutants of machine code that are tried, and why some that nothing shows are harmless."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module
from typing import Any

from taxfree_check.executed.run import DEVICES
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.variant import Problem, operation_names, problem_class, variants
from tests.check.executed.mutate import Subject, Tried, sampled

#: whose mutants are tried, of every fused variant; of gfx950, which has the same memory model and
#: other matrix instructions, of one variant of each operation
ARCHITECTURE, OTHER_ARCHITECTURE = "gfx942", "gfx950"
OF_OTHER = (
    ("all_gather_matmul", "push"),
    ("attention", "flash"),
    ("embedding_all_to_all", "push"),
    ("flash_decode", "fused"),
    ("matmul_all_reduce", "push_two_shot_lamport"),
    ("matmul_reduce_scatter", "push"),
    ("stencil", "persistent"),
)


def _problem(op: str, *sizes: int, **fields: Any) -> Problem:
    return problem_class(op)(*sizes, world_size=2, **fields)


#: operation -> problems whose sizes fill tiles, so that all waves have rows to store
PROBLEMS = {
    "all_gather_matmul": _problem("all_gather_matmul", 64, 64, 64, gather_dim=0),
    "attention": _problem("attention", 1, 128, 2, 1, 32),
    "embedding_all_to_all": _problem("embedding_all_to_all", 8, 2, 2, 8, 128),
    "flash_decode": _problem("flash_decode", 1, 16, 1, 32, 70),
    "matmul_all_reduce": _problem("matmul_all_reduce", 16, 64, 128, residual=True),
    "matmul_reduce_scatter": _problem("matmul_reduce_scatter", 32, 64, 128),
    "stencil": _problem("stencil", 64, 128, steps=4, norm_every=2),
}


def cases() -> list[tuple[str, str, str]]:
    """Operations, their fused variants that run on this architecture, and the architecture."""
    hardware = KNOWN[DEVICES[ARCHITECTURE]]
    every = [
        (op, name, ARCHITECTURE)
        for op in operation_names()
        for name, variant in variants(op).items()
        if variant.fused and not variant.unsupported_reason(PROBLEMS[op], hardware)
    ]
    return every + [(*each, OTHER_ARCHITECTURE) for each in OF_OTHER]


@dataclass(frozen=True)
class Harmless:
    """Mutants that nothing shows, and that need not be shown.

    Args:
        module: of the device function that their instructions come from.
        line: of its text; the instructions come from there, or from what it calls.
        kinds: beginnings of the names of the changes.
        why: they are as right as the original, as long as no wait times out.
    """

    module: str
    line: str
    kinds: tuple[str, ...]
    why: str


_OF_POLL = ("s_waitcnt", "s_barrier", "ds_", "sc1")
_AT_END = "the kernel ends with this signal, and the end of a kernel writes everything back"
_ABORTED = "the word that is read is written after a timeout only"

HARMLESS = (
    Harmless(
        "device.sync", 'lead = _poll(words, peers.generation, mask, "acquire", "sys")', _OF_POLL,
        "the result of a wait's last poll only shows a timeout: the loop has seen the signal",
    ),
    Harmless(
        "device.sync", 'lead = _poll(words, peers.generation, mask, POLL, "sys")', _OF_POLL,
        "the first poll only decides whether the loop is entered, which polls again",
    ),
    Harmless(
        "device.packets", "seen = _load_words(words, GROUP)", ("s_waitcnt", "s_barrier", "sc"),
        "the first poll only decides whether the loop is entered, which polls again",
    ),
    Harmless(
        "device.sync",
        'tl.atomic_xchg(word, generation, sem="release", scope="sys", mask=mask)',
        ("ds_read", "branch never", "s_waitcnt lgkmcnt"),
        "the compiler's code for lanes that write the same word: none do",
    ),
    Harmless("device.sync", "if is_aborted(peers.control_ptr):", ("",), _ABORTED),
    Harmless("device.sync", "if lead < 0:", ("branch",), _ABORTED),
    Harmless("copies", "if is_aborted(control_ptr):", ("",), _ABORTED),
    Harmless("device.packets", "if is_aborted(peers.control_ptr):", ("",), _ABORTED),
    Harmless("device.packets", "if late > 0:", ("branch",), _ABORTED),
    Harmless(
        "device.packets",
        "tl.store(slot_ptr + first + lanes, empty, mask=first + lanes < last, "
        'cache_modifier=".wt")',
        ("sc0",), "the kernel's end writes it back, before a peer sends to that slot again",
    ),
    Harmless(
        "device.packets", "for first in range(share * EMPTIED, last, shares * EMPTIED):",
        ("branch never",), "a loop that is entered for no words: each of its stores is masked",
    ),
    *(
        Harmless(
            f"{op}.{variant}", "generation = sync.running_generation(buffers.control_ptr)", ("",),
            "Lamport words go by turns: the generation appears in reports only",
        )
        for op, variant in (
            ("matmul_all_reduce", "push_lamport"),
            ("matmul_all_reduce", "push_two_shot_lamport"),
            ("matmul_reduce_scatter", "push_lamport"),
        )
    ),
    Harmless(
        "device.sync", 'tl.atomic_add(count_ptr, share.to(tl.int64), sem="relaxed", scope="gpu")',
        ("s_waitcnt",), "the program leaves here: its end waits for what is in flight",
    ),
    Harmless("copies", "sync.signal(peers, channel, peer, GROUP)", ("s_waitcnt", "sc1"), _AT_END),
    Harmless(
        "all_gather_matmul.paper.push_two_kernel",
        "fused.push_chunk(tl.program_id(0), shard, slot_ptr, peers, GROUP, GATHER)", ("sc1",),
        _AT_END,
    ),
    Harmless("flash_decode.fine_wait", "send_chunk(", ("sc1",), _AT_END),
    Harmless(
        "stencil.persistent",
        "return sync.wait_for_units(counters_ptr + number, steps, peers, GROUP, mask=exists)",
        ("buffer_inv sc0", "sc1 of a atomic"), "counters are of one GPU, whose scope is enough",
    ),
    Harmless(
        "stencil.persistent",
        "return sync.wait_for_units(counters_ptr + number, steps, peers, GROUP, mask=exists)",
        ("buffer_wbl2",),
        "a poll writes nothing back: it is the arrival of a program that ends, to which the "
        "compiler gives this line, and which has stored nothing since it counted its last tile",
    ),
)  # fmt: skip


def why_harmless(kind: str, lines: Sequence[str]) -> str:
    """Why a mutant need not be shown, if it survives; else empty.

    Args:
        lines: see :class:`Outcome`.
    """
    for each in HARMLESS:
        number = lines_of(each.module).index(each.line) + 1  # the first of several such lines
        place = f"{each.module.split('.')[-1]}.py:{number}"
        if place in lines and kind.startswith(each.kinds):
            return each.why
    return ""


@cache
def lines_of(module: str) -> list[str]:
    source = inspect.getsource(import_module(f"taxfree_kernels.{module}"))
    return [line.strip() for line in source.split("\n")]


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant.

    Args:
        kernel, kind, instruction: what was changed.
        lines: of the source, the innermost first.
        verdict: "wrong", "hang", "error", "equivalent", "harmless" or "survives".
        reason: of the two that need one.
    """

    @classmethod
    def of(cls, tried: Tried) -> Outcome:
        """A mutant that survives is harmless if it is known to be, by the lines of now."""
        mutant, verdict, reason = tried.mutant, tried.verdict, tried.reason
        text, source = mutant.before.text, mutant.before.source
        if verdict == "survives" and (why := why_harmless(mutant.kind, source)):
            verdict, reason = "harmless", why
        return cls(mutant.kernel, mutant.kind, text, source, verdict, reason)

    kernel: str
    kind: str
    instruction: str
    lines: tuple[str, ...]
    verdict: str
    reason: str


@dataclass(frozen=True)
class Result:
    """The mutants of a variant.

    Args:
        executed, instructions: of its kernels.
        every: mutants of instructions that were executed; of each kernel and kind, some are tried.
        outcomes: of those.
    """

    op: str
    variant: str
    architecture: str
    executed: int
    instructions: int
    every: int
    outcomes: tuple[Outcome, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, fields: dict[str, Any]) -> Result:
        outcomes = [Outcome(**each) for each in fields.pop("outcomes")]
        return cls(**fields, outcomes=tuple(outcomes))

    def count(self, *verdicts: str) -> int:
        return sum(each.verdict in verdicts for each in self.outcomes)


def result(
    op: str,
    variant: str,
    architecture: str,
    most_of_a_kind: int,
    kinds: Sequence[str] = (),
    without_harmless: bool = False,
) -> Result:
    """Try mutants of a variant.

    Args:
        most_of_a_kind: of each kernel and kind of change.
        kinds: of changes; none for all.
        without_harmless: do not try those that need not be shown, most of which survive all runs.
    """
    subject = Subject(op, variant, [PROBLEMS[op]], architecture)
    every = [each for each in subject.mutants() if not kinds or each.kind in kinds]
    outcomes = tuple(
        Outcome.of(subject.try_one(each))
        for each in sampled(every, most_of_a_kind)
        if not (without_harmless and why_harmless(each.kind, each.before.source))
    )
    return Result(op, variant, architecture, *subject.instructions(), len(every), outcomes)


def survivors(results: list[Result]) -> Iterator[tuple[Result, Outcome]]:
    for each in results:
        for outcome in each.outcomes:
            if outcome.verdict == "survives":
                yield each, outcome
