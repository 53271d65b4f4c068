"""`taxfree db`."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import asdict, replace

import pytest

from taxfree import fingerprints
from taxfree_cli.record_map import SIZES
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.variant import operation_names, problem_class, variants
from taxfree_tune.measuring.results import Results, Row, save
from taxfree_tune.tuning.verification import Verification
from taxfree_tuning_db import (
    Database,
    HardwareFingerprint,
    Measurement,
    Record,
    SoftwareFingerprint,
    TrialRecord,
    export,
)

pytestmark = pytest.mark.usefixtures("no_library_results")

H200 = HardwareFingerprint("NVIDIA H200", "sm_90", 132, 141 << 30, "nvlink")
MI300X = HardwareFingerprint("AMD MI300X", "gfx942", 304, 192 << 30, "xgmi", 8)
SOFTWARE = SoftwareFingerprint("0.1.0", "3.6.0", "2.11.0", "580.65", "cuda 13.0", "nccl 2.28.9")
VERSIONS = {"baseline": 1, "push": 1}
PROBLEM = {
    "m": 16,
    "n": 3584,
    "k": 8192,
    "gather_dim": 1,
    "dtype": "float16",
    "world_size": 8,
    "weight_layout": "nk",
    "bias": False,
    "x_dtype": "same",
    "scales": "none",
    "fast_accumulation": False,
}
SHAPE = "m=16 n=3584 k=8192"
PUSH = variants("all_gather_matmul")["push"].seed_configs(
    problem_class("all_gather_matmul")(**PROBLEM), KNOWN["h200"]
)[0]


def measured(variant, us):
    return Measurement(
        variant=variant,
        config=PUSH if variant == "push" else {},
        version=VERSIONS[variant],
        median_us={"graph": us},
        iqr_us={"graph": 0.5},
        samples=50,
        relative_error=0.0004,
    )


RECORD = Record(
    op="all_gather_matmul",
    problem=PROBLEM,
    hardware=H200,
    software=SOFTWARE,
    winner=measured("push", 30.0),
    baseline=measured("baseline", 45.0),
    runners_up=(),
    trials=2,
    seconds_spent=12.5,
    provenance={"source": "user", "created": "2026-01-02T03:04:05+00:00"},
)


@pytest.fixture(autouse=True)
def _kernels_of_today(monkeypatch):
    monkeypatch.setattr(fingerprints, "versions", lambda op: VERSIONS)
    monkeypatch.setattr(fingerprints, "software_fingerprint", lambda: SOFTWARE)
    monkeypatch.setattr("taxfree_cli.db.shipped_records", lambda: ())


@pytest.fixture
def stored(tmp_path):
    """Put records where the command line looks for them, and give the path."""

    def put(*records):
        path = tmp_path / "tuning.sqlite"
        with Database(path) as database:
            for record in records:
                database.put(record)
        return path

    return put


def documents(outcome):
    return json.loads(outcome.out)["records"]


class TestPath:
    def test_prints_what_the_environment_says(self, cli, tmp_path):
        assert cli("db", "path").out == f"{tmp_path / 'tuning.sqlite'}\n"

    def test_an_option_stands_over_the_environment(self, cli):
        outcome = cli("db", "path", "--db", "/some/where.sqlite", "--json")
        assert json.loads(outcome.out) == {"path": "/some/where.sqlite", "exists": False}


class TestList:
    def test_shows_a_line_per_record(self, cli, stored):
        stored(RECORD, replace(RECORD, hardware=MI300X))
        outcome = cli("db", "list", "--all")
        assert len(outcome.out.splitlines()) == 3
        assert "m=16 n=3584 k=8192 dtype=float16 world_size=8" in outcome.out
        assert "1.5" in outcome.out

    @pytest.mark.parametrize("command", ["list", "show"])
    def test_shows_a_map_by_rows_and_gpus(self, cli, stored, monkeypatch, command):
        of_two = replace(RECORD, problem=PROBLEM | {"m": 64, "world_size": 2})
        stored(RECORD, of_two, replace(RECORD, hardware=MI300X, winner=RECORD.baseline))
        assert cli("db", command).out.splitlines() == [
            "all_gather_matmul n=3584 k=8192 dtype=float16, AMD MI300X",
            " m  8 GPUs ",
            "16  library",
            "",
            "all_gather_matmul n=3584 k=8192 dtype=float16, NVIDIA H200",
            " m  2 GPUs      8 GPUs    ",
            "16              push 1.50x",
            "64  push 1.50x            ",
            "",
            "records: 3 user; --all shows their times",
        ]
        monkeypatch.setenv("COLUMNS", "25")
        assert [line.split() for line in cli("db", command).out.splitlines()[-6:-2]] == [
            ["m", "2", "GPUs"], ["64", "push", "1.50x"],
            ["m", "8", "GPUs"], ["16", "push", "1.50x"],
        ]  # fmt: skip

    def test_rows_of_the_map_are_what_neighbours_differ_in(self):
        named = {name for op in operation_names() for name in fingerprints.interpolated_fields(op)}
        assert set(SIZES) == named

    def test_all_records_stand_by_their_numbers(self, cli, stored):
        stored(*(replace(RECORD, problem=PROBLEM | {"m": m}) for m in (1024, 16, 64)))
        rows = cli("db", "list", "--all", "--gpu", "H200", "--op", RECORD.op).out.splitlines()
        sizes = [int(row.split()[1][2:]) for row in rows if "user" in row]
        assert sizes == [16, 64, 1024]

    def test_a_record_in_full_fits_a_terminal(self, cli, stored, monkeypatch):
        monkeypatch.setenv("COLUMNS", "80")
        stored(replace(RECORD, runners_up=(RECORD.winner,)))
        lines = cli("db", "show", "--shapes", SHAPE, "--gpus", 8).out.splitlines()
        assert max(map(len, lines)) <= 80
        assert [line.split()[:2] for line in lines if "graph" in line] == [
            ["winner", "push"], ["library", "baseline"], ["no.", "2"],
        ]  # fmt: skip

    def test_times_of_interpreted_kernels_are_not_compared(self, cli, stored):
        cpu = HardwareFingerprint("CPU", "interpreter", 2, 16 << 30, "shared memory")
        stored(replace(RECORD, hardware=cpu))
        assert "1.5" not in cli("db", "list").out + cli("db", "list", "--all").out

    def test_selects_by_gpu_and_op(self, cli, stored):
        stored(RECORD, replace(RECORD, hardware=MI300X))
        (only,) = documents(cli("db", "list", "--gpu", "mi300", "--json"))
        assert only["hardware"]["gpu"] == "AMD MI300X"
        assert documents(cli("db", "list", "--op", "flash_decode", "--json")) == []
        for op in ("flash_decode", "decode_step"):
            assert cli("db", "list", "--op", op).out == "records: none\n"
            assert cli("db", "show", "--op", op, "--all").out == "records: none\n"
        assert cli("db", "list", "--op", "atention").code == 2

    def test_json_holds_whole_records(self, cli, stored):
        stored(RECORD)
        (document,) = documents(cli("db", "list", "--json"))
        assert Record.from_json(document) == RECORD

    def test_shows_shipped_records_where_there_is_no_database_yet(self, cli, monkeypatch):
        monkeypatch.setattr("taxfree_cli.db.shipped_records", lambda: (RECORD,))
        outcome = cli("db", "list", "--json")
        assert len(documents(outcome)) == 1
        assert "only shipped records" in outcome.err


class TestShow:
    def test_selects_by_world_size_and_type(self, cli, stored):
        stored(RECORD, replace(RECORD, problem=PROBLEM | {"world_size": 4}))
        (only,) = documents(cli("db", "show", "--gpus", "4", "--json"))
        assert only["problem"]["world_size"] == 4
        assert documents(cli("db", "show", "--dtype", "bf16", "--json")) == []

    def test_shows_all_that_was_measured(self, cli, stored):
        stored(RECORD)
        outcome = cli("db", "show", "--shapes", SHAPE)
        for word in ("winner", "push", "BLOCK_N=64", "baseline", "45", "nccl 2.28.9", "2 trials"):
            assert word in outcome.out

    def test_shows_trials(self, cli, stored):
        path = stored(RECORD)
        assert "reason" not in cli("db", "show", "--trials").out  # none yet
        hung = TrialRecord("push", {"block_n": 32}, "hung", "rank 3 is late", {}, 30.0, 1)
        with Database(path) as database:
            database.add_trial(RECORD.key, hung)
        assert "rank 3 is late" in cli("db", "show", "--trials").out
        (document,) = documents(cli("db", "show", "--trials", "--json"))
        assert document["tried"][0]["state"] == "hung"
        (document,) = documents(cli("db", "show", "--json"))
        assert "tried" not in document

    def test_takes_any_world_size_unless_one_is_asked_for(self, cli, stored):
        stored(RECORD, replace(RECORD, problem=PROBLEM | {"world_size": 4, "m": 32}))
        assert len(documents(cli("db", "show", "--shapes", SHAPE, "--json"))) == 1
        assert cli("db", "show", "--shapes", SHAPE, "--gpus", "4").code == 1

    def test_fails_where_a_shape_has_no_record(self, cli, stored):
        stored(RECORD)
        outcome = cli("db", "show", "--shapes", "m=16,32,64 n=3584 k=8192")
        assert outcome.code == 1
        assert outcome.out == ""
        assert "no record of m=32 n=3584 k=8192" in outcome.err
        assert "and 1 more" in outcome.err


class TestWhy:
    @pytest.mark.parametrize(
        ("shape", "kind", "words"),
        [
            (SHAPE, "exact", "exact: push BLOCK_K="),
            ("m=20 n=3584 k=8192", "neighbour", "neighbour: push"),
            ("m=16 n=64 k=64", "miss", "miss: the library runs"),
            (
                "m=64 n=3584 k=8192",
                "miss",
                "m=16 bias=False dtype=float16, a factor of 4",
            ),
        ],
    )
    def test_shows_the_outcome_of_the_trace(self, cli, stored, shape, kind, words):
        stored(RECORD)
        assert words in cli("db", "why", "--shapes", shape).out
        (answer,) = json.loads(cli("db", "why", "--shapes", shape, "--json").out)["look_ups"]
        assert answer["kind"] == kind
        assert answer["lookup_trace"]

    def test_says_that_the_record_is_of_an_earlier_version(self, cli, stored, monkeypatch):
        stored(RECORD)
        monkeypatch.setattr(fingerprints, "versions", lambda op: VERSIONS | {"push": 2})
        outcome = cli("db", "why", "--shapes", SHAPE)
        assert "+ a known variant: measured with version 1 of push, now 2" in outcome.out
        assert "= another version: push BLOCK_K=" in outcome.out

    def test_says_that_the_variant_is_unknown(self, cli, stored, monkeypatch):
        stored(RECORD)
        monkeypatch.setattr(fingerprints, "versions", lambda op: {"baseline": 1})
        outcome = cli("db", "why", "--shapes", SHAPE)
        assert "variant push is unknown" in outcome.out
        assert "refused: the library runs" in outcome.out

    def test_flags_other_software(self, cli, stored, monkeypatch):
        stored(RECORD)
        newer = replace(SOFTWARE, triton="3.9.0")
        monkeypatch.setattr(fingerprints, "software_fingerprint", lambda: newer)
        assert "(measured with another triton)" in cli("db", "why", "--shapes", SHAPE).out

    def test_what_does_not_run_here_is_not_lent(self, cli, stored):
        stored(replace(RECORD, winner=replace(RECORD.winner, config=PUSH | {"CHUNKS": 3})))
        outcome = cli("db", "why", "--shapes", "m=20 n=3584 k=8192")
        assert "push: CHUNKS=3 is not in the space of this problem" in outcome.out
        assert "miss: the library runs" in outcome.out

    def test_needs_a_record_to_know_the_hardware(self, cli, stored):
        stored()
        outcome = cli("db", "why", "--shapes", SHAPE)
        assert outcome.code == 1
        assert "no record names a GPU" in outcome.err


class TestExchange:
    def test_what_is_exported_can_be_imported(self, cli, stored, tmp_path):
        stored(RECORD)
        file, other = tmp_path / "records.json", tmp_path / "other.sqlite"
        assert cli("db", "export", file).code == 0
        outcome = cli("db", "import", file, "--db", other)
        assert outcome.code == 0
        assert outcome.out == "1 added\n0 replaced\n0 kept\n"
        again = json.loads(cli("db", "import", file, "--db", other, "--json").out)
        assert again == {"added": [], "replaced": [], "kept": [RECORD.key], "refused": []}

    @pytest.mark.parametrize(
        ("change", "why"),
        [
            ({"op": "../../../etc/passwd"}, "there is no operation '../../../etc/passwd'"),
            ({"problem": PROBLEM | {"m": 10**20}}, "has no problem"),
            ({"winner": replace(measured("push", 1.0), variant="fast")}, "no variant 'fast'"),
            (
                {"winner": replace(measured("push", 1.0), config=PUSH | {"BLOCK_M": 10**9})},
                "push: BLOCK_M=1000000000 is beyond its values",
            ),
            (
                {"winner": replace(measured("push", 1.0), config={"BLOCK_M": "__import__('os')"})},
                "is beyond its values",
            ),
        ],
    )
    def test_what_no_operation_of_today_is_is_refused(self, cli, tmp_path, change, why):
        text = io.StringIO()
        other = replace(RECORD, problem=PROBLEM | {"m": 64})
        export([replace(RECORD, **change), other], text)
        (tmp_path / "team.json").write_text(text.getvalue())
        outcome = cli("db", "import", tmp_path / "team.json")
        assert outcome.code == 1
        assert why in outcome.err
        assert outcome.out.splitlines()[0] == "1 added"

    def test_an_import_comes_from_stdin(self, cli, tmp_path, monkeypatch):
        text = io.StringIO()
        export([RECORD], text)
        monkeypatch.setattr(sys, "stdin", io.StringIO(text.getvalue()))
        assert cli("db", "import", "-").out.splitlines()[0] == "1 added"

    @pytest.mark.parametrize("command", ["list", "list --all", "show --all"])
    def test_what_steers_a_terminal_is_shown_as_text(self, cli, stored, command):
        stored(replace(RECORD, hardware=replace(H200, gpu="\x1b[2J\nerror: fake")))
        shown = cli("db", *command.split()).out
        assert "\x1b" not in shown
        assert r"\x1b[2J" in shown
        assert "\nerror" not in shown

    def test_why_fits_a_terminal(self, cli, stored, monkeypatch):
        stored(RECORD)
        monkeypatch.setenv("COLUMNS", "80")
        out = cli("db", "why", "--shapes", SHAPE, "--gpus", "8", "--gpu", "H200").out
        assert max(map(len, out.splitlines())) <= 80
        assert "exact: push" in out

    @pytest.mark.filterwarnings("default")
    def test_a_row_that_is_no_record_leaves_the_others(self, cli, stored, tmp_path):
        stored(RECORD)
        with Database(tmp_path / "tuning.sqlite") as database, database.transaction():
            database._records["planted " * 50] = "{}"
        outcome = cli("db", "export")
        assert outcome.code == 0
        assert len(json.loads(outcome.out)["records"]) == 1
        assert outcome.err.startswith("warning: foreign record planted planted")
        assert len(outcome.err.splitlines()[0]) < 200

    def test_records_say_which_file_they_are_from(self, cli, stored, tmp_path):
        stored(RECORD)
        cli("db", "export", tmp_path / "team.json")
        cli("db", "import", tmp_path / "team.json", "--db", tmp_path / "other.sqlite")
        (record,) = documents(cli("db", "list", "--db", tmp_path / "other.sqlite", "--json"))
        assert record["provenance"] == RECORD.provenance | {
            "source": "imported", "from": "team.json",
        }  # fmt: skip

    def test_a_dry_run_shows_what_would_change_and_stores_nothing(self, cli, stored, tmp_path):
        faster = replace(RECORD, winner=replace(measured("push", 20.0), samples=60))
        path = stored(faster)
        cli("db", "export", tmp_path / "team.json")
        stored(RECORD)
        before = path.read_bytes()
        outcome = cli("db", "import", tmp_path / "team.json", "--dry-run")
        assert outcome.code == 0
        assert "changed" in outcome.out
        assert outcome.out.endswith("0 added\n1 replaced\n0 kept\n")
        found = json.loads(cli("db", "import", tmp_path / "team.json", "--dry-run", "--json").out)
        (difference,) = found["differences"]
        assert difference["before"]["winner"]["median_us"] == {"graph": 30.0}
        assert difference["after"]["winner"]["median_us"] == {"graph": 20.0}
        assert difference["differing"] == ["winner"]
        assert path.read_bytes() == before
        none = tmp_path / "none.sqlite"
        outcome = cli("db", "import", tmp_path / "team.json", "--dry-run", "--db", none)
        assert outcome.out.endswith("1 added\n0 replaced\n0 kept\n")
        assert not none.exists()

    def test_tables_are_compared(self, cli, stored, tmp_path):
        path = stored(RECORD)
        cli("db", "export", tmp_path / "a.json")
        other = replace(RECORD, problem=PROBLEM | {"m": 64})
        stored(other)
        outcome = cli("db", "diff", tmp_path / "a.json", path)
        assert "m=64" in outcome.out
        assert outcome.out.endswith("1 added, 0 removed, 0 changed\n")
        assert cli("db", "diff", path, path).out == "0 added, 0 removed, 0 changed\n"
        (found,) = json.loads(cli("db", "diff", path, tmp_path / "a.json", "--json").out)[
            "differences"
        ]
        assert (found["change"], found["after"]) == ("removed", None)
        assert found["before"]["problem"]["m"] == 64

    def test_no_database_is_overwritten_by_an_export(self, cli, stored, tmp_path):
        stored(RECORD)
        saved = cli("db", "path").out.strip()
        (tmp_path / "link.json").symlink_to(saved)
        for file in (saved, tmp_path / "link.json"):
            outcome = cli("db", "export", file)
            assert (outcome.code, outcome.out) == (1, "")
            assert "cannot be written: it is a database" in outcome.err
        assert len(documents(cli("db", "list", "--json"))) == 1

    def test_an_export_goes_to_stdout(self, cli, stored):
        stored(RECORD)
        outcome = cli("db", "export")
        assert json.loads(outcome.out)["records"] == [json.loads(json.dumps(RECORD.to_json()))]
        assert outcome.err == "records exported: 1\n"

    def test_refused_records_are_warned_of_and_fail(self, cli, stored, tmp_path):
        stored(RECORD)
        file = tmp_path / "records.json"
        cli("db", "export", file)
        document = json.loads(file.read_text())
        document["records"].append({"op": "all_gather_matmul"})
        file.write_text(json.dumps(document))
        outcome = cli("db", "import", file, "--db", tmp_path / "other.sqlite")
        assert outcome.code == 1
        assert outcome.out.startswith("1 added")
        assert "warning: records[1] is refused" in outcome.err


def timed(variant, mode, us, problem=PROBLEM, **other):
    values = {
        "op": "all_gather_matmul", "problem": problem, "variant": variant,
        "config": PUSH if variant == "push" else {}, "mode": mode, "median_us": us,
        "iqr_us": 0.5, "samples_us": (us,) * 25, "t_floor_us": 14.0, "t_gemm_us": 20.0,
        "t_link_us": 3.0, "t_bound_us": 14.0, "relative_error": 0.001,
        "version": VERSIONS.get(variant),
    }  # fmt: skip
    return Row(**values | other)


ROWS = (
    timed("baseline", "eager", 140.0),
    timed("baseline", "graph", 42.0),
    timed("push", "eager", 50.0),
    timed("push", "graph", 28.0),
    timed("dispatch", "eager", 140.0, config={"variant": "baseline"}),
    timed("dispatch", "graph", 42.0, config={"variant": "baseline"}),
)


class TestVerify:
    @pytest.fixture(autouse=True)
    def _two_h200s(self, monkeypatch):
        monkeypatch.setattr("taxfree_tune.devices.fabric_for", lambda name: "cuda")
        monkeypatch.setattr("taxfree_tune.devices.gpu_name", lambda fabric: "NVIDIA H200")
        monkeypatch.setattr("taxfree_tune.devices.most_ranks", lambda fabric: 8)

    @pytest.fixture
    def verdict(self, monkeypatch):
        """Let every record have a verdict of one state."""

        def put(state):
            monkeypatch.setattr(
                "taxfree_tune.tuning.verification.verify",
                lambda records, fabric: (
                    Verification(each, state, "graph", 31.0, "push", "why" * (state != "holds"))
                    for each in records
                ),
            )

        return put

    @pytest.mark.parametrize(
        ("state", "code", "said"),
        [
            ("holds", 0, ""),
            ("slower", 1, "1 of 1 records no longer hold"),
            ("unknown", 1, "no longer hold"),
            ("failed", 1, "no longer hold"),
            ("wrong", 4, "no longer hold"),
            ("hung", 5, "no longer hold"),
            ("disturbed", 1, "nothing could be verified"),
        ],
    )
    def test_the_exit_code_says_whether_the_table_holds(
        self, cli, stored, verdict, state, code, said
    ):
        stored(RECORD)
        verdict(state)
        outcome = cli("db", "verify")
        assert outcome.code == code
        assert said in outcome.err
        assert state in outcome.out
        (found,) = json.loads(cli("db", "verify", "--json").out)["verdicts"]
        assert (found["state"], found["recorded_us"], found["winner_us"]) == (state, 30.0, 31.0)

    def test_a_sample_is_measured_that_the_seed_decides(self, cli, stored, verdict, tmp_path):
        path = stored(*(replace(RECORD, problem=PROBLEM | {"m": m}) for m in range(1, 21)))
        verdict("holds")

        def taken(*options):
            found = json.loads(cli("db", "verify", path, "--json", *options).out)
            assert found["records"] == 20
            return [each["problem"]["m"] for each in found["verdicts"]]

        assert len(taken()) == 5
        assert taken("--sample", 3, "--seed", 1) == taken("--sample", 3, "--seed", 1)
        assert taken("--sample", 3, "--seed", 1) != taken("--sample", 3, "--seed", 2)
        assert sorted(taken("--sample", 100)) == list(range(1, 21))

    def test_records_of_other_machines_are_left_alone(self, cli, stored):
        stored(replace(RECORD, hardware=MI300X), replace(RECORD, problem=PROBLEM | {"m": 0}))
        outcome = cli("db", "verify")
        assert outcome.code == 1
        assert "none of 2 records of operations is of this machine" in outcome.err


class TestAdopt:
    @pytest.fixture
    def bench(self, tmp_path):
        """Write rows as a bench does, and give the path."""

        def put(*rows):
            machine = {"hardware": asdict(H200), "software": asdict(SOFTWARE)}
            machine["created"] = "2026-02-03T04:05:06+00:00"
            save(Results(machine, rows), tmp_path / "bench.json")
            return tmp_path / "bench.json"

        return put

    def test_makes_a_record_of_what_was_fastest(self, cli, bench):
        outcome = cli("db", "adopt", bench(*ROWS))
        assert outcome.out.endswith("\n1 added, 0 kept, 0 left out\n")
        (record,) = map(Record.from_json, documents(cli("db", "list", "--json")))
        assert record.key == RECORD.key
        assert record.winner == replace(
            measured("push", 28.0), relative_error=0.001, samples=25,
            median_us={"eager": 50.0, "graph": 28.0}, iqr_us={"eager": 0.5, "graph": 0.5},
        )  # fmt: skip
        assert record.baseline.median_us == {"eager": 140.0, "graph": 42.0}
        assert (record.software, record.trials) == (SOFTWARE, 1)
        assert record.provenance["created"] == "2026-02-03T04:05:06+00:00"
        assert record.provenance["method"] == "bench"

    def test_times_of_a_throttled_gpu_are_left_out_but_not_those_under_a_power_cap(
        self, cli, bench
    ):
        rows = [timed("baseline", "graph", 45.0), timed("push", "graph", 30.0)]
        capped = [replace(row, throttled=("power cap",)) for row in rows]
        assert cli("db", "adopt", bench(*capped)).out.endswith("1 added, 0 kept, 0 left out\n")
        hot = [replace(row, throttled=("power cap", "heat (hardware)")) for row in rows]
        outcome = cli("db", "adopt", bench(*hot))
        assert outcome.out.endswith("0 added, 0 kept, 1 left out\n")
        assert "measured on a GPU slowed by heat (hardware)" in outcome.err

    def test_wins_only_beyond_3_percent(self, cli, bench):
        rows = [replace(row, median_us=41.0) for row in ROWS if row.variant == "push"]
        cli("db", "adopt", bench(*ROWS[:2], *rows))
        (record,) = map(Record.from_json, documents(cli("db", "list", "--json")))
        assert record.winner == record.baseline
        assert [each.variant for each in record.runners_up] == ["push"]

    @pytest.mark.parametrize(
        ("picked", "us", "added"),
        [("push", 41.0, 0), ("push", 43.0, 1), ("baseline", 41.0, 1)],
        ids=["faster", "slower", "the baseline"],
    )
    def test_takes_nothing_from_dispatch_without_a_clear_winner(
        self, cli, bench, picked, us, added
    ):
        """The config of a neighbour may be slightly faster."""
        rows = [replace(row, median_us=41.0) for row in ROWS if row.variant == "push"]
        dispatched = [timed("dispatch", mode, us) for mode in ("eager", "graph")]
        dispatched = [replace(row, config={"variant": picked}) for row in dispatched]
        outcome = cli("db", "adopt", bench(*ROWS[:2], *rows, *dispatched))
        assert outcome.out.endswith(f"{added} added, 0 kept, {1 - added} left out\n")
        assert ("dispatch runs, of push, is already faster" in outcome.err) == (not added)

    @pytest.mark.parametrize("whose", ["of the user", "shipped"])
    def test_leaves_records_that_there_are(self, cli, bench, stored, monkeypatch, whose):
        if whose == "shipped":
            monkeypatch.setattr("taxfree_cli.db.shipped_records", lambda: (RECORD,))
        else:
            stored(RECORD)
        other = [replace(row, problem=PROBLEM | {"m": 32}) for row in ROWS]
        done = json.loads(cli("db", "adopt", bench(*ROWS, *other), "--json").out)
        assert done["kept"] == [RECORD.key]
        assert len(done["added"]) == 1

    def test_takes_the_place_of_a_record_of_another_version(self, cli, bench, stored):
        stored(replace(RECORD, winner=replace(RECORD.winner, version=0)))
        assert cli("db", "adopt", bench(*ROWS)).out.endswith("\n1 added, 0 kept, 0 left out\n")
        assert "= exact: push" in cli("db", "why", "--shapes", SHAPE).out

    def test_what_has_changed_may_be_slower_but_not_faster(self, cli, bench, tmp_path):
        slower, faster = (
            [timed("pull", mode, us, version=0) for mode in ("eager", "graph")]
            for us in (200.0, 20.0)
        )
        assert "1 added" in cli("db", "adopt", bench(*ROWS, *slower)).out
        outcome = cli("db", "adopt", bench(*ROWS, *faster), "--db", tmp_path / "other", "--json")
        ((_, why),) = json.loads(outcome.out)["left_out"]
        assert why == "pull was faster, and has changed since"
        assert outcome.err.startswith("warning: ")

    @pytest.mark.parametrize(
        ("rows", "why"),
        [
            (ROWS[2:], "this version's baseline was not measured"),
            (ROWS[:2], "no other variant is of this"),
            (
                [replace(row, problem=PROBLEM | {"k": 63}) for row in ROWS],
                "not a problem of this version",
            ),
            ([replace(row, op="convolution") for row in ROWS], "not a problem of this version"),
        ],
        ids=["no baseline", "baseline alone", "odd problem", "other operation"],
    )
    def test_what_says_too_little_is_left_out(self, cli, bench, rows, why):
        outcome = cli("db", "adopt", bench(*rows))
        assert outcome.out == "0 added, 0 kept, 1 left out\n"
        assert why in outcome.err


class TestPrune:
    def test_deletes_records_of_unknown_variants(self, cli, stored):
        gone = replace(RECORD.winner, variant="removed")
        stored(replace(RECORD, winner=gone))
        stored(replace(RECORD, problem=PROBLEM | {"m": 32}, winner=RECORD.baseline))
        (deleted,) = json.loads(cli("db", "prune", "--json").out)["deleted"]
        assert deleted["problem"]["m"] == 16
        assert len(documents(cli("db", "list", "--json"))) == 1
