"""Rules that the assembly of every kernel has to obey; each gate names one.

The interpreter runs kernels as they are written; what the compiler made of their synchronisation,
loads and loops shows only here. A gate takes a :class:`Subject` and returns what breaks its rule.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from taxfree_kernels.compiled.assembly import Assembly, Instruction, Loop, Place, Role


@dataclass(frozen=True)
class Violation:
    """A broken rule, and the line of the assembly that shows it."""

    gate: str
    message: str
    line: int = 0
    evidence: str = ""

    def __str__(self) -> str:
        where = f" (line {self.line}: {self.evidence})" if self.line else ""
        return f"{self.gate}: {self.message}{where}"


@dataclass(frozen=True)
class Subject:
    """One compiled kernel.

    Args:
        text: its PTX or amdgcn.
        ttir, ttgir: what it was before.
        num_warps, num_stages: it was compiled with.
        spill_bytes: per thread.
        matrix_remarks: see :func:`taxfree_kernels.compiled.compile.matrix_remarks`.
        aligned: rows of all matrices start at multiples of 16 bytes, so accesses can be wide.
        launched_early: before the kernel before it has ended.
        begins_call: the kernel before it is of another call.
    """

    text: str
    ttir: str = ""
    ttgir: str = ""
    num_warps: int = 4
    num_stages: int = 1
    spill_bytes: int = 0
    matrix_remarks: Sequence[str] = ()
    aligned: bool = True
    launched_early: bool = False
    begins_call: bool = True

    @cached_property
    def assembly(self) -> Assembly:
        return Assembly(self.text)

    @property
    def threads(self) -> int:
        """Of one program."""
        return self.num_warps * (32 if self.assembly.is_ptx else 64)

    @property
    def is_one_wave(self) -> bool:
        """Whether its threads run in step, on CDNA: compilers then leave barriers out."""
        return self.num_warps == 1 and not self.assembly.is_ptx

    @cached_property
    def k_loops(self) -> list[Loop]:
        """Loops with matrix instructions, without the loops around them."""
        code = self.assembly
        matrix = [loop for loop in code.loops if _any(code, loop, Role.MATRIX)]
        return [loop for loop in matrix if not any(other.blocks < loop.blocks for other in matrix)]

    @cached_property
    def poll_loops(self) -> list[Loop]:
        """Innermost loops that read a word that a peer writes."""
        code = self.assembly
        return [loop for loop in code.loops if _polls(code, loop) and not code.nested(loop)]

    @cached_property
    def source(self) -> str:
        """Its first form, without the branches that no program takes."""
        never = set(_NO_PROGRAM.findall(self.ttir))
        return _IF.sub(lambda found: "" if found[2] in never else found[0], self.ttir)

    @cached_property
    def wait_loops(self) -> int:
        """Loops of the source that poll signals, by atomics."""
        return sum(bool(_SIGNAL_POLL.search(body)) for _, body in _WHILE.findall(self.source))

    @cached_property
    def word_loops(self) -> int:
        """Loops of the source that poll words: blocks of them, by volatile loads."""
        return sum(bool(_WORD_POLL.search(body)) for _, body in _WHILE.findall(self.ttir))

    @cached_property
    def word_bytes(self) -> int:
        """Of a flag-in-data word 8, of a bare one 4; a kernel has one kind or none."""
        found = [*_WORD_POLL.findall(self.ttir), *_WORD_STORE.findall(self.ttir)]
        return min((int(bits) // 8 for _, bits in found), default=8)


#: in Triton's IR: a loop, up to the brace that closes it; a poll and a store of such words.
_WHILE = re.compile(r"^( *)(?:%[^\n]*? = )?scf\.while\b(.*?)^\1\}(?! do)", re.MULTILINE | re.DOTALL)
_SIGNAL_POLL = re.compile(r"tt\.atomic_rmw add, (?:acquire|relaxed), sys,")
_WORD_POLL = re.compile(r"tt\.load .*isVolatile = true.*: tensor<([\dx]+)x!tt\.ptr<i(32|64)>>")
_POLLED = re.compile(
    r"(?:tt\.load .*isVolatile = true|buffer_load .*\bcv\b).*"
    r" tensor<([\dx]+)x(?:!tt\.ptr<)?i(?:32|64)"
)
_WORD_STORE = re.compile(
    r"tt\.store .*cache_?[mM]odifier = wt.*: tensor<([\dx]+)x!tt\.ptr<i(32|64)>"
)

#: in Triton's IR: what no program's id is, and a branch up to its end or its other side
_NO_PROGRAM = re.compile(r"(%[\w#]+) = arith\.cmpi slt, %program\w*, %c0_i32\b")
_IF = re.compile(
    r"^( *)(?:%[^\n]*? = )?scf\.if (%[\w#]+)[^\n]*\{\n.*?^\1\}", re.MULTILINE | re.DOTALL
)

#: in Triton's IR for GPUs: a linear layout and its steps from warp to warp; a reduction
_LINEAR = re.compile(r"^(#\w+) = #ttg\.linear<\{.*?warp = (\[.*\]), block", re.MULTILINE)
_STEP = re.compile(r"\[([\d, ]+)\]")
_REDUCTION = re.compile(
    r'"tt\.reduce"\([^\n]*?<\{axis = (\d+) : i32\}> \(\{.*?\n *\}\) : \(tensor<[^\n]*?, (#\w+)>',
    re.DOTALL,
)

_POLLS = (Role.POLL, Role.VOLATILE)

_PROGRESS = (
    Role.POLL, Role.ACQUIRE, Role.RELEASE, Role.CAS, Role.LOAD, Role.COPY, Role.STORE,
    Role.SHARED_STORE, Role.MATRIX,
)  # fmt: skip

#: in assembly: the exchange of a thread that has waited in vain
_GIVES_UP = re.compile(r"relaxed\.exch|atomic_swap")

#: what a loop does besides, around a wait that is gone
_NOT_IN_A_WAIT = (
    Role.LOAD, Role.COPY, Role.STORE, Role.BULK_STORE, Role.MATRIX, Role.RELEASE,
)  # fmt: skip

Gate = Callable[[Subject], Iterator[Violation]]
GATES: dict[str, Gate] = {}
#: those whose rules are about speed alone: what breaks another one may give wrong results
OF_SPEED: set[str] = set()


def _gate(function: Gate) -> Gate:
    GATES[function.__name__] = function
    return function


def _gate_of_speed(function: Gate) -> Gate:
    OF_SPEED.add(function.__name__)
    return _gate(function)


def violations(subject: Subject, of_speed: bool = True) -> list[Violation]:
    """What `subject` breaks, gate by gate.

    Args:
        of_speed: look through the gates of speed as well.
    """
    gates = [gate for name, gate in GATES.items() if of_speed or name not in OF_SPEED]
    return [violation for gate in gates for violation in gate(subject)]


def _any(code: Assembly, loop: Loop, *roles: Role) -> bool:
    return any(instruction.plays(*roles) for instruction in code.inside(loop))


def _polls(code: Assembly, loop: Loop) -> bool:
    return any(
        instruction.plays(Role.POLL) or _is_system_acquire(instruction)
        for instruction in code.inside(loop)
    )


def _polls_words(code: Assembly, loop: Loop, word_bytes: int) -> bool:
    """Whether a loop loads whole words past the caches."""
    return any(
        instruction.plays(*_POLLS)
        and instruction.scope == "sys"
        and instruction.element >= word_bytes
        for instruction in code.inside(loop)
    )


def _system(code: Assembly, role: Role) -> list[Place]:
    return [place for place in code.places(role) if code.at(place).scope == "sys"]


def _found(gate: Gate, message: str, at: Instruction) -> Violation:
    return Violation(gate.__name__, message, at.line, at.text)


# -- signals ------------------------------------------------------------------------------------


@_gate
def barrier_before_release(subject: Subject) -> Iterator[Violation]:
    """Between a program's stores and its release there is a barrier of all its threads."""
    code = subject.assembly
    if subject.is_one_wave:
        return
    for place in code.places(Role.RELEASE):
        stores = (Role.STORE, Role.BULK_STORE)
        early = _first(code, place, _is(Role.BARRIER), *stores, backwards=True)
        if early is not None:
            yield _found(barrier_before_release, "no barrier between store and release", early)


@_gate
def stores_drained(subject: Subject) -> Iterator[Violation]:
    """On CDNA each wave waits for its own stores before the barrier that precedes the release."""
    code = subject.assembly
    if code.is_ptx:
        return
    for place in code.places(Role.RELEASE):
        for barrier in [place] if subject.is_one_wave else _last_barriers(code, place):
            store = _first(code, barrier, _is(Role.DRAIN), Role.STORE, backwards=True)
            if store is not None:
                yield _found(stores_drained, "store not waited for by its own wave", store)


@_gate
def system_scope(subject: Subject) -> Iterator[Violation]:
    """What is released and acquired at system scope in the source, is in the assembly.

    Device scope is for counters, which acquire and release at once.
    """
    code, orders = subject.assembly, _orders(subject.source)
    for semantics, scope in orders:
        if scope != "sys" and semantics != "acq_rel":
            yield Violation("system_scope", f"{semantics} at {scope} scope in the source")
    for role, name in ((Role.RELEASE, "release"), (Role.ACQUIRE, "acquire")):
        for reach in ("sys", "gpu"):
            wanted = sum(
                name in _ORDERS[semantics] and scope == reach for semantics, scope in orders
            )
            found = sum(code.at(place).scope == reach for place in code.places(role))
            if found < wanted:
                message = (
                    f"{wanted} {name}s at {reach} scope in the source, {found} in the assembly"
                )
                yield Violation("system_scope", message)
        narrow = [place for place in code.places(role) if code.at(place).scope != "sys"]
        counters = sum(scope != "sys" for _, scope in orders)
        if orders and len(narrow) > counters:
            yield _found(system_scope, f"{name} lost its system scope", code.at(narrow[0]))


@_gate
def bulk_stores_done(subject: Subject) -> Iterator[Violation]:
    """A release comes after bulk stores have completed, not only read their source."""
    code = subject.assembly
    for place in code.places(Role.RELEASE):
        under_way = (Role.BULK_STORE, Role.BULK_READ)
        store = _first(code, place, _is(Role.BULK_DONE), *under_way, backwards=True)
        if store is not None:
            yield _found(bulk_stores_done, "bulk store unfinished at the release", store)


# -- waits --------------------------------------------------------------------------------------


@_gate
def poll_in_loop(subject: Subject) -> Iterator[Violation]:
    """The polled load was not moved out of its loop, nor the loop deleted.

    An acquire is in a loop of polls, or before it (when the first poll acquires), or after it.
    """
    code = subject.assembly
    spinning = {
        code.at(place).line
        for loop in subject.poll_loops
        for place in code.places(Role.POLL, Role.ACQUIRE)
        if place[0] in loop.blocks
    }
    for place in _system(code, Role.ACQUIRE):
        around = {code.at(place).line}
        around.update(one.line for one in code.walk(place, _never))
        around.update(one.line for one in code.walk(place, _never, backwards=True))
        if not around & spinning:
            yield _found(poll_in_loop, "acquire without a polling loop", code.at(place))
    # on CDNA polls of words look like others
    wanted = subject.wait_loops + (0 if code.is_ptx else subject.word_loops)
    only = [loop for loop in subject.poll_loops if not _any(code, loop, *_NOT_IN_A_WAIT)]
    if len(only) < wanted:
        yield Violation("poll_in_loop", f"{wanted} waits in the source, {len(only)} loops poll")


@_gate
def acquire_after_poll(subject: Subject) -> Iterator[Violation]:
    """A loop of relaxed polls is left through an acquire at system scope, before any load.

    Polls of words need none; on CDNA they look like others, and are counted.
    """
    code = subject.assembly
    found = []
    for loop in subject.poll_loops:
        if any(_is_system_acquire(instruction) for instruction in code.inside(loop)):
            continue
        place = next(at for at in code.places(Role.POLL) if at[0] in loop.blocks)
        passed = list(code.walk(place, _is_system_acquire))
        early = [one for one in passed if one.plays(Role.LOAD, Role.COPY)]
        if early:
            found.append(_found(acquire_after_poll, "load before the acquire", early[0]))
        elif not _acquires_after(code, place):
            late = code.at(place)
            found.append(_found(acquire_after_poll, "poll without an acquire after it", late))
    yield from found[0 if code.is_ptx else subject.word_loops :]


@_gate
def barrier_after_acquire(subject: Subject) -> Iterator[Violation]:
    """All threads of a program wait for the one that acquired, before any of them loads."""
    code = subject.assembly
    if subject.is_one_wave:
        return
    for place in code.places(Role.ACQUIRE):
        uses = (Role.LOAD, Role.COPY, Role.STORE, Role.BULK_STORE)
        early = _first(code, place, _ends_wait, *uses)
        if early is not None:
            yield _found(barrier_after_acquire, "no barrier between acquire and use", early)


@_gate
def proxy_fence_before_bulk_copies(subject: Subject) -> Iterator[Violation]:
    """What was waited for is copied by the TMA only behind a fence between the two proxies."""
    code = subject.assembly
    for place in _system(code, Role.ACQUIRE):
        early = _first(code, place, _is(Role.PROXY_FENCE), Role.BULK_COPY)
        if early is not None:
            message = "no proxy fence between acquire and copy"
            yield _found(proxy_fence_before_bulk_copies, message, early)


@_gate
def nothing_before_early_wait(subject: Subject) -> Iterator[Violation]:
    """A kernel that is launched early waits, and on no path accesses memory before that wait.

    Exception: after a kernel of its own call it may read the generation, by an atomic that only
    reads, since the kernels of earlier calls have ended.
    """
    code, gate = subject.assembly, nothing_before_early_wait
    uses = [Role.LOAD, Role.COPY, Role.BULK_COPY, Role.STORE, Role.BULK_STORE, Role.ATOMIC]
    if subject.begins_call:
        uses += [*_POLLS, Role.ACQUIRE]
    waits = code.places(Role.EARLY_WAIT)
    if subject.launched_early and not waits:
        yield Violation(gate.__name__, "launched early, and does not wait")
    if not waits:
        return
    entry = (0, -1)
    early = _first(code, entry, _is(Role.EARLY_WAIT), *uses)
    if early is not None:
        yield _found(gate, "memory is used before the wait", early)


@_gate
def no_wait_in_k_loop(subject: Subject) -> Iterator[Violation]:
    """No poll and no acquire in a loop of matrix instructions: its loads are issued ahead."""
    code = subject.assembly
    for loop in subject.k_loops:
        for instruction in code.inside(loop):
            if instruction.plays(*_POLLS) or _is_system_acquire(instruction):
                yield _found(no_wait_in_k_loop, "wait inside a pipelined loop", instruction)
                break


@_gate
def no_weak_poll(subject: Subject) -> Iterator[Violation]:
    """Nothing is polled by compare-and-swap or volatile load: some compilers get them wrong.

    Except blocks of words.
    """
    code = subject.assembly
    weak = (Role.CAS,) if subject.word_loops else (Role.CAS, Role.VOLATILE)
    for place in code.places(*weak):
        yield _found(no_weak_poll, "compare-and-swap or volatile load", code.at(place))


@_gate
def whole_words(subject: Subject) -> Iterator[Violation]:
    """Words are stored and polled as a whole (8 bytes, bare ones 4), bypassing all caches.

    LLVM merges loads of the same address, which padded rows of words have; PTX keeps all of them.
    """
    if not _WORD_POLL.search(subject.ttir) and not _WORD_STORE.search(subject.ttir):
        return
    code, size = subject.assembly, subject.word_bytes
    innermost = [loop for loop in code.loops if not code.nested(loop)]
    loops = [loop for loop in innermost if _polls_words(code, loop, size)]
    if len(loops) < subject.word_loops:
        message = f"{subject.word_loops} loops of the source poll words, {len(loops)} do"
        yield Violation("whole_words", message)
    in_loops = [one for loop in loops for one in code.inside(loop)]
    for one in in_loops:
        if one.plays(Role.LOAD):
            yield _found(whole_words, "a word polled in a cache", one)
    polls = [code.at(place) for place in code.places(*_POLLS)]
    polled_again = [one for one in in_loops if one.plays(*_POLLS)]
    stores = [code.at(place) for place in code.places(Role.STORE)]
    words_polled = _bytes(subject, _WORD_POLL) if code.is_ptx else 2 * _past_caches(polled_again)
    words_stored = _bytes(subject, _WORD_STORE)
    for what, made, wanted in (("polled", polls, words_polled), ("stored", stores, words_stored)):
        past = _past_caches(made)
        if past < wanted:
            message = f"of {wanted} bytes a thread {past} are {what} past the caches"
            yield Violation("whole_words", message)
    words = [*polled_again, *(one for one in polls if one.plays(Role.VOLATILE))]
    if words_stored:
        words += stores
    for one in words:
        if one.scope == "sys" and one.element < size:
            yield _found(whole_words, "a word in parts", one)


@_gate
def own_words(subject: Subject) -> Iterator[Violation]:
    """No word is polled by two threads, or twice: one poll may see what the other has not.

    Compilers replicate a block smaller than the program across threads, and load such a block again
    for each layout that it is used in.
    """
    polls = [_size(shape) for shape in _POLLED.findall(subject.ttgir)]
    if len(polls) != len(_WORD_POLL.findall(subject.ttir)):
        yield Violation("own_words", "the compiler has doubled a load of words, or lost one")
    for words in polls:
        if words < subject.threads:
            message = f"{words} words are polled by {subject.threads} threads"
            yield Violation("own_words", message)


@_gate
def no_blind_spin(subject: Subject) -> Iterator[Violation]:
    """No loop of barriers whose threads only look at shared memory that it does not write.

    Some compilers move the polling thread out of the loop in which the others wait for it.
    """
    code = subject.assembly
    for loop in code.loops:
        if code.nested(loop):
            continue
        inside = list(code.inside(loop))
        looks = any(one.plays(Role.SHARED_LOAD) for one in inside)
        waits = [one for one in inside if one.plays(Role.BARRIER)]
        if looks and waits and not any(one.plays(*_PROGRESS) for one in inside):
            yield _found(no_blind_spin, "a loop that waits for a thread outside of it", waits[0])


# -- reductions ---------------------------------------------------------------------------------


@_gate
def warps_of_reductions(subject: Subject) -> Iterator[Violation]:
    """No reduction across warps has a layout that interleaves warps along its axis and others.

    Some compilers number such warps wrongly, so that two of them store to the same location.
    """
    layouts = dict(_LINEAR.findall(subject.ttgir))
    for body in _REDUCTION.finditer(subject.ttgir):
        axis, layout = int(body.group(1)), body.group(2)
        steps = [step.split(",") for step in _STEP.findall(layouts.get(layout, ""))]
        dims = [next((at for at, each in enumerate(step) if int(each)), -1) for step in steps]
        if axis in dims and len([*groupby(dims)]) > len(set(dims)):
            message = f"along axis {axis} with warps {layouts[layout]}"
            yield Violation("warps_of_reductions", message)


# -- speed --------------------------------------------------------------------------------------


@_gate_of_speed
def matrix_cores(subject: Subject) -> Iterator[Violation]:
    """Every dot is done by matrix instructions, the widest that its shape allows."""
    wanted = len(re.findall(r"\btt\.dot\b", subject.ttir))
    if wanted and not subject.assembly.places(Role.MATRIX):
        yield Violation("matrix_cores", f"{wanted} dots, no matrix instruction")
    for line in re.findall(r"= tt\.dot .*", subject.ttgir):
        shape = re.search(r"-> tensor<(\d+)x(\d+)x\w+, (#\w+)>", line)
        if shape is None:
            continue
        rows, layout = int(shape.group(1)), shape.group(3)
        if not layout.startswith("#mma"):
            yield Violation("matrix_cores", f"dot by plain multiply-adds: {line.strip()[:80]}")
        elif subject.assembly.is_ptx and rows >= 64 and subject.num_warps >= 4:
            yield Violation("matrix_cores", f"{shape.group(0)} by mma.sync, not by wgmma")


@_gate_of_speed
def overlapping_matrices(subject: Subject) -> Iterator[Violation]:
    """Matrix instructions that run asynchronously do not wait for one another."""
    for remark in subject.matrix_remarks:
        yield Violation("overlapping_matrices", remark)


@_gate_of_speed
def pipelined(subject: Subject) -> Iterator[Violation]:
    """The loads of a loop of matrix instructions are issued stages ahead."""
    if not subject.aligned or subject.num_stages < 2:
        return
    code = subject.assembly
    for loop in subject.k_loops:
        inside = list(code.inside(loop))
        if code.is_ptx:
            if not any(one.plays(Role.COPY) for one in inside):
                yield _found(pipelined, "no asynchronous copy in the k loop", inside[0])
            for one in inside:
                if one.plays(Role.LOAD):
                    yield _found(pipelined, "synchronous load in the k loop", one)
                    break
        elif not _reads_shared_first(inside):
            yield _found(pipelined, "the k loop waits for its own loads", inside[0])


@_gate_of_speed
def wide_accesses(subject: Subject) -> Iterator[Violation]:
    """Loops move 16 bytes per thread and instruction, or all its share of a small tile.

    CDNA copies into shared memory by 4 or 16 bytes: a share of 8 is two copies.
    """
    if not subject.aligned:
        return
    code = subject.assembly
    shares = _small_shares(subject)

    def is_narrow(one: Instruction) -> bool:
        width = 2 * one.width if one.plays(Role.COPY) and not code.is_ptx else one.width
        return one.width < 16 and not shares & {one.width, width}

    k_blocks = {block for loop in subject.k_loops for block in loop.blocks}
    for loop in code.loops:
        if code.nested(loop):
            continue
        inside = list(code.inside(loop))
        copies = any(one.plays(Role.LOAD) for one in inside) and any(
            one.plays(Role.STORE) for one in inside
        )
        if not copies and not loop.blocks <= k_blocks:
            continue
        moves = [one for one in inside if one.plays(Role.LOAD, Role.COPY, Role.STORE)]
        narrow = [one for one in moves if is_narrow(one)]
        if narrow:
            yield _found(
                wide_accesses, f"{len(narrow)} accesses below 16 bytes in a loop", narrow[0]
            )


@_gate_of_speed
def wide_words(subject: Subject) -> Iterator[Violation]:
    """Threads that have 16 bytes or more of every block of words store as much at a time."""
    code = subject.assembly
    stored = [_size(shape) for shape, _ in _WORD_STORE.findall(subject.ttgir)]
    fewest = 16 // subject.word_bytes * subject.threads
    if not subject.aligned or not stored or min(stored) < fewest:
        return
    for place in code.places(Role.STORE):
        one = code.at(place)
        if one.scope == "sys" and one.width < 16:
            yield _found(wide_words, "fewer words at once than a thread has", one)
            break


@_gate_of_speed
def no_spills(subject: Subject) -> Iterator[Violation]:
    """Registers suffice."""
    if subject.spill_bytes:
        yield Violation("no_spills", f"{subject.spill_bytes} bytes a thread in local memory")


@_gate_of_speed
def no_waterfall(subject: Subject) -> Iterator[Violation]:
    """No loop over lanes around an access whose descriptor differs between lanes (CDNA)."""
    code = subject.assembly
    for loop in code.loops:
        inside = list(code.inside(loop))
        if len(loop.blocks) > 2 or not any(one.plays(Role.FIRST_LANE) for one in inside):
            continue
        accesses = [one for one in inside if one.text.startswith("buffer_")]
        if accesses and not any(one.plays(Role.BARRIER, Role.MATRIX) for one in inside):
            yield _found(no_waterfall, "one access per lane", accesses[0])


# -- helpers ------------------------------------------------------------------------------------


def _past_caches(accesses: Iterable[Instruction]) -> int:
    """Bytes of accesses that bypass all caches, for each thread."""
    return sum(one.width for one in accesses if one.scope == "sys")


def _size(shape: str) -> int:
    """Elements of a block: 128, of 2x64."""
    return math.prod(map(int, shape.split("x")))


def _bytes(subject: Subject, words: re.Pattern[str]) -> int:
    """Bytes that a thread has of all blocks of words in the source."""
    return sum(
        max(1, _size(shape) // subject.threads) * int(bits) // 8
        for shape, bits in words.findall(subject.source)
    )


def _is(*roles: Role) -> Callable[[Instruction], bool]:
    return lambda instruction: instruction.plays(*roles)


def _first(
    code: Assembly,
    place: Place,
    stop: Callable[[Instruction], bool],
    *roles: Role,
    backwards: bool = False,
) -> Instruction | None:
    """The first instruction of one of these roles on the ways from `place` to where they stop."""
    passed = code.walk(place, stop, backwards=backwards)
    return next((instruction for instruction in passed if instruction.plays(*roles)), None)


def _ends_wait(instruction: Instruction) -> bool:
    """A barrier; or the exchange by which the thread that polled gives up, to report it alone."""
    return instruction.plays(Role.BARRIER) or _GIVES_UP.search(instruction.text) is not None


def _is_system_acquire(instruction: Instruction) -> bool:
    return instruction.plays(Role.ACQUIRE) and instruction.scope == "sys"


_ORDERS = {
    "release": ("release",),
    "acquire": ("acquire",),
    "acq_rel": ("acquire", "release"),
}


def _orders(ttir: str) -> list[tuple[str, str]]:
    """(semantics, scope) of the ordered atomics of the source."""
    found = re.findall(r"tt\.atomic_(?:rmw \w+|cas|load|store)[, ]+(\w+), (\w+),", ttir)
    return [(semantics, scope) for semantics, scope in found if semantics != "relaxed"]


def _last_barriers(code: Assembly, place: Place) -> list[Place]:
    """The first barriers met on the ways back from `place`."""
    met: list[Instruction] = []

    def stop(instruction: Instruction) -> bool:
        if instruction.plays(Role.BARRIER):
            met.append(instruction)
        return instruction.plays(Role.BARRIER)

    for _ in code.walk(place, stop, backwards=True):
        pass
    return [barrier for barrier in code.places(Role.BARRIER) if code.at(barrier) in met]


def _never(instruction: Instruction) -> bool:
    return False


def _acquires_after(code: Assembly, place: Place) -> bool:
    return any(_is_system_acquire(one) for one in code.walk(place, _never))


def _small_shares(subject: Subject) -> set[int]:
    """Bytes per thread of tiles that are too small for 16."""
    shares = set()
    for dimensions, bits in re.findall(
        r"(?:load|async_copy)\w*\b.*?(?::|->) tensor<([\dx]+)x(?:!tt\.ptr<)?[a-z]+(\d+)",
        subject.ttgir,
    ):
        shares.add(max(1, _size(dimensions) // subject.threads) * int(bits) // 8)
    return {share for share in shares if share < 16}


def _reads_shared_first(inside: list[Instruction]) -> bool:
    """Whether a loop begins with what an earlier iteration, or its prologue, has put into LDS."""
    for instruction in inside:
        if instruction.plays(Role.SHARED_LOAD, Role.COPY, Role.MATRIX):
            return True
        if instruction.plays(Role.SHARED_STORE):
            return False
    return False
