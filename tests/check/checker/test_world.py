"""Anybody's kernels in a world: each convention, right and broken, and what a host may do."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from taxfree_check.checker import CheckFailed, Reason, World
from taxfree_check.checker.conventions import iris
from taxfree_cli.app import run as command
from tests.rooms import ROOT

from . import anybody

RIGHT = {
    "tables of pointers": anybody.tables(),
    "Iris": anybody.of_iris(),
    "symmetric memory": anybody.of_symm_mem(),
    "Triton-distributed": anybody.of_triton_dist(),
    "PTX": anybody.of_ptx(),
    "PTX, red": anybody.of_ptx("red"),
    "PTX, atom": anybody.of_ptx("atom"),
    "PTX, fences": anybody.of_ptx("fence", "fence"),
    "PTX, membar and volatile": anybody.of_ptx("membar"),
}
BROKEN = {
    "relaxed poll": (anybody.tables("relaxed poll"), Reason.NO_ACQUIRE),
    "volatile poll": (anybody.tables("volatile poll"), Reason.NO_ACQUIRE),
    "relaxed signal": (anybody.tables("relaxed signal"), Reason.NO_RELEASE),
    "gpu scope": (anybody.tables("gpu scope"), Reason.SCOPE),
    "signal first": (anybody.tables("signal first"), Reason.EARLY_SIGNAL),
    "one slot": (anybody.tables("one slot"), Reason.LIFETIME),
    "waits first": (anybody.tables("waits first"), Reason.DEADLOCK),
    "Iris, default scope": (anybody.of_iris("default scope"), Reason.SCOPE),
    "Iris, plain flag": (anybody.of_iris("plain flag"), Reason.NO_WAIT),
    "symmetric memory, relaxed send": (anybody.of_symm_mem("relaxed"), Reason.NO_RELEASE),
    "symmetric memory, relaxed wait": (anybody.of_symm_mem(wait="relaxed"), Reason.NO_ACQUIRE),
    "Triton-distributed, gpu scope": (anybody.of_triton_dist("gpu"), Reason.SCOPE),
    "PTX, relaxed": (anybody.of_ptx("relaxed"), Reason.NO_RELEASE),
    "PTX, relaxed wait": (anybody.of_ptx(wait="relaxed"), Reason.NO_ACQUIRE),
    "PTX, weak": (anybody.of_ptx("weak"), Reason.NO_RELEASE),
    "PTX, gpu": (anybody.of_ptx("gpu"), Reason.SCOPE),
    "PTX, fence of the GPU": (anybody.of_ptx("gpu fence"), Reason.SCOPE),
    "PTX, multimem": (anybody.of_ptx("multimem"), Reason.UNKNOWN),
    "PTX, not known": (anybody.of_ptx("tensor core"), Reason.UNKNOWN),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_kernel_passes(name):
    with World(ranks=2, seeds=6) as world:
        RIGHT[name](world)
    (checked,) = world.checks
    assert checked.verdict == "pass"
    assert checked.schedules == 6


def report_of(run, **how) -> CheckFailed:
    with World(**{"ranks": 2, "seeds": 12} | how) as world, pytest.raises(CheckFailed) as failed:
        run(world)
    return failed.value


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_kernel_is_reported_with_its_reason(name):
    run, reason = BROKEN[name]
    found = report_of(run).checked.violation
    assert found.reason is reason, str(found)


def test_a_report_names_lines_ranks_the_element_the_remedy_and_the_order_of_events():
    report = str(report_of(anybody.tables("relaxed poll")))
    first, second = (report.find(f"rank {rank}, program 0 of _tables, call ") for rank in (0, 1))
    assert -1 not in (first, second)
    assert "inbox[0, 0]" in report
    assert "make the read at anybody.py:" in report
    assert "reads (atomic, relaxed, sys)" in report
    assert "writes (atomic, release, sys)" in report
    assert "replay: World(ranks=2, seeds=1, first_seed=" in report
    for word in ("generation", "Lamport", "LL packet", "payload slot", "pool"):
        assert word not in report


def test_a_deadlock_says_who_waits_for_what():
    report = str(report_of(anybody.tables("waits first")))
    assert "rank 0, program 0 of _tables, call 0 waits in" in report
    assert "for rank 0's flags[0], which holds 0: nobody has written it" in report


@triton.jit
def _waits_for_call(flags, box, rank, call):
    """Call 0 waits for a flag of 0, which it holds from the beginning."""
    if rank == 0:
        tl.store(tl.load(box + 1).to(tl.pointer_type(tl.int32)), call)
        flag = tl.load(flags + 1).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(flag, call, sem="release", scope="sys")
    else:
        flag = tl.load(flags + 1).to(tl.pointer_type(tl.int32))
        while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < call:
            pass
        tl.load(tl.load(box + 1).to(tl.pointer_type(tl.int32)))


def test_a_wait_that_the_first_value_satisfied_is_said_so():
    def run(world):
        flags, box = world.zeros((1,), torch.int32), world.zeros((1,), torch.int32)
        world.run(lambda rank, call: _waits_for_call[(1,)](flags.bases, box.bases, rank, call))

    report = str(report_of(run))
    assert "of _waits_for_call, call 0 read rank 1's flags[0] before anybody had written" in report
    assert "what it held at first, 0, ended the wait" in report


def test_a_refused_instruction_is_named():
    assert "multimem.red.release.sys.global.add.u32 [$1], 1" in str(
        report_of(anybody.of_ptx("multimem"))
    )


def test_a_gluon_kernel_is_refused_by_name():
    gluon = pytest.importorskip("triton.experimental.gluon")

    @gluon.jit
    def layouts(x):
        pass

    failed = report_of(lambda world: world.run(lambda rank: layouts[(1,)](world.heap_bases)))
    assert failed.checked.violation.reason is Reason.UNKNOWN
    assert "layouts: a Gluon kernel" in str(failed)


def test_a_seed_repeats_its_report():
    first = report_of(anybody.tables("one slot"))
    seed = int(first.checked.violation.replay.partition("first_seed=")[2].rstrip(")"))
    again = report_of(anybody.tables("one slot"), seeds=1, first_seed=seed)
    assert again.checked.violation.details == first.checked.violation.details


@triton.jit
def _gets(inbox, out, rank, heap_bases):
    """As Iris' code translates: from this rank, to the one whose memory is read."""
    iris.get(inbox, out, rank, 1 - rank, heap_bases)


def test_get_of_iris_reads_the_second_rank_s_memory():
    with World(ranks=2, seeds=2) as world:
        hosts = [iris.Iris(world, rank) for rank in range(2)]
        inboxes = [host.full((1,), float(rank)) for rank, host in enumerate(hosts)]
        outs = [torch.zeros(1) for _ in range(2)]

        def check():
            assert [out.item() for out in outs] == [1.0, 0.0]

        world.run(
            lambda rank: _gets[(1,)](inboxes[rank], outs[rank], rank, hosts[rank].heap_bases),
            check=check,
        )


# -- what a host may do ---------------------------------------------------------------------------


@triton.jit
def _add(x, y, LANES: tl.constexpr):
    lanes = tl.program_id(1) * LANES + tl.arange(0, LANES)
    tl.store(y + lanes, tl.load(y + lanes) + tl.load(x + lanes))


@triton.jit
def _gather(bases, out, RANKS: tl.constexpr, LANES: tl.constexpr):
    """Loads of all ranks, in the syntax that a kernel may use."""
    for peer in tl.range(RANKS, num_stages=2):
        there = tl.load(bases + peer).to(tl.pointer_type(tl.float32))
        block = tl.make_tensor_descriptor(there, [2, LANES], [LANES, 1], [1, LANES])
        tl.debug_barrier()
        tl.store(out + peer * LANES + tl.arange(0, LANES), block.load([1, 0]).reshape(LANES))


@pytest.mark.parametrize("barrier", [False, True])
def test_barriers_between_calls_order_kernels_of_several_launches(barrier):
    with World(ranks=2, seeds=8) as world:
        x = world.full((2, 16), 1.0)
        outs = [torch.zeros(2, 16) for _ in range(2)]

        def call(rank):
            _add[(1, 2)](x.local(rank), x.local(rank), 16)
            if barrier:
                world.barrier()
            _gather[(1,)](x.bases, outs[rank], 2, 16, num_warps=8)

        def check():
            assert all((out == 8).all() for out in outs)

        if barrier:
            world.run(call, barrier=True, check=check)
        else:
            with pytest.raises(CheckFailed, match="no wait"):
                world.run(call)


@triton.autotune([triton.Config({"LANES": each}) for each in (8, 16)], key=[])
@triton.jit
def _tuned(x, y, LANES: tl.constexpr):
    lanes = tl.program_id(0) * LANES + tl.arange(0, LANES)
    tl.store(y + lanes, tl.load(x + lanes))


def test_an_autotuned_kernel_takes_a_config_by_seed_and_a_grid_of_it():
    seen = set()
    with World(ranks=1, seeds=8) as world:
        x, y = world.full((16,), 3.0), world.zeros((16,))

        def grid(meta):
            seen.add(meta["LANES"])
            return (triton.cdiv(16, meta["LANES"]),)

        def check():
            assert (y.local(0) == 3).all()

        world.run(lambda rank: _tuned[grid](x.local(rank), y.local(rank)), check=check)
    assert seen == {8, 16}


def test_each_schedule_begins_with_the_same_memory():
    with World(ranks=1, seeds=5) as world:
        x, y, plain = world.full((16,), 1.0), world.zeros((16,)), torch.zeros(16)

        def call(rank):
            _add[(1, 1)](x.local(rank), y.local(rank), 16)
            _add[(1, 1)](x.local(rank), plain, 16)

        def check():
            assert (y.local(0) == 3).all()
            assert (plain == 3).all()

        world.run(call, check=check)
        world.run(call, calls=1)  # a further run begins where that one ended
        assert (y.local(0) == 4).all()


def test_a_side_stream_is_ordered_by_forks_and_joins():
    def check(*, joins_before_use: bool) -> None:
        with World(ranks=1, seeds=8) as world:
            x, y = world.full((16,), 1.0), world.zeros((16,))

            def call(rank):
                stream = world.side_stream()
                with stream.forked():
                    _add[(1, 1)](x.local(rank), y.local(rank), 16)
                if joins_before_use:
                    stream.join()
                _add[(1, 1)](y.local(rank), x.local(rank), 16)
                stream.join()

            world.run(call, calls=1)

    check(joins_before_use=True)
    with pytest.raises(CheckFailed, match="no wait"):
        check(joins_before_use=False)


@triton.jit
def _grid_barrier(counter):
    tl.atomic_add(counter, 1, sem="release", scope="gpu")
    while tl.atomic_add(counter, 0, sem="acquire", scope="gpu") < tl.num_programs(0):
        pass


def test_a_barrier_of_the_grid_needs_programs_that_run_at_the_same_time():
    def run(**how):
        with World(ranks=1, seeds=8, **how) as world:
            counter = world.zeros((1,), torch.int32)
            world.run(lambda rank: _grid_barrier[(3,)](counter.local(rank)), calls=1)

    run(co_resident=True)
    with pytest.raises(CheckFailed, match="have not started"):
        run()


def test_a_wrong_result_is_the_check_s_assertion():
    with World(ranks=1, seeds=2) as world:
        x, y = world.full((16,), 1.0), world.zeros((16,))

        def check():
            assert (y.local(0) == 7).all(), "no seven"

        with pytest.raises(CheckFailed, match=r"wrong result(.|\n)*no seven"):
            world.run(lambda rank: _add[(1, 1)](x.local(rank), y.local(rank), 16), check=check)


@triton.jit
def _assumes(x):
    tl.assume(tl.program_id(0) > 0)
    tl.store(x + tl.program_id(0), 1.0)


def test_a_false_assumption_is_reported():
    with World(ranks=1, seeds=2) as world:
        x = world.zeros((2,))
        with pytest.raises(CheckFailed, match="false assumption"):
            world.run(lambda rank: _assumes[(2,)](x.local(rank)))


@triton.jit
def _signals_if(flag, wanted):
    if wanted > 0:
        tl.atomic_xchg(flag, 1, sem="release", scope="sys")


def test_a_synchronising_line_that_never_ran_is_no_pass():
    def check():
        with World(ranks=1, seeds=2) as world:
            flag = world.zeros((1,), torch.int32)
            world.run(lambda rank: _signals_if[(1,)](flag.local(rank), 0))

    with pytest.raises(CheckFailed, match="not covered"):
        check()


# -- the command ----------------------------------------------------------------------------------

CONTRACT = json.loads((ROOT / "tests/kernels/iris_contract.json").read_text())


@pytest.mark.parametrize("name", CONTRACT["device_signatures"])
def test_a_stand_in_takes_what_iris_function_takes(name):
    parameters = inspect.signature(getattr(iris, name).fn).parameters.values()
    assert _bare(parameters) == CONTRACT["device_signatures"][name]
    former = CONTRACT["parent_signatures"].get(name)
    assert former is None or CONTRACT["device_signatures"][name].startswith(former[:-1])


@pytest.mark.parametrize("name", CONTRACT["context_signatures"])
def test_a_stand_in_takes_what_a_method_of_iris_context_takes(name):
    method = getattr(iris.DeviceContext, name)
    parameters = inspect.signature(method).parameters.values()
    taken = [each for each in parameters if each.name != "self"]
    assert _bare(taken) == CONTRACT["context_signatures"][name]


def _bare(parameters):
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in parameters]
    return str(inspect.Signature(bare))


def test_a_failed_test_shows_the_report_and_no_lines_of_the_checker():
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    shown = subprocess.run(
        [*command, f"{FILE}::test_relaxed_ring"], cwd=ROOT, capture_output=True, text=True
    ).stdout
    assert "no acquire" in shown
    assert "checker/world.py" not in shown


@triton.jit
def put_by_copy_engine(x, inbox, rank, heap_bases, QUEUES: tl.constexpr):
    lanes = tl.arange(0, 4)
    iris.put(
        x + lanes, inbox + lanes, rank, 1 - rank, heap_bases,
        use_copy_engine=QUEUES, contiguous_copy=True,
    )  # fmt: skip


@pytest.mark.parametrize("is_used", [False, True])
def test_copies_by_copy_engines_are_refused_by_name(is_used):
    with World(2, seeds=1, covered=False) as world:
        inbox, xs = world.empty((4,)), [torch.ones(4) for _ in range(2)]

        def call(rank):
            put_by_copy_engine[(1,)](xs[rank], inbox.local(rank), rank, world.heap_bases, is_used)

        if is_used:
            with pytest.raises(CheckFailed, match=r"not simulated.*\n(.*\n)*.*copy engine"):
                world.run(call, calls=1)
        else:
            world.run(call, calls=1)


FILE = Path(__file__).with_name("ring_example.py")


def test_the_command_checks_a_function_whether_triton_interprets_or_not():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    arguments = ["check", f"{FILE}::ring", "--ranks", "2", "--seeds", "5"]
    ended = subprocess.run(
        [sys.executable, "-m", "taxfree_cli.app", *arguments],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "tl.atomic_xchg(" in ended.stdout


@pytest.mark.parametrize("columns", [60, 80])
def test_the_report_fits_a_terminal(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert command(["check", f"{FILE}::test_relaxed_ring", "--seeds", "5"]) == 4
    shown = capsys.readouterr()
    lines = (shown.out + shown.err).splitlines()
    (replay,) = (line for line in lines if "--first-seed" in line)  # once, and unbroken
    assert max(len(line) for line in lines if line is not replay) <= columns
    rows = shown.out.partition("order of events:")[2].splitlines()[1:]
    assert len({line.index("|") for line in rows}) == 1  # side by side


def test_the_command_reports_and_replays(capsys):
    assert command(["check", f"{FILE}::test_relaxed_ring", "--seeds", "5"]) == 4
    captured = capsys.readouterr()
    assert "no acquire" in captured.out
    replay = captured.err.splitlines()[-1].partition("taxfree ")[2].split()
    assert command(replay) == 4
    assert "no acquire" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([f"{FILE}::nothing"], "has no function 'nothing'"),
        (["{made}::ends"], "raised SystemExit: 3"),
        (["{made}::later"], "is no plain function"),
        (["{made}::Kind"], "is no plain function"),
        ([str(FILE)], "names no function"),
        (["nowhere.py::ring"], "there is no file 'nowhere.py'"),
        (["{made}::gluon"], "what run 1 does is not simulated"),
        ([f"{FILE}::ring", "--gpus", "2"], "takes --ranks"),
        (["--ranks", "2"], "--ranks needs FILE::FUNCTION"),
    ],
)
def test_a_wrong_target_is_one_error_line(arguments, text, capsys, tmp_path):
    made = tmp_path / "made.py"
    made.write_text(
        "def ends():\n    raise SystemExit(3)\nasync def later(): ...\nclass Kind: ...\n"
        "from triton.experimental import gluon as g\n@g.jit\ndef kernel(x): ...\n"
        "def gluon(world): world.run(lambda rank: kernel[(1,)](world.heap_bases))\n"
    )
    arguments = [each.replace("{made}", str(made)) for each in arguments]
    assert command(["check", *arguments]) in (1, 2)
    (error,) = [each for each in capsys.readouterr().err.splitlines() if each.startswith("error:")]
    assert text in error
