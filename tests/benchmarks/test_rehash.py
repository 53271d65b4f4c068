"""Kernel hashes move with names, and stay where instructions change."""

import json
import os
import random
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from benchmarks import measurements, rehash
from benchmarks.digests import Code, Compiler, Digests, Launch, NotRecordable, error_of
from benchmarks.measurements import Document, Site, Subject, load_documents
from benchmarks.rehash import Finding
from taxfree_kernels.cross_compile.instructions import plain_assembly, plain_ttir
from taxfree_kernels.cross_compile.report import triton_version
from taxfree_tuning_db.renamed import RENAMED, Renamed
from tests.ranks import ROOT, copy_of_kernels, replace_in

OP = "all_gather_matmul"
TRITON = triton_version(None)
OLD, CURRENT = "0" * 16, "1" * 16
CONFIG = {"BLOCK_M": 16}
PICKED = {"variant": "push", **CONFIG}
SUBJECT = Subject("NVIDIA H200", OP, '{"m":16}', "push", '{"BLOCK_M":16}')
LAUNCH = Launch(Code({"3.6.0": "t6", "3.9.0": "t9"}, {"3.9.0": "a9"}), 132, (0, 1))

#: measurements whose sources were other ones already when digests were first made
STALE = {("matmul_all_reduce", "push_two_shot_lamport", "d8e68d9f56b76527")}


def row(variant: str, kernel_hash: str, config: dict) -> dict:
    measured = {"op": OP, "problem": {"m": 16}, "variant": variant, "config": config}
    return measured | {"kernel_hash": kernel_hash}


def document(tmp_path: Path, *rows: dict) -> Document:
    path = tmp_path / "rows.json"
    environment = {"hardware": {"gpu": "NVIDIA H200"}}
    path.write_text(json.dumps({"schema": 1, "environment": environment, "rows": rows}) + "\n")
    return Document.load(path)


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    return load_documents(ROOT)


@pytest.fixture(scope="module")
def digests() -> Digests:
    return Digests.load(ROOT / rehash.DIGESTS)


class TestCommittedFiles:
    def test_shipped_records_are_of_the_current_sources(self, documents: list[Document]) -> None:
        shipped = [each for each in documents if "tuning_db" in each.path.parts]
        assert shipped
        stale = {
            (site.subject.op, site.subject.variant, site.kernel_hash)
            for each in shipped
            for site in each.sites
            if site.kernel_hash != measurements.current_hash(site.subject)
        }
        assert stale <= STALE, "run `make rehash`"

    def test_digests_are_there(self, documents: list[Document], digests: Digests) -> None:
        missing = {
            str(site.subject)
            for each in documents
            for site in each.sites
            if site.kernel_hash == measurements.current_hash(site.subject)
            and (site.subject, site.kernel_hash) not in digests.launches
        }
        assert not missing, "run `python -m benchmarks.rehash --record`"

    def test_the_file_is_as_it_would_be_written(self, digests: Digests) -> None:
        assert digests.text() == (ROOT / rehash.DIGESTS).read_text()

    def test_a_sample_compiles_to_its_digests(self, digests: Digests) -> None:
        seed = os.environ.get("TAXFREE_SAMPLE_SEED", f"{datetime.now(UTC):%Y-%m-%d}")
        print(f"TAXFREE_SAMPLE_SEED={seed}")
        known = sorted(key for key, made in digests.launches.items() if made)
        with Compiler({TRITON: None}, workers=1) as compiler:
            for subject, kernel_hash in random.Random(seed).sample(known, 3):
                now = compiler.launches(subject)
                compiler.compile((each.code for each in now), assembly=False)
                assert error_of(now) is None, subject
                was = digests.launches[subject, kernel_hash]
                assert rehash.difference(was, now, [TRITON]) is None, subject


@pytest.fixture(scope="module")
def measured(digests: Digests) -> Subject:
    """One of the committed measurements."""
    return min(each for each, _ in digests.launches if (each.op, each.variant) == (OP, "push"))


@pytest.fixture(scope="module")
def compiled(measured: Subject) -> Digests:
    """Its digests from the current sources, of the assembly too."""
    with Compiler({TRITON: None}, workers=1) as compiler:
        made = compiler.launches(measured)
        compiler.compile((each.code for each in made), assembly=True)
        assert error_of(made) is None
    assert all(each.code.ttir and each.code.assembly for each in made)
    return Digests({(measured, OLD): made})


@pytest.fixture
def old(compiled: Digests) -> Digests:
    return Digests(dict(compiled.launches))


class TestTrees:
    """The current sources against edited ones, which only the compiling process sees."""

    def findings(
        self, tree: Path, subject: Subject, old: Digests, monkeypatch: pytest.MonkeyPatch
    ) -> list[Finding]:
        monkeypatch.syspath_prepend(tree)
        monkeypatch.setattr(measurements, "current_hash", lambda _: CURRENT)
        entry = {"variant": subject.variant, "kernel_hash": OLD}
        site = Site(subject, entry)
        holding = Document(tree, "", {}, [site])
        with Compiler({TRITON: None}, workers=1) as compiler:
            findings = rehash.examine([holding], old, compiler)
        rehash.move([holding], findings)
        assert entry["kernel_hash"] == (CURRENT if findings[0].status == "moved" else OLD)
        return findings

    @pytest.mark.timeout(900)
    def test_a_renamed_function_moves_the_hash(
        self, tmp_path: Path, measured: Subject, old: Digests, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tree = copy_of_kernels(tmp_path)
        for file in (tree / "taxfree_kernels").rglob("*.py"):
            text = file.read_text()
            file.write_text(re.sub(r"\b(signal|program)\b", r"renamed_\1", text))
        (finding,) = self.findings(tree, measured, old, monkeypatch)
        assert (finding.status, finding.why) == ("moved", "")
        assert old.launches[measured, CURRENT][0].code.assembly

    @pytest.mark.timeout(900)
    def test_a_changed_instruction_does_not(
        self, tmp_path: Path, measured: Subject, old: Digests, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tree = copy_of_kernels(tmp_path)
        signal, scope = r'(atomic_xchg\(word, .*scope=)"sys"', r'\1"gpu"'
        replace_in(tree / "taxfree_kernels" / "device" / "sync.py", signal, scope)
        (finding,) = self.findings(tree, measured, old, monkeypatch)
        assert finding.status == "changed"
        assert finding.why == f"launch 1: other instructions under Triton {TRITON}"
        assert finding.why in rehash.summary([finding])
        assert "push" in rehash.summary([finding])
        assert (measured, CURRENT) not in old.launches


class NoCompiler:
    """Stands in for a compiler where there is nothing of ours to compile."""

    tritons = ("3.6.0", "3.9.0")

    def __init__(self, launches: tuple[Launch, ...] = ()) -> None:
        self._launches = launches

    def launches(self, subject: Subject) -> tuple[Launch, ...]:
        if subject.variant == "broken":
            raise NotRecordable("no such meta-parameter")
        return self._launches

    def compile(self, codes: object, assembly: bool) -> None:
        pass


class TestExamining:
    @pytest.fixture(autouse=True)
    def current(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(measurements, "current_hash", lambda _: CURRENT)

    def states(self, held: Document, digests: Digests, *launches: Launch) -> list[tuple[str, str]]:
        compiler = NoCompiler(launches)
        findings = rehash.examine([held], digests, compiler)  # type: ignore[arg-type]
        rehash.move([held], findings)
        return [(each.status, each.why) for each in findings]

    def test_what_is_not_known_stays(self, tmp_path: Path) -> None:
        held = document(tmp_path, row("push", OLD, CONFIG))
        assert self.states(held, Digests({})) == [("stale", "")]
        assert held.new_text() == held.text

    def test_a_removed_variant_stays_without_digests(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        held = document(tmp_path, row("push", OLD, CONFIG))
        digests = Digests({(SUBJECT, OLD): (LAUNCH,)})
        assert rehash.without_unused(digests, [held]).launches == digests.launches
        monkeypatch.setattr(measurements, "current_hash", lambda _: None)
        assert self.states(held, digests) == [("removed", "")]
        assert held.new_text() == held.text
        assert not rehash.without_unused(digests, [held]).launches

    def test_a_current_one_without_digests_is_told(self, tmp_path: Path) -> None:
        held = document(tmp_path, row("push", CURRENT, CONFIG))
        assert self.states(held, Digests({})) == [("unrecorded", "")]
        assert self.states(held, Digests({(SUBJECT, CURRENT): (LAUNCH,)})) == [("current", "")]

    def test_a_row_of_the_dispatcher_is_of_what_it_picked(self, tmp_path: Path) -> None:
        held = document(tmp_path, row("dispatch", OLD, PICKED))
        digests = Digests({(SUBJECT, OLD): (LAUNCH,)})
        assert self.states(held, digests, LAUNCH) == [("moved", "")]
        (changed,) = json.loads(held.new_text())["rows"]
        assert changed == row("dispatch", CURRENT, PICKED)

    def test_library_calls_alone_move_by_rule(self, tmp_path: Path) -> None:
        held = document(tmp_path, row("push", OLD, CONFIG))
        digests = Digests({(SUBJECT, OLD): ()})
        findings = rehash.examine([held], digests, NoCompiler())  # type: ignore[arg-type]
        assert [(each.status, each.by_rule) for each in findings] == [("moved", True)]
        assert "1 hashes moved by rule" in rehash.summary(findings)

    def test_a_plan_that_cannot_be_made_is_told(self, tmp_path: Path) -> None:
        held = document(tmp_path, row("broken", OLD, CONFIG))
        (site,) = held.sites
        digests = Digests({(site.subject, OLD): (LAUNCH,)})
        assert self.states(held, digests) == [("changed", "no such meta-parameter")]

    @pytest.mark.parametrize(
        ("now", "why"),
        [
            ((), "launches 0 kernels, not 1"),
            ((Launch(LAUNCH.code, 64, (0, 1)),), "launch 1: 64 programs, not 132"),
            ((Launch(LAUNCH.code, 132, (0, 2)),), "launch 1: arguments (0, 2), not (0, 1)"),
            (
                (Launch(Code({"3.6.0": "t6", "3.9.0": "x"}, {"3.9.0": "x"}), 132, (0, 1)),),
                "launch 1: other instructions under Triton 3.9.0",
            ),
            (
                (Launch(Code({"3.6.0": "x", "3.9.0": "t9"}, {"3.6.0": "x"}), 132, (0, 1)),),
                "launch 1: other TTIR under Triton 3.6.0, and",
            ),
        ],
    )
    def test_differences(self, tmp_path: Path, now: tuple[Launch, ...], why: str) -> None:
        held = document(tmp_path, row("push", OLD, CONFIG))
        ((status, told),) = self.states(held, Digests({(SUBJECT, OLD): (LAUNCH,)}), *now)
        assert status == "changed"
        assert told.startswith(why)

    def test_the_same_assembly_suffices(self, tmp_path: Path) -> None:
        held = document(tmp_path, row("push", OLD, CONFIG))
        now = Launch(Code({"3.6.0": "t6", "3.9.0": "x"}, {"3.9.0": "a9"}), 132, (0, 1))
        assert self.states(held, Digests({(SUBJECT, OLD): (LAUNCH,)}), now) == [("moved", "")]


class TestDigests:
    def test_are_read_as_written(self, tmp_path: Path) -> None:
        path = tmp_path / "instructions.json"
        path.write_text(Digests({(SUBJECT, OLD): (LAUNCH, LAUNCH)}).text())
        assert Digests.load(path).launches == {(SUBJECT, OLD): (LAUNCH, LAUNCH)}
        assert json.loads(path.read_text())["kernels"] == [["t6", "", "t9", "a9"]]

    def test_are_found_under_new_names(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "instructions.json"
        path.write_text(Digests({(SUBJECT, OLD): (LAUNCH,)}).text())
        held = row("push", OLD, CONFIG)
        monkeypatch.setitem(RENAMED, OP, Renamed({"push": "send"}, {"BLOCK_M": "TILE_M"}))
        (subject,) = (site.subject for site in document(tmp_path, held).sites)
        assert (subject.variant, subject.config) == ("send", '{"TILE_M":16}')
        assert Digests.load(path).launches == {(subject, OLD): (LAUNCH,)}


class TestPlainText:
    def test_functions_of_ttir_have_no_names(self) -> None:
        ttir = 'tt.func @_a(%a) {{ tt.call @"{0}.f"() asm "@$1 st" }} tt.func private @"{0}.f"()'
        assert plain_ttir(ttir.format("old")) == plain_ttir(ttir.format("new"))
        assert plain_ttir(ttir.format("old")) != plain_ttir(ttir.format("old").replace("$1", "$2"))

    def test_values_have_no_names_and_constants_no_order(self) -> None:
        one, two = "%c1 = arith.constant 1 : i32", "%c2 = arith.constant 2 : i32"
        kernel = "tt.func @_a(%x: i32)\n  {}\n  {}\n  %s = arith.addi %x, %c1 : i32\n  use %s, %c2"
        as_written = plain_ttir(kernel.format(one, two))
        assert as_written == plain_ttir(kernel.format(two, one))
        assert as_written == plain_ttir(kernel.format(one, two).replace("%x", "%arg0"))
        assert as_written != plain_ttir(kernel.format(one, two.replace("2 :", "3 :")))
        assert as_written != plain_ttir(kernel.format(one, two).replace("%s, %c2", "%x, %c2"))

    def test_assembly_has_no_names_and_comments(self) -> None:
        ptx = "// {0}\n.visible .entry {0}(.param .u64 {0}_param_0) // {0}\n st.b32 [%r1], %r{1};\n"
        assert plain_assembly(ptx.format("_push", 2)) == plain_assembly(ptx.format("_send", 2))
        assert plain_assembly(ptx.format("_push", 2)) != plain_assembly(ptx.format("_push", 3))
