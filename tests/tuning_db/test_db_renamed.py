"""Documents that use old names are read with the current names."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from taxfree_tuning_db import Database, Record, export, import_records, renamed
from taxfree_tuning_db.renamed import RENAMED, Renamed, with_new_names
from tests.tuning_db.examples import OP, PUSH, TRIAL, problem_of, record_of

NAMES = Renamed(
    variants={"push": "send"},
    config={"block_m": "BLOCK_M"},
    problem={"gather_dim": "dim"},
    constants={"send": {"AHEAD": 1}},
)
NEW_PUSH = replace(PUSH, variant="send", config={**PUSH.config, "BLOCK_M": 64})
del NEW_PUSH.config["block_m"]


@pytest.fixture
def new_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RENAMED, OP, NAMES)


def new_problem() -> dict:
    problem = problem_of(16)
    return {("dim" if name == "gather_dim" else name): each for name, each in problem.items()}


class TestNames:
    def test_no_old_name_is_used_again(self) -> None:
        for names in RENAMED.values():
            for table in (names.variants, names.config, names.problem):
                assert not set(table) & set(table.values())

    @pytest.mark.usefixtures("new_names")
    def test_a_row_of_the_dispatcher_names_what_it_picked(self) -> None:
        row = {"variant": "dispatch", "config": {"variant": "push", "block_m": 64}}
        new = {"variant": "dispatch", "config": {"variant": "send", "BLOCK_M": 64}}
        assert with_new_names(OP, row) == new
        assert row["config"]["variant"] == "push"

    @pytest.mark.usefixtures("new_names")
    @pytest.mark.parametrize(("ahead", "version"), [({"AHEAD": 1}, 3), ({}, 3), ({"AHEAD": 2}, 0)])
    def test_a_key_that_became_a_constant_goes_and_another_value_is_not_todays(
        self, ahead: dict[str, int], version: int
    ) -> None:
        old = {"variant": "push", "version": 3, "config": {"block_m": 64, **ahead}}
        new = {"variant": "send", "version": version, "config": {"BLOCK_M": 64}}
        assert with_new_names(OP, old) == new
        picked = {"variant": "dispatch", "config": {"variant": "push", **ahead}}
        assert with_new_names(OP, picked)["config"] == {"variant": "send"}
        other = {"variant": "pull", "version": 3, "config": ahead}
        assert with_new_names(OP, other) == other

    @pytest.mark.usefixtures("new_names")
    def test_other_operations_and_what_is_no_document_stay(self) -> None:
        assert with_new_names("another", {"variant": "push"}) == {"variant": "push"}
        for document in (None, 3, [], {"config": 3, "variant": [], "winner": None}):
            assert with_new_names(OP, document) == document


class TestReaders:
    def test_a_record(self, monkeypatch: pytest.MonkeyPatch) -> None:
        document = json.loads(json.dumps(record_of().to_json()))
        monkeypatch.setitem(RENAMED, OP, NAMES)
        record = Record.from_json(document)
        assert record.winner == NEW_PUSH
        assert record.runners_up[0].config == {"BLOCK_M": 128}
        assert record.problem == new_problem()
        assert Record.from_json(record.to_json()) == record

    def test_an_export(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        export([record_of()], tmp_path / "old.json")
        monkeypatch.setitem(RENAMED, OP, NAMES)
        with Database(tmp_path / "new.sqlite") as database:
            report = import_records(database, tmp_path / "old.json")
            assert [each.winner for each in report.added] == [NEW_PUSH]
            assert database.get(replace(record_of(), problem=new_problem()).key) is not None


class TestDatabase:
    @pytest.fixture
    def old(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A database from before the names were changed."""
        with Database(tmp_path / "tuning.sqlite") as database:
            database.put(record_of())
            database.add_trial(record_of().key, TRIAL)
        monkeypatch.setitem(RENAMED, OP, NAMES)
        return tmp_path / "tuning.sqlite"

    KEY = replace(record_of(), problem=new_problem()).key

    def test_finds_what_is_stored_under_old_names(self, old: Path) -> None:
        with Database(old, read_only=True) as database:
            record = database.get(self.KEY)
            assert record is not None
            assert record.winner == NEW_PUSH
            assert list(database.records()) == [record]
            (trial,) = database.trials(self.KEY)
            assert (trial.variant, trial.config) == ("send", {"BLOCK_M": 64})

    def test_replaces_it(self, old: Path) -> None:
        with Database(old) as database:
            record = database.get(self.KEY)
            assert record is not None
            database.put(replace(record, trials=1))
            assert [each.trials for each in database.records()] == [1]
            database.add_trial(self.KEY, replace(TRIAL, seconds=9.0))
            assert [each.seconds for each in database.trials(self.KEY)] == [TRIAL.seconds, 9.0]

    def test_deletes_it(self, old: Path) -> None:
        with Database(old) as database:
            database.delete([self.KEY])
            assert list(database.records()) == []

    def test_without_renamed_fields_there_is_one_key(self) -> None:
        record = replace(record_of(), op="embedding_all_to_all")
        assert renamed.former_key(record.key) is None
        assert renamed.former_key("no key") is None


class TestAddedFields:
    def test_a_record_of_before_is_that_of_the_value_that_all_had(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with Database(tmp_path / "tuning.sqlite") as database:
            database.put(record_of())
        monkeypatch.setitem(RENAMED, OP, Renamed(added={"x_dtype": "same"}))
        of_before, of_today = problem_of(16) | {"x_dtype": "same"}, {"x_dtype": "fp8"}
        with Database(tmp_path / "tuning.sqlite") as database:
            (found,) = database.records()
            assert found.problem == of_before
            assert database.get(found.key) == found
            assert database.get(replace(found, problem=of_before | of_today).key) is None
            database.put(replace(found, trials=1))
            assert [each.trials for each in database.records()] == [1]
