"""The ranking of configs for hardware that is not here; compiling is replaced."""

from __future__ import annotations

import pytest

from taxfree.cost_model import machine, times
from taxfree.tuning.ranking import ranking
from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_kernels.attention.problem import Attention
from taxfree_kernels.cross_compile.resources import Resources
from taxfree_kernels.cross_compile.screen import Verdict

ATTENTION = Attention(batch=1, length=512, q_heads=16, kv_heads=16, head_dim=64, causal=False)
MATMUL = AllGatherMatmul(m=64, n=3584, k=8192, world_size=8)


class Screen:
    """Compiles nothing: each candidate has these programs on a unit, but for those it refuses."""

    def __init__(self, programs=2, refuses=lambda config: None):
        self.asked, self._programs, self._refuses = [], programs, refuses

    def verdicts(self, op, problem, candidates):
        self.asked += candidates
        kernels = {"a kernel": Resources(128, 0, 0, self._programs)}
        return [Verdict(name, c, kernels, self._refuses(c)) for name, c in candidates]


@pytest.mark.parametrize("problem", [ATTENTION, MATMUL])
def test_the_baseline_is_followed_by_the_fastest_of_what_was_compiled(problem):
    screen = Screen()
    baseline, *found = ranking(problem, screen, "mi300x", trials=8, compiled=3)
    assert (baseline.variant, baseline.config) == ("baseline", {})
    assert [each.us for each in found] == sorted(each.us for each in found)
    assert len(found) == len(screen.asked) == 3
    assert all(each.resources.programs_per_unit == 2 for each in found)


def test_what_is_refused_makes_room_for_the_next():
    def ranked(screen):
        return ranking(ATTENTION, screen, "mi300x", trials=12, compiled=3)

    _, fastest, *_ = ranked(Screen())
    screen = Screen(refuses=lambda config: "it spills" if config == fastest.config else None)
    _, *found = ranked(screen)
    assert [each.refused for each in found] == [None, None, None, "it spills"]
    assert found[-1].config == fastest.config
    assert len(screen.asked) == 4


def test_the_time_is_the_cost_models_and_waiting_for_reads():
    def of(programs):
        _, *found = ranking(ATTENTION, Screen(programs), "mi300x", trials=4)
        return {tuple(each.config.items()): each for each in found}

    one, four = of(1), of(4)
    assert any(one[each].us != four[each].us for each in one)
    for each in one.values():
        modelled = times(machine("mi300x"), ATTENTION, each.variant, each.config)
        assert each.us == pytest.approx(modelled.t_graph_us + each.waits_us)
        assert each.waits_us > 0
        assert 0 <= each.traffic.hit_rate < 1


def test_without_a_trace_the_time_is_the_cost_models():
    packed = Attention(batch=2, length=512, q_heads=4, kv_heads=4, head_dim=64, packed=True)
    for problem in packed, MATMUL:
        for each in ranking(problem, Screen(), "mi325x", trials=3):
            modelled = times(machine("mi325x"), problem, each.variant, each.config)
            assert (each.us, each.traffic) == (modelled.t_graph_us, None)


def test_refused_problems_have_reasons():
    alone = AllGatherMatmul(m=64, n=64, k=64, world_size=1)
    _, *left_out = ranking(alone, Screen(), "mi300x", trials=3)
    assert left_out
    assert all(each.refused for each in left_out)
