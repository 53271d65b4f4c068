"""Digests of the code that recorded launches compile to, without the names in their sources.

Two digests are made. That of the TTIR, Triton's first intermediate form after inlining, together
with the compile options: it is the whole input of the compiler proper, so equal digests mean equal
machine code, and it takes a tenth of the time. That of the PTX or amdgcn: where refactored sources
differ as TTIR they may still compile to the same instructions. Neither runs an assembler.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import triton

from taxfree_check.cross_compile.compile import warm_up
from taxfree_check.cross_compile.record import Launch, flat
from taxfree_kernels.hardware import Hardware

_UNCOUNTED_OPTIONS = ("extern_libs",)  # holds paths


class _Stop(Exception):
    """Ends a compilation before the assembler."""


def digests(launches: Sequence[Launch], hardware: Hardware, assembly: bool) -> dict[str, str]:
    """Compile as far as is asked: {"ttir": digest} and, if `assembly`, {"assembly": ...}.

    Numbers of programs and numeric arguments count as well; of no launches there are no digests.
    Triton's driver and cache of this process are replaced: for processes that do nothing else.
    Raises whatever the compiler raises.
    """
    _use_own_cache()
    made = [_digests(launch, hardware, assembly) for launch in launches]
    numbers = [
        (launch.kernel.grid, [arg for arg in flat(launch.args) if isinstance(arg, int | float)])
        for launch in launches
    ]
    return {
        form: _digest(
            repr([(forms[form], *more) for forms, more in zip(made, numbers, strict=True)])
        )
        for form in (made[0] if made else ())
    }


def _digests(launch: Launch, hardware: Hardware, assembly: bool) -> dict[str, str]:
    digests: dict[str, str] = {}

    def watch(*stage_args: Any) -> Any:
        if not stage_args:  # asked for what the hook adds to the cache's key
            return "", ""
        _, stages, options, *_ = stage_args
        *_, text_stage, binary_stage = stages
        lower = stages["ttgir"]

        def after_ttir(module: Any, metadata: Any) -> Any:
            digests["ttir"] = _digest(f"{_options(options)}\n{plain_ttir(module.str_nodebug())}")
            if not assembly:
                raise _Stop
            return lower(module, metadata)

        def instead_of_assembling(text: str, metadata: Any) -> Any:
            digests["assembly"] = _digest(plain_assembly(text))
            raise _Stop

        stages["ttgir"], stages[binary_stage] = after_ttir, instead_of_assembling
        return None

    before = triton.knobs.runtime.add_stages_inspection_hook
    triton.knobs.runtime.add_stages_inspection_hook = watch
    try:
        warm_up(launch, hardware)
    except _Stop:
        return digests
    finally:
        triton.knobs.runtime.add_stages_inspection_hook = before
    raise RuntimeError(f"{launch.name} was compiled without being looked at")


@cache
def _use_own_cache() -> tempfile.TemporaryDirectory[str]:
    """Compile always, into a folder that goes with the process, and without lines of sources."""
    folder = tempfile.TemporaryDirectory(prefix="taxfree-instructions-")
    triton.knobs.cache.dir = folder.name
    triton.knobs.compilation.always_compile = True
    triton.knobs.compilation.disable_line_info = True
    return folder


def _options(options: Any) -> str:
    values = vars(options).items()
    return repr(sorted((name, value) for name, value in values if name not in _UNCOUNTED_OPTIONS))


_CONSTANT = re.compile(r"\s*(%[\w.$-]+) = arith\.constant (.*)")
_VALUE = re.compile(r"%[\w.$-]+")


def plain_ttir(text: str) -> str:
    """TTIR whose functions and values are numbered, its constants in place of their names.

    Constants are all defined where a function begins, in an order that depends on the order in
    which sources mention them. Nothing that the compiler makes of them does.
    """
    functions = re.findall(r'tt\.func (?:\w+ )?@("[^"]+"|[\w.$]+)', text)
    return "\n".join(_plain_lines(_numbered(text, functions).splitlines()))


def _plain_lines(lines: Iterable[str]) -> Iterator[str]:
    names: dict[str, str] = {}

    def name(match: re.Match[str]) -> str:
        return names.setdefault(match[0], f"%{len(names)}")

    for line in lines:
        if line.lstrip().startswith("tt.func"):
            names.clear()
        if constant := _CONSTANT.match(line):
            names[constant[1]] = f"({constant[2]})"
        else:
            yield _VALUE.sub(name, line)


def plain_assembly(text: str) -> str:
    """PTX or amdgcn without comments and empty lines, its functions numbered instead of named."""
    text = re.sub(r"//.*|/\*.*?\*/|^\s*;.*", "", text, flags=re.MULTILINE)
    functions = re.findall(r"\.(?:entry|func)\s+(?:\([^)]*\)\s*)?([\w$]+)", text)
    functions += re.findall(r"^\s*\.amdhsa_kernel\s+([\w$.]+)", text, re.MULTILINE)
    lines = _numbered(text, functions).splitlines()
    return "\n".join(" ".join(line.split()) for line in lines if line.strip())


def _numbered(text: str, functions: Iterable[str]) -> str:
    for number, name in enumerate(dict.fromkeys(functions)):
        whole_name = rf"(?<![\w$]){re.escape(name)}(?=_param_|(?![\w$]))"
        text = re.sub(whole_name, f"function{number}", text)
    return text


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
