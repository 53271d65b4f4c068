"""SIGKILL at random moments of a search: of its controller, or of a rank."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path
from random import Random

import pytest

from taxfree_tuning_db import Database
from tests.ranks import PYTHON, environment, wait_until_gone, workers_of
from tests.sample import Sample
from tests.tune.test_tuner import PROBLEM, finish, key, start

MOMENTS = range(14)  # each takes three starts of torch
PATIENCE_S = 300.0  # of what never takes so long, unless the machine is busy


class Search(contextlib.AbstractContextManager["Search"]):
    """A controller whose lines are read as it prints them."""

    def __init__(self, db: Path) -> None:
        self.process = start(db, trials=1000)
        self.done, self.groups = 0, 0
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            kind, value = json.loads(line)
            self.groups += kind == "group"
            if kind == "event":
                self.done = value["done"]

    def wait_for(self, groups: int, trials: int) -> None:
        """Wait until so many groups were started, and so many trials printed since."""
        deadline, wanted = time.monotonic() + PATIENCE_S, None
        while wanted is None or self.done < wanted:
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            if wanted is None and self.groups >= groups:
                wanted = self.done + trials
            time.sleep(0.01)

    def __exit__(self, *raised: object) -> None:
        """Kill it; what it had printed is read."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()


def shared_memory_of(pids: list[int]) -> set[str]:
    """Files in shared memory that processes have mapped."""
    maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in pids)
    return set(re.findall(r"/dev/shm/\S+", maps))


@pytest.mark.timeout(3600)
def test_a_kill_at_any_moment_loses_no_trial_that_was_printed(
    tmp_path: Path, sample: Sample
) -> None:
    db, known = tmp_path / "tuning.sqlite", ()
    for moment in sample.of(MOMENTS):
        random = Random(moment)
        with Search(db) as search:
            search.wait_for(groups=1, trials=random.randint(0, 3))
            time.sleep(random.uniform(0.0, 0.5))
            if random.random() < 0.5:  # a rank, which the controller replaces
                os.kill(random.choice(workers_of(search.process.pid)), signal.SIGKILL)
                search.wait_for(groups=2, trials=1)
            workers = workers_of(search.process.pid)
            shared = shared_memory_of(workers)
        assert wait_until_gone(workers, 30) == []
        assert not any(map(os.path.exists, shared))
        with Database(db) as database:
            trials = database.trials(key())
            assert not list(database.records())
        assert trials[: len(known)] == known
        assert sum(trial.state == "measured" for trial in trials) >= search.done
        known = trials
    measured = sum(trial.state == "measured" for trial in known)
    said = finish(start(db, trials=measured + 1), PATIENCE_S)
    after = [json.dumps([t["variant"], t["config"]], sort_keys=True) for t in said["trials"]]
    assert [trial["variant"] for trial in said["trials"]][: len(known)] == [
        trial.variant for trial in known
    ]
    assert sum(each["state"] == "measured" for each in said["trials"]) == measured + 1
    assert len(after) > len(known)


def test_a_second_search_is_refused_and_leaves_the_first_alone(tmp_path: Path) -> None:
    db = tmp_path / "tuning.sqlite"
    shape = f"m={PROBLEM['m']} n={PROBLEM['n']} k={PROBLEM['k']}"
    command = [
        *(PYTHON, "-W", "ignore", "-m", "taxfree_cli.app", "tune", "--fabric", "host"),
        *("--gpus", "2", "--shapes", shape, "--trials", "4", "--db", str(db)),
    ]
    both = [
        subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=PATIENCE_S)[1] for process in both]
    codes = [process.returncode for process in both]
    assert 0 in codes, said
    for code, text in zip(codes, said, strict=True):
        assert code == 0 or "another taxfree tune writes into" in text
    with Database(db, read_only=True) as database:
        (record,) = database.records()
        measured = [t for t in database.trials(record.key) if t.state == "measured"]
        assert record.trials == len(measured) == 4
        assert len({str((t.variant, t.config)) for t in measured}) == 4
