"""Measures all results of the documents, on the GPUs of one node: an hour or more.

    python -m benchmarks.measure --gpus 8             # everything
    python -m benchmarks.measure --gpus 8 --dry-run   # print the commands
    python -m benchmarks.measure --gpus 8 --only tune --only bench --op matmul_all_reduce

Each step is a command that can also be run by itself. Records go to the tuning database, results to
``benchmarks/results``, the source of tables and pictures. A step that fails changes no
file. The trials of a search are kept, so that a second run continues the first.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.commands import positive
from taxfree.files import write
from taxfree_tune import devices
from taxfree_tune.measuring.results import machine_name

RESULTS = Path("benchmarks/results")  # in the working directory, the checkout
INTERMEDIATE = 3584  # of a model's block, on each rank: a Llama 70B's over 8
_BLOCK_ROWS = "1,16,64,512,2048"
_BLOCK_SUMS = f"n=8192 k={INTERMEDIATE}"
_MINUTES = 10  # limit of most steps
#: operation -> the shapes of its result file
SHAPES: Mapping[str, Sequence[str]] = {
    "all_gather_matmul": (
        "paper gather_dim=0,1",
        "large",
        f"m=16,64,512,2048 n={2 * INTERMEDIATE} k=8192 gather_dim=0",
    ),
    "matmul_all_reduce": (
        "m=1,2,4,8,16,32,64,128,256,512,1024,2048,4096 n=8192 k=1024,3584",
        f"m={_BLOCK_ROWS} {_BLOCK_SUMS} residual=1",
        f"m=16,64 {_BLOCK_SUMS} residual=1 rms_norm=1",
    ),
    "matmul_reduce_scatter": (
        f"m=16,64,128,256,512,1024,2048,4096,8192,16384 {_BLOCK_SUMS}",
        "m=64,256,1024,4096,16384 n=8192 k=3696",
        "m=64,256,1024,4096,16384 n=4096 k=1792",
    ),
    "flash_decode": ("paper", "batches", "strong"),
    "embedding_all_to_all": ("paper", "rows"),
    "stencil": ("plane", "cube"),
}


@dataclasses.dataclass(frozen=True)
class MeasureStep:
    """A command.

    Args:
        kind: "tune", "bench", ...; a value of `--only`.
        arguments: of Python.
        minutes: time limit.
        file: the file that it writes.
        option: the option, or the variable of the environment (in capitals), that names the file;
            None if the command prints the content.
    """

    kind: str
    arguments: tuple[str, ...]
    minutes: float
    file: Path | None = None
    option: str | None = None

    def _command(self, file: Path | None) -> tuple[dict[str, str], list[str], Path | None]:
        """Variables, Python's arguments, and the file of stdout, so that `file` is written."""
        if file is None:
            return {}, [*self.arguments], None
        if self.option is None:
            return {}, [*self.arguments], file
        if self.option.isupper():
            return {self.option: str(file)}, [*self.arguments], None
        return {}, [*self.arguments, self.option, str(file)], None

    def __str__(self) -> str:
        variables, arguments, output = self._command(self.file)
        words = [f"{name}={value}" for name, value in variables.items()]
        words.append(shlex.join(["python", *arguments]))
        return " ".join(words) + (f" > {output}" if output else "")

    def run(self) -> str | None:
        """Run the command; returns the failure, or None."""
        if self.file is None:
            return self._run(None)
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder, "made.json")
            failed = self._run(made)
            if failed is None and not made.exists():
                failed = "it made no file"  # all of its tests were skipped
            if failed is None:
                write(self.file, json.dumps(json.loads(made.read_text(encoding="utf-8"))) + "\n")
        return failed

    def _run(self, file: Path | None) -> str | None:
        variables, arguments, output = self._command(file)
        command, environment = [sys.executable, *arguments], os.environ | variables
        with output.open("w") if output else contextlib.nullcontext() as stdout:
            try:
                done = subprocess.run(
                    command, env=environment, stdout=stdout, timeout=60 * self.minutes, check=False
                )
            except subprocess.TimeoutExpired:
                return f"ended after {self.minutes:g} minutes"
        return f"exit code {done.returncode}" if done.returncode else None


def steps(gpus: int, machine: str, trials: int, budget: int) -> Iterator[MeasureStep]:
    """All steps, in order.

    Args:
        machine: as result files name it, "nvidia-h200".
        trials: of each problem.
        budget: minutes of each operation's search.
    """
    name = f"{machine}-x{gpus}.json"

    def said(shapes: Sequence[str]) -> tuple[str, ...]:
        return tuple(word for shape in shapes for word in ("--shapes", shape))

    def taxfree(command: str, op: str, *options: str, dtype: str = "bf16") -> tuple[str, ...]:
        typed = () if op in ("flash_decode", "stencil") else ("--dtype", dtype)
        words = ("-m", "taxfree_cli.app", command, "--op", op, "--gpus", str(gpus), *typed)
        return (*words, *options)

    paper, large, *_ = SHAPES["all_gather_matmul"]
    wanted = [(op, shapes, "bf16", "") for op, shapes in SHAPES.items()]
    for op, shapes, dtype, suffix in (*wanted, ("all_gather_matmul", (paper,), "fp16", "-fp16")):
        search = ("--trials", str(trials), "--budget", f"{budget}m")
        tuned = taxfree("tune", op, *said(shapes), *search, dtype=dtype)
        yield MeasureStep("tune", tuned, budget + _MINUTES)
        timed = taxfree("bench", op, *said(shapes), dtype=dtype)
        file = RESULTS / op / f"{machine}-x{gpus}{suffix}.json"
        yield MeasureStep("bench", timed, 3 * _MINUTES, file, "--out")
    for shape, suffix in ((paper, ""), (large, "-large")):
        swept = taxfree("explain", "all_gather_matmul", *said([shape]), "--sweep", "--json")
        file = RESULTS / "explain" / f"{machine}-x{gpus}{suffix}.json"
        yield MeasureStep("explain", swept, _MINUTES, file)
    traced = taxfree("explain", "all_gather_matmul", "--shapes", "m=1024 n=3584 k=8192")
    file = RESULTS / "timeline" / name
    yield MeasureStep("timeline", traced, _MINUTES, file, "--trace")
    tests = ("-m", "pytest", "-q", "-m", "gpu", "tests/tune/test_taxes_gpu.py")
    file = RESULTS / "instrument" / f"{machine}-x2.json"  # the tests take two, whatever is there
    yield MeasureStep("instrument", tests, _MINUTES, file, "TAXFREE_INSTRUMENT_RECORD")
    soak = ("-m", "benchmarks.soak", "--gpus", str(gpus))
    file = RESULTS / "soak" / name
    yield MeasureStep("soak", soak, 6 * _MINUTES, file, "--out")


def run_all(wanted: Sequence[MeasureStep]) -> int:
    """Run all steps in order, also after failures; returns the exit code."""
    failed = []
    for number, step in enumerate(wanted, 1):
        print(f"[{number}/{len(wanted)}] {step}", flush=True)
        if reason := step.run():
            failed.append(f"{step.kind}: {reason}: {step}")
            print(f"failed: {reason}", file=sys.stderr, flush=True)
    print("\n".join(["", *failed]) if failed else "all steps are done", flush=True)
    return 1 if failed else 0


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gpus", type=positive, required=True)
    parser.add_argument("--machine", help="in the names of result files; as the driver says")
    parser.add_argument("--trials", type=positive, default=40, help="of each problem")
    parser.add_argument(
        "--budget", type=positive, default=20, help="minutes of each operation's search"
    )
    kinds = list(dict.fromkeys(step.kind for step in steps(2, "", 1, 1)))
    parser.add_argument("--only", action="append", choices=kinds, help="steps; all by default")
    parser.add_argument("--op", action="append", choices=SHAPES, help="steps of this operation")
    parser.add_argument("--dry-run", action="store_true", help="print the commands")
    options = parser.parse_args()
    gpu = devices.gpu_name("cuda")
    machine = options.machine or (machine_name(gpu) if gpu else None)
    if machine is None and not options.dry_run:
        parser.error("the driver names no GPU: give its name in result files by --machine")
    every = steps(options.gpus, machine or "nvidia-h200", options.trials, options.budget)
    wanted = [
        step
        for step in every
        if (options.only is None or step.kind in options.only)
        and (options.op is None or any(op in step.arguments for op in options.op))
    ]
    if options.dry_run:
        print("\n".join(map(str, wanted)))
        return 0
    try:
        return run_all(wanted)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
