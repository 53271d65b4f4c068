"""The checker on real variants: they pass, runs repeat exactly, thin coverage is no pass."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from taxfree_check.checker import (
    MIXED,
    STEP,
    CheckFailed,
    SimulatedFabric,
    Simulation,
    Wanted,
    assert_protocol_holds,
    check_variant,
    checkable_variants,
    tiny_problems,
)
from taxfree_check.checker.check import SEEDS, WORLD_SIZES
from taxfree_check.checker.coverage import Coverage, Executed
from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_kernels.device import sync
from taxfree_kernels.device.peers import Group, Peers, translate
from taxfree_kernels.errors import PlanError
from taxfree_kernels.fabric import heap
from taxfree_kernels.fabric.heap import DeviceBarrier
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.launch import Kernel
from taxfree_kernels.matmul_all_reduce.problem import MatmulAllReduce
from taxfree_kernels.matmul_reduce_scatter.problem import MatmulReduceScatter
from taxfree_kernels.stencil import words
from taxfree_kernels.stencil.problem import Stencil
from taxfree_kernels.variant import (
    Ready,
    op_of,
    operation,
    operation_names,
    operation_shapes,
    problem_class,
    variants,
)
from tests.check.checker.mutate import mutants
from tests.check.checker.mutated import GROUPS
from tests.sample import PARTS, Sample

OP = "all_gather_matmul"
WITHOUT_KERNELS = (
    "baseline", "rail", "registered", "splits", "torch_fused", "torch_symm_mem",
    "warp_specialized",  # is not interpreted
)  # fmt: skip
VARIANTS = [(op, name) for op in operation_names() for name in checkable_variants(op)]
TWIN = (STEP, "twin")
SLOW = (STEP, "stencil")  # of which a part takes two ranks or three


@contextlib.contextmanager
def _relaxed_signals():
    weaker = [each for each in mutants([sync.signal]) if "'release' -> 'relaxed'" in str(each)]
    with weaker[0].installed():
        yield


def seeds(op: str, name: str, problems: Sequence[Any], sample: Sample) -> Sequence[int]:
    """One seed for each problem, since seeds take them in turns; or so many as show all mutants.

    By and by the days' parts take the others.
    """
    if not sample.is_part:
        groups = (each for each in GROUPS.values() if each.op == op and name in each.variants)
        return max([range(28), *(each.seeds for each in groups)], key=len)
    rounds = range(0, SEEDS, len(problems))
    (first,) = sample.one_of([rounds[at * len(rounds) // PARTS] for at in range(PARTS)])
    return range(first, first + len(problems))


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("op", "name"), [*VARIANTS, TWIN])
def test_a_variant_holds_its_protocol(op, name, sample):
    is_short = sample.is_part and op in SLOW
    worlds = sample.one_of(WORLD_SIZES) if is_short else WORLD_SIZES
    problems = [problem for world in worlds for problem in tiny_problems(op, world)]
    checked = check_variant(op, name, problems, seeds(op, name, problems, sample))
    if not sample.is_part and checked.verdict == "not covered":
        checked = check_variant(op, name, problems)
    assert checked.violation is None, str(checked)
    assert (checked.verdict == "nothing to check") == (name in WITHOUT_KERNELS)
    if not sample.is_part:  # a part of the seeds may not cover every line
        assert checked.verdict in ("pass", "nothing to check"), str(checked)


#: on five ranks, of which several have nothing
SPARSE = {
    "all_gather_matmul": [
        {"m": 2, "n": 16, "k": 16, "gather_dim": 0},
        {"m": 6, "n": 16, "k": 16, "gather_dim": 0},
        {"m": 2, "n": 16, "k": 80, "gather_dim": 1},
    ],
    "matmul_all_reduce": [{"m": 2, "n": 48, "k": 16}, {"m": 22, "n": 16, "k": 16}],
    "matmul_reduce_scatter": [
        {"m": 2, "n": 16, "k": 16},
        {"m": 6, "n": 16, "k": 16},
        {"m": 2, "n": 80, "k": 16, "scatter_dim": 1},
    ],
    "embedding_all_to_all": [
        {"batch": 1, "bag": 1, "tables": 2, "rows": 2, "dim": 2, "shard_dim": dim} for dim in (0, 1)
    ],
    "attention": [{"batch": 1, "length": 5, "q_heads": 1, "kv_heads": 1, "head_dim": 16}],
    "flash_decode": [
        {"batch": 1, "q_heads": 2, "kv_heads": 1, "head_dim": 16, "kv_len_per_rank": 20}
    ],
    "stencil": [{"rows": 5, "columns": 3, "steps": 2, "norm_every": 1}],
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("op", "name"), VARIANTS)
def test_a_variant_holds_its_protocol_where_ranks_have_nothing(op, name, sample):
    problems = [problem_class(op)(world_size=5, **fields) for fields in SPARSE[op]]
    checked = check_variant(op, name, problems, sample.of(range(7)))
    assert checked.violation is None, str(checked)


#: whose rows travel with scales, of tiles that share rows with a peer's shard, and of others
SCALED = [
    {"m": 5, "k": 256, "gather_dim": 1, "scales": "block"},
    {"m": 17, "k": 144, "gather_dim": 0, "scales": "block"},
    {"m": 29, "k": 32, "gather_dim": 0, "scales": "channel"},
    {"m": 4, "k": 32, "gather_dim": 0, "scales": "channel"},
]


@pytest.mark.parametrize("name", ["one_shot", "overlap", "push", "push_tma"])
def test_a_gather_of_fp8_rows_holds_its_protocol(name, sample):
    problems = [AllGatherMatmul(n=32, world_size=2, x_dtype="fp8", **each) for each in SCALED]
    served = problems if name != "overlap" else problems[1:]
    checked = check_variant(OP, name, served, sample.of(range(12)))
    assert checked.violation is None, str(checked)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_sum_over_an_fp8_wire_holds_its_protocol(world_size, sample):
    kind = {"world_size": world_size, "residual": True, "fp8_wire": True}
    problems = [MatmulAllReduce(17, 96, 32, **kind), MatmulAllReduce(3, 48, 40, **kind)]
    checked = check_variant("matmul_all_reduce", "push_two_shot", problems, sample.of(range(8)))
    assert checked.violation is None, str(checked)


@pytest.mark.parametrize(("world_size", "scatter_dim"), [(2, 0), (3, 0), (2, 1)])
def test_a_scatter_over_an_fp8_wire_holds_its_protocol(world_size, scatter_dim, sample):
    kind = {"world_size": world_size, "scatter_dim": scatter_dim, "fp8_wire": True}
    problems = [MatmulReduceScatter(17, 96, 32, **kind), MatmulReduceScatter(3, 48, 40, **kind)]
    checked = check_variant("matmul_reduce_scatter", "push", problems, sample.of(range(8)))
    assert checked.violation is None, str(checked)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", [1, 4, 8])
def test_a_decode_step_holds_its_protocol_on_any_number_of_ranks(world_size, sample):
    problems = tiny_problems(STEP, world_size)
    checked = check_variant(STEP, "twin", problems, sample.of(range(len(problems))))
    assert checked.violation is None, str(checked)


@pytest.mark.parametrize("world_size", range(2, 9))
def test_some_tiny_problem_is_for_each_variant_that_any_is_for(world_size):
    """The soak takes these problems on any number of ranks."""

    def served(op, ranks):
        return {
            name
            for name, variant in variants(op).items()
            for problem in operation_shapes(op).tiny(ranks)
            if variant.unsupported_reason(problem, KNOWN["h200"]) is None
        }

    for op in operation_names():
        lost = served(op, 2) - served(op, world_size)
        assert lost <= {"torch_fused", "torch_symm_mem"}  # these have no kernels of ours


def test_a_violation_says_how_to_see_it_again():
    with _relaxed_signals():
        violation = check_variant(OP, "push", seeds=range(3, 4)).violation
    assert violation.replay.startswith("taxfree check --op all_gather_matmul --variant push --sh")
    assert violation.replay.endswith("--first-seed 3 --seeds 1")


def test_a_seed_gives_the_same_report_each_time():
    with _relaxed_signals():
        reports = [str(check_variant(OP, MIXED, seeds=range(5, 6)).violation) for _ in range(3)]
    assert reports[0] == reports[1] == reports[2]


def test_a_report_names_both_lines_both_ranks_the_memory_and_the_edge():
    with _relaxed_signals():
        report = str(check_variant(OP, "push", seeds=range(1)).violation)
    assert report.startswith("no release: ")
    assert "payload slot" in report
    assert "rank 0, program" in report
    assert "rank 1, program" in report
    assert "device/tiles.py" in report


def test_a_failed_assertion_shows_the_report():
    with _relaxed_signals(), pytest.raises(CheckFailed, match="no release"):
        assert_protocol_holds(OP, "push", seeds=range(1))


def test_one_schedule_is_too_little_for_a_pass():
    assert check_variant(OP, "one_shot", seeds=range(1)).verdict == "not covered"


def test_lines_that_a_problem_cannot_reach_are_not_asked_for():
    rows = [AllGatherMatmul(5, 32, 32, gather_dim=0, world_size=2)]
    checked = check_variant(OP, "push", rows, seeds=range(4))
    waits = [line.text for line in checked.coverage.lines if "wait_for_rows" in line.text]
    assert [text.partition("(")[0] for text in waits] == ["arrived = wait_for_rows"]


def test_a_part_of_a_condition_may_rule_lines_out():
    """Rows are normalised by programs of their own, unless BLOCK_ROW, a constant, is 0."""
    problem = problem_class("matmul_all_reduce")(m=2, n=16, k=16, world_size=2)
    for rms_norm in (False, True):
        problems = [replace(problem, rms_norm=rms_norm)]
        checked = check_variant("matmul_all_reduce", "push_two_shot_lamport", problems, range(1))
        texts = {line.text.partition("(")[0] for line in checked.coverage.lines}
        assert ("_normalise_row" in texts) == rms_norm


def test_several_programs_empty_the_words_of_tiny_problems():
    rows = [MatmulAllReduce(17, 96, 32, world_size=2)]
    checked = check_variant("matmul_all_reduce", "push_two_shot_lamport", rows, range(2))
    (emptied,) = (
        executed for line, executed in checked.coverage.lines.items() if "empty_" in line.text
    )
    assert len(emptied.programs) > 1


@triton.jit
def _one_sender(control_ptr, bases, rank, GROUP: tl.constexpr):
    peers = Peers(control_ptr, bases, rank, 1)
    program = tl.program_id(0)
    if program == 0:
        sync.signal(peers, 0, 1 - rank, GROUP)
    else:
        sync.wait(peers, 0, 1 - rank, GROUP)


def test_one_program_covers_a_line_that_no_other_can_reach():
    coverage = Coverage()
    coverage.expect(_one_sender, {"GROUP": Group(2, "interpreter")}, 3)
    by_text = {line.text.partition("(")[0]: executed for line, executed in coverage.lines.items()}
    assert {text: executed.most_programs for text, executed in by_text.items()} == {
        "sync.signal": 1,
        "sync.wait": 2,
    }
    for executed in by_text.values():
        executed.add(Executed(ranks={0, 1}, programs={0}, calls={1, 2, 3}))
    missing = [line.text.partition("(")[0] for line, _ in coverage.missing(Wanted())]
    assert missing == ["sync.wait"]


def _stencils_between_sums(fabric: SimulatedFabric) -> list:
    """Calls that borrow a slot of Lamport words, between such as take turns with them."""
    calls = []
    for problem, name, extra in (
        (Stencil(6, 4, steps=4, world_size=2), "persistent", {"PROGRAMS": 2}),
        (MatmulAllReduce(2, 16, 16, world_size=2), "push_lamport", {}),
    ):
        op, variant = operation(op_of(problem)), variants(op_of(problem))[name]
        config = variant.seed_configs(problem, fabric.hardware)[0] | extra
        plan = Ready(variant.plan(problem, fabric, config))
        given = op.make_inputs(problem, fabric.rank, 1, fabric.device)
        output = op.empty_output(problem, fabric.device)
        calls.append(partial(plan, *given, output))
    return calls * 4


def _violations_between_sums(seeds: Sequence[int]) -> Iterator[str]:
    simulation = Simulation(2)
    for seed in seeds:
        outcome = simulation.run(_stencils_between_sums, seed, co_resident=True)
        if outcome.violation is not None:
            yield str(outcome.violation)


def test_a_stencil_borrows_words_of_the_turn_to_come():
    assert list(_violations_between_sums(range(6))) == []
    (two_slots,) = (
        each for each in mutants([words.area_at]) if "turn" in ast.unparse(each.replacement)
    )
    with two_slots.installed():
        assert next(_violations_between_sums(range(6)), "").startswith("payload lifetime")


@triton.jit
def _write(box_ptr, value_ptr):
    tl.store(box_ptr, tl.load(value_ptr))


@triton.jit
def _read(box_ptr, out_ptr, heap_bases, rank, WORLD: tl.constexpr):
    peers = Peers(None, heap_bases, rank, None)
    for peer in range(WORLD):
        tl.store(out_ptr + peer, tl.load(translate(box_ptr, peers, peer)))


def _exchange_around_barriers(fabric: SimulatedFabric) -> list:
    barrier = DeviceBarrier(fabric, timeout_s=1.0)
    box = fabric.heap.empty(1, torch.int64)
    value, out = torch.ones(1, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    write, read = Kernel(_write, 1), Kernel(_read, 1, {"WORLD": fabric.world_size})

    def call():
        write(box, value)
        barrier()
        read(box, out, fabric.heap_bases, fabric.rank)
        barrier()

    return [call] * 3


def _violations_of_the_barrier() -> Iterator[str]:
    simulation = Simulation(3, heap_bytes=8192)
    for seed in range(12):
        outcome = simulation.run(_exchange_around_barriers, seed)
        if outcome.violation is not None:
            yield str(outcome.violation)


def test_the_barrier_on_the_device_holds_its_protocol():
    assert list(_violations_of_the_barrier()) == []


def test_a_barrier_that_does_not_wait_is_reported():
    for mutant in mutants([heap._barrier]):
        if "channel 0" in str(mutant):  # its channel is 0
            continue
        with mutant.installed():
            assert any(_violations_of_the_barrier()), str(mutant)


def test_an_unknown_variant_is_an_error_for_users():
    with pytest.raises(PlanError, match="no variant 'pusj'"):
        check_variant(OP, "pusj")
