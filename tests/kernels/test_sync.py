"""Signals, waits, arrivals and generations, and what happens when a signal does not come."""

from __future__ import annotations

import pytest

from tests.ranks import OP, gather_dims, on_every_fabric, our_names, require

TASKS = "tests.kernels.sync_tasks"
BOUND = 0.8
SHORTEST = {"host": BOUND, "cuda": 0.9 * BOUND}  # GPUs count polls, of which the rate is measured
FUSED_OR_ONE_SHOT = our_names()


@on_every_fabric
class TestGenerations:
    @pytest.mark.parametrize("first", [0, 2**31 - 3, 2**32 - 3])
    def test_each_call_advances_by_one_however_many_programs_it_has(self, ranks, first):
        grids = [1, 7, 3, 100, 1, 2]
        found = ranks.run(ranks.few, f"{TASKS}:generations", grids=grids, first=first)[0]
        assert found == [[first + 1 + call] * grid for call, grid in enumerate(grids)]


@on_every_fabric
class TestArrivals:
    def test_the_last_of_each_launch_is_told_so_and_leaves_the_counter_at_zero(self, ranks):
        found = ranks.run(ranks.few, f"{TASKS}:arrivals", programs=[1, 5, 2, 5])[0]
        assert [sum(last) for last, _ in found] == [1, 1, 1, 1]
        assert [counter for _, counter in found] == [0, 0, 0, 0]


@on_every_fabric
class TestSignalsAndWaits:
    def test_a_wait_ends_with_the_data_of_its_signal(self, ranks):
        for found, _, _ in ranks.run(ranks.several, f"{TASKS}:messages", rounds=5):
            assert found == [(True, True)] * 5

    def test_a_signal_word_belongs_to_one_channel_and_source_and_is_never_cleared(self, ranks):
        found = ranks.run(ranks.several, f"{TASKS}:messages", rounds=5)
        for rank, (_, touched, word) in enumerate(found):
            assert touched == [(5, (rank - 1) % ranks.several)]
            assert word == 5

    def test_a_mask_says_who_is_signalled_and_who_matters(self, ranks):
        found = ranks.run(3, f"{TASKS}:masks")
        assert [rank["word"] for rank in found] == [9, 4, 9]
        assert [rank["other"] for rank in found] == [0, 0, 0]
        assert found[1]["those that came"]
        assert found[1]["nobody"]

    @pytest.mark.parametrize("word", [5, 2**31 - 1, 2**31 + 1, 2**38])
    def test_a_word_serves_its_generation_and_all_before(self, ranks, word):
        wanted = [word - 1, word, 0, word + 1]
        found = ranks.run(ranks.few, f"{TASKS}:later_generations", word=word, wanted=wanted)[0]
        assert found == [True, True, True, False]


@on_every_fabric
@pytest.mark.parametrize("lamport", [False, True])
class TestWords:
    @pytest.mark.parametrize("first", [0, 2**31 - 2, 2**32 - 3])
    def test_come_as_they_were_sent_in_each_generation(self, ranks, first, lamport):
        task = f"{TASKS}:exchanged_words"
        for found in ranks.run(ranks.several, task, first=first, calls=8, lamport=lamport):
            assert found == [True] * 8

    def test_that_are_missing_end_in_a_timeout_that_names_their_sender(self, ranks, lamport):
        found = ranks.run(3, f"{TASKS}:missing_words", timeout_s=BOUND, lamport=lamport)
        seen = 1 if lamport else 0  # nobody knows of which call an empty word was
        message = f"rank 0 waited 0.8 s for rank 2 (program 0, words, generation 2, seen {seen})"
        assert found[0]["error"] == message
        for rank, each in enumerate(found):
            assert each["masked"]
            assert each["first error"] is None
            assert each["all"] == (rank != 0)
            assert each["aborted"]
            assert each["works again"]


@on_every_fabric
class TestTimeouts:
    def test_who_waited_for_whom_is_told_and_everybody_stops_waiting(self, ranks):
        require(3, ranks.fabric)  # ranks that share a GPU count the bound more slowly
        first, second, third = ranks.run(3, f"{TASKS}:timeouts", timeout_s=BOUND)
        arrived, seconds = first["first wait"]
        assert not arrived
        assert SHORTEST[ranks.fabric] <= seconds < BOUND + 10  # on a busy machine
        assert first["next wait"][0] is False
        assert first["next wait"][1] < BOUND / 2
        message = "rank 0 waited 0.8 s for rank 2 (program 0, channel 3, generation 7, seen 0)"
        assert first["errors"] == [message] * 2
        assert second["peer's wait"][0] is False
        assert second["peer's wait"][1] < BOUND / 2
        assert "rank 1 aborted: a peer timed out on rank 2" in second["errors"][0]
        assert all(rank["aborted"] for rank in (first, second, third))

    def test_a_reset_makes_the_pool_work_again(self, ranks):
        for rank in ranks.run(3, f"{TASKS}:timeouts", timeout_s=BOUND):
            assert rank["after the reset"] is None
            assert rank["works again"]

    def test_the_missing_one_of_many_is_named(self, ranks):
        message = ranks.run(
            3, f"{TASKS}:missing_lanes", told=[(0, 1), (1, 1), (1, 2)], timeout_s=BOUND
        )[0]
        assert "for rank 2 (program 0, channel 0, generation 3, seen 0)" in message

    def test_a_channel_is_not_named_with_the_source_of_another(self, ranks):
        message = ranks.run(3, f"{TASKS}:missing_lanes", told=[(0, 1), (1, 2)], timeout_s=BOUND)[0]
        pairs = ("rank 2 (program 0, channel 0,", "rank 1 (program 0, channel 1,")
        assert any(pair in message for pair in pairs), message


@on_every_fabric
@pytest.mark.dealt("op")
@pytest.mark.parametrize(
    ("op", "variant", "fields"),
    [
        *(
            (OP, name, {"m": 33, "n": 16, "k": 48, "gather_dim": dim})
            for name in FUSED_OR_ONE_SHOT
            for dim in gather_dims(name)
        ),
        ("matmul_all_reduce", "push", {"m": 5, "n": 48, "k": 12, "rms_norm": True}),
        ("matmul_all_reduce", "push_two_shot", {"m": 5, "n": 96, "k": 12}),
        ("stencil", "persistent", {"rows": 12, "columns": 9, "steps": 3, "norm_every": 1}),
        ("stencil", "copies", {"rows": 12, "columns": 9, "steps": 3, "norm_every": 1}),
    ],
)
class TestAbsentPeer:
    def test_outputs_that_need_it_are_nan_until_a_reset(self, ranks, op, variant, fields):
        from tests.kernels.tasks import Case

        case = Case(variant, fields, op=op)
        found = ranks.run(ranks.several, f"{TASKS}:absent_peer", case=case, timeout_s=BOUND)
        for rank in found[:-1]:
            assert rank["error"] is not None
            assert rank["NaN"]
            assert rank["neither right nor NaN"] == 0
        for rank in found:
            assert rank["right after the reset"] == [True] * 3
            assert rank["error after the reset"] is None
