"""Versions: what outlives changes of kernels, and how measurements of older files get theirs."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Iterator
from typing import Any

from taxfree import fingerprints
from taxfree_kernels.variant import operation_names, variants
from taxfree_tune.measuring.results import load
from taxfree_tuning_db import Database, Record, TrialRecord, import_records, shipped_records
from taxfree_tuning_db.hashes import HASHES_OF_VERSION_1
from tests.ranks import PYTHON, copy_of_kernels, environment, replace_in

#: measured before the sources that versions began with; runners-up with another value than that of
#: a constant that was a key of configs then
OF_VERSION_0 = {
    ("matmul_all_reduce", "push_two_shot_lamport"): 1,
    ("all_gather_matmul", "overlap"): 1,
    ("matmul_reduce_scatter", "overlap"): 7,
}

DISPATCHED = """
import dataclasses
from taxfree._runtime.dispatch import Dispatcher
from taxfree.settings import Settings
from taxfree.problems import recorded_problem
from taxfree_kernels.hardware import KNOWN
from taxfree_tuning_db import Table, shipped_records

table, dispatchers = Table(shipped=shipped_records()), {}
for record in shipped_records():
    machine = record.hardware
    if machine not in dispatchers:
        known = KNOWN["h200" if "H200" in machine.gpu else "h100"]
        hardware = dataclasses.replace(
            known, name=machine.gpu, memory_bytes=machine.memory_bytes
        )
        dispatchers[machine] = Dispatcher(table, hardware, Settings())
    problem = recorded_problem(record.op, record.problem)
    choice = dispatchers[machine].choose(record.op, problem)
    is_won = (choice.variant, choice.config) == (record.winner.variant, record.winner.config)
    print(choice.kind, is_won)
"""


def with_hashes(op: str, document: Any) -> Any:
    """A document as it was before versions."""
    if isinstance(document, list):
        return [with_hashes(op, each) for each in document]
    if not isinstance(document, dict):
        return document
    old = {name: with_hashes(op, value) for name, value in document.items()}
    if "version" in old:
        if op == "flash_decode" and old["variant"] == "splits":
            old["variant"] = "library"  # its name then
        known = HASHES_OF_VERSION_1[op][old["variant"]]
        old["kernel_hash"] = known if old.pop("version") == 1 else "d8e68d9f56b76527"
    return old


def measurements(records: tuple[Record, ...]) -> Iterator[tuple[str, Any]]:
    for record in records:
        for each in (record.winner, record.baseline, *record.runners_up):
            yield record.op, each


def of_file_hashes() -> tuple[Record, ...]:
    """The shipped records that were measured when files named hashes of sources."""
    return tuple(
        each
        for each in shipped_records()
        if "H200" in each.hardware.gpu and each.provenance["created"] < "2026-11-24"
    )


def test_measurements_of_file_hashes_are_of_the_first_version() -> None:
    found = list(measurements(of_file_hashes()))
    of_others = Counter((op, each.variant) for op, each in found if each.version != 1)
    assert (len(found), of_others) == (1351, OF_VERSION_0)


def test_shipped_records_are_served_when_a_shared_device_function_is_rewritten(tmp_path) -> None:
    tree = copy_of_kernels(tmp_path)
    body = r"(def running_generation\(control_ptr\):\n(?:.|\n)*?\n    )return (.*)\n"
    replace_in(
        tree / "taxfree_kernels/device/sync.py", body, r"\1generation = \2\n    return generation\n"
    )
    done = subprocess.run(
        [PYTHON, "-c", DISPATCHED],
        env=environment(tree),
        capture_output=True,
        text=True,
        check=True,
    )
    served = Counter(done.stdout.splitlines())
    ways = ("another version", "exact")
    assert served == Counter(
        f"{ways[each.winner.version == variants(each.op)[each.winner.variant].version]} True"
        for each in shipped_records()
    )


class TestHashes:
    """Files of taxfree 0.1 name hashes of sources."""

    def test_every_variant_has_one_at_most(self) -> None:
        named = {op: known.keys() for op, known in HASHES_OF_VERSION_1.items()}
        assert named.keys() <= set(operation_names())
        texts = [text for known in HASHES_OF_VERSION_1.values() for text in known.values()]
        assert len(set(texts)) == len(texts) == 39

    def test_an_export_and_a_database_of_then_are_the_shipped_records(self, tmp_path) -> None:
        entries = [with_hashes(each.op, each.to_json()) for each in of_file_hashes()]
        assert '"version"' not in json.dumps(entries)
        with Database(tmp_path / "tuning.sqlite") as database:
            report = import_records(database, {"taxfree_tuning_db": 1, "records": entries})
            assert report.refused == ()
            assert {each.key for each in report.added} == {each.key for each in of_file_hashes()}
            for record, entry in zip(of_file_hashes(), entries, strict=True):
                assert Record.from_json(entry) == record
                database._records[record.key] = json.dumps(entry)
            stored = {each.key: each for each in database.records()}
        assert stored == {each.key: each for each in of_file_hashes()}

    def test_trials_of_a_database(self, tmp_path) -> None:
        record = shipped_records()[0]
        winner = record.winner
        trial = TrialRecord(winner.variant, winner.config, "measured", "", {"graph": 1.0}, 1.0, 1)
        with Database(tmp_path / "tuning.sqlite") as database:
            database.add_trial(record.key, trial)
            ((place, stored),) = database._trials.items()
            database._trials[place] = json.dumps(with_hashes(record.op, json.loads(stored)))
            assert database.trials(record.key) == (trial,)

    def test_rows_of_a_result_file(self, tmp_path) -> None:
        row = {
            "op": "all_gather_matmul", "problem": {"m": 1}, "config": {}, "mode": "eager",
            "median_us": 1.0, "iqr_us": 0.0, "samples_us": [1.0], "t_floor_us": 1.0,
            "t_gemm_us": None, "t_link_us": 1.0, "t_bound_us": 1.0, "relative_error": None,
        }  # fmt: skip
        known = HASHES_OF_VERSION_1["all_gather_matmul"]["push"]
        rows = [
            row | {"variant": variant, "kernel_hash": text}
            for variant, text in (("push", known), ("push", "0" * 16), ("theirs", ""))
        ]
        path = tmp_path / "rows.json"
        path.write_text(json.dumps({"schema": 1, "environment": {}, "rows": rows}))
        assert [each.version for each in load(path).rows] == [1, 0, None]


def test_versions_are_those_of_the_variants() -> None:
    for op in operation_names():
        assert all(version >= 1 for version in fingerprints.versions(op).values())
