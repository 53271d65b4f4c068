"""Digests of the code that measurements launch, and the compiler that makes them."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import measurements
from benchmarks.measurements import Subject
from taxfree_kernels.cross_compile.instructions import kernel_key, run_time_values
from taxfree_kernels.cross_compile.pool import CompilePool
from taxfree_kernels.cross_compile.record import record
from taxfree_kernels.cross_compile.report import triton_version
from taxfree_kernels.cross_compile.screen import request
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.variant import problem_class
from taxfree_tuning_db.records import canonical_json
from taxfree_tuning_db.renamed import with_new_names

OLDEST_TRITON = Path(__file__).parents[1] / ".triton36"
SCHEMA = 1
WORKERS = 2
_TIMEOUT_S = 600.0


@dataclass
class Code:
    """Digests of one compiled kernel.

    Args:
        ttir: version of Triton -> digest of the TTIR and the options.
        assembly: version of Triton -> digest of the PTX or amdgcn, if it was made.
        errors: version of Triton -> why the kernel does not compile.
        request: to a compile worker; empty if the code was read from a file.
    """

    ttir: dict[str, str]
    assembly: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    request: dict[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Launch:
    """One launch of a measurement: the kernel, its number of programs, its numeric arguments."""

    code: Code
    grid: int
    values: tuple[int | float, ...]


Key = tuple[Subject, str]  # with the hash of the sources


class Digests:
    """The committed digests: the launches of each measurement."""

    def __init__(self, launches: dict[Key, tuple[Launch, ...]]) -> None:
        self.launches = launches

    @classmethod
    def load(cls, path: Path) -> Digests:
        """Read digests, with current names; none if there is no file.

        Raises:
            SystemExit: the file has another schema.
        """
        if not path.exists():
            return cls({})
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["schema"] != SCHEMA:
            raise SystemExit(f"error: {path}: schema {document['schema']} is not {SCHEMA}")
        tritons = document["tritons"]
        codes = [_code(tritons, digests) for digests in document["kernels"]]
        launches = [
            Launch(codes[kernel], grid, tuple(values))
            for kernel, grid, values in document["launches"]
        ]
        found = {}
        for group in document["measurements"]:
            for problem, config, numbers in group["measured"]:
                fields = {"problem": document["problems"][problem], "variant": group["variant"]}
                fields["config"] = document["configs"][config]
                named = with_new_names(group["op"], fields)
                texts = canonical_json(named["problem"]), canonical_json(named["config"])
                subject = Subject(group["gpu"], group["op"], texts[0], named["variant"], texts[1])
                found[subject, group["kernel_hash"]] = tuple(launches[each] for each in numbers)
        return cls(found)

    def text(self) -> str:
        """The content of the file; it does not depend on the order of recording."""
        problems, configs, kernels, launches = (dict[str, int]() for _ in range(4))

        def number(known: dict[str, int], text: str) -> int:  # in order of appearance
            return known.setdefault(text, len(known))

        codes = [each.code for made in self.launches.values() for each in made]
        tritons = sorted({version for code in codes for version in code.ttir})
        groups: dict[str, list[Any]] = {}
        for (subject, kernel_hash), made in sorted(self.launches.items(), key=lambda item: item[0]):
            numbers = []
            for each in made:
                kernel = number(kernels, canonical_json(_digests_of(tritons, each.code)))
                launch = canonical_json([kernel, each.grid, each.values])
                numbers.append(number(launches, launch))
            entry = [number(problems, subject.problem), number(configs, subject.config), numbers]
            place = {"gpu": subject.gpu, "op": subject.op, "variant": subject.variant}
            place["kernel_hash"] = kernel_hash
            groups.setdefault(canonical_json(place), []).append(entry)
        lines = [f'"schema":{SCHEMA}', f'"tritons":{canonical_json(tritons)}']
        names = ("problems", "configs", "kernels", "launches")
        for name, texts in zip(names, (problems, configs, kernels, launches), strict=True):
            lines.append(f'"{name}":[\n' + ",\n".join(texts) + "\n]")
        said = [
            f'{place[:-1]},"measured":{canonical_json(measured)}}}'
            for place, measured in groups.items()
        ]
        lines.append('"measurements":[\n' + ",\n".join(said) + "\n]")
        return "{" + ",\n".join(lines) + "}\n"


def _digests_of(tritons: Sequence[str], code: Code) -> list[str]:
    """Digests of TTIR and assembly under each Triton in turn; empty if unknown."""
    return [table.get(each, "") for each in tritons for table in (code.ttir, code.assembly)]


def _code(tritons: Sequence[str], digests: Sequence[str]) -> Code:
    pairs = [zip(tritons, digests[begin::2], strict=True) for begin in (0, 1)]
    return Code(*({triton: digest for triton, digest in each if digest} for each in pairs))


class NotRecordable(Exception):
    """A measurement's plan cannot be made or compiled any more."""


class Compiler:
    """Compiles the current sources under several Tritons; a context manager with processes.

    Args:
        tritons: version -> its folder, or None for the environment's.
        workers: processes, shared by the Tritons.
    """

    def __init__(self, tritons: dict[str, Path | None], workers: int = WORKERS) -> None:
        each = max(1, workers // len(tritons))
        self.tritons = tuple(tritons)
        self._pools = {
            version: CompilePool(each, _TIMEOUT_S, path) for version, path in tritons.items()
        }
        self._codes: dict[str, Code] = {}

    def launches(self, subject: Subject) -> tuple[Launch, ...]:
        """Launches of our kernels by a measurement's plan, not compiled yet.

        Raises:
            NotRecordable: the plan cannot be made.
        """
        gpu = next((each for each in KNOWN.values() if each.name == subject.gpu), None)
        if gpu is None:
            raise NotRecordable(f"unknown GPU {subject.gpu!r}: add it to hardware.KNOWN")
        if measurements.current_hash(subject) is None:
            raise NotRecordable(f"there is no variant {subject.variant!r} of {subject.op!r}")
        try:
            problem = problem_class(subject.op)(**json.loads(subject.problem))
            config = json.loads(subject.config)
            made = record(subject.op, subject.variant, problem, config, gpu)
            asked = request(subject.op, problem, subject.variant, config, gpu)
        except Exception as error:  # whatever a plan raises is the reason
            raise NotRecordable(f"{type(error).__name__}: {error}") from error
        found = []
        for number, each in enumerate(made):
            key = kernel_key(each)
            digest = {"launch": number, "key": key}
            new = Code({}, request=asked | {"digest": digest})
            code = self._codes.setdefault(f"{subject.gpu}\0{key}", new)
            found.append(Launch(code, each.kernel.grid, tuple(run_time_values(each))))
        return tuple(found)

    def compile(self, codes: Iterable[Code], assembly: bool) -> None:
        """Fill in missing digests, or why there are none."""
        each_once = {id(code): code for code in codes}.values()
        with ThreadPoolExecutor(len(self._pools)) as threads:
            list(threads.map(lambda each: self._compile(each, each_once, assembly), self._pools))

    def _compile(self, version: str, codes: Iterable[Code], assembly: bool) -> None:
        lacking = [
            code
            for code in codes
            if version not in (code.assembly if assembly else code.ttir)
            and version not in code.errors
        ]
        answers = self._pools[version].answers(
            code.request | {"digest": code.request["digest"] | {"assembly": assembly}}
            for code in lacking
        )
        what, begin, said = "assembly" if assembly else "TTIR", time.monotonic(), time.monotonic()
        for done, (code, answer) in enumerate(zip(lacking, answers, strict=True), 1):
            if "error" in answer:
                code.errors[version] = f"Triton {version}: {answer['error']}"
                continue
            code.ttir[version] = answer["ttir"]
            if assembly:
                code.assembly[version] = answer["assembly"]
            if time.monotonic() - said > 10 or done == len(lacking):
                said = time.monotonic()
                progress = f"{what} of {done}/{len(lacking)} kernels, {said - begin:.0f} s"
                say(f"Triton {version}: {progress}")

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, *raised: Any) -> None:
        for pool in self._pools.values():
            pool.close()


def error_of(launches: Iterable[Launch]) -> str | None:
    """Why one of these did not compile, or None."""
    return next((error for each in launches for error in each.code.errors.values()), None)


def both_tritons() -> dict[str, Path | None]:
    """The environment's Triton and the oldest supported.

    Raises:
        SystemExit: the oldest is not installed.
    """
    if not (OLDEST_TRITON / "triton").is_dir():
        raise SystemExit("error: the oldest Triton is missing\nhint: make .triton36/.stamp")
    paths: tuple[Path | None, ...] = (None, OLDEST_TRITON)
    return {triton_version(path): path for path in paths}


def say(text: str) -> None:
    """Report progress on stderr."""
    print(f"rehash: {text}", file=sys.stderr, flush=True)
