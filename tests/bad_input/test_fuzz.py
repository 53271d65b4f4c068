"""Thousands of spoiled shapes, files and databases: accepted, or refused as the table's rows are.

    pytest tests/bad_input/test_fuzz.py            a hundred files
    pytest tests/bad_input/test_fuzz.py -m soak    ten thousand

A failure names its seed; `run_case(place, seed)` repeats it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import sqlite3
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import pytest
import yaml

from taxfree._runtime.startup import _heap_bytes
from taxfree.fingerprints import versions
from taxfree_cli.app import run
from taxfree_cli.asked import what_is_asked
from taxfree_cli.exits import ExitCode
from taxfree_cli.options import ShapeOptions
from taxfree_kernels.variant import problem_class
from taxfree_tune.measuring import results
from taxfree_tuning_db import Database, DatabaseError, HardwareFingerprint, export
from taxfree_tuning_db.errors import ForeignRecordWarning
from tests.bad_input.mutations import (
    SHAPES,
    spoiled_bytes,
    spoiled_document,
    spoiled_json,
    spoiled_text,
)
from tests.bad_input.outcome import Outcome, assert_is_refused
from tests.bad_input.places import CONFIG
from tests.sample import Sample
from tests.tuning_db.examples import HUNG, OP, TRIAL, record_of

MOST_CPU_SECONDS = 10.0  # of one command
REFUSALS = (ExitCode.FAILED, ExitCode.USAGE, ExitCode.NO_HARDWARE)

CPU = HardwareFingerprint("CPU", "cpu", 1, 16 << 30, "shared memory")
RECORDS = [
    record_of(problem=asdict(problem_class(OP)(m=m, n=64, k=64, world_size=2)), hardware=CPU)
    for m in (16, 64)
]
YAML = [*SHAPES, {"m": [1, 16], "n": 64, "k": 64}, {"m": 16, "n": 64, "k": 64, "dtype": "bf16"}]
ROW = results.Row(
    OP, RECORDS[0].problem, "push", {"BLOCK_M": 16}, "eager", 30.0, 1.0, (29.0, 30.0), 5.0, None,
    4.0, 5.0, 0.001, throttled=("power cap",),
)  # fmt: skip
EARLIER = json.loads(json.dumps(results.Results({"gpus": []}, (ROW,)).to_json()))
TO_ADOPT = EARLIER | {
    "environment": {
        "hardware": asdict(CPU),
        "software": asdict(RECORDS[0].software),
        "created": "2026-01-02T03:04:05+00:00",
    },
    "rows": [
        EARLIER["rows"][0] | {"variant": name, "version": version}
        for name, version in versions(OP).items()
    ],
}


@dataclass
class TunedFolder:
    """A folder with a database, and what was in the database before it was spoiled."""

    folder: Path
    pristine: bytes

    @property
    def database(self) -> Path:
        return self.folder / "tuning.sqlite"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TunedFolder:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TAXFREE_DB", "tuning.sqlite")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with Database("tuning.sqlite") as database:
        for record in RECORDS:
            database.put(record)
            database.add_trial(record.key, TRIAL)
            database.add_trial(record.key, HUNG)
    return TunedFolder(tmp_path, (tmp_path / "tuning.sqlite").read_bytes())


# -- what is spoiled, and the commands that meet it --


def a_shape(random: Random, place: TunedFolder) -> Iterator[list[str]]:
    text = spoiled_text(random, random.choice(SHAPES)).replace("\x00", "")  # no argument holds NUL
    yield ["shapes", f"--shapes={text}", *_options(random)]


def a_shape_file(random: Random, place: TunedFolder) -> Iterator[list[str]]:
    text = yaml.safe_dump(spoiled_document(random, YAML))
    if random.random() < 0.5:
        text = spoiled_text(random, text)
    _write(place.folder / "shapes.yaml", text)
    yield ["shapes", "--shapes", "shapes.yaml", *_options(random)]


def a_model(random: Random, place: TunedFolder) -> Iterator[list[str]]:
    config = CONFIG | {"torch_dtype": "bfloat16", "text_config": None, "head_dim": 128}
    _write(place.folder / "config.json", spoiled_json(random, config))
    yield ["shapes", "--model", "config.json", "--tp", random.choice("1238")]


def earlier_results(random: Random, place: TunedFolder) -> Iterator[list[str]]:
    """Refused when they are read, or else because there is no such fabric here."""
    _write(place.folder / "old.json", spoiled_json(random, EARLIER))
    yield ["bench", "--compare", "old.json", "--fabric", "cuda"]


def results_to_adopt(random: Random, place: TunedFolder) -> Iterator[list[str]]:
    _write(place.folder / "old.json", spoiled_json(random, TO_ADOPT))
    yield ["db", "adopt", "old.json"]
    yield from _readings(random)


def an_import(random: Random, place: TunedFolder) -> Iterator[list[str]]:
    text = io.StringIO()
    export([record_of(128), *RECORDS], text)
    _write(place.folder / "records.json", spoiled_json(random, json.loads(text.getvalue())))
    yield ["db", "import", "records.json", "--dry-run", "--json"]
    yield ["db", "diff", "tuning.sqlite", "records.json", "--json"]
    yield ["db", "import", "records.json"]
    yield from _readings(random)


def stored_values(random: Random, place: TunedFolder) -> Iterator[list[str]]:
    """Rows that look like ours."""
    table = random.choice(("records", "records", "trials", "meta"))
    with contextlib.closing(sqlite3.connect(place.database)) as sqlite, sqlite:
        rows = sqlite.execute(f"SELECT key, value FROM {table}").fetchall()
        key, value = random.choice(rows)
        spoiled = spoiled_json(random, json.loads(value)).encode(errors="replace").decode()
        sqlite.execute(f"UPDATE {table} SET value = ? WHERE key = ?", (spoiled, key))
    yield from _readings(random)


def stored_bytes(random: Random, place: TunedFolder) -> Iterator[list[str]]:
    """A damaged file."""
    place.database.write_bytes(spoiled_bytes(random, place.pristine))
    yield from _readings(random)


KINDS: tuple[Callable[[Random, TunedFolder], Iterator[list[str]]], ...] = (
    a_shape, a_shape_file, a_model, earlier_results, results_to_adopt, an_import, stored_values,
    stored_bytes,
)  # fmt: skip


def _options(random: Random) -> list[str]:
    options = ["", "--json", "--gpus 8", "--gpus 3 --dtype bf16", "--model none.json"]
    return shlex.split(random.choice(options))


def _readings(random: Random) -> Iterator[list[str]]:
    ways = ["list", "list --json", "show", "show --trials", "show --trials --json", "export"]
    ways += ["show --shapes 16x64x64", "why --shapes 16x64x64 --json", "why --shapes 16x64x64"]
    yield ["db", *random.choice(ways).split()]


def _write(path: Path, text: str) -> None:
    path.write_bytes(text.encode("utf-8", "surrogatepass"))


# -- the property --


@pytest.mark.parametrize("count", [560, pytest.param(10_000, marks=pytest.mark.soak)])
def test_whatever_is_spoiled_is_accepted_or_refused_cleanly(
    place: TunedFolder, count: int, sample: Sample
) -> None:
    seeds = sample.of(range(count))
    accepted = sum(run_case(place, seed) for seed in seeds)
    assert 0.1 * len(seeds) < accepted < 0.9 * len(seeds)  # neither harmless nor past recognition


def run_case(place: TunedFolder, seed: int) -> bool:
    """Spoil something, and see that every command takes it well; whether all were accepted."""
    place.database.write_bytes(place.pristine)
    random, accepted = Random(seed), True
    kind = random.choice(KINDS)
    for arguments in kind(random, place):
        before = _content(place.folder)
        begun = time.process_time()
        outcome = call(arguments)
        try:
            assert time.process_time() - begun < MOST_CPU_SECONDS
            if outcome.code == ExitCode.DONE:
                assert not re.search("^error:", outcome.err, re.MULTILINE)
                if "--json" in arguments:
                    json.loads(outcome.out)
                continue
            accepted = False
            assert outcome.code in REFUSALS
            assert_is_refused(outcome, outcome.code)
            if "records are refused" in outcome.err:  # of an import; the others are in
                continue
            assert outcome.out == ""
            assert _content(place.folder) == before
        except Exception as error:
            error.add_note(f"seed {seed}, {kind.__name__}: taxfree {shlex.join(arguments)}")
            error.add_note(f"it said: {outcome.err[-2000:]!r}")
            raise
    if kind in (an_import, stored_values):
        use_as_a_library_does(place, seed)
    return accepted


def use_as_a_library_does(place: TunedFolder, seed: int) -> None:
    """What commands that measure, and a runtime, read of the records before they measure."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ForeignRecordWarning)
            asked = what_is_asked(ShapeOptions(OP, None, None, None), "host", place.database, None)
        _heap_bytes(asked.history.records, 2)
    except DatabaseError:
        return
    except Exception as error:
        error.add_note(f"seed {seed}")
        if not hasattr(error, "message"):
            raise


def call(arguments: list[str]) -> Outcome:
    """Run a command with streams that are as strict as a terminal's."""
    out = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    err = io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace", write_through=True)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(arguments)
    return Outcome(code, *(stream.buffer.getvalue().decode() for stream in (out, err)))


def _content(folder: Path) -> dict[str, bytes]:
    return {entry.name: Path(entry.path).read_bytes() for entry in os.scandir(folder)}
