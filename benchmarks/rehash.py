"""Move kernel hashes in committed measurements to today's, where the instructions are the same.

    python -m benchmarks.rehash            move hashes; exit status 1 if a measurement is stale
    python -m benchmarks.rehash --check    change nothing; 1 if there is anything to do
    python -m benchmarks.rehash --record   also write digests for measurements that have none
    ... --record --assembly [--variant ..] also of their assembly; an hour for all

A measurement is valid for the sources that its `kernel_hash` was made of, so any change of a name
makes it stale. This tool keeps digests of the code that each measurement of the shipped tables and
committed result files launches, in benchmarks/instructions.json. After a refactoring it compiles
today's sources, for the GPU that was measured and without one, with this Triton and the oldest
supported, and moves the hash where both make the same code, launched alike.

What is compared: the kernels that a plan launches, in order, on one rank: their digests, numbers of
programs and numeric arguments. Digests are equal where the TTIR and the compile options are, which
are the whole input of the compiler; else where the PTX is, from which the same assembler makes the
same machine code. Names, comments and lines of sources do not count. PTX takes several times as
long, so its digests are made only when they are needed, by --record --assembly in a tree of the old
sources. What torch and the vendor's libraries do is not compared. Where no kernel of ours is
launched before a plan asks for its peers (baselines, library variants), only library calls stand
behind the hash. It then moves if that is still so: whoever changes what these variants call must
measure them again.

A measurement whose hash is neither today's nor that of a digest was stale before. It stays as it
is, and so does one of a variant that was removed. Names that were changed in stored documents are
mapped by `taxfree_tuning_db.renamed`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from taxfree import fingerprints
from taxfree.measuring.results import DISPATCH
from taxfree_kernels import hardware as hardware_module
from taxfree_kernels.cross_compile.instructions import kernel_key, run_time_values
from taxfree_kernels.cross_compile.pool import CompilePool
from taxfree_kernels.cross_compile.record import record
from taxfree_kernels.cross_compile.report import triton_version
from taxfree_kernels.cross_compile.screen import request
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.variant import operation_names, problem_class
from taxfree_tuning_db import files
from taxfree_tuning_db.renamed import with_new_names

ROOT = Path(__file__).parents[1]
MEASURED = ("tuning_db/taxfree_tuning_db/tables/*.json", "benchmarks/results/**/*.json")
DIGESTS = "benchmarks/instructions.json"
OLDEST_TRITON = ROOT / ".triton36"
SCHEMA = 1
WORKERS = 2
_TIMEOUT_S = 600.0
_BATCH = 200  # measurements recorded between two writes of the digests

Status = Literal["current", "unrecorded", "moved", "changed", "stale", "removed"]


# -- measurements --------------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class Subject:
    """What was measured; problem and config as canonical JSON, under today's names."""

    gpu: str
    op: str
    problem: str
    variant: str
    config: str

    def __str__(self) -> str:
        return f"{self.op} {self.problem} {self.variant} {self.config} on {self.gpu}"


@dataclass(frozen=True)
class Site:
    """Where a measurement stands.

    Args:
        file: that holds it.
        entry: the JSON object with the hash; changed in place.
    """

    file: Path
    subject: Subject
    entry: dict[str, Any]

    @property
    def kernel_hash(self) -> str:
        return str(self.entry["kernel_hash"])


@dataclass
class Document:
    """A committed file of measurements."""

    path: Path
    text: str
    content: Any
    sites: list[Site]

    @classmethod
    def load(cls, path: Path) -> Document:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)
        if "records" in content:
            content["records"] = [with_new_names(each["op"], each) for each in content["records"]]
            return cls(path, text, content, list(_sites_of_records(path, content["records"])))
        if "rows" not in content:  # it measures no variant
            return cls(path, text, content, [])
        content["rows"] = [with_new_names(each.get("op"), each) for each in content["rows"]]
        gpu = content["environment"].get("hardware", {}).get("gpu", "")
        return cls(path, text, content, list(_sites_of_rows(path, content["rows"], gpu)))

    def new_text(self) -> str:
        """The file as it should be, in the form that it has.

        Raises:
            SystemExit: the file is in no form that this tool can write.
        """
        was = json.loads(self.text)
        for form in (
            {"indent": 1, "sort_keys": True},
            {"indent": 1},
            {},
            {"separators": (",", ":")},
        ):
            for end in ("\n", ""):
                if json.dumps(was, **form) + end == self.text:
                    return json.dumps(self.content, **form) + end
        raise SystemExit(f"error: {self.path}: written by none of our tools; format it as JSON")


def _sites_of_records(path: Path, records: Iterable[dict[str, Any]]) -> Iterator[Site]:
    for each in records:
        gpu, op, problem = each["hardware"]["gpu"], each["op"], _canonical(each["problem"])
        for entry in (each["winner"], each["baseline"], *each["runners_up"]):
            config = _canonical(entry["config"])
            yield Site(path, Subject(gpu, op, problem, entry["variant"], config), entry)


def _sites_of_rows(path: Path, rows: Iterable[dict[str, Any]], gpu: str) -> Iterator[Site]:
    for row in rows:
        if not row.get("kernel_hash"):  # no kernel of ours, or a file without hashes
            continue
        variant, config = row["variant"], dict(row["config"])
        if variant == DISPATCH:
            variant = config.pop("variant")
        problem = _canonical(row["problem"])
        yield Site(path, Subject(gpu, row["op"], problem, variant, _canonical(config)), row)


def _canonical(values: Any) -> str:
    return json.dumps(values, sort_keys=True, separators=(",", ":"))


def load_documents(root: Path) -> list[Document]:
    """All committed files of measurements."""
    paths = sorted(path for pattern in MEASURED for path in root.glob(pattern))
    return [Document.load(path) for path in paths]


def todays_hash(subject: Subject) -> str | None:
    """The hash of the variant's sources; None if there is no such variant any more."""
    if subject.op not in operation_names():
        return None
    return fingerprints.kernel_hashes(subject.op).get(subject.variant)


# -- digests -------------------------------------------------------------------------------------


@dataclass
class Code:
    """What one kernel compiles to.

    Args:
        ttir: version of Triton -> digest of the TTIR and the options.
        assembly: version of Triton -> digest of the PTX or amdgcn, where it is known.
    """

    ttir: dict[str, str]
    assembly: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Launch:
    """One launch of a measurement: the kernel, its programs and its numeric arguments."""

    code: Code
    grid: int
    values: tuple[int | float, ...]


Key = tuple[Subject, str]  # what was measured, and the hash of the sources


class Digests:
    """The committed digests: what each measurement of certain sources launches."""

    def __init__(self, launches: dict[Key, tuple[Launch, ...]]) -> None:
        self.launches = launches

    @classmethod
    def load(cls, path: Path) -> Digests:
        """Read digests under today's names; none if there is no file.

        Raises:
            SystemExit: the file is of another schema.
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
                subject = _subject(
                    group["gpu"],
                    group["op"],
                    document["problems"][problem],
                    group["variant"],
                    document["configs"][config],
                )
                found[subject, group["kernel_hash"]] = tuple(launches[each] for each in numbers)
        return cls(found)

    def text(self) -> str:
        """The content of the file, the same whatever was recorded first."""
        problems, configs, kernels, launches = _Numbers(), _Numbers(), _Numbers(), _Numbers()
        codes = [each.code for made in self.launches.values() for each in made]
        tritons = sorted({version for code in codes for version in code.ttir})
        groups: dict[tuple[str, str, str, str], list[Any]] = {}
        for (subject, kernel_hash), made in sorted(self.launches.items(), key=lambda item: item[0]):
            numbers = []
            for each in made:
                kernel = kernels.of(_canonical(_digests_of(tritons, each.code)))
                numbers.append(launches.of(_canonical([kernel, each.grid, each.values])))
            place = (subject.gpu, subject.op, subject.variant, kernel_hash)
            groups.setdefault(place, []).append(
                [problems.of(subject.problem), configs.of(subject.config), numbers]
            )
        lines = [f'"schema":{SCHEMA}', f'"tritons":{_canonical(tritons)}']
        tables = {
            "problems": problems,
            "configs": configs,
            "kernels": kernels,
            "launches": launches,
        }
        for name, numbered in tables.items():
            lines.append(f'"{name}":[\n' + ",\n".join(numbered.items) + "\n]")
        said = [
            _canonical({"gpu": gpu, "op": op, "variant": variant, "kernel_hash": kernel_hash})[:-1]
            + f',"measured":{_canonical(measured)}}}'
            for (gpu, op, variant, kernel_hash), measured in groups.items()
        ]
        lines.append('"measurements":[\n' + ",\n".join(said) + "\n]")
        return "{" + ",\n".join(lines) + "}\n"


class _Numbers:
    """Numbers texts in order of appearance."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def of(self, text: str) -> int:
        return self._known.setdefault(text, len(self._known))

    @property
    def items(self) -> list[str]:
        return list(self._known)


def _subject(gpu: str, op: str, problem: Any, variant: str, config: Any) -> Subject:
    named = with_new_names(op, {"problem": problem, "variant": variant, "config": config})
    return Subject(
        gpu, op, _canonical(named["problem"]), named["variant"], _canonical(named["config"])
    )


def _digests_of(tritons: Sequence[str], code: Code) -> list[str]:
    """TTIR and assembly under each Triton in turn; empty where it is not known."""
    return [table.get(each, "") for each in tritons for table in (code.ttir, code.assembly)]


def _code(tritons: Sequence[str], digests: Sequence[str]) -> Code:
    ttir = dict(zip(tritons, digests[::2], strict=True))
    assembly = dict(zip(tritons, digests[1::2], strict=True))
    return Code(
        {name: digest for name, digest in ttir.items() if digest},
        {name: digest for name, digest in assembly.items() if digest},
    )


# -- compiling -----------------------------------------------------------------------------------


class NotRecordable(Exception):
    """A measurement's plan cannot be made or compiled today."""


class Compiler:
    """Compiles today's sources under several Tritons; a context manager, as it holds processes.

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
        """What a measurement launches today, not compiled yet; library calls are left out.

        Raises:
            NotRecordable: the plan cannot be made.
        """
        try:
            problem = problem_class(subject.op)(**json.loads(subject.problem))
            config, gpu = json.loads(subject.config), hardware_named(subject.gpu)
            made = record(subject.op, subject.variant, problem, config, gpu)
            asked = request(subject.op, problem, subject.variant, config, gpu)
        except Exception as error:  # whatever a plan raises is why
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
        """Fill in what is missing of these; what fails to compile is in :attr:`errors`."""
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
                _say(
                    f"Triton {version}: {what} of {done}/{len(keys)} kernels, {said - begin:.0f} s"
                )

    def _lacks(self, key: str, version: str, assembly: bool) -> bool:
        code = self._codes[key]
        return version not in (code.assembly if assembly else code.ttir) and (
            f"{key}\0{version}" not in self.errors
        )

    def _request(self, key: str, assembly: bool) -> dict[str, Any]:
        asked = self._requests[key]
        return asked | {"digest": asked["digest"] | {"assembly": assembly}}

    def error_of(self, launches: Iterable[Launch]) -> str | None:
        """Why one of these did not compile, or None."""
        codes = {id(each.code) for each in launches}
        for key, code in self._codes.items():
            if id(code) in codes:
                for version in self.tritons:
                    if error := self.errors.get(f"{key}\0{version}"):
                        return error
        return None

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, *raised: Any) -> None:
        for pool in self._pools.values():
            pool.__exit__(*raised)


@cache
def hardware_named(gpu: str) -> Hardware:
    """A device by the name that fingerprints have.

    Raises:
        NotRecordable: nothing is known of it.
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


def _say(text: str) -> None:
    print(f"rehash: {text}", file=sys.stderr, flush=True)


# -- comparing -----------------------------------------------------------------------------------


@dataclass
class Finding:
    """What became of one measurement, in all files that hold it with this hash.

    Args:
        status: "current": the hash is today's, and digests are known; "unrecorded": they are not;
            "moved": the same code; "changed": other code; "stale": it was stale before; "removed":
            its variant is no more.
        why: of "changed", what differs and under which Triton.
        by_rule: no kernel of ours was compared.
    """

    subject: Subject
    kernel_hash: str
    status: Status
    why: str = ""
    by_rule: bool = False
    sites: int = 0


_NO_ASSEMBLY = (
    "no digest of the old assembly to compare: in a tree of the old sources, run --record "
    "--assembly --variant NAME, bring its benchmarks/instructions.json here, and try again"
)


def difference(old: Sequence[Launch], new: Sequence[Launch], tritons: Iterable[str]) -> str | None:
    """How the code of two measurements differs under any of these Tritons, or None."""
    if len(old) != len(new):
        return f"launches {len(new)} kernels, not {len(old)}"
    for number, (was, now) in enumerate(zip(old, new, strict=True), 1):
        if was.grid != now.grid:
            return f"launch {number}: {now.grid} programs, not {was.grid}"
        if was.values != now.values:
            return f"launch {number}: arguments {now.values}, not {was.values}"
        for triton in tritons:
            if triton not in was.code.ttir:
                return f"launch {number}: there is no digest of Triton {triton}"
            if was.code.ttir[triton] == now.code.ttir[triton]:
                continue
            if triton not in was.code.assembly:
                return f"launch {number}: other TTIR under Triton {triton}, and {_NO_ASSEMBLY}"
            if was.code.assembly[triton] != now.code.assembly[triton]:
                return f"launch {number}: other instructions under Triton {triton}"
    return None


def examine(documents: Iterable[Document], digests: Digests, compiler: Compiler) -> list[Finding]:
    """Find out what each measurement is today; old ones are compiled and compared."""
    counts = Counter(
        (site.subject, site.kernel_hash) for document in documents for site in document.sites
    )
    findings, compared = [], []
    for (subject, kernel_hash), sites in sorted(counts.items()):
        finding = Finding(subject, kernel_hash, "stale", sites=sites)
        findings.append(finding)
        known = digests.launches.get((subject, kernel_hash))
        todays = todays_hash(subject)
        if todays is None:
            finding.status = "removed"
        elif kernel_hash == todays:
            finding.status = "unrecorded" if _is_incomplete(known, compiler.tritons) else "current"
        elif known is not None:
            compared.append(finding)
    _compare(compared, digests, compiler)
    return findings


def _is_incomplete(launches: Sequence[Launch] | None, tritons: Iterable[str]) -> bool:
    if launches is None:
        return True
    return any(not set(tritons) <= each.code.ttir.keys() for each in launches)


def _compare(findings: Sequence[Finding], digests: Digests, compiler: Compiler) -> None:
    """Compile and judge measurements of older sources; digests learn the moved ones."""
    made = _planned(findings, compiler)
    compiler.compile((each.code for plan in made.values() for each in plan), assembly=False)
    compared = [
        (launch.code, now.code)
        for finding in findings
        for launch, now in zip(
            digests.launches[finding.subject, finding.kernel_hash],
            made.get(finding.subject, ()),
            strict=False,
        )
    ]
    unlike = [
        now for was, now in compared if was.assembly and not was.ttir.items() <= now.ttir.items()
    ]
    compiler.compile(unlike, assembly=True)
    for finding in findings:
        if finding.subject in made:
            _judge(finding, made[finding.subject], digests, compiler)
        else:
            finding.status = "changed"


def _judge(finding: Finding, now: tuple[Launch, ...], digests: Digests, compiler: Compiler) -> None:
    was = digests.launches[finding.subject, finding.kernel_hash]
    finding.why = compiler.error_of(now) or difference(was, now, compiler.tritons) or ""
    finding.by_rule = not was and not now
    finding.status = "changed" if finding.why else "moved"
    if finding.status == "changed":
        return
    for old, new in zip(was, now, strict=True):
        new.code.assembly |= {
            each: old.code.assembly[each]
            for each in compiler.tritons
            if each in old.code.assembly and each not in new.code.assembly
        }
    todays = todays_hash(finding.subject)
    assert todays is not None
    digests.launches[finding.subject, todays] = now


def move(documents: Iterable[Document], findings: Iterable[Finding]) -> None:
    """Give moved measurements today's hash, in the documents in memory."""
    moved = {(each.subject, each.kernel_hash) for each in findings if each.status == "moved"}
    for document in documents:
        for site in document.sites:
            if (site.subject, site.kernel_hash) in moved:
                site.entry["kernel_hash"] = todays_hash(site.subject)


def record_missing(
    findings: Iterable[Finding], digests: Digests, compiler: Compiler, assembly: bool
) -> Iterator[None]:
    """Make the digests that measurements of today's sources lack; yields when some are complete."""
    lacking = []
    for finding in findings:
        known = digests.launches.get((finding.subject, finding.kernel_hash))
        if finding.status == "unrecorded" or (
            finding.status == "current" and assembly and _lacks_assembly(known, compiler.tritons)
        ):
            lacking.append(finding)
    for begin in range(0, len(lacking), _BATCH):
        batch = lacking[begin : begin + _BATCH]
        _say(f"records measurements {begin + 1} to {begin + len(batch)} of {len(lacking)}")
        made = _planned(batch, compiler)
        compiler.compile((each.code for plan in made.values() for each in plan), assembly)
        for finding in batch:
            if (plan := made.get(finding.subject)) is None:
                continue
            finding.why = compiler.error_of(plan) or ""
            if not finding.why:
                finding.status = "current"
                digests.launches[finding.subject, finding.kernel_hash] = plan
        yield


def _planned(findings: Iterable[Finding], compiler: Compiler) -> dict[Subject, tuple[Launch, ...]]:
    """What each launches today; why one cannot be planned is left in the finding."""
    made = {}
    for finding in findings:
        try:
            made[finding.subject] = compiler.launches(finding.subject)
        except NotRecordable as error:
            finding.why = str(error)
    return made


def _lacks_assembly(launches: Sequence[Launch] | None, tritons: Iterable[str]) -> bool:
    return any(not set(tritons) <= each.code.assembly.keys() for each in launches or ())


def without_unused(digests: Digests, documents: Iterable[Document]) -> Digests:
    """Without digests of what no file holds any more, and of variants that are no more."""
    held = {
        (site.subject, site.kernel_hash)
        for each in documents
        for site in each.sites
        if todays_hash(site.subject) is not None
    }
    return Digests({key: made for key, made in digests.launches.items() if key in held})


# -- the command ---------------------------------------------------------------------------------


def table(findings: Iterable[Finding]) -> str:
    """One line for each variant: how many measurements are in which state."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    for each in findings:
        count = counts.setdefault((each.subject.op, each.subject.variant), Counter())
        count[each.status] += 1
        count["by rule"] += each.by_rule
    columns = ("current", "moved", "by rule", "changed", "stale", "unrecorded", "removed")
    lines = [f"{'operation':22} {'variant':22} " + " ".join(f"{each:>10}" for each in columns)]
    for (op, variant), count in sorted(counts.items()):
        cells = " ".join(f"{count[each]:>10}" for each in columns)
        lines.append(f"{op:22} {variant:22} {cells}")
    return "\n".join(lines)


_HEADINGS = {
    "changed": "compile to other instructions; measure them again, or take the change back",
    "stale": "were stale before: no digest is of their hash; they stay as they are",
    "unrecorded": "have no digests yet: run with --record before the sources change",
}


def summary(findings: Sequence[Finding]) -> str:
    """The table, and each measurement that is not all right."""
    parts = [table(findings)]
    for status, heading in _HEADINGS.items():
        bad = [each for each in findings if each.status == status]
        if bad:
            parts.append(f"\n{len(bad)} measurements {heading}:")
            parts += [f"  {each.subject} ({each.kernel_hash}) {each.why}".rstrip() for each in bad]
    by_rule = sum(each.by_rule and each.status == "moved" for each in findings)
    if by_rule:
        parts.append(f"\n{by_rule} hashes moved by rule: only library calls stand behind them.")
    return "\n".join(parts)


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Run the command on the committed files of a tree; returns the exit status."""
    options = _parser().parse_args(arguments)
    begin = time.monotonic()
    documents, digests = load_documents(root), Digests.load(root / DIGESTS)
    with Compiler(both_tritons(), options.workers) as compiler:
        findings = examine(documents, digests, compiler)
        if options.record:
            asked = [
                each
                for each in findings
                if each.subject.variant in options.variant or not options.variant
            ]
            for _ in record_missing(asked, digests, compiler, options.assembly):
                files.write(root / DIGESTS, digests.text())
    move(documents, findings)
    texts = {each.path: each.new_text() for each in documents}
    texts[root / DIGESTS] = without_unused(digests, documents).text()
    to_write = [path for path, text in texts.items() if text != _text(path)]
    if not options.check:
        for path in to_write:
            files.write(path, texts[path])
    if options.json:
        print(json.dumps([dataclasses.asdict(each) for each in findings], indent=1))
    else:
        print(summary(findings))
        for path in to_write:
            print(f"{'would change' if options.check else 'changed'}: {path.relative_to(root)}")
    _say(f"{time.monotonic() - begin:.0f} s")
    bad = {"changed", "unrecorded"} if options.check else {"changed"}
    is_bad = any(each.status in bad for each in findings)
    return int(is_bad or (options.check and bool(to_write)))


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.rehash",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="change nothing")
    what.add_argument("--record", action="store_true", help="write digests that are missing")
    parser.add_argument("--assembly", action="store_true", help="with --record: of assembly, too")
    parser.add_argument(
        "--variant", action="append", default=[], help="with --record: only of this one; repeatable"
    )
    parser.add_argument("--json", action="store_true", help="findings as JSON on stdout")
    parser.add_argument("--workers", type=int, default=WORKERS, help="compiling processes (2)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
