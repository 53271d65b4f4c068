"""The measuring protocol, without ranks: in which order callables are timed."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from taxfree_tune.measuring import timer


class TestOrder:
    COUNT, TURNS = 5, 12

    @pytest.fixture
    def timed(self):
        """The order in which callables ran on a rank, turn by turn, and their samples."""

        def run():
            ran: list[int] = []
            runs = [
                lambda i=index: (ran.append(i), time.sleep(i * 1e-3)) for index in range(self.COUNT)
            ]
            fabric = SimpleNamespace(barrier=lambda: None)
            told: list[int] = []
            samples = timer._host_clock(fabric, runs, self.TURNS, told.append)
            assert told == ran
            return [ran[i : i + self.COUNT] for i in range(0, len(ran), self.COUNT)], samples

        return run

    def test_each_callable_runs_once_a_turn_and_at_no_fixed_place(self, timed):
        turns, samples = timed()
        assert all(sorted(turn) == list(range(self.COUNT)) for turn in turns)
        for index in range(self.COUNT):
            assert len({turn.index(index) for turn in turns}) > 2
            assert len(samples[index]) == self.TURNS
            assert min(samples[index]) >= index * 1e3  # microseconds, of this one

    def test_ranks_agree(self, timed):
        assert timed()[0] == timed()[0]
