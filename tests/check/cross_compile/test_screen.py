"""The screen refuses candidates that cannot run, says why, and survives a compiler that dies."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from taxfree_check.cross_compile.asm_checks import BrokenRule
from taxfree_check.cross_compile.pool import CompilePool
from taxfree_check.cross_compile.record import GhostFabric, record
from taxfree_check.cross_compile.report import (
    KernelReport,
    format_report,
    summary,
    triton_version,
)
from taxfree_check.cross_compile.resources import Resources, illegal_reason, programs_per_unit
from taxfree_check.cross_compile.screen import Screen, request
from taxfree_kernels.errors import PlanError
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.variant import problem_class, variants
from tests.ranks import copy_of_kernels, replace_in
from tests.tritons import FOLDERS, NEWEST, TRITONS

OP = "all_gather_matmul"
PROBLEM = problem_class(OP)(m=16, n=256, k=1024, world_size=2)


def default(variant: str, device: str) -> dict[str, object]:
    return variants(OP)[variant].seed_configs(PROBLEM, KNOWN[device])[0]


@pytest.fixture(scope="module")
def screen() -> Iterator[Screen]:
    with pytest.MonkeyPatch.context() as patch, Screen(KNOWN["h200"], workers=1) as screen:
        patch.setattr("taxfree_check.cross_compile.screen.SPILL_LIMIT", 1 << 20)
        yield screen


class TestScreen:
    def test_reports_resources_of_kernels(self, screen: Screen) -> None:
        (verdict,) = screen.verdicts(OP, PROBLEM, [("push", default("push", "h200"))])
        assert verdict.illegal_reason is None
        resources = verdict.kernels["push"]
        assert 0 < resources.registers <= 255
        assert 0 < resources.shared_memory <= KNOWN["h200"].shared_memory
        assert resources.programs_per_unit >= 1

    def test_refuses_spills(self, monkeypatch: pytest.MonkeyPatch) -> None:
        config = default("push", "mi300x")
        monkeypatch.setattr("taxfree_check.cross_compile.screen.SPILL_LIMIT", -1)
        with Screen(KNOWN["mi300x"], workers=1) as screen:
            (verdict,) = screen.verdicts(OP, PROBLEM, [("push", config)])
        assert verdict.illegal_reason == "spills 0 bytes a thread"

    @pytest.mark.dealt("device")
    @pytest.mark.parametrize("device", ["h200", "mi300x"])
    def test_refuses_what_is_compiled_wrongly(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
    ) -> None:
        broken = copy_of_kernels(tmp_path)  # which the compiler's process imports
        signal, scope = r'(atomic_xchg\(word, .*scope=)"sys"', r'\1"gpu"'
        replace_in(broken / "taxfree_kernels" / "device" / "sync.py", signal, scope)
        for folder in filter(None, [FOLDERS[NEWEST], broken]):
            monkeypatch.syspath_prepend(folder)
        with Screen(KNOWN[device], workers=1) as screen:
            (verdict,) = screen.verdicts(OP, PROBLEM, [("push", default("push", device))])
        assert verdict.kernels.keys() == {"push"}
        assert verdict.illegal_reason is not None
        assert verdict.illegal_reason.startswith("compiled wrongly: system_scope: ")

    def test_leaves_speed_to_the_clock(self, screen: Screen) -> None:
        narrow = problem_class(OP)(m=33, n=255, k=1030, world_size=2)
        (verdict,) = screen.verdicts(OP, narrow, [("push", default("push", "h200"))])
        assert verdict.kernels["push"].spill_bytes > 0
        assert verdict.illegal_reason is None

    def test_does_not_compile_what_the_variant_refuses(self) -> None:
        config = {**default("push", "h200"), "BLOCK_M": 256}
        refused = variants(OP)["push"].illegal_reason(PROBLEM, KNOWN["h200"], config)
        with Screen(KNOWN["h200"]) as screen:
            (verdict,) = screen.verdicts(OP, PROBLEM, [("push", config)])
        assert refused is not None
        assert verdict.illegal_reason == refused
        assert verdict.kernels == {}

    def test_passes_library_paths(self, screen: Screen) -> None:
        (verdict,) = screen.verdicts(OP, PROBLEM, [("baseline", {})])
        assert verdict.illegal_reason is None
        assert verdict.kernels == {}

    def test_compiles_nothing_for_the_interpreter(self) -> None:
        with Screen(KNOWN["cpu"]) as screen:
            (verdict,) = screen.verdicts(OP, PROBLEM, [("push", default("push", "cpu"))])
        assert verdict.illegal_reason is None
        assert verdict.kernels == {}

    def test_names_an_unknown_variant(self) -> None:
        with Screen(KNOWN["cpu"]) as screen, pytest.raises(PlanError, match="no variant 'x'"):
            screen.verdicts(OP, PROBLEM, [("x", {})])


def fake_triton(folder: Path, body: str) -> Path:
    (folder / "triton").mkdir()
    (folder / "triton" / "__init__.py").write_text(body)
    return folder


class TestPool:
    ASKED = request(OP, PROBLEM, "push", default("push", "h200"), KNOWN["h200"])

    def test_outlives_a_compiler_that_dies(self, tmp_path: Path) -> None:
        path = fake_triton(tmp_path, "import os\nos._exit(3)\n")
        with CompilePool(1, triton_path=path) as pool:
            answers = list(pool.answers([self.ASKED, self.ASKED]))
        assert answers == [{"error": "the compiler's process died"}] * 2

    def test_says_what_a_dying_compiler_said(self, tmp_path: Path) -> None:
        body = "import os\nos.write(2, b'x.cpp:1: Assertion `a == b\\' failed.')\nos._exit(3)\n"
        with CompilePool(1, triton_path=fake_triton(tmp_path, body)) as pool:
            assert list(pool.answers([self.ASKED])) == [{"error": "Assertion `a == b' failed"}]

    def test_kills_a_compiler_that_hangs(self, tmp_path: Path) -> None:
        path = fake_triton(tmp_path, "import time\ntime.sleep(60)\n")
        with CompilePool(1, timeout_s=1.0, triton_path=path) as pool:
            answers = list(pool.answers([self.ASKED, self.ASKED]))
        assert answers == [{"error": "compiling took longer than 1 s"}] * 2

    @pytest.mark.parametrize("niceness", [0, 10])
    def test_is_nice_where_it_is_asked(self, tmp_path: Path, niceness: int) -> None:
        path = fake_triton(tmp_path, "import os\nraise OSError(os.getpriority(0, 0))\n")
        with CompilePool(1, triton_path=path, niceness=niceness) as pool:
            (answer,) = pool.answers([self.ASKED])
        assert answer == {"error": f"OSError: {min(os.getpriority(0, 0) + niceness, 19)}"}

    def test_what_was_begun_is_compiled_once(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        body = f"open({str(log)!r}, 'a').write('x')\nraise OSError('no')\n"
        with CompilePool(1, triton_path=fake_triton(tmp_path, body)) as pool:
            pool.begin([self.ASKED, self.ASKED])
            (answer,) = pool.answers([self.ASKED])
            assert (answer["error"], log.read_text()) == ("OSError: no", "x")
            list(pool.answers([self.ASKED]))
        assert log.read_text() == "xx"

    def test_is_started_before_it_is_asked(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        path = fake_triton(tmp_path, f"open({str(log)!r}, 'a').write('x')\nraise OSError('no')\n")
        with CompilePool(2, triton_path=path) as pool:
            pool.start()
            until = time.monotonic() + 60.0
            while not (log.exists() and len(log.read_text()) == 2):
                assert time.monotonic() < until, "not all processes were started"
                time.sleep(0.1)

    def test_ends_what_has_just_been_started(self, tmp_path: Path) -> None:
        path = fake_triton(tmp_path, "import time\ntime.sleep(60)\n")
        with CompilePool(4, triton_path=path) as pool:
            pool.start()
        assert not any(worker.is_alive for worker in pool._started)

    @pytest.mark.skipif("3.6.0" not in TRITONS, reason="later Tritons build no launchers")
    @pytest.mark.parametrize("device", ["h200", "mi300x"])
    def test_builds_the_launchers_of_what_ranks_will_run(
        self, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        driver, cache = tmp_path / "driver", tmp_path / "cache"
        driver.mkdir()
        for name in ("libcuda.so.1", "libamdhip64.so"):
            made = ["cc", "-shared", "-x", "c", "/dev/null", "-o", str(driver / name)]
            subprocess.run(made, check=True)
        monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
        monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(driver))
        monkeypatch.setenv("TRITON_LIBHIP_PATH", str(driver / "libamdhip64.so"))
        asked = request(OP, PROBLEM, "push", default("push", device), KNOWN[device])
        with CompilePool(1, triton_path=FOLDERS["3.6.0"]) as pool:
            for to_run, count in ((False, 0), (True, 1)):
                (answer,) = pool.answers([asked | {"to_run": to_run}])
                assert "error" not in answer
                assert len(list(cache.rglob("__triton_launcher*.so"))) == count

    def test_gives_the_first_line_of_an_exception(self) -> None:
        with CompilePool(1) as pool:
            (answer,) = pool.answers([{**self.ASKED, "op": "nonsense"}])
        assert answer["error"].startswith("PlanError: unknown op 'nonsense'")


class TestRecord:
    @pytest.mark.parametrize(
        ("variant", "kernels"),
        [
            ("baseline", []),
            ("registered", []),
            ("one_shot", ["gather"]),
            ("pull", ["pull"]),
            ("push", ["push"]),
            ("push_two_kernel", ["send", "push"]),
        ],
    )
    def test_records_what_a_call_launches(self, variant: str, kernels: list[str]) -> None:
        config = default(variant, "mi300x")
        launches = record(OP, variant, PROBLEM, config, KNOWN["mi300x"])
        assert [launch.name for launch in launches] == kernels
        assert all(launch.kernel.grid > 0 for launch in launches)

    def test_a_ghost_has_no_group(self) -> None:
        ghost = GhostFabric(2, KNOWN["h200"], 1 << 22)
        with ghost, pytest.raises(PlanError, match="no process group"):
            ghost.group  # noqa: B018


class TestResources:
    @pytest.mark.parametrize(
        ("device", "registers", "shared", "warps", "programs"),
        [
            ("h200", 32, 0, 4, 16),
            ("h200", 168, 0, 8, 1),
            ("h200", 64, 100 * 1024, 4, 2),
            ("h200", 64, 228 * 1024, 4, 0),
            ("mi300x", 128, 0, 4, 4),
            ("mi300x", 128, 48 * 1024, 4, 1),
            ("mi350x", 128, 48 * 1024, 4, 3),
            ("mi300x", 512, 0, 8, 0),
        ],
    )
    def test_programs_per_unit(
        self, device: str, registers: int, shared: int, warps: int, programs: int
    ) -> None:
        assert programs_per_unit(KNOWN[device], registers, shared, warps) == programs

    def test_refusals(self) -> None:
        hardware = KNOWN["mi300x"]
        assert illegal_reason(Resources(64, 0, 1024, 2), hardware, 64) is None
        assert (
            illegal_reason(Resources(64, 65, 1024, 2), hardware, 64) == "spills 65 bytes a thread"
        )
        too_much = illegal_reason(Resources(64, 0, 65537, 0), hardware, 64)
        assert too_much == "65537 bytes of shared memory, 65536 are there"
        assert illegal_reason(Resources(512, 0, 0, 0), hardware, 64) is not None


class TestReport:
    def test_text(self) -> None:
        report = KernelReport(
            OP, {"m": 1}, "push", {"BLOCK_M": 16}, "h200", "push", "sm_90", "3.6.0",
            Resources(90, 8, 1024, 2), [BrokenRule("pipelined", "no copy", 3, "bar.sync")],
        )  # fmt: skip
        assert format_report(report).splitlines() == [
            "all_gather_matmul push push: sm_90, Triton 3.6.0",
            "  problem    m=1",
            "  config     BLOCK_M=16",
            "  takes      90 registers, 8 bytes spilled, 1024 bytes of shared memory, "
            "2 programs per compute unit",
            "  violation  pipelined: no copy (line 3: bar.sync)",
        ]
        assert summary([report]) == "1 kernels for sm_90 under Triton 3.6.0: 1 with violations"

    def test_finds_the_installed_triton(self) -> None:
        assert triton_version(None)[0].isdigit()
        assert triton_version(Path("/nowhere")) == "unknown"
