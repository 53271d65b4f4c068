"""Digests of the code that measurements launch, and the compiler that makes them."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks import measurements
from benchmarks.measurements import Subject
from taxfree_kernels import hardware as hardware_module
from taxfree_kernels.cross_compile.instructions import kernel_key, run_time_values
from taxfree_kernels.cross_compile.pool import CompilePool
from taxfree_kernels.cross_compile.record import record
from taxfree_kernels.cross_compile.report import triton_version
from taxfree_kernels.cross_compile.screen import request
from taxfree_kernels.hardware import Hardware
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
    """

    ttir: dict[str, str]
    assembly: dict[str, str] = field(default_factory=dict)


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
        self._requests: dict[str, dict[str, Any]] = {}
        self.errors: dict[str, str] = {}

    def launches(self, subject: Subject) -> tuple[Launch, ...]:
        """Launches of our kernels by a measurement's plan, not compiled yet.

        Raises:
            NotRecordable: the plan cannot be made.
        """
        if measurements.current_hash(subject) is None:
            raise NotRecordable(
                f"there is no variant {subject.variant!r} of {subject.op!r} any more"
            )
        try:
            problem = problem_class(subject.op)(**json.loads(subject.problem))
            config, gpu = json.loads(subject.config), hardware_named(subject.gpu)
            made = record(subject.op, subject.variant, problem, config, gpu)
            asked = request(subject.op, problem, subject.variant, config, gpu)
        except Exception as error:  # whatever a plan raises is the reason
            raise NotRecordable(f"{type(error).__name__}: {error}") from error
        found = []
        for number, each in enumerate(made):
            key = f"{subject.gpu}\0{kernel_key(each)}"
            if key not in self._codes:
                self._codes[key] = Code({})
                digest = {"launch": number, "key": kernel_key(each), "assembly": False}
                self._requests[key] = asked | {"digest": digest}
            found.append(Launch(self._codes[key], each.kernel.grid, tuple(run_time_values(each))))
        return tuple(found)

    def compile(self, codes: Iterable[Code], assembly: bool) -> None:
        """Fill in missing digests; failures are in :attr:`errors`."""
        wanted = {id(code) for code in codes}
        keys = [key for key, code in self._codes.items() if id(code) in wanted]
        with ThreadPoolExecutor(len(self._pools)) as threads:
            list(threads.map(lambda each: self._compile(each, keys, assembly), self._pools))

    def _compile(self, version: str, keys: Sequence[str], assembly: bool) -> None:
        keys = [key for key in keys if self._lacks(key, version, assembly)]
        answers = self._pools[version].answers([self._request(key, assembly) for key in keys])
        what, begin, said = "assembly" if assembly else "TTIR", time.monotonic(), time.monotonic()
        for done, (key, answer) in enumerate(zip(keys, answers, strict=True), 1):
            if "error" in answer:
                self.errors[f"{key}\0{version}"] = f"Triton {version}: {answer['error']}"
                continue
            self._codes[key].ttir[version] = answer["ttir"]
            if assembly:
                self._codes[key].assembly[version] = answer["assembly"]
            if time.monotonic() - said > 10 or done == len(keys):
                said = time.monotonic()
                progress = f"{what} of {done}/{len(keys)} kernels, {said - begin:.0f} s"
                say(f"Triton {version}: {progress}")

    def _lacks(self, key: str, version: str, assembly: bool) -> bool:
        code = self._codes[key]
        is_known = version in (code.assembly if assembly else code.ttir)
        return not is_known and f"{key}\0{version}" not in self.errors

    def _request(self, key: str, assembly: bool) -> dict[str, Any]:
        asked = self._requests[key]
        return asked | {"digest": asked["digest"] | {"assembly": assembly}}

    def error_of(self, launches: Iterable[Launch]) -> str | None:
        """Why one of these did not compile, or None."""
        codes = {id(each.code) for each in launches}
        keys = [key for key, code in self._codes.items() if id(code) in codes]
        errors = (self.errors.get(f"{key}\0{each}") for key in keys for each in self.tritons)
        return next(filter(None, errors), None)

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, *raised: Any) -> None:
        for pool in self._pools.values():
            pool.__exit__(*raised)


@cache
def hardware_named(gpu: str) -> Hardware:
    """A device by its name in fingerprints.

    Raises:
        NotRecordable: the device is unknown.
    """
    for each in hardware_module.KNOWN.values():
        if each.name == gpu:
            return each
    raise NotRecordable(f"unknown GPU {gpu!r}: add it to taxfree_kernels.hardware.KNOWN")


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
