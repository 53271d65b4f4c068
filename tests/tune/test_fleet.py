"""Nodes that tune one list together, on a real PostgreSQL."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import optuna
import pytest
import sqlalchemy
from optuna.trial import FrozenTrial, TrialState

from taxfree.errors import TaxfreeError, UsageError
from taxfree_cli.exits import ExitCode
from taxfree_kernels.hardware import KNOWN
from taxfree_tune.measuring.trial import Candidate, key
from taxfree_tune.tuning import fleet as fleets
from taxfree_tune.tuning.fleet import Fleet
from taxfree_tune.tuning.search import Search
from taxfree_tuning_db import Database
from tests import postgres
from tests.ranks import environment
from tests.tune.test_search import FAST, SLOW

pytestmark = pytest.mark.skipif(not postgres.is_here(), reason="no server: apt install postgresql")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with postgres.server() as found:
        yield found


@pytest.fixture
def node(url: str) -> Iterator[Callable[[], Fleet]]:
    """Makes nodes, all of which end with the test."""
    nodes: list[Fleet] = []

    def join() -> Fleet:
        nodes.append(Fleet(url))
        return nodes[-1]

    yield join
    for each in nodes:
        each.__exit__(None, None, None)


def search(fleet: Fleet, name: str, seed: int = 0) -> Search:
    return Search({"fast": FAST, "slow": SLOW}, None, KNOWN["cpu"], seed, name, fleet)


class TestClaims:
    @pytest.mark.filterwarnings("ignore")  # Python's filters are of no thread
    def test_nodes_at_once_never_ask_for_one_candidate_twice(
        self, node: Callable[[], Fleet]
    ) -> None:
        asked: list[str] = []

        def tune(fleet: Fleet) -> None:
            found = search(fleet, "at once")
            found.enqueue([Candidate("fast", {"BLOCK": 16, "SWAP": False})])
            while batch := found.ask(2, 9):
                for each in batch:
                    asked.append(key(each))
                    found.tell(each, 1.0 + len(asked), {"eager": 1.0})

        nodes = [threading.Thread(target=tune, args=(node(),)) for _ in range(3)]
        for each in nodes:
            each.start()
        for each in nodes:
            each.join()
        assert max(Counter(asked).values()) == 1
        assert len(asked) == 9

    def test_what_others_told_is_learned_and_what_they_claimed_counts(
        self, node: Callable[[], Fleet]
    ) -> None:
        first, second = search(node(), "shared"), search(node(), "shared")
        told, claimed = first.ask(2, 3)
        first.tell(told, 5.0, {"eager": 5.0})
        (asked,) = second.ask(3, 3)
        assert asked not in (told, claimed)
        assert second.told() == [(told, {"eager": 5.0})]
        assert second.best(1) == [(5.0, told)]
        assert second.ask(1, 3) == []
        assert second.waits_for_others

    def test_a_failure_elsewhere_is_not_tried_again(self, node: Callable[[], Fleet]) -> None:
        first = search(node(), "failed")
        failed = first.ask(1)[0]
        first.tell_pruned(failed, "hung: rank 1")
        assert failed not in search(node(), "failed").ask(10)

    def test_claims_of_a_dead_node_are_asked_anew(self, node: Callable[[], Fleet]) -> None:
        dead, alive = node(), node()
        claimed = search(dead, "dead").ask(2)
        other = search(alive, "dead")
        assert not {*map(key, claimed)} & {*map(key, other.ask(2))}
        dead.__exit__(None, None, None)  # its heartbeats end
        with alive.storage.engine.begin() as connection:
            connection.execute(
                sqlalchemy.text(
                    "UPDATE trial_heartbeats SET heartbeat = heartbeat - :lease * interval '1 s' "
                    "WHERE trial_id = ANY(:claims)"
                ),
                {"lease": 2 * fleets.LEASE_S, "claims": [*dead._held]},
            )
        assert {*map(key, other.ask(2))} == {*map(key, claimed)}  # in any order

    def test_the_last_measurement_is_of_one_node(self, node: Callable[[], Fleet]) -> None:
        first, second = node(), node()
        mine = first.finals("finals")
        assert mine is not None
        assert mine.trial is not None
        assert second.finals("finals") is None
        first.decided("finals", mine.trial, {"winner": "push"})
        theirs = second.finals("finals")
        assert theirs is not None
        assert (theirs.record, theirs.trial) == ({"winner": "push"}, None)


class TestErrors:
    @pytest.mark.parametrize("given", ["sqlite:///study.db", "host/database", ""])
    def test_another_url_is_refused(self, given: str) -> None:
        with pytest.raises(UsageError, match="no URL of PostgreSQL"):
            Fleet(given)

    def test_a_server_that_does_not_answer_is_named_without_the_password(self) -> None:
        with pytest.raises(TaxfreeError, match="does not answer") as error:
            Fleet("postgresql://me:secret@127.0.0.1:9/none")
        assert "secret" not in str(error.value) + error.value.message


@pytest.mark.timeout(500)  # two sessions of tuning, on a machine that may be busy
def test_two_nodes_tune_a_list_and_the_death_of_one_loses_nothing(url: str, tmp_path: Path) -> None:
    """One is killed while both measure; the other finishes the list, and nothing is tried twice."""
    shapes = ["--shapes", "3,5x32x32", "--gpus", "2", "--fabric", "host", "--trials", "5"]

    def start(name: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.tune.fleet_node", "tune", *shapes]
        command += ["--db", f"{tmp_path}/{name}.sqlite", "--storage", url]
        return subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)

    before = studies(url).keys()
    doomed = start("doomed")
    other = start("other")
    try:
        assert doomed.stderr is not None
        lines = []
        for line in doomed.stderr:
            lines.append(line)
            if "tuning" in line:  # its first batch is measured
                break
        assert "tuning" in lines[-1], lines
        doomed.kill()
        said = other.communicate(timeout=400)[1]
        assert other.returncode == ExitCode.DONE, said
    finally:
        for each in (doomed, other):
            each.kill()
            each.communicate()
    with Database(tmp_path / "other.sqlite", read_only=True) as database:
        records = list(database.records())
        assert sorted(record.problem["m"] for record in records) == [3, 5]
        for record in records:
            stored = {key(Candidate(t.variant, t.config)) for t in database.trials(record.key)}
            assert len(stored) >= record.trials == 5
    searched = [own for name, own in studies(url).items() if name not in before]
    assert len(searched) == 2
    for own in searched:
        told = [trial for trial in own if "median_us" in trial.user_attrs and trial.value]
        measured = Counter(str(sorted(trial.params.items())) for trial in told)
        assert (len(measured), max(measured.values())) == (5, 1)
        assert not [trial for trial in own if trial.state == TrialState.RUNNING]


def studies(url: str) -> dict[str, list[FrozenTrial]]:
    """The trials of each search in a storage; last measurements have no parameters."""
    storage = optuna.storages.RDBStorage(url.replace("://", "+psycopg://"))
    names = optuna.get_all_study_names(storage)
    found = {name: storage.get_all_trials(storage.get_study_id_from_name(name)) for name in names}
    storage.remove_session()
    storage.engine.dispose()
    return {name: own for name, own in found.items() if any(trial.params for trial in own)}
