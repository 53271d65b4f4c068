"""Whether recorded problems still compile to the instructions of the base commit.

    python -m benchmarks.instructions [--base REF]     compiles and compares; exit status 1 if not
    python -m benchmarks.instructions --write [--because "OP VARIANT" "REASON" ...]

benchmarks/digests.json holds digests of the code of some recorded problems of each variant,
under each Triton, for NVIDIA and AMD targets, which need not be present. Where a change makes
other instructions, its author raises the variant's `version`, or states why the times stay good;
`--write` then writes the digests of now. This is advice to authors: no user's run reads the file.

Two codes are the same if TTIR and compile options are, the whole input of the compiler; else if the
assembly is, before the assembler. Numbers of programs and numeric arguments count; names, comments
and calls of torch and of vendors' libraries do not. Digests are of one version of Triton: those of
one that is not here are neither compared nor kept.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from taxfree._runtime.legality import illegal_reason
from taxfree.problems import format_problem
from taxfree_check.cross_compile.pool import CompilePool
from taxfree_check.cross_compile.report import triton_version
from taxfree_check.cross_compile.screen import request
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.reduction.fused import FusedReductionVariant
from taxfree_kernels.variant import operation_names, operation_shapes, problem_class, variants
from taxfree_tuning_db import files, shipped_records
from taxfree_tuning_db.records import canonical_json
from taxfree_tuning_db.renamed import with_new_names

ROOT = Path(__file__).parents[1]
FILE = "benchmarks/digests.json"
OLDEST_TRITON = ROOT / ".tritons" / "3.6.0"
_TARGETS = {"h200": 3, "mi300x": 1}  # target -> problems of a variant that are compiled for it
_TIMEOUT_S = 600.0
_COMMAND = "python -m benchmarks.instructions"

Digest = dict[str, str]  # "ttir" and "assembly"; of what did not compile "error" and why
Pools = Mapping[str, CompilePool]  # by version of Triton


@dataclass(frozen=True, order=True)
class CompiledCase:
    """A variant with a config on a problem of a target; problem and config are canonical JSON."""

    op: str
    variant: str
    target: str
    problem: str
    config: str

    @classmethod
    def of(cls, op: str, variant: str, target: str, problem: Any, config: Any) -> CompiledCase:
        return cls(op, variant, target, canonical_json(problem), canonical_json(config))

    def __str__(self) -> str:
        shown = format_problem(self.op, json.loads(self.problem))
        return f"{shown} on {self.target} with {self.config}"


@dataclass
class Digests:
    """The content of the file.

    Args:
        statements: "OP VARIANT" -> its version, and why the times of this version stay good though
            its instructions have changed; empty if they have not.
        cases: case -> version of Triton -> digest.
    """

    statements: dict[str, tuple[int, str]] = field(default_factory=dict)
    cases: dict[CompiledCase, dict[str, Digest]] = field(default_factory=dict)

    @classmethod
    def load(cls, text: str) -> Digests:
        """Read a file, with current names."""
        document, loaded = json.loads(text), cls()
        for named, (version, because) in document["statements"].items():
            op, name = named.split()
            name = with_new_names(op, {"variant": name})["variant"]
            loaded.statements[f"{op} {name}"] = version, because
        for op, name, target, problem, config, digests in document["cases"]:
            new = with_new_names(op, {"variant": name, "problem": problem, "config": config})
            case = CompiledCase.of(op, new["variant"], target, new["problem"], new["config"])
            loaded.cases[case] = digests
        return loaded

    def text(self) -> str:
        """The content of the file, a line for each case; the order of recording does not count."""
        statements = json.dumps(self.statements, indent=1, sort_keys=True)
        cases = ",\n".join(
            f'["{case.op}","{case.variant}","{case.target}",{case.problem},{case.config},'
            f"{canonical_json(digests)}]"
            for case, digests in sorted(self.cases.items())
        )
        return f'{{"statements":{statements},\n"cases":[\n{cases}\n]}}\n'


def recorded_cases(op: str, name: str) -> Iterator[CompiledCase]:
    """Recorded problems of a variant, or those that tests compile, with a config for each target.

    For a target that no record names it is the first config that a search would try.
    """
    measured = [
        (problem_class(op)(**record.problem), measurement.config, record.hardware.gpu)
        for record in shipped_records()
        for measurement in (record.winner, *record.runners_up)
        if (record.op, measurement.variant) == (op, name)
    ]
    asked = measured or [(problem, {}, "") for problem in operation_shapes(op).aligned]
    variant = variants(op)[name]
    for target, count in _TARGETS.items():
        hardware, by_problem = KNOWN[target], dict[str, CompiledCase]()
        for problem, config, gpu in asked:
            if variant.unsupported_reason(problem, hardware) is None:
                recorded_config = [config] if gpu == hardware.name else []
                for config in (*recorded_config, *variant.seed_configs(problem, hardware)):
                    if illegal_reason(variant, problem, hardware, config) is None:
                        case = CompiledCase.of(op, name, target, vars(problem), dict(config))
                        by_problem.setdefault(case.problem, case)
                        break
        every = sorted(by_problem.values())
        yield from every[:: max(1, -(-len(every) // count))]


def cases_of_fp8_wire(op: str, name: str) -> Iterator[CompiledCase]:
    """A problem whose partial sums travel in fp8, for each target: few records are of such."""
    variant = variants(op)[name]
    if isinstance(variant, FusedReductionVariant) and variant.sends_fp8:
        fields = {"x_dtype": "fp8", "scales": "channel", "fp8_wire": True}
        problem: Any = problem_class(op)(1024, 8192, 2048, dtype="bfloat16", world_size=2, **fields)
        for target in _TARGETS:
            config, *_ = variant.seed_configs(problem, KNOWN[target])
            yield CompiledCase.of(op, name, target, vars(problem), dict(config))


def compiled(
    before: Mapping[CompiledCase, Mapping[str, Digest]], pools: Pools
) -> dict[CompiledCase, Any]:
    """The digests of cases under each Triton; assembly is made only where the TTIR has changed.

    Cases that launch no kernel of ours are left out, unless they did.
    """
    every = [(triton, case) for case in before for triton in pools]
    made = _answers(every, pools, assembly=False)
    unlike = [pair for pair in every if not _same(before[pair[1]].get(pair[0], {}), made[pair])]
    made |= _answers(unlike, pools, assembly=True)
    after: dict[CompiledCase, dict[str, Digest]] = {}
    for triton, case in every:
        was = before[case].get(triton, {})
        now = made[triton, case] if (triton, case) in unlike else was
        if was or now:
            after.setdefault(case, {})[triton] = now
    return after


def _answers(
    every: Sequence[tuple[str, CompiledCase]], pools: Pools, assembly: bool
) -> dict[tuple[str, CompiledCase], Digest]:
    def asked(case: CompiledCase) -> dict[str, Any]:
        problem = problem_class(case.op)(**json.loads(case.problem))
        target, config = KNOWN[case.target], json.loads(case.config)
        return request(case.op, problem, case.variant, config, target) | {"assembly": assembly}

    answers = {
        triton: pool.answers([asked(case) for under, case in every if under == triton])
        for triton, pool in pools.items()
    }
    return {under: next(answers[under[0]]) for under in every}


def _same(was: Digest, now: Digest) -> bool:
    return any(was.get(form) == digest for form, digest in now.items())


def silent_changes(before: Digests, now: Digests) -> list[str]:
    """What to tell the author of other digests who neither raised a version nor said why."""
    changed: dict[str, list[str]] = {}
    for case, digests in now.cases.items():
        for triton, digest in digests.items():
            was = before.cases.get(case, {}).get(triton)
            if was is not None and not _same(was, digest):
                lines = changed.setdefault(f"{case.op} {case.variant}", [])
                lines.append(f"  {case}, Triton {triton}")
    silent = {
        kernel: lines
        for kernel, lines in changed.items()
        if not _is_explained(before.statements.get(kernel), *now.statements[kernel])
    }
    told = [
        f"instructions of {kernel} changed for these recorded problems: raise its version, or "
        f"state why its times stay good\n" + "\n".join(lines)
        for kernel, lines in silent.items()
    ]
    reasons = " ".join(f"--because '{kernel}' 'REASON'" for kernel in silent)
    return [*told, f"{_COMMAND} --write {reasons}"] if silent else []


def other_variants(before: Digests, now: Digests) -> list[str]:
    """What to tell the author of variants or versions that the file does not have."""
    kernels = before.statements.keys() | now.statements.keys()
    changed = [
        kernel
        for kernel in sorted(kernels)
        if before.statements.get(kernel) != now.statements.get(kernel)
    ]
    return [f"not as in {FILE}: {', '.join(changed)}: run {_COMMAND} --write"] if changed else []


def failures(now: Digests) -> list[str]:
    """What did not compile, perhaps in time: it has no digests that could be written."""
    return [
        f"{case} does not compile under Triton {triton}: {digest['error']}"
        for case, digests in now.cases.items()
        for triton, digest in digests.items()
        if "error" in digest
    ]


def _is_explained(before: tuple[int, str] | None, version: int, because: str) -> bool:
    return before is None or version > before[0] or because not in ("", before[1])


def today(before: Digests, reasons: Mapping[str, str]) -> Digests:
    """The cases of today's variants, with their versions, still with the digests that are known."""
    now = Digests()
    for op in operation_names():
        for name, variant in variants(op).items():
            kernel = f"{op} {name}"
            version, because = before.statements.get(kernel, (0, ""))
            stays = because if version == variant.version else ""
            now.statements[kernel] = variant.version, reasons.get(kernel, stays)
            of_kernel = {case: made for case, made in before.cases.items()
                   if (case.op, case.variant) == (op, name)}  # fmt: skip
            of_wire = {case: of_kernel.get(case, {}) for case in cases_of_fp8_wire(op, name)}
            now.cases |= of_kernel or {case: {} for case in recorded_cases(op, name)}
            now.cases |= of_wire
    return now


def base_digests(ref: str) -> Digests | None:
    """The digests of a commit; None if there is no such commit, or it has none."""
    command = ["git", "show", f"{ref}:{FILE}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return Digests.load(done.stdout) if done.returncode == 0 else None


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = _parser()
    options = parser.parse_args()
    path = ROOT / FILE
    before = Digests.load(path.read_text(encoding="utf-8")) if path.exists() else Digests()
    now = today(before, reasons := dict(options.because))
    if unknown := reasons.keys() - now.statements.keys():
        parser.error(f"--because {sorted(unknown)}: one of {', '.join(now.statements)}")
    base = base_digests(options.base or "main")
    if base is None and options.base:
        parser.error(f"--base {options.base}: there is no such commit, or it has no digests")
    if not options.write and (told := other_variants(before, now)):
        print(*told)
        return 1
    folders = [None, OLDEST_TRITON] if (OLDEST_TRITON / "triton").is_dir() else [None]
    here = {triton_version(folder): folder for folder in folders}
    recorded = {triton for digests in before.cases.values() for triton in digests}
    for triton in sorted(recorded ^ here.keys()):
        _say(f"NOT COMPARED under Triton {triton}: no digests (--write), or not installed here")
    with contextlib.ExitStack() as stack:
        pools = {
            triton: stack.enter_context(CompilePool(1, _TIMEOUT_S, folder))
            for triton, folder in here.items()
            if options.write or triton in recorded
        }
        now.cases = compiled(now.cases, pools)
    told = failures(now) + silent_changes(before, now)
    if options.write:
        if not told:
            files.write(path, now.text())
    elif base is None:
        _say("NOT COMPARED with main, which is not here: only with the file")
    else:
        told += silent_changes(base, before)
    print("\n\n".join(told) or "the same instructions, or it is said why not")
    return int(bool(told))


def _say(text: str) -> None:
    print(f"instructions: {text}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m benchmarks.instructions", description=__doc__, formatter_class=form
    )
    parser.add_argument("--base", metavar="REF", help="the base commit; main, if it is here")
    parser.add_argument("--write", action="store_true", help="write the digests of now")
    parser.add_argument(
        "--because", action="append", nargs=2, default=[], metavar=("'OP VARIANT'", "REASON"),
        help="with --write: why its times stay good; repeatable",
    )  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main())
