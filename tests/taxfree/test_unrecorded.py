"""The unrecorded problems of a run are kept in a file for `taxfree tune --shapes`."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from taxfree._runtime.dispatch import Dispatcher
from taxfree._runtime.unrecorded import UnrecordedProblems
from taxfree.settings import Settings
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.variant import op_of, problem_class, resized
from taxfree_tune.shapes import ShapeRequest, expand, operations
from taxfree_tuning_db import Table
from tests.tuning_db.examples import record_of

GATHER, DECODE = "all_gather_matmul", "flash_decode"
MATMUL = problem_class(GATHER)(m=1, n=3584, k=8192, dtype="bfloat16", world_size=8)
ATTENTION = problem_class(DECODE)(
    batch=1, q_heads=8, kv_heads=2, head_dim=64, kv_len_per_rank=1, page_size=16, world_size=2
)
STARTED = (
    "import pathlib, torch, taxfree._runtime.unrecorded as m; "
    "met = m.UnrecordedProblems(pathlib.Path({path!r})); "
)
COUNTED = (
    "from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul as P; "
    "met.add(P(m=1, n=8, k=8), 5); "
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new" / "problems.yaml"


def count(path: Path, problem: Any, *calls: tuple[int, ...]) -> None:
    met = UnrecordedProblems(path)
    for sizes in calls:
        met.add(problem, *sizes)
    met.close()


def kept(path: Path, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(each[name] for name in names) for each in yaml.safe_load(path.read_text())]


def run_python(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True)


class TestEntries:
    def test_sizes_between_powers_of_two_are_one_with_the_largest_that_was_called(
        self, path: Path
    ) -> None:
        count(path, MATMUL, *[(m,) for m in (1, 2, 3, 4, 48, 33, 48, 65)])
        assert kept(path, "m", "calls") == [(48, 3), (4, 2), (1, 1), (2, 1), (65, 1)]

    def test_2000_sizes_are_a_list_that_a_search_finishes(self, path: Path) -> None:
        count(path, MATMUL, *[(m,) for m in range(1, 2001)])
        found = kept(path, "m", "calls")
        assert found[0] == (2000, 976)
        assert len(found) == 12
        assert sum(calls for _, calls in found) == 2000

    def test_keys_that_attention_has_room_for_are_merged_as_rows_are(self, path: Path) -> None:
        count(path, ATTENTION, (3, 40960), (4, 33000), (4, 32768))
        assert kept(path, "batch", "kv_len_per_rank", "calls") == [(4, 40960, 2), (4, 32768, 1)]

    @pytest.mark.parametrize("seed", range(20))
    def test_their_records_serve_all_sizes_that_were_called(self, path: Path, seed: int) -> None:
        random_ = random.Random(seed)
        called = [int(2 ** random_.uniform(0, 13)) for _ in range(random_.randint(1, 60))]
        count(path, MATMUL, *[(m,) for m in called])
        tops = {m for (m,) in kept(path, "m")}
        records = [record_of(problem=asdict(resized(MATMUL, m=m))) for m in tops]
        dispatcher = Dispatcher(Table(user=records), KNOWN["h200"], Settings())
        for m in called:
            assert dispatcher.bounds(GATHER, resized(MATMUL, m=m), "m")[1] in tops

    def test_they_are_shapes_that_give_the_problems_back(self, path: Path) -> None:
        count(path, MATMUL, (7,))
        count(path, ATTENTION, (3, 80), (3, 80))
        request = ShapeRequest([str(path)])
        assert operations(request, GATHER) == [DECODE, GATHER]
        assert expand(GATHER, request) == [resized(MATMUL, m=7)]
        assert expand(DECODE, request) == [resized(ATTENTION, batch=3, kv_len_per_rank=80)]
        assert op_of(expand(DECODE, request)[0]) == DECODE


class TestFile:
    def test_runs_add_up_and_a_larger_size_takes_the_place_of_a_smaller(self, path: Path) -> None:
        count(path, MATMUL, (40,), (100,))
        count(path, MATMUL, (60,), (60,))
        assert kept(path, "m", "calls") == [(60, 3), (100, 1)]

    def test_runtimes_of_one_process_add_up(self, path: Path) -> None:
        first, second = UnrecordedProblems(path), UnrecordedProblems(path)
        for met in (first, second, first):
            met.add(MATMUL, 5)
            met.write()
        assert kept(path, "m", "calls") == [(5, 3)]

    def test_processes_that_write_at_once_add_up(self, path: Path) -> None:
        code = (
            STARTED.format(path=str(path))
            + f"[exec({COUNTED + 'met.write()'!r}) for _ in range(50)]"
        )
        writers = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
        assert [writer.wait(timeout=400) for writer in writers] == [0, 0]
        assert kept(path, "m", "calls") == [(5, 100)]
        assert os.listdir(path.parent) == [path.name]

    def test_it_is_written_when_the_interpreter_ends(self, path: Path) -> None:
        run_python(STARTED.format(path=str(path)) + COUNTED)
        assert kept(path, "m", "calls") == [(5, 1)]

    def test_a_fork_writes_nothing(self, path: Path) -> None:
        fork = "import os, sys; child = os.fork(); child and os.waitpid(child, 0); sys.exit()"
        run_python(STARTED.format(path=str(path)) + COUNTED + fork)
        assert kept(path, "m", "calls") == [(5, 1)]

    def test_an_empty_one_is_filled(self, path: Path) -> None:
        path.parent.mkdir()
        path.touch()
        count(path, MATMUL, (5,))
        assert kept(path, "m", "calls") == [(5, 1)]

    @pytest.mark.parametrize(
        "content",
        [
            "- m=16 n=64 k=64\n",
            "- {m: 16, n: 64, k: 64}\n",
            "- {op: all_gather_matmul, calls: 1, m: 16}\n",
            "- {op: convolution, calls: 1}\n",
            "name: a config\n",
            "16\n",
            "[",
            "\x00",
        ],
    )
    def test_one_that_holds_something_else_is_left_alone(self, path: Path, content: str) -> None:
        path.parent.mkdir()
        path.write_text(content)
        with pytest.warns(RuntimeWarning, match="holds something else") as caught:
            count(path, MATMUL, (5,))
        assert len(caught) == 1
        assert path.read_text() == content

    def test_a_path_that_cannot_be_written_is_one_warning(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        for path in (tmp_path, tmp_path / "file" / "problems.yaml"):
            with pytest.warns(RuntimeWarning, match="collects no problems") as caught:
                count(path, MATMUL, (5,))
            assert len(caught) == 1

    def test_what_cannot_be_written_now_is_warned_of_once_and_written_later(
        self, path: Path
    ) -> None:
        met = UnrecordedProblems(path)
        path.parent.touch()
        met.add(MATMUL, 5)
        with pytest.warns(RuntimeWarning, match="collects no problems"):
            met.write()
        met.close()  # warnings are errors in tests
        path.parent.unlink()
        met.write()
        assert kept(path, "m", "calls") == [(5, 1)]
