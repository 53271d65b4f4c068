"""The store: what it keeps, what it refuses, and what several processes may do to it."""

import contextlib
import os
import pickle
import signal
import sqlite3
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import platformdirs
import pytest

from taxfree_tuning_db import (
    Database,
    DatabaseCorrupt,
    DatabaseError,
    DatabaseFull,
    DatabaseLocked,
    DatabaseMissing,
    DatabaseReadOnly,
    DatabaseTooNew,
    DatabaseUnreadable,
    ForeignRecord,
    InvalidRecord,
    connection,
    default_path,
    prune,
)
from taxfree_tuning_db.errors import ForeignRecordWarning
from tests.tuning_db.examples import BASELINE, HUNG, TRIAL, record_of, start_python


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A database that holds two records and a trial."""
    path = tmp_path / "tuning.sqlite"
    with Database(path) as database:
        database.put(record_of(16))
        database.put(record_of(64))
        database.add_trial(record_of(16).key, TRIAL)
    return path


@contextlib.contextmanager
def raw(path: Path) -> Iterator[sqlite3.Connection]:
    """Change the file behind the store's back."""
    with contextlib.closing(sqlite3.connect(path)) as sqlite, sqlite:
        yield sqlite


def plant(path: Path, table: str, key: str, value: object) -> None:
    with raw(path) as sqlite:
        sqlite.execute(f"REPLACE INTO {table} VALUES (?, ?)", (key, value))


def fail(monkeypatch: pytest.MonkeyPatch, statement: str, message: str) -> None:
    """Let SQLite fail at the statements that start like this."""

    class Failing(sqlite3.Connection):
        def execute(self, sql, *arguments):
            if sql.startswith(statement):
                raise sqlite3.OperationalError(message)
            return super().execute(sql, *arguments)

    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *a, **k: connect(*a, factory=Failing, **k))


class TestRecords:
    def test_what_was_put_is_there_after_reopening(self, path):
        with Database(path, read_only=True) as database:
            assert database.get(record_of(16).key) == record_of(16)
            assert list(database.records()) == [record_of(16), record_of(64)]

    def test_an_unknown_key_has_no_record(self, path):
        with Database(path) as database:
            assert database.get("nothing") is None

    def test_putting_again_replaces(self, path):
        with Database(path) as database:
            database.put(record_of(16, winner=BASELINE))
            assert database.get(record_of(16).key).winner == BASELINE
            assert len(list(database.records())) == 2

    def test_deleting_skips_what_is_not_there(self, path):
        with Database(path) as database:
            database.delete(["nothing", record_of(16).key])
            assert list(database.records()) == [record_of(64)]

    def test_the_records_are_those_of_one_moment(self, path):
        with Database(path) as database:
            seen = database.records()
            next(seen)
            database.delete([record_of(64).key])
            assert list(seen) == [record_of(64)]

    def test_the_values_are_json_text(self, path):
        with raw(path) as sqlite:
            kinds = sqlite.execute("SELECT DISTINCT typeof(value) FROM records").fetchall()
        assert kinds == [("text",)]


class TestTrials:
    def test_they_come_back_in_order(self, path):
        key = record_of(16).key
        with Database(path) as database:
            for number in range(12):
                database.add_trial(key, replace(HUNG, config={"number": number}))
            numbers = [trial.config.get("number") for trial in database.trials(key)]
        assert numbers == [None, *range(12)]

    def test_each_key_has_its_own(self, path):
        with Database(path) as database:
            database.add_trial(record_of(64).key, HUNG)
            assert database.trials(record_of(16).key) == (TRIAL,)
            assert database.trials(record_of(64).key) == (HUNG,)
            assert database.trials("nothing") == ()

    def test_they_may_come_before_any_record(self, path):
        with Database(path) as database:
            database.add_trial(record_of(1).key, TRIAL)
            assert database.get(record_of(1).key) is None

    def test_they_outlive_their_record(self, path):
        with Database(path) as database:
            database.delete([record_of(16).key])
            assert database.trials(record_of(16).key) == (TRIAL,)


class TestTransaction:
    def test_an_exception_undoes_all_of_it(self, path):
        before = path.read_bytes()
        with Database(path) as database:
            with contextlib.suppress(KeyboardInterrupt), database.transaction():
                database.put(record_of(128))
                database.add_trial(record_of(16).key, HUNG)
                raise KeyboardInterrupt
            assert len(list(database.records())) == 2
        assert path.read_bytes() == before

    def test_four_processes_lose_no_update(self, path):
        script = """
import sys
from dataclasses import replace
from taxfree_tuning_db import Database
from tests.tuning_db.examples import TRIAL, record_of

key = record_of(16).key
with Database(sys.argv[1]) as database:
    for _ in range(100):
        with database.transaction():
            record = database.get(key)
            database.put(replace(record, trials=record.trials + 1))
            database.add_trial(key, TRIAL)
"""
        with Database(path) as database:
            database.put(record_of(16, trials=0))
        workers = [start_python(script, path) for _ in range(4)]
        assert [worker.communicate(timeout=400)[0] for worker in workers] == [""] * 4
        assert [worker.returncode for worker in workers] == [0] * 4
        with Database(path) as database:
            assert database.get(record_of(16).key).trials == 400
            assert len(database.trials(record_of(16).key)) == 401

    def test_a_writer_killed_half_way_loses_only_what_it_had_not_committed(self, path):
        script = """
import sys, time
from taxfree_tuning_db import Database
from tests.tuning_db.examples import record_of

with Database(sys.argv[1]) as database:
    database.put(record_of(128))
    with database.transaction():
        database.put(record_of(16, provenance={"note": "x" * 8_000_000}))
        print("half way", flush=True)
        time.sleep(60)
"""
        journal = path.with_name(f"{path.name}-journal")
        with start_python(script, path) as writer:
            assert writer.stdout.readline() == "half way\n"
            writer.send_signal(signal.SIGKILL)
        assert journal.stat().st_size > 0  # it had begun to change the file
        with Database(path, read_only=True) as database:
            assert list(database.records()) == [record_of(128), record_of(16), record_of(64)]
        assert not journal.exists()


class TestErrors:
    @pytest.fixture(autouse=True)
    def _no_patience(self, monkeypatch):
        monkeypatch.setattr(connection, "BUSY_TIMEOUT_S", 0.05)

    def test_nothing_to_read(self, tmp_path):
        with pytest.raises(DatabaseMissing, match="no tuning database") as caught:
            Database(tmp_path / "none.sqlite", read_only=True)
        assert "taxfree tune" in caught.value.hint
        assert list(tmp_path.iterdir()) == []

    def test_an_empty_file_to_read(self, tmp_path):
        (tmp_path / "empty.sqlite").touch()
        with pytest.raises(DatabaseMissing):
            Database(tmp_path / "empty.sqlite", read_only=True)
        assert (tmp_path / "empty.sqlite").read_bytes() == b""

    def test_writing_makes_the_folders(self, tmp_path):
        with Database(tmp_path / "a" / "b c?#%.sqlite") as database:
            database.put(record_of())
        assert (tmp_path / "a" / "b c?#%.sqlite").is_file()

    def test_a_folder_is_unreadable(self, tmp_path):
        with pytest.raises(DatabaseUnreadable, match="unable to open"):
            Database(tmp_path, read_only=True)

    def test_a_path_through_a_file_is_unreadable(self, path):
        for through in (path / "tuning.sqlite", path / "folder" / "tuning.sqlite"):
            with pytest.raises(DatabaseUnreadable, match="cannot be reached: Not a directory"):
                Database(through)

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
    def test_permissions_are_respected(self, path):
        path.chmod(0o444)
        with Database(path) as database, pytest.raises(DatabaseReadOnly):
            database.put(record_of())
        path.chmod(0)
        with pytest.raises(DatabaseUnreadable):
            Database(path, read_only=True)

    @pytest.mark.parametrize(
        "change",
        [
            lambda database: database.put(record_of(128)),
            lambda database: database.delete([record_of(16).key]),
            lambda database: database.add_trial("key", TRIAL),
        ],
    )
    def test_read_only_refuses_every_change(self, path, change):
        before = path.read_bytes()
        with (
            Database(path, read_only=True) as database,
            pytest.raises(DatabaseReadOnly, match="reading only"),
        ):
            change(database)
        assert path.read_bytes() == before

    @pytest.mark.parametrize("read_only", [True, False])
    def test_a_file_that_is_not_sqlite_is_corrupt(self, tmp_path, read_only):
        text = tmp_path / "text"
        text.write_text("no database at all\n" * 100)
        with pytest.raises(DatabaseCorrupt, match="not a SQLite database"):
            Database(text, read_only=read_only)
        assert text.read_text().startswith("no database")

    def test_a_damaged_page_is_corrupt(self, path):
        content = bytearray(path.read_bytes())
        content[4096:] = b"\xff" * len(content[4096:])
        path.write_bytes(content)
        with pytest.raises(DatabaseCorrupt, match="damaged"), Database(path) as database:
            list(database.records())

    @pytest.mark.parametrize("read_only", [True, False])
    @pytest.mark.parametrize("table", ["songs (title)", "meta (key, value)"])
    def test_another_programs_database_is_left_alone(self, tmp_path, table, read_only):
        path = tmp_path / "other.sqlite"
        with raw(path) as sqlite:
            sqlite.execute(f"CREATE TABLE {table}")
        before = path.read_bytes()
        with pytest.raises(DatabaseCorrupt, match="not a tuning database"):
            Database(path, read_only=read_only)
        assert path.read_bytes() == before

    def test_locked_by_another(self, path):
        with raw(path) as other, Database(path) as database:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(DatabaseLocked, match="another process"):
                database.put(record_of(128))
            assert len(list(database.records())) == 2

    def test_a_reader_that_does_not_go_away(self, path):
        before = path.read_bytes()
        with raw(path) as other, Database(path) as database:
            other.execute("BEGIN").execute("SELECT * FROM records").fetchone()
            with pytest.raises(DatabaseLocked):
                database.put(record_of(128))
            other.rollback()
            assert path.read_bytes() == before
            database.put(record_of(128))

    @pytest.mark.parametrize("read_only", [True, False])
    def test_a_newer_schema_is_left_alone(self, path, read_only):
        plant(path, "meta", "schema", "2")
        before = path.read_bytes()
        with pytest.raises(DatabaseTooNew, match="schema 2") as caught:
            Database(path, read_only=read_only)
        assert "update taxfree" in caught.value.hint
        assert path.read_bytes() == before

    @pytest.mark.parametrize("statement", ["REPLACE", "COMMIT"])
    @pytest.mark.parametrize(
        ("message", "error"),
        [
            ("database or disk is full", DatabaseFull),
            ("attempt to write a readonly database", DatabaseReadOnly),
            ("database is locked", DatabaseLocked),
            ("disk I/O error", DatabaseUnreadable),
        ],
    )
    def test_a_write_that_fails_leaves_the_file_as_it_was(
        self, path, monkeypatch, statement, message, error
    ):
        before = path.read_bytes()
        fail(monkeypatch, statement, message)
        with Database(path) as database:
            with pytest.raises(error) as caught:
                database.put(record_of(128))
            assert type(caught.value) is error
            assert len(list(database.records())) == 2
        assert path.read_bytes() == before

    def test_no_space_for_a_new_database(self, tmp_path, monkeypatch):
        fail(monkeypatch, "COMMIT", "database or disk is full")
        with pytest.raises(DatabaseFull, match="disk is full"):
            Database(tmp_path / "new.sqlite")
        monkeypatch.undo()
        with Database(tmp_path / "new.sqlite") as database:
            database.put(record_of())

    def test_every_error_is_one_line_with_one_hint(self, tmp_path):
        with pytest.raises(DatabaseError) as caught:
            Database(tmp_path / "none.sqlite", read_only=True)
        assert str(caught.value) == caught.value.message
        assert "\n" not in caught.value.message + caught.value.hint
        assert caught.value.hint

    def test_a_record_changed_to_nonsense_is_not_written(self, path):
        before = path.read_bytes()
        record = record_of(128)
        record.problem["n"] = float("nan")
        with Database(path) as database, pytest.raises(InvalidRecord, match=r"problem\.n"):
            database.put(record)
        assert path.read_bytes() == before

    def test_a_database_may_not_follow_a_fork(self, path, monkeypatch):
        with Database(path) as database:
            monkeypatch.setattr(os, "getpid", lambda: -1)
            with pytest.raises(DatabaseError, match="forked"):
                list(database.records())

    def test_nothing_works_after_closing(self, path):
        database = Database(path)
        database.close()
        database.close()
        with pytest.raises(DatabaseError, match="closed"):
            database.get("key")
        with pytest.raises(DatabaseError, match="closed"):
            database.put(record_of())


class Touch:
    """Runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


class TestForeignRows:
    def test_a_pickle_is_reported_and_not_run(self, path, tmp_path):
        bait, key = tmp_path / "bait", record_of(16).key
        for table, row in [("records", key), ("trials", f"{key} #000000000"), ("meta", "extra")]:
            plant(path, table, row, pickle.dumps(Touch(bait)))
        with Database(path) as database:
            with pytest.warns(ForeignRecordWarning, match="not text; it is passed over"):
                assert [record.problem["m"] for record in database.records()] == [64]
            with pytest.raises(ForeignRecord, match="not text") as caught:
                database.get(key)
            with pytest.raises(ForeignRecord, match="not text"):
                database.trials(key)
        assert caught.value.key == key
        assert not bait.exists()

    @pytest.mark.parametrize("schema", [b"\x80\x04.", "one", 1, None])
    def test_a_schema_that_is_no_number_is_not_ours(self, path, schema):
        plant(path, "meta", "schema", schema)
        with pytest.raises(DatabaseCorrupt, match="not a tuning database"):
            Database(path)

    @pytest.mark.parametrize(
        ("value", "why"),
        [
            ("{", "not JSON"),
            ("[" * 100_000, "not JSON"),
            ('{"op": "x"}', "missing"),
            ("NaN", "not a JSON object"),
            (None, "not text"),
            (12, "not text"),
        ],
    )
    def test_what_is_no_record_is_foreign(self, path, value, why):
        plant(path, "records", "planted", value)
        with Database(path) as database:
            with pytest.raises(ForeignRecord, match=rf"^foreign record planted: .*{why}"):
                database.get("planted")
            database.delete(["planted"])
            assert len(list(database.records())) == 2

    @pytest.mark.parametrize("key", ["planted", b"planted"])
    @pytest.mark.parametrize("value", [b"\x80\x04.", "{", record_of(16).key])
    def test_one_row_leaves_the_others(self, path, key, value):
        plant(path, "records", key, value)
        with Database(path) as database:
            with pytest.warns(ForeignRecordWarning, match="it is passed over$"):
                assert len(list(database.records())) == 2
            with pytest.warns(ForeignRecordWarning):
                assert prune(database, {"all_gather_matmul": ["push", "baseline"]}) == []

    def test_a_record_under_another_key_is_foreign(self, path):
        with raw(path) as sqlite:
            sqlite.execute("UPDATE records SET key = 'moved' WHERE key = ?", (record_of(16).key,))
        with Database(path) as database, pytest.raises(ForeignRecord, match="another key"):
            database.get("moved")

    def test_a_trial_under_a_strange_key_is_foreign(self, path):
        plant(path, "trials", "key #last", "{}")
        with Database(path) as database, pytest.raises(ForeignRecord, match="key of a trial"):
            database.add_trial("key", TRIAL)


class TestDefaultPath:
    def test_of_a_user_without_a_home_it_is_in_the_temporary_folder(self, monkeypatch):
        def homeless(*_):
            raise RuntimeError("could not determine the home directory")

        monkeypatch.delenv("TAXFREE_DB", raising=False)
        monkeypatch.setattr(platformdirs, "user_data_path", homeless)
        own = Path(tempfile.gettempdir(), f"taxfree-{os.getuid()}")
        assert default_path() == own / "tuning.sqlite"

    def test_the_environment_comes_first(self, monkeypatch):
        monkeypatch.setenv("TAXFREE_DB", "~/here.sqlite")
        assert default_path() == Path.home() / "here.sqlite"

    @pytest.mark.parametrize("value", [None, ""])
    def test_else_it_is_in_the_users_data_folder(self, monkeypatch, value):
        monkeypatch.delenv("TAXFREE_DB", raising=False)
        if value is not None:
            monkeypatch.setenv("TAXFREE_DB", value)
        assert default_path() == platformdirs.user_data_path() / "taxfree" / "tuning.sqlite"
