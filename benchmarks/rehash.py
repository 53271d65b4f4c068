"""Move kernel hashes of committed measurements to the current ones, where the code is the same.

    python -m benchmarks.rehash            move hashes; exit status 1 if a measurement is stale
    python -m benchmarks.rehash --check    change nothing; 1 if there is anything to do
    python -m benchmarks.rehash --record   also write digests for measurements that have none
    ... --record --assembly [--variant ..] also of their assembly; an hour for all

A measurement is valid for the sources that its `kernel_hash` covers, so a renamed identifier makes
it stale. benchmarks/instructions.json holds digests of the code that each measurement of the
shipped tables and committed result files launches. After a refactoring, this tool compiles the
current sources for the measured GPU, which need not be present, under this Triton and the oldest
supported one. The hash moves where both make the same code with the same launches.

The tool compares the kernels that a plan launches on one rank, in order: digests, numbers of
programs and numeric arguments. Two kernels are the same if TTIR and compile options are equal, the
whole input of the compiler; else if the PTX is equal, which the same assembler turns into the same
machine code. Names, comments and line numbers do not count. PTX takes several times as long, so its
digests are made only on demand, by --record --assembly in a tree of the old sources.

Calls of torch and of vendors' libraries are not compared. A variant that launches none of our
kernels before it asks for its peers (baselines, library variants) moves its hash by rule: a change
of its calls needs a new measurement.

A measurement whose hash is neither current nor in a digest was stale before and stays as it is; so
does one of a removed variant. `taxfree_tuning_db.renamed` maps old names in stored documents.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks import measurements
from benchmarks.digests import (
    WORKERS,
    Compiler,
    Digests,
    Launch,
    NotRecordable,
    both_tritons,
    error_of,
    say,
)
from benchmarks.measurements import Document, Subject, load_documents
from taxfree_tuning_db import files

ROOT = Path(__file__).parents[1]
DIGESTS = "benchmarks/instructions.json"
_BATCH = 200  # measurements recorded between two writes of the digests

Status = Literal["current", "unrecorded", "moved", "changed", "stale", "removed"]


@dataclass
class Finding:
    """The status of one measurement, in all files that hold it with this hash.

    Args:
        status: "current": the hash is current, and digests are known; "unrecorded": they are not;
            "moved": the same code; "changed": other code; "stale": it was stale before; "removed":
            its variant was removed.
        why: of "changed", the difference and the Triton.
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
    """Find the status of each measurement; those of older sources are compiled and compared."""
    counts = Counter(
        (site.subject, site.kernel_hash) for document in documents for site in document.sites
    )
    findings, compared = [], []
    for (subject, kernel_hash), sites in sorted(counts.items()):
        finding = Finding(subject, kernel_hash, "stale", sites=sites)
        findings.append(finding)
        known = digests.launches.get((subject, kernel_hash))
        current = measurements.current_hash(subject)
        if current is None:
            finding.status = "removed"
        elif kernel_hash == current:
            is_known = known is not None and not _lacks(known, compiler.tritons, "ttir")
            finding.status = "current" if is_known else "unrecorded"
        elif known is not None:
            compared.append(finding)
    _compare(compared, digests, compiler)
    return findings


def _lacks(launches: Sequence[Launch], tritons: Iterable[str], kind: str) -> bool:
    """Whether a digest is missing; `kind` is "ttir" or "assembly"."""
    return any(not set(tritons) <= getattr(each.code, kind).keys() for each in launches)


def _compare(findings: Sequence[Finding], digests: Digests, compiler: Compiler) -> None:
    """Compile and judge measurements of older sources; add the launches of moved ones."""
    made = _planned(findings, compiler)
    compiler.compile((each.code for plan in made.values() for each in plan), assembly=False)
    unlike = []
    for finding in findings:
        before = digests.launches[finding.subject, finding.kernel_hash]
        for was, now in zip(before, made.get(finding.subject, ()), strict=False):
            if was.code.assembly and not was.code.ttir.items() <= now.code.ttir.items():
                unlike.append(now.code)
    compiler.compile(unlike, assembly=True)
    for finding in findings:
        if finding.subject in made:
            _judge(finding, made[finding.subject], digests, compiler)
        else:
            finding.status = "changed"


def _judge(finding: Finding, now: tuple[Launch, ...], digests: Digests, compiler: Compiler) -> None:
    was = digests.launches[finding.subject, finding.kernel_hash]
    finding.why = error_of(now) or difference(was, now, compiler.tritons) or ""
    finding.by_rule = not was and not now
    finding.status = "changed" if finding.why else "moved"
    if finding.status == "changed":
        return
    for old, new in zip(was, now, strict=True):
        assembly = old.code.assembly
        known = {each: assembly[each] for each in compiler.tritons if each in assembly}
        new.code.assembly = known | new.code.assembly
    current = measurements.current_hash(finding.subject)
    assert current is not None
    digests.launches[finding.subject, current] = now


def move(documents: Iterable[Document], findings: Iterable[Finding]) -> None:
    """Give moved measurements the current hash, in the documents in memory."""
    moved = {(each.subject, each.kernel_hash) for each in findings if each.status == "moved"}
    for document in documents:
        for site in document.sites:
            if (site.subject, site.kernel_hash) in moved:
                site.entry["kernel_hash"] = measurements.current_hash(site.subject)


def record_missing(
    findings: Iterable[Finding], digests: Digests, compiler: Compiler, assembly: bool
) -> Iterator[None]:
    """Make missing digests of measurements of the current sources; yields after each batch."""
    lacking = []
    for finding in findings:
        known = digests.launches.get((finding.subject, finding.kernel_hash), ())
        needs_assembly = assembly and _lacks(known, compiler.tritons, "assembly")
        if finding.status == "unrecorded" or (finding.status == "current" and needs_assembly):
            lacking.append(finding)
    for begin in range(0, len(lacking), _BATCH):
        batch = lacking[begin : begin + _BATCH]
        say(f"records measurements {begin + 1} to {begin + len(batch)} of {len(lacking)}")
        made = _planned(batch, compiler)
        compiler.compile((each.code for plan in made.values() for each in plan), assembly)
        for finding in batch:
            if (plan := made.get(finding.subject)) is None:
                continue
            finding.why = error_of(plan) or ""
            if not finding.why:
                finding.status = "current"
                digests.launches[finding.subject, finding.kernel_hash] = plan
        yield


def _planned(findings: Iterable[Finding], compiler: Compiler) -> dict[Subject, tuple[Launch, ...]]:
    """The launches of each; a plan that cannot be made leaves its reason in the finding."""
    made = {}
    for finding in findings:
        try:
            made[finding.subject] = compiler.launches(finding.subject)
        except NotRecordable as error:
            finding.why = str(error)
    return made


def without_unused(digests: Digests, documents: Iterable[Document]) -> Digests:
    """The digests of measurements that a file still holds, of variants that still exist."""
    held = {
        (site.subject, site.kernel_hash)
        for each in documents
        for site in each.sites
        if measurements.current_hash(site.subject) is not None
    }
    return Digests({key: made for key, made in digests.launches.items() if key in held})


# -- the command ---------------------------------------------------------------------------------


def table(findings: Iterable[Finding]) -> str:
    """One line per variant: the number of measurements of each status."""
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
    "changed": "compile to other instructions; measure them again, or undo the change",
    "stale": "were stale before: no digest has their hash; they stay as they are",
    "unrecorded": "have no digests yet: run with --record before the sources change",
}


def summary(findings: Sequence[Finding]) -> str:
    """The table, and each measurement that needs attention."""
    parts = [table(findings)]
    for status, heading in _HEADINGS.items():
        bad = [each for each in findings if each.status == status]
        if bad:
            parts.append(f"\n{len(bad)} measurements {heading}:")
            parts += [f"  {each.subject} ({each.kernel_hash}) {each.why}".rstrip() for each in bad]
    by_rule = sum(each.by_rule and each.status == "moved" for each in findings)
    if by_rule:
        parts.append(f"\n{by_rule} hashes moved by rule: their plans only call libraries.")
    return "\n".join(parts)


def main() -> int:
    """Run the command line; returns the exit status."""
    options = _parser().parse_args()
    begin = time.monotonic()
    documents, digests = load_documents(ROOT), Digests.load(ROOT / DIGESTS)
    with Compiler(both_tritons(), options.workers) as compiler:
        findings = examine(documents, digests, compiler)
        if options.record:
            names = options.variant or {each.subject.variant for each in findings}
            asked = [each for each in findings if each.subject.variant in names]
            for _ in record_missing(asked, digests, compiler, options.assembly):
                files.write(ROOT / DIGESTS, digests.text())
    move(documents, findings)
    texts = {each.path: each.new_text() for each in documents}
    texts[ROOT / DIGESTS] = without_unused(digests, documents).text()
    to_write = [path for path, text in texts.items() if text != _text(path)]
    if not options.check:
        for path in to_write:
            files.write(path, texts[path])
    if options.json:
        print(json.dumps([dataclasses.asdict(each) for each in findings], indent=1))
    else:
        print(summary(findings))
        for path in to_write:
            print(f"{'would change' if options.check else 'changed'}: {path.relative_to(ROOT)}")
    say(f"{time.monotonic() - begin:.0f} s")
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
    parser.add_argument("--assembly", action="store_true", help="with --record: of assembly too")
    parser.add_argument(
        "--variant", action="append", default=[], help="with --record: only this one; repeatable"
    )
    parser.add_argument("--json", action="store_true", help="findings as JSON on stdout")
    parser.add_argument("--workers", type=int, default=WORKERS, help="compiling processes (2)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
