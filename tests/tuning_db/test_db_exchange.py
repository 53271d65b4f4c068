"""Export, import and the shipped tables."""

import io
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from jsonschema import Draft202012Validator

from docs.scripts import export_schema
from taxfree_tuning_db import (
    OF_A_BENCH,
    Database,
    DatabaseUnreadable,
    ForeignRecord,
    InvalidRecord,
    NotAnExport,
    Record,
    differences,
    export,
    import_records,
    plan_import,
    read_export,
    read_table,
    shipped_records,
)
from taxfree_tuning_db.tables import records_in
from tests.bad_input.mutations import spoiled_document
from tests.tuning_db.examples import PUSH, SOFTWARE, record_of


def document_of(*records: Record) -> dict:
    return {"taxfree_tuning_db": 1, "records": [record.to_json() for record in records]}


def created(time: str) -> dict[str, str]:
    return {"source": "user", "created": time}


def imported(record: Record, origin: str = "") -> Record:
    mark = {"source": "imported"} | ({"from": origin} if origin else {})
    return replace(record, provenance=record.provenance | mark)


def refusal(entry: object) -> str | None:
    try:
        Record.from_json(entry)
    except InvalidRecord as error:
        return error.message
    return None


OF_BENCH = created("2026-06-01T00:00:00Z") | {"method": OF_A_BENCH}


@pytest.fixture
def database(tmp_path):
    with Database(tmp_path / "tuning.sqlite") as database:
        yield database


class TestExport:
    def test_importing_an_export_gives_the_same_records_marked_with_their_origin(
        self, database, tmp_path
    ):
        records = [record_of(m) for m in (1, 16, 64)]
        export(records, tmp_path / "out.json")
        report = import_records(database, tmp_path / "out.json", "out.json")
        marked = [imported(record, "out.json") for record in records]
        assert sorted(report.added, key=lambda record: record.problem["m"]) == marked
        assert sorted(database.records(), key=lambda record: record.problem["m"]) == marked
        assert differences(records, database.records()) == []

    def test_the_document_does_not_depend_on_the_order(self):
        one, other = io.StringIO(), io.StringIO()
        export([record_of(1), record_of(2)], one)
        export([record_of(2), record_of(1)], other)
        assert one.getvalue() == other.getvalue()

    def test_a_path_that_cannot_be_written_is_an_error_and_leaves_nothing(self, tmp_path):
        (tmp_path / "folder").mkdir()
        for path in (tmp_path / "folder", tmp_path / "none" / "out.json"):
            with pytest.raises(DatabaseUnreadable, match="cannot be written"):
                export([record_of()], path)
        assert [each.name for each in tmp_path.iterdir()] == ["folder"]

    def test_a_link_stays_and_its_file_is_replaced(self, tmp_path):
        (tmp_path / "latest.json").symlink_to("today.json")
        for records in ([record_of(1)], [record_of(1), record_of(2)]):
            export(records, tmp_path / "latest.json")
            assert len(read_export(tmp_path / "today.json")) == len(records)
        assert (tmp_path / "latest.json").is_symlink()

    def test_what_is_no_file_is_written_into(self, tmp_path):
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        try:
            export([], pipe)
            assert json.loads(os.read(reader, 1000))["records"] == []
        finally:
            os.close(reader)
        assert pipe.is_fifo()


class TestImport:
    def test_the_report_tells_what_became_of_each(self, database):
        database.put(record_of(1))
        database.put(record_of(2))
        better = record_of(1, winner=replace(PUSH, samples=51))
        worse = record_of(2, winner=replace(PUSH, samples=49))
        document = document_of(better, worse, record_of(4))
        document["records"].append({"op": "broken"})
        report = import_records(database, document)
        assert report.added == (imported(record_of(4)),)
        assert report.replaced == (imported(better),)
        assert report.kept == (record_of(2),)
        assert report.refused == (("records[3]", "problem: missing"),)
        assert list(database.records()) == [
            imported(better), record_of(2), imported(record_of(4)),
        ]  # fmt: skip

    def test_a_plan_is_what_the_import_does(self, database):
        database.put(record_of(1))
        before = database.path.read_bytes()
        better = record_of(1, winner=replace(PUSH, samples=51))
        document = document_of(better, record_of(2), record_of(2))
        plan = plan_import(database.get, document, "team.json")
        assert database.path.read_bytes() == before
        assert plan == import_records(database, document, "team.json")
        assert (len(plan.added), len(plan.replaced), len(plan.kept)) == (1, 1, 1)

    @pytest.mark.parametrize(
        ("known", "offered", "is_better"),
        [
            ({}, {}, False),
            ({}, {"provenance": created("2026-01-02T03:04:06+00:00")}, True),
            ({}, {"provenance": created("2026-01-02T04:04:05+02:00")}, False),
            ({}, {"provenance": created("2026-01-02T03:04:06")}, True),
            ({}, {"provenance": {}}, False),
            ({"provenance": {}}, {}, True),
            (
                {"winner": replace(PUSH, samples=60)},
                {"provenance": created("2026-06-01T00:00:00Z")},
                False,
            ),
            (
                {"winner": replace(PUSH, samples=60)},
                {
                    "provenance": created("2026-06-01T00:00:00Z"),
                    "software": replace(SOFTWARE, taxfree="2.0.0"),
                },
                True,
            ),
            (
                {"winner": replace(PUSH, samples=60)},
                {
                    "provenance": created("2026-06-01T00:00:00Z"),
                    "winner": replace(PUSH, version=3),
                },
                True,
            ),
            ({}, {"provenance": OF_BENCH, "winner": replace(PUSH, samples=60)}, False),
            ({"provenance": OF_BENCH, "winner": replace(PUSH, samples=60)}, {}, True),
        ],
    )
    def test_a_search_is_better_then_more_samples_then_newer_and_of_other_kernels_newer(
        self, database, known, offered, is_better
    ):
        database.put(record_of(16, **known))
        report = import_records(database, document_of(record_of(16, **offered)))
        assert (len(report.replaced), len(report.kept)) == ((1, 0) if is_better else (0, 1))
        expected = imported(record_of(16, **offered)) if is_better else record_of(16, **known)
        assert database.get(record_of(16).key) == expected

    def test_a_stream_will_do(self, database):
        report = import_records(database, io.StringIO(json.dumps(document_of(record_of()))))
        assert report.added == (imported(record_of()),)

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            ("", "not JSON"),
            ("[" * 100_000, "not JSON"),
            ("[]", "has no 'taxfree_tuning_db'"),
            ('{"records": []}', "has no 'taxfree_tuning_db'"),
            ('{"taxfree_tuning_db": 2, "records": []}', "version 2 is not 1"),
            ('{"taxfree_tuning_db": 1}', "no list of records"),
            ('{"taxfree_tuning_db": 1, "records": {}}', "no list of records"),
            (b"\xff\xfe\x00", "not text"),
        ],
    )
    def test_another_document_is_no_export(self, database, tmp_path, text, why):
        database.put(record_of())
        before = database.path.read_bytes()
        path = tmp_path / "other.json"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(NotAnExport, match=why) as caught:
            import_records(database, path)
        assert str(path) in caught.value.message
        assert database.path.read_bytes() == before

    def test_a_document_that_is_not_there_is_unreadable(self, tmp_path):
        with pytest.raises(DatabaseUnreadable, match="No such file"):
            read_export(tmp_path / "none.json")

    @pytest.mark.parametrize(
        ("spoil", "why"),
        [
            (lambda r: r["hardware"].update(gpu="\x1b[2JH200"), "cannot be printed"),
            (lambda r: r["problem"].update({"\u202em": 1}), "cannot be printed"),
            (lambda r: r["hardware"].update(gpu="H" * 100_000), "has 100000 characters"),
            (lambda r: r["winner"].update(samples=10**30), "1e+30 samples"),
            (lambda r: r["provenance"].update(created="9999-12-31"), "is not over yet"),
        ],
    )
    def test_what_no_program_writes_is_refused_and_spoils_no_other(self, database, spoil, why):
        document = document_of(record_of(1), record_of(16))
        spoil(document["records"][0])
        report = import_records(database, document)
        assert [record.problem["m"] for record in report.added] == [16]
        ((entry, reason),) = report.refused
        assert entry == "records[0]"
        assert why in reason
        assert reason.isprintable()

    def test_a_key_that_is_there_twice_is_refused(self, database):
        text = json.dumps(document_of(record_of(1), record_of(16)))
        report = import_records(database, io.StringIO(text.replace('"m": 1,', '"m": 1, "m": 2,')))
        assert report.refused == (("records[0]", "key 'm' is there twice"),)
        assert len(report.added) == 1
        text = text.replace('"records":', '"records": [], "records":')
        with pytest.raises(NotAnExport, match="key 'records' is there twice"):
            read_export(io.StringIO(text))

    def test_who_imports_may_refuse_more(self, database):
        document = document_of(record_of(1), record_of(16))
        report = import_records(
            database, document, refusal=lambda r: "odd" if r.problem["m"] % 2 else None
        )
        assert report.refused == (("records[0]", "odd"),)

    def test_a_foreign_row_in_the_way_undoes_the_import(self, database):
        with database.transaction():
            database._records[record_of(2).key] = "{}"
        before = database.path.read_bytes()
        with pytest.raises(ForeignRecord):
            import_records(database, document_of(record_of(1), record_of(2)))
        assert database.path.read_bytes() == before


class TestTables:
    def test_are_read_from_a_database_or_an_export(self, database, tmp_path):
        database.put(record_of())
        export([record_of()], tmp_path / "a.json")
        assert read_table(database.path) == read_table(tmp_path / "a.json") == (record_of(),)

    def test_that_hold_something_else_are_an_error(self, tmp_path):
        document = document_of(record_of()) | {"records": [{"op": "broken"}]}
        (tmp_path / "a.json").write_text(json.dumps(document))
        with pytest.raises(NotAnExport, match=r"a\.json.*records\[0\]: problem: missing"):
            read_table(tmp_path / "a.json")

    def test_differ_in_what_was_measured(self):
        faster = record_of(2, winner=replace(PUSH, median_us={"eager": 1.0, "graph": 1.0}))
        elsewhere = imported(record_of(3), "team.json")
        before = [record_of(1), record_of(2), record_of(3)]
        found = differences(before, [faster, elsewhere, record_of(4)])
        assert [(each.change, each.record.problem["m"]) for each in found] == [
            ("removed", 1), ("changed", 2), ("added", 4),
        ]  # fmt: skip
        assert (found[1].before, found[1].after) == (record_of(2), faster)
        assert [each.differing for each in found] == [(), ("winner",), ()]


class TestSchema:
    def test_the_file_is_current(self):
        assert (
            export_schema.PATH.read_text() == export_schema.text()
        )  # python -m docs.scripts.export_schema

    def test_exports_and_shipped_tables_follow_it(self):
        validator = Draft202012Validator(export_schema.export_schema())
        validator.check_schema(export_schema.export_schema())
        validator.validate(json.loads(json.dumps(document_of(record_of(), record_of(2)))))
        validator.validate(json.loads(json.dumps(document_of(*shipped_records()))))

    def test_it_refuses_what_an_import_refuses(self):
        """And no more: a record that can be imported follows it."""
        validator = Draft202012Validator(export_schema.export_schema())
        # what JSON Schema cannot say, or says with other words: 1.0 is an integer there
        beyond = "not finite|not text|ISO time|modes unlike|not an integer"
        judged = []
        for seed in range(2000):
            text = json.dumps(spoiled_document(Random(seed), document_of(record_of())["records"]))
            (entry, *_) = [*json.loads(text), None]
            follows = validator.is_valid({"taxfree_tuning_db": 1, "records": [entry]})
            reason = refusal(entry)
            judged.append(reason is None)
            if reason is None:
                assert follows, seed
            else:
                assert not follows or re.search(beyond, reason), (seed, reason)
        assert 100 < sum(judged) < 1900


class TestShippedTables:
    def test_all_are_valid(self):
        assert all(each.provenance["source"] == "shipped" for each in shipped_records())

    def test_they_are_read_by_name_and_only_json(self, tmp_path):
        export([record_of(2)], tmp_path / "b.json")
        export([record_of(1)], tmp_path / "a.json")
        (tmp_path / "notes.txt").touch()
        found = records_in(tmp_path)
        assert [each.problem for each in found] == [record_of(m).problem for m in (1, 2)]
        assert {each.provenance["source"] for each in found} == {"shipped"}

    def test_a_table_that_is_no_export_is_an_error(self, tmp_path):
        (tmp_path / "a.json").write_text("{}")
        with pytest.raises(NotAnExport, match=r"a\.json"):
            records_in(tmp_path)

    def test_a_record_that_breaks_the_schema_is_an_error(self, tmp_path: Path):
        document = document_of(record_of())
        document["records"][0]["trials"] = "many"
        (tmp_path / "a.json").write_text(json.dumps(document))
        with pytest.raises(InvalidRecord, match="trials: is not an integer"):
            records_in(tmp_path)
