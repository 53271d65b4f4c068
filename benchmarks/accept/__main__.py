"""Runs what a user runs, on the GPUs of this machine, and fails where something is broken or slow.

    python -m benchmarks.accept --gpus 2           # at most six minutes
    python -m benchmarks.accept --gpus 2 --long    # the tests that need GPUs, and whole models

Each step is a command with a limit, which imports while the step before runs. Tests, which mostly
start processes and compile, share the GPUs: several files run at the same time. The record says
what each step found, and holds the figures. It is written to ``benchmarks/results/accept`` after
every step, and names the sources of each. With ``--long`` steps that passed with the same sources
are not run again, so that a run that was cut short goes on, and the repair of a test repeats that
test alone; with ``--only`` they stay beside those that are run.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.accept.train import ROUNDS
from benchmarks.commands import positive
from taxfree.files import write
from taxfree_kernels.variant import is_library
from taxfree_tune import devices
from taxfree_tune.measuring.results import DISPATCH, machine_name
from taxfree_tune.tuning.winner import noise

RESULTS = Path(__file__).parents[1] / "results" / "accept"
PROBLEMS, EXPLAINED = map(Path(__file__).with_name, ("problems.yaml", "explained.yaml"))
LEAST = 0.97  # of the fastest library path's speed, for what dispatch runs
#: by dispatch to an eager call of the library: a share where hosts are slow, which differ by 25 %
ADDED_US, ADDED_SHARE = 3.0, 0.05
AUTOTUNED_S = 4.0  # for a problem, on average, in the ranks of an engine
ACCOUNTED = 0.1  # of a call's time, that an account may leave open
SOURCES = ("kernels", "taxfree", "tuning_db", "tune", "check", "taxfree_cli", "benchmarks", "tests")
MANY = 8  # steps at once: of each two or three ranks compile, on 32 cores
FEW = 3
#: file of tests -> how many steps run at once where it is one of them, if not `MANY`. On a GPU
#: processes take turns: waits with bounds of a second last as many times longer.
AT_ONCE = {
    "tests/kernels/test_sync.py": FEW,
    "tests/benchmarks/test_soak.py": FEW,
    "tests/tune/test_doctor.py": FEW,
    "tests/taxfree/test_faults.py": 1,  # has the shortest bounds
    "tests/taxfree/test_life.py": 1,  # counts all memory that is in use
    "tests/tune/test_autotune.py": 1,  # measures
    "tests/tune/test_taxes_gpu.py": 1,
}
#: file of tests that takes long, and begins first -> how many steps it is split into
PARTS = {
    "tests/kernels/test_contract.py": 5,
    "tests/kernels/test_fp8.py": 3,
    "tests/models/test_decode_step.py": 1,
    "tests/models/test_graph_pools.py": 3,
    "tests/taxfree/test_runtime_calls.py": 3,
    "tests/taxfree/test_shipped_gpu.py": 4,
    "tests/taxfree/test_sizes.py": 2,
}

#: what a command printed on stdout -> figures, and what is wrong with them
Judge = Callable[[str], tuple[Any, list[str]]]
Entries = Generator[dict[str, Any], None, None]


@dataclass(frozen=True)
class Step:
    """A command, what may be wrong with its result, and how long it may take.

    Args:
        name: in the record.
        arguments: of Python.
        seconds: its limit.
        judge: of its output; None where only the exit code counts.
        variables: of its environment.
        at_once: how many steps of this number run at the same time.
    """

    name: str
    arguments: tuple[str, ...]
    seconds: float
    judge: Judge | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    at_once: int = 1

    @property
    def waits(self) -> bool:
        """Whether it does nothing but import until it may go."""
        return self.arguments[1].startswith("benchmarks.accept.")

    def start(self) -> subprocess.Popen[str]:
        """Start it, so that it imports; what waits goes on when `run` sends a line."""
        return subprocess.Popen(
            [sys.executable, *self.arguments],
            env=os.environ | self.variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, process: subprocess.Popen[str], deadline: float = math.inf) -> dict[str, Any]:
        """Let the started process go, until the deadline of `time.monotonic`; returns the entry."""
        begin = time.monotonic()
        try:
            out, said = process.communicate("{}\n", max(0.0, min(self.seconds, deadline - begin)))
            failures = [f"exit code {process.returncode}"] if process.returncode else []
        except subprocess.TimeoutExpired:
            _end(process)
            out, said = process.communicate()
            is_late = time.monotonic() > deadline
            failures = ["not finished" if is_late else f"ended after {self.seconds:g} s"]
        finally:
            _end(process)
        entry: dict[str, Any] = {"name": self.name, "seconds": round(time.monotonic() - begin, 1)}
        if failures:
            entry["said"] = (out + said)[-4000:]
        if self.judge is not None:
            try:
                entry["figures"], wrong = self.judge(out)
                failures += wrong
            except (ValueError, LookupError) as error:
                failures.append(f"its output is not what it should be: {error!r}")
        return entry | {"failures": failures}


def entries(left: Sequence[Step], deadline: float) -> Entries:
    """The entries of steps, as they end: those that follow each other with one `at_once` together.

    At the deadline, of `time.monotonic`, what runs is ended, and nothing more is begun: failures.
    """
    for at_once, group in itertools.groupby(left, lambda step: step.at_once):
        if at_once == 1:
            yield from in_turn(list(group), deadline)
        else:
            yield from together(list(group), at_once, deadline)


def in_turn(left: Sequence[Step], deadline: float) -> Entries:
    """The entries of steps that run one after the other, while the next one imports."""
    ahead: subprocess.Popen[str] | None = None
    try:
        for step, following in itertools.zip_longest(left, left[1:]):
            if time.monotonic() > deadline:
                yield _not_begun(step)
                continue
            process, ahead = ahead or step.start(), None
            if following is not None and following.waits:
                ahead = following.start()
            yield step.run(process, deadline)
    finally:
        if ahead is not None:
            _end(ahead)


def together(left: Sequence[Step], at_once: int, deadline: float) -> Entries:
    """The entries of steps, so many of which run at the same time."""
    started: list[subprocess.Popen[str]] = []

    def run(step: Step) -> dict[str, Any]:
        if time.monotonic() > deadline:
            return _not_begun(step)
        started.append(process := step.start())
        return step.run(process, deadline)

    pool = ThreadPoolExecutor(at_once)
    try:
        for done in as_completed([pool.submit(run, step) for step in left]):
            yield done.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in started:
            if process.poll() is None:
                _end(process)


def _not_begun(step: Step) -> dict[str, Any]:
    return {"name": step.name, "seconds": 0.0, "failures": ["not begun"]}


def _end(process: subprocess.Popen[str]) -> None:
    """Kill a command and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def steps(gpus: int, folder: Path) -> Iterator[Step]:
    """What is run in a few minutes."""
    on = ("--gpus", str(gpus))
    database = {"TAXFREE_DB": str(folder / "tuning.sqlite")}
    of = (*on, "--dtype", "bf16", "--json", "--shapes")
    asked = (*of, str(PROBLEMS))
    yield DOCTOR
    yield Step("tune", taxfree("tune", *asked, "--trials", "4"), 120, tuned, database)
    yield Step("autotune", launched(gpus, "autotune"), 90, autotuned,
               {"TAXFREE_DB": str(folder / "autotuned.sqlite")})  # fmt: skip
    yield Step("bench", taxfree("bench", *asked), 90, benched, database)
    yield Step("explain", taxfree("explain", *of, str(EXPLAINED)), 120, explained, database)
    yield Step("db verify", taxfree("db", "verify", "--sample", "1", "--json"), 60, None, database)
    cost = folder / "host_cost.json"
    yield Step("host cost", ready("benchmarks.host_cost", *on, "--out", str(cost)), 60,
               dispatched(cost))  # fmt: skip
    modes = [part for mode in ("eager", "graph", "step") for part in ("--mode", mode)]
    few = model(on, 2, "--prefill", "1024", "--decode", "1", *modes)
    yield Step("PyTorch", few, 90, modelled, database)
    yield Step("Transformers", launched(gpus, "generate", "--batches", "1"), 120, same, database)
    yield Step("training", launched(gpus, "train"), 90, trained, database)


def long_steps(gpus: int, folder: Path) -> Iterator[Step]:
    """The rest, in steps of at most eight minutes."""
    on = ("--gpus", str(gpus))
    database = {"TAXFREE_DB": str(folder / "tuning.sqlite")}
    yield DOCTOR
    yield from tests()
    yield Step("Transformers", launched(gpus, "generate"), 240, same, database)
    yield Step("model of 4 layers", model(on, 4), 480, modelled, database)
    whole = model(on, 32, "--prefill", "1024", "--decode", "1")
    yield Step("whole model", whole, 480, modelled, database)


def tests() -> Iterator[Step]:
    """Files of tests and their parts: first what many run beside, and of that what takes long."""
    files = sorted(gpu_tests(), key=lambda path: (-AT_ONCE.get(path, MANY), path not in PARTS))
    of_all = ("-m", "pytest", "-m", "gpu", "-q", "--sample", "all", "-p", "no:cacheprovider")
    # Else Inductor has as many processes as there are cores, for each rank.
    few = {"TORCHINDUCTOR_COMPILE_THREADS": "4"}
    for path in files:
        parts = PARTS.get(path, 1)
        for part in (f"{number}/{parts}" for number in range(1, parts + 1)):
            name = path if parts == 1 else f"{path} {part}"
            command = (*of_all, "--part", part, path)
            yield Step(name, command, 480, summed_up, few, AT_ONCE.get(path, MANY))


def gpu_tests() -> list[str]:
    """The files of tests that are marked `gpu`, in order."""
    marks = ("on_every_fabric", "mark.gpu")
    return [
        str(path)
        for path in sorted(Path("tests").rglob("test_*.py"))
        if any(mark in path.read_text(encoding="utf-8") for mark in marks)
    ]


def taxfree(*arguments: str) -> tuple[str, ...]:
    """A command as a user gives it."""
    return ready("taxfree_cli.app", *arguments)


def ready(module: str, *arguments: str) -> tuple[str, ...]:
    """The `main` of a module, which waits for its turn with all imported."""
    return ("-m", "benchmarks.accept.ready", module, *arguments)


def launched(gpus: int, name: str, *arguments: str) -> tuple[str, ...]:
    """A script of this folder, on ranks."""
    return ("-m", "benchmarks.accept.ranks", str(gpus), f"benchmarks.accept.{name}", *arguments)


def model(on: Sequence[str], layers: int, *more: str) -> tuple[str, ...]:
    """Prefill and decode of Llama 8B."""
    of_model = ("--model", "llama-3.1-8b", "--layers", str(layers))
    return taxfree("bench", *on, *of_model, *more, "--json")


# -- what is wrong with a result --


def summed_up(out: str) -> tuple[Any, list[str]]:
    """How many tests have passed."""
    return out.splitlines()[-1], []


def tuned(out: str) -> tuple[Any, list[str]]:
    """Problems with the record's winner and its gain."""
    document = json.loads(out)
    names = ("op", "problem", "winner", "mode", "median_us", "speedup", "measured", "seconds")
    left = [f"{row['op']} {row['problem']}: {row['reason']}" for row in document["skipped"]]
    return [{name: row[name] for name in names} for row in document["rows"]], left


def autotuned(out: str) -> tuple[Any, list[str]]:
    """What was tuned in the ranks of a program, and what it took."""
    document, wrong = same(out)
    left = [row for row in document["rows"] if row["winner"] is None]
    wrong += [f"{row['op']} {row['problem']}: {row['reason']}" for row in left]
    mean = document["seconds"] / len(document["rows"])
    return document, wrong + [f"a problem takes {mean:.1f} s"] * (mean > AUTOTUNED_S)


def found_machine(out: str) -> tuple[Any, list[str]]:
    """The software and the machine."""
    document = json.loads(out)
    return {name: document[name] for name in ("software", "machine")}, []


def benched(out: str) -> tuple[Any, list[str]]:
    """What dispatch runs, beside the fastest library path."""
    document = json.loads(out)
    wrong = [
        f"{skip['op']} {skip['variant']} {skip['state']}: {skip['reason']}"
        for skip in document["skipped"]
        if skip["state"] != "refused"
    ]
    figures = []
    for row in document["rows"]:
        if row["variant"] != DISPATCH:
            continue
        beside = [
            library
            for library in document["rows"]
            if is_library(library["op"], library["variant"])
            and all(library[name] == row[name] for name in ("op", "problem", "mode"))
        ]
        best = min(beside, key=lambda library: library["median_us"])
        speedup = best["median_us"] / row["median_us"]
        names = ("op", "problem", "mode", "config", "median_us", "iqr_us")
        figure = {name: row[name] for name in names}
        figures.append(
            figure | {"library": best["variant"], "library_us": best["median_us"],
                      "library_iqr_us": best["iqr_us"], "speedup": speedup}
        )  # fmt: skip
        if _is_slower(*(Time.of(timed) for timed in (row, best))):
            wrong.append(
                f"{row['op']} {row['problem']}, {row['mode']}: dispatch takes "
                f"{row['median_us']:.1f} us, {best['variant']} {best['median_us']:.1f}"
            )
    return figures, wrong


class Time(NamedTuple):
    """A median of so many samples, and the distance of their quartiles, in microseconds."""

    us: float
    iqr_us: float
    samples: int

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Time:
        return cls(row["median_us"], row["iqr_us"], len(row["samples_us"]))


def _is_slower(ours: Time, theirs: Time) -> bool:
    """Whether a median is above the least speed by more than the noise of medians."""
    return ours.us - theirs.us / LEAST > noise(ours[1:], theirs[1:])


def trained(out: str) -> tuple[Any, list[str]]:
    """Steps of training beside PyTorch's."""
    document, wrong = same(out)
    for row in document["rows"]:
        ours, theirs = (
            Time(row[f"{name}_us"], row[f"{name}_iqr_us"], ROUNDS) for name in ("taxfree", "torch")
        )
        if _is_slower(ours, theirs):
            mode = "compiled" if row["is_compiled"] else "eager"
            wrong.append(f"{mode}: a step takes {ours.us:.0f} us, PyTorch's {theirs.us:.0f}")
    return document, wrong


def explained(out: str) -> tuple[Any, list[str]]:
    """How much of each account is open."""
    figures, wrong = [], []
    for row in json.loads(out)["rows"]:
        rest = row["unexplained_us"]
        rest = row["residual_us"] if rest is None else rest
        share = rest / row["t_eager_us"]
        names = ("op", "problem", "variant", "t_eager_us", "t_graph_us", "open")
        figures.append({name: row[name] for name in names} | {"unexplained": share})
        if abs(share) > ACCOUNTED and not row["open"]:
            wrong.append(f"{row['op']} {row['problem']} {row['variant']}: {share:.0%} is open")
    return figures, wrong


def modelled(out: str) -> tuple[Any, list[str]]:
    """The gain over PyTorch, and modes that are wrong, fail, or are slower than it."""
    document = json.loads(out)
    names = ("phase", "path", "mode", "median_us", "iqr_us", "tokens_per_s", "speedup",
             "relative_error")  # fmt: skip
    broken = [skip for skip in document["skipped"] if skip["state"] != "refused"]
    wrong = [f"{skip['path']} {skip['mode']}: {skip['reason']}" for skip in broken]
    for row in document["rows"]:
        ours = Time.of(row)
        theirs = ours._replace(us=ours.us * (row["speedup"] or 1.0))
        if _is_slower(ours, theirs):
            phase = f"{row['phase']['name']} of batch {row['phase']['batch']}"
            wrong.append(
                f"{row['mode']}, {phase}: taxfree takes {ours.us:.0f} us, PyTorch {theirs.us:.0f}"
            )
    return [{name: row[name] for name in names} for row in document["rows"]], wrong


def dispatched(path: Path) -> Judge:
    """What dispatch adds to the host time of library calls."""

    def judge(_: str) -> tuple[Any, list[str]]:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        return rows, [
            f"dispatch adds {row['given_us']:.1f} us to {row['problem']}"
            for row in rows
            if row["given_us"] > max(ADDED_US, ADDED_SHARE * row["library_us"])
        ]

    return judge


def same(out: str) -> tuple[Any, list[str]]:
    """Whether taxfree's results are the library's."""
    document = json.loads(out.splitlines()[-1])
    return document, [f"another result: {row}" for row in document["rows"] if not row["is_same"]]


DOCTOR = Step("doctor", taxfree("doctor", "--json"), 60, found_machine)


# -- the record --


def main() -> int:
    """Run the command line; returns the exit code."""
    made = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    made.add_argument("--gpus", type=positive, default=2)
    made.add_argument("--long", action="store_true", help="the tests, and whole models")
    made.add_argument("--seconds", type=positive, default=100_000, help="end what runs after them")
    made.add_argument("--only", action="append", help="run this step, by name, again; repeatable")
    made.add_argument("--keep", action="store_true", help="also what passed with other sources")
    made.add_argument("--out", type=Path, help="file of the record")
    options = made.parse_args()
    gpu = devices.gpu_name(devices.fabric_for("auto")) or "unknown"
    suffix = "-long" if options.long else ""
    name = f"{machine_name(gpu)}-x{options.gpus}{suffix}.json"
    path, begin = options.out or RESULTS / name, time.monotonic()
    created = datetime.now(UTC).isoformat(timespec="seconds")
    record: dict[str, Any] = {"schema": 1, "created": created, "gpu": gpu, "ranks": options.gpus}
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        listed = list((long_steps if options.long else steps)(options.gpus, Path(folder)))
        sources = {step.name: digest_of(step) for step in listed}
        wanted = set(options.only or sources)
        kept = _passed(path, sources, options.keep) if options.long or options.only else {}
        if options.only:
            kept = {name: step for name, step in kept.items() if name not in wanted}
        record["steps"] = list(kept.values())
        left = [step for step in listed if step.name in wanted - kept.keys()]
        with contextlib.closing(entries(left, begin + options.seconds)) as ended:
            for entry in ended:
                record["steps"].append(entry | {"sources": sources[entry["name"]]})
                write(path, json.dumps(record, indent=1) + "\n")
                state = "FAILED" if entry["failures"] else "passed"
                print(f"{entry['name']}: {state}, {entry['seconds']} s", flush=True)
                for failure in entry["failures"]:
                    print(f"  {failure}", flush=True)
                if "said" in entry:
                    print(entry["said"], flush=True)
                failed |= bool(entry["failures"])
    print(f"{time.monotonic() - begin:.0f} s, wrote {path}")
    return int(failed)


def digest_of(step: Step) -> str:
    """16 hex digits for the Python files that a step's result may depend on."""
    digest = _product().copy()
    for argument in step.arguments:
        if argument.startswith("tests/"):
            digest.update(argument.encode() + Path(argument).read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
def _product() -> hashlib._Hash:
    """The hash of all Python files but tests, whose common parts count."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in SOURCES for path in Path(folder).rglob("*.py")):
        if not path.name.startswith("test_"):
            digest.update(str(path).encode() + path.read_bytes())
    return digest


def _passed(path: Path, sources: Mapping[str, str], of_all: bool) -> dict[str, Any]:
    """The steps of earlier runs that passed, by name, each with its run's time.

    Args:
        path: of the record.
        sources: of today's steps, by name.
        of_all: also those of other sources.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return {
        step["name"]: {"created": record["created"]} | step
        for step in record["steps"]
        if not step["failures"]
        and step["name"] in sources
        and (of_all or step["sources"] == sources[step["name"]])
    }


if __name__ == "__main__":
    sys.exit(main())
