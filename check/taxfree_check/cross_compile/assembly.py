"""Instructions of PTX and amdgcn, read as roles that the assembly checks look for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto


class Role(Enum):
    """Effects of an instruction that matter to the assembly checks."""

    BARRIER = auto()  # of all threads of a program, or of a role of several warps
    WARP_BARRIER = auto()  # of a warp, which may be all that has a role
    DRAIN = auto()  # the wave's own stores have completed
    WRITE_BACK = auto()  # of a cache; a drain behind it waits for its end
    RELEASE = auto()
    ACQUIRE = auto()
    POLL = auto()  # reads a word that a peer writes
    LOAD = auto()  # from global memory, into registers
    COPY = auto()  # from global memory, into shared memory, asynchronous
    BULK_COPY = auto()  # such a copy by the TMA, through the asynchronous proxy
    PROXY_FENCE = auto()  # orders it after what the generic proxy has seen in global memory
    SHARED_FENCE = auto()  # the same in shared memory
    ARRIVAL = auto()  # at a barrier in shared memory, without bytes to come
    EARLY_WAIT = auto()  # of a kernel that was launched early, until the one before has ended
    LAUNCH_NEXT = auto()  # lets the next kernel begin
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
class AsmInstruction:
    """One instruction.

    Args:
        line: in the assembly, from 1.
        text: as it is there.
        roles: what it does.
        scope: "sys" or "gpu", for releases, acquires, polls, and stores past the caches.
        width: bytes per thread, for loads, copies and stores.
        element: bytes that are guaranteed to be accessed at once.
        source: the line that it was compiled from, or "".
    """

    line: int
    text: str
    roles: frozenset[Role] = frozenset()
    scope: str = ""
    width: int = 0
    element: int = 0
    source: str = ""

    @property
    def op(self) -> str:
        """Mnemonic with its modifiers."""
        return next(word for word in self.text.split() if not word.startswith("@"))

    def has(self, *roles: Role) -> bool:
        """Whether it has any of `roles`."""
        return not self.roles.isdisjoint(roles)

    @property
    def is_system_acquire(self) -> bool:
        return self.has(Role.ACQUIRE) and self.scope == "sys"


@dataclass(frozen=True)
class Syntax:
    """The patterns of one assembly language.

    Args:
        label: its group is the label.
        comment: begins one.
        branch: groups `condition`, which may be empty, and `target`, a label or one of a table.
        end: of the program.
        read: an instruction, from line number, text, and scope of a pending release.
        opens_release: scope of the release that a line begins, or "".
    """

    label: re.Pattern[str]
    comment: str
    branch: re.Pattern[str]
    end: re.Pattern[str]
    read: Callable[[int, str, str], AsmInstruction]
    opens_release: Callable[[str], str]


def _by_prefix(op: str, roles: Mapping[tuple[str, ...], Role]) -> Iterator[Role]:
    yield from (role for prefixes, role in roles.items() if op.startswith(prefixes))


# -- PTX ----------------------------------------------------------------------------------------

_PTX_BITS = re.compile(r"\.(?:v(\d)\.)?[bfsu](\d+)\b")
_PTX_COPY_SIZE = re.compile(r"\],\s*(0x[0-9a-f]+|\d+)", re.IGNORECASE)
_PTX_ROLES = {
    ("bar.sync", "barrier.sync", "barrier.cta.sync"): Role.BARRIER,
    ("bar.warp.sync",): Role.WARP_BARRIER,
    ("wgmma.mma_async", "mma.sync"): Role.MATRIX,
    ("mbarrier.arrive.shared",): Role.ARRIVAL,
    ("griddepcontrol.wait",): Role.EARLY_WAIT,
    ("griddepcontrol.launch_dependents",): Role.LAUNCH_NEXT,
    ("cp.async.cg", "cp.async.ca"): Role.COPY,
    ("ld.shared", "ldmatrix"): Role.SHARED_LOAD,
    ("st.shared", "stmatrix"): Role.SHARED_STORE,
}


def _read_ptx(number: int, line: str, _pending: str) -> AsmInstruction:
    text = re.sub(r"^[{}\s]*(@!?%\w+\s+)?", "", line)
    op = text.split()[0].rstrip(";") if text.split() else ""
    parts = frozenset(op.split("."))
    scope = next((name for name in ("sys", "gpu", "cta") if name in parts), "")
    if parts & {"volatile", "wt"}:
        scope = "sys"
    bits = _PTX_BITS.search(op)
    element = int(bits.group(2)) // 8 if bits else 0
    width = int(bits.group(1) or 1) * element if bits else 0
    if op.startswith("cp.async.bulk"):
        width = 16
    elif op.startswith("cp.async."):
        size = _PTX_COPY_SIZE.search(text)
        width = int(size.group(1), 0) if size else 0
    return AsmInstruction(number, line, frozenset(_ptx_roles(op, parts)), scope, width, element)


def _ptx_roles(op: str, parts: frozenset[str]) -> Iterator[Role]:
    if op.startswith("cp.async.bulk"):
        yield from _ptx_bulk_roles(op, parts)
    elif op.startswith("fence.proxy.async"):
        yield Role.SHARED_FENCE if "shared" in op else Role.PROXY_FENCE
    elif op.startswith(("atom.", "red.")) and "shared" not in parts:
        yield from _ptx_atomic_roles(parts)
    elif op.startswith("ld.") and parts & {"global", "volatile", "relaxed", "acquire"}:
        yield from _ptx_load_roles(parts)
    elif op.startswith("st.global") or (op.startswith("st.") and "release" in parts):
        yield Role.STORE
        if "release" in parts:
            yield Role.RELEASE
    else:
        yield from _by_prefix(op, _PTX_ROLES)


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


PTX = Syntax(
    label=re.compile(r"(\$L\w+):"),
    comment="//",
    branch=re.compile(
        r"(?P<condition>@!?%\w+\s+)?"
        r"(?:bra(?:\.uni)?\s+(?=\$L)|brx\.idx(?:\.uni)?\s+%\w+,\s*)(?P<target>\$?\w+)"
    ),
    end=re.compile(r"(ret|exit|trap)\b"),
    read=_read_ptx,
    opens_release=lambda line: "",
)


# -- amdgcn -------------------------------------------------------------------------------------

_AMD_ACCESS = re.compile(r"(buffer|global|flat)_(load|store|atomic)_(\w+)")
_AMD_BYTES = (("x4", 16), ("x3", 12), ("x2", 8), ("dword", 4), ("b128", 16), ("b64", 8),
              ("b32", 4), ("short", 2), ("d16", 2), ("byte", 1))  # fmt: skip
_AMD_DRAINED = re.compile(r"s_waitcnt\b.*vmcnt\(0\)|s_waitcnt 0\b")
_AMD_ROLES = {
    ("s_barrier",): Role.BARRIER,
    ("buffer_inv",): Role.ACQUIRE,
    ("buffer_wbl2",): Role.WRITE_BACK,
    ("v_mfma", "v_smfmac"): Role.MATRIX,
    ("ds_read",): Role.SHARED_LOAD,
    ("ds_write",): Role.SHARED_STORE,
    ("v_readfirstlane",): Role.FIRST_LANE,
}


def _read_amdgcn(number: int, line: str, pending: str) -> AsmInstruction:
    access = _AMD_ACCESS.match(line)
    if access is not None:
        return _read_amd_access(number, line, access, pending)
    roles = set(_by_prefix(line, _AMD_ROLES))
    if _AMD_DRAINED.match(line):
        roles.add(Role.DRAIN)
    return AsmInstruction(number, line, frozenset(roles), _cache_scope(line, "buffer_inv"))


def _read_amd_access(number: int, line: str, access: re.Match[str], pending: str) -> AsmInstruction:
    action, kind = access.group(2), access.group(3)
    width = next((size for name, size in _AMD_BYTES if name in kind), 0)
    roles = set()
    if action == "atomic":
        roles.add(Role.ATOMIC)
        if "cmpswap" in kind:
            roles.add(Role.CAS)
        if kind.startswith(("add", "or")) and "sc1" in line and not pending:
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
    return AsmInstruction(number, line, frozenset(roles), scope, width, min(width, 8))


def _cache_scope(line: str, op: str) -> str:
    """Scope of a write-back or invalidation of caches; "" for other instructions."""
    if not line.startswith(op):
        return ""
    return "sys" if "sc0 sc1" in line else "gpu"


AMDGCN = Syntax(
    label=re.compile(r"(\.LBB\w+):"),
    comment=";",
    branch=re.compile(r"s_(?P<condition>c)?branch\w*\s+(?P<target>\.LBB\w+)"),
    end=re.compile(r"s_endpgm\b"),
    read=_read_amdgcn,
    opens_release=lambda line: _cache_scope(line, "buffer_wbl2"),
)
