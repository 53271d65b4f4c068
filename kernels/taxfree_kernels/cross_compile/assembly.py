"""A common model of PTX and amdgcn: blocks of instructions with roles, control flow, loops."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property


class Role(Enum):
    """What an instruction does, as far as the gates care."""

    BARRIER = auto()  # of all threads of a program
    DRAIN = auto()  # the wave's own stores have completed
    RELEASE = auto()
    ACQUIRE = auto()
    POLL = auto()  # reads a word that a peer writes
    LOAD = auto()  # from global memory, into registers
    COPY = auto()  # from global memory, into shared memory, asynchronous
    BULK_COPY = auto()  # such a copy by the TMA, through the asynchronous proxy
    PROXY_FENCE = auto()  # orders it after what the generic proxy has seen in global memory
    EARLY_WAIT = auto()  # of a kernel that was launched early, until the one before has ended
    STORE = auto()  # to global memory
    BULK_STORE = auto()  # to global memory, asynchronous
    BULK_READ = auto()  # waits until bulk stores have read their source, and no more
    BULK_DONE = auto()  # waits until bulk stores have completed
    SHARED_LOAD = auto()
    SHARED_STORE = auto()
    MATRIX = auto()
    ATOMIC = auto()  # in global memory, of any kind
    CAS = auto()
    VOLATILE = auto()
    FIRST_LANE = auto()  # makes a register of a wave uniform


POLLS = (Role.POLL, Role.VOLATILE)


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Args:
        line: in the assembly, from 1.
        text: as it is there.
        roles: what it does.
        scope: "sys" or "gpu", for releases, acquires, polls, and stores past the caches.
        width: bytes per thread, for loads, copies and stores.
        element: bytes that are guaranteed to be accessed at once.
    """

    line: int
    text: str
    roles: frozenset[Role] = frozenset()
    scope: str = ""
    width: int = 0
    element: int = 0

    @property
    def op(self) -> str:
        """What it is called, with what is part of the name."""
        return next(word for word in self.text.split() if not word.startswith("@"))

    def plays(self, *roles: Role) -> bool:
        return not self.roles.isdisjoint(roles)

    @property
    def is_system_acquire(self) -> bool:
        return self.plays(Role.ACQUIRE) and self.scope == "sys"


def playing(*roles: Role) -> Callable[[Instruction], bool]:
    """Whether an instruction plays any of `roles`."""
    return lambda instruction: instruction.plays(*roles)


@dataclass
class Block:
    """Instructions that run one after the other; then one of `successors`."""

    label: str
    instructions: list[Instruction] = field(default_factory=list)
    successors: list[int] = field(default_factory=list)
    skips_if_masked: bool = False


Place = tuple[int, int]  # block, instruction in it


@dataclass(frozen=True)
class Loop:
    """A natural loop: its header, and its blocks."""

    header: int
    blocks: frozenset[int]


class Assembly:
    """The control flow of one kernel.

    Args:
        text: PTX or amdgcn.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.is_ptx = ".visible .entry" in text or ".target sm_" in text
        self.blocks = _blocks(text, _PTX if self.is_ptx else _AMDGCN)

    @cached_property
    def predecessors(self) -> list[list[int]]:
        before: list[list[int]] = [[] for _ in self.blocks]
        for index, block in enumerate(self.blocks):
            for successor in block.successors:
                before[successor].append(index)
        return before

    @cached_property
    def loops(self) -> list[Loop]:
        """Natural loops, one per header; of two headers that one tail returns to, the outer."""
        dominators = self._dominators()
        bodies: dict[int, set[int]] = {}
        for tail, block in enumerate(self.blocks):
            headers = dominators[tail].intersection(block.successors)
            if headers:
                header = min(headers, key=lambda one: len(dominators[one]))
                bodies.setdefault(header, {header}).update(self._body(header, tail))
        return [Loop(header, frozenset(body)) for header, body in bodies.items()]

    def places(self, *roles: Role) -> list[Place]:
        """Where instructions with any of `roles` stand, in the order of the text."""
        return [
            (index, position)
            for index, block in enumerate(self.blocks)
            for position, instruction in enumerate(block.instructions)
            if instruction.plays(*roles)
        ]

    def places_at_system_scope(self, role: Role) -> list[Place]:
        return [place for place in self.places(role) if self.at(place).scope == "sys"]

    def at(self, place: Place) -> Instruction:
        return self.blocks[place[0]].instructions[place[1]]

    def inside(self, loop: Loop) -> Iterator[Instruction]:
        """The instructions of a loop, in the order of the text."""
        for index in sorted(loop.blocks):
            yield from self.blocks[index].instructions

    def has(self, loop: Loop, *roles: Role) -> bool:
        """Whether a loop has an instruction with any of `roles`."""
        return any(instruction.plays(*roles) for instruction in self.inside(loop))

    def nested(self, loop: Loop) -> list[Loop]:
        """The loops inside `loop`."""
        return [other for other in self.loops if other.blocks < loop.blocks]

    def walk(
        self, start: Place, stop: Callable[[Instruction], bool], backwards: bool = False
    ) -> Iterator[Instruction]:
        """Every instruction on any path from `start` until the path's first that `stop` accepts.

        Neither the start nor where a path stops are part of it.
        """
        index, position = start
        step = -1 if backwards else 1
        pending = [(index, position + step)]
        seen: set[int] = set()
        while pending:
            index, position = pending.pop()
            instructions = self.blocks[index].instructions
            while 0 <= position < len(instructions) and not stop(instructions[position]):
                yield instructions[position]
                position += step
            if 0 <= position < len(instructions):
                continue
            following = self.predecessors[index] if backwards else self.blocks[index].successors
            for other in following:
                if other not in seen:
                    seen.add(other)
                    end = len(self.blocks[other].instructions) - 1 if backwards else 0
                    pending.append((other, end))

    def first(
        self,
        start: Place,
        stop: Callable[[Instruction], bool],
        *roles: Role,
        backwards: bool = False,
    ) -> Instruction | None:
        """The first instruction of one of these roles on the ways from `start`; see `walk`."""
        passed = self.walk(start, stop, backwards=backwards)
        return next((instruction for instruction in passed if instruction.plays(*roles)), None)

    def _dominators(self) -> list[set[int]]:
        everything = set(range(len(self.blocks)))
        dominators = [{0}, *(set(everything) for _ in self.blocks[1:])]
        changed = True
        while changed:
            changed = False
            for index in range(1, len(self.blocks)):
                above = [dominators[before] for before in self.predecessors[index]]
                found = {index} | (set.intersection(*above) if above else set())
                if found != dominators[index]:
                    dominators[index], changed = found, True
        return dominators

    def _body(self, header: int, tail: int) -> set[int]:
        body, pending = {header}, [tail]
        while pending:
            index = pending.pop()
            if index not in body:
                body.add(index)
                pending.extend(self.predecessors[index])
        return body


@dataclass(frozen=True)
class _Syntax:
    label: re.Pattern[str]
    comment: str
    branch: re.Pattern[str]  # groups: condition (may be empty), target
    end: re.Pattern[str]
    read: Callable[[int, str, str], Instruction]  # line, text, scope of a pending release
    opens_release: Callable[[str], str]


def _blocks(text: str, syntax: _Syntax) -> list[Block]:
    blocks = [Block("entry")]
    targets: list[list[str]] = [[]]
    falls_through = [True]
    pending_release = ""

    def start(label: str) -> None:
        blocks.append(Block(label))
        targets.append([])
        falls_through.append(True)

    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.split(syntax.comment)[0].strip()
        if not line:
            continue
        if label := syntax.label.match(line):
            start(label.group(1))
            continue
        if branch := syntax.branch.match(line):
            targets[-1].append(branch.group("target"))
            falls_through[-1] = bool(branch.group("condition"))
            blocks[-1].skips_if_masked = line.startswith("s_cbranch_execz")
            start("")
            continue
        if syntax.end.match(line):
            falls_through[-1] = False
            start("")
            continue
        pending_release = syntax.opens_release(line) or pending_release
        instruction = syntax.read(number, line, pending_release)
        if instruction.plays(Role.RELEASE):
            pending_release = ""
        if instruction.roles:
            blocks[-1].instructions.append(instruction)
    _connect(blocks, targets, falls_through)
    return blocks


def _connect(blocks: list[Block], targets: list[list[str]], falls_through: list[bool]) -> None:
    index_of = {block.label: index for index, block in enumerate(blocks) if block.label}
    for index, block in enumerate(blocks):
        block.successors = [index_of[target] for target in targets[index] if target in index_of]
        if falls_through[index] and index + 1 < len(blocks):
            block.successors.append(index + 1)
    _run_masked_acquires(blocks)
    for block in blocks:
        block.successors = [_through_empty(blocks, successor) for successor in block.successors]
    for index in set(range(len(blocks))) - _reachable(blocks):
        blocks[index] = Block("unreachable")


def _through_empty(blocks: list[Block], index: int) -> int:
    """Where a jump to `index` really ends."""
    seen = {index}
    while not blocks[index].instructions and len(blocks[index].successors) == 1:
        index = blocks[index].successors[0]
        if index in seen:
            break
        seen.add(index)
    return index


def _run_masked_acquires(blocks: list[Block]) -> None:
    """Forget the jump of waves without active lanes over an acquire of the others."""
    for index, block in enumerate(blocks):
        if not block.skips_if_masked:
            continue
        skipped = blocks[index + 1 : block.successors[0]]
        if any(one.plays(Role.ACQUIRE) for inner in skipped for one in inner.instructions):
            block.successors = [index + 1]


def _reachable(blocks: list[Block]) -> set[int]:
    seen: set[int] = set()
    pending = [0]
    while pending:
        index = pending.pop()
        if index not in seen:
            seen.add(index)
            pending.extend(blocks[index].successors)
    return seen


# -- PTX ----------------------------------------------------------------------------------------

_PTX_BITS = re.compile(r"\.(?:v(\d)\.)?[bfsu](\d+)\b")
_PTX_COPY_SIZE = re.compile(r"\],\s*(0x[0-9a-f]+|\d+)", re.IGNORECASE)


def _read_ptx(number: int, line: str, _pending: str) -> Instruction:
    text = re.sub(r"^[{}\s]*(@!?%\w+\s+)?", "", line)
    op = text.split()[0].rstrip(";") if text.split() else ""
    parts = frozenset(op.split("."))
    roles = frozenset(_ptx_roles(op, parts))
    scope = next((name for name in ("sys", "gpu", "cta") if name in parts), "")
    if parts & {"volatile", "wt"}:
        scope = "sys"
    bits = _PTX_BITS.search(op)
    element = int(bits.group(2)) // 8 if bits else 0
    return Instruction(number, line, roles, scope, _ptx_width(op, text), element)


def _ptx_roles(op: str, parts: frozenset[str]) -> Iterator[Role]:
    if op.startswith(("bar.sync", "barrier.sync", "barrier.cta.sync")):
        yield Role.BARRIER
    elif op.startswith(("wgmma.mma_async", "mma.sync")):
        yield Role.MATRIX
    elif op.startswith("cp.async.bulk"):
        yield from _ptx_bulk_roles(op, parts)
    elif op.startswith("fence.proxy.async") and "shared" not in op:
        yield Role.PROXY_FENCE
    elif op.startswith("griddepcontrol.wait"):
        yield Role.EARLY_WAIT
    elif op.startswith(("cp.async.cg", "cp.async.ca")):
        yield Role.COPY
    elif op.startswith(("atom.", "red.")) and "shared" not in parts:
        yield from _ptx_atomic_roles(parts)
    elif op.startswith("ld.") and parts & {"global", "volatile", "relaxed", "acquire"}:
        yield from _ptx_load_roles(parts)
    elif op.startswith("st.global") or (op.startswith("st.") and "release" in parts):
        yield Role.STORE
        if "release" in parts:
            yield Role.RELEASE
    elif op.startswith(("ld.shared", "ldmatrix")):
        yield Role.SHARED_LOAD
    elif op.startswith(("st.shared", "stmatrix")):
        yield Role.SHARED_STORE


def _ptx_bulk_roles(op: str, parts: frozenset[str]) -> Iterator[Role]:
    if "wait_group" in parts:
        yield Role.BULK_READ if "read" in parts else Role.BULK_DONE
    elif "prefetch" in parts or "commit_group" in parts:
        return
    elif ".global.shared" in op or ".reduce." in op:
        yield Role.BULK_STORE
    else:
        yield Role.COPY
        yield Role.BULK_COPY


def _ptx_atomic_roles(parts: frozenset[str]) -> Iterator[Role]:
    yield Role.ATOMIC
    if "cas" in parts:
        yield Role.CAS
    if parts & {"release", "acq_rel"}:
        yield Role.RELEASE
    if parts & {"acquire", "acq_rel"}:
        yield Role.ACQUIRE
    if "relaxed" in parts and parts & {"add", "or"} and "sys" in parts:
        yield Role.POLL


def _ptx_load_roles(parts: frozenset[str]) -> Iterator[Role]:
    if "volatile" in parts:
        yield Role.VOLATILE
    elif "acquire" in parts:
        yield Role.ACQUIRE
    elif "relaxed" in parts:
        yield Role.POLL
    elif "shared" not in parts:
        yield Role.LOAD


def _ptx_width(op: str, text: str) -> int:
    if op.startswith("cp.async.bulk"):
        return 16
    if op.startswith("cp.async."):
        size = _PTX_COPY_SIZE.search(text)
        return int(size.group(1), 0) if size else 0
    bits = _PTX_BITS.search(op)
    return int(bits.group(1) or 1) * int(bits.group(2)) // 8 if bits else 0


_PTX = _Syntax(
    label=re.compile(r"(\$L\w+):"),
    comment="//",
    branch=re.compile(r"(?P<condition>@!?%\w+\s+)?bra(?:\.uni)?\s+(?P<target>\$L\w+)"),
    end=re.compile(r"(ret|exit|trap)\b"),
    read=_read_ptx,
    opens_release=lambda line: "",
)


# -- amdgcn -------------------------------------------------------------------------------------

_AMD_ACCESS = re.compile(r"(buffer|global|flat)_(load|store|atomic)_(\w+)")
_AMD_BYTES = (("x4", 16), ("x3", 12), ("x2", 8), ("dword", 4), ("b128", 16), ("b64", 8),
              ("b32", 4), ("short", 2), ("d16", 2), ("byte", 1))  # fmt: skip
_AMD_DRAINED = re.compile(r"s_waitcnt\b.*vmcnt\(0\)|s_waitcnt 0\b")


def _read_amdgcn(number: int, line: str, pending: str) -> Instruction:
    access = _AMD_ACCESS.match(line)
    if access is not None:
        return _read_amd_access(number, line, access, pending)
    op = line.split()[0]
    role, scope = None, ""
    if op == "s_barrier":
        role = Role.BARRIER
    elif _AMD_DRAINED.match(line):
        role = Role.DRAIN
    elif op == "buffer_inv":
        role, scope = Role.ACQUIRE, "sys" if "sc0 sc1" in line else "gpu"
    elif op.startswith(("v_mfma", "v_smfmac")):
        role = Role.MATRIX
    elif op.startswith("ds_read"):
        role = Role.SHARED_LOAD
    elif op.startswith("ds_write"):
        role = Role.SHARED_STORE
    elif op.startswith("v_readfirstlane"):
        role = Role.FIRST_LANE
    return Instruction(number, line, frozenset({role} if role else ()), scope)


def _read_amd_access(number: int, line: str, access: re.Match[str], pending: str) -> Instruction:
    action, what = access.group(2), access.group(3)
    width = next((size for name, size in _AMD_BYTES if name in what), 0)
    roles = set()
    if action == "atomic":
        roles.add(Role.ATOMIC)
        if "cmpswap" in what:
            roles.add(Role.CAS)
        if what.startswith(("add", "or")) and "sc1" in line and not pending:
            roles.add(Role.POLL)
    elif action == "store":
        roles.add(Role.STORE)
    elif "sc1" in line:
        roles.add(Role.POLL)
    elif re.search(r"\blds\b|_lds_", line):
        roles.add(Role.COPY)
    else:
        roles.add(Role.LOAD)
    scope = "sys" if "sc1" in line else ""
    if pending and action != "load":
        roles.add(Role.RELEASE)
        # Both the write-back and the access itself have to reach the system.
        scope = "sys" if pending == "sys" and "sc1" in line else "gpu"
    return Instruction(number, line, frozenset(roles), scope, width, min(width, 8))


def _amd_opens_release(line: str) -> str:
    if not line.startswith("buffer_wbl2"):
        return ""
    return "sys" if "sc0 sc1" in line else "gpu"


_AMDGCN = _Syntax(
    label=re.compile(r"(\.LBB\w+):"),
    comment=";",
    branch=re.compile(r"s_(?P<condition>c)?branch\w*\s+(?P<target>\.LBB\w+)"),
    end=re.compile(r"s_endpgm\b"),
    read=_read_amdgcn,
    opens_release=_amd_opens_release,
)
