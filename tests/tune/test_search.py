"""The search: what it proposes, what it remembers, and that a seed decides it."""

from __future__ import annotations

import dataclasses

import pytest

from taxfree_kernels.hardware import KNOWN

pytestmark = pytest.mark.filterwarnings("ignore:.*is an experimental feature")
CPU = KNOWN["cpu"]


class Knobs:
    """A variant with two meta-parameters, of which one pair is refused."""

    def __init__(self, slowness):
        self.slowness = slowness

    def space(self, problem, hardware):
        return {"BLOCK": (16, 32, 64, 128), "SWAP": (False, True)}

    def unsupported_reason(self, problem, hardware):
        return None

    def illegal_reason(self, problem, hardware, config):
        if config["BLOCK"] == 128 and config["SWAP"]:
            return "128 rows cannot be swapped"
        return None

    def time(self, config):
        return self.slowness * (10 + abs(config["BLOCK"] - 64) + 5 * config["SWAP"])


FAST, SLOW = Knobs(1), Knobs(3)
USABLE = 2 * 7


def search(seed=0, variants=None):
    from taxfree_tune.tuning.search import Search

    return Search(variants or {"fast": FAST, "slow": SLOW}, None, CPU, seed)


def candidate(variant, block, swap=False):
    from taxfree_tune.measuring.trial import Candidate

    return Candidate(variant, {"BLOCK": block, "SWAP": swap})


def measure(found, batch):
    for each in batch:
        found.tell(each, {"fast": FAST, "slow": SLOW}[each.variant].time(each.config))


def run(found, trials, batch=3):
    """Ask and measure in batches; the candidates in their order."""
    tried = []
    while len(tried) < trials and (asked := found.ask(min(batch, trials - len(tried)))):
        measure(found, asked)
        tried += asked
    return [text(each) for each in tried]


def text(each):
    from taxfree_tune.measuring.trial import key

    return key(each)


class TestProposals:
    def test_what_is_enqueued_comes_first_and_in_its_order(self):
        found = search()
        first = [candidate("slow", 32), candidate("fast", 16, True), candidate("fast", 128)]
        found.enqueue(first)
        assert found.ask(2) + found.ask(1) == first

    def test_nothing_is_proposed_twice_and_the_whole_space_is_found(self):
        tried = run(search(), trials=USABLE)
        assert len(tried) == len(set(tried)) == USABLE

    def test_an_exhausted_space_proposes_nothing(self):
        found = search()
        run(found, trials=100)
        assert found.ask(3) == []
        assert found.measured == USABLE

    def test_what_a_variant_refuses_is_told_with_its_reason_and_never_proposed(self):
        found = search()
        found.enqueue([candidate("fast", 128, True)])
        assert candidate("fast", 128, True) not in found.ask(5)
        assert (candidate("fast", 128, True), "128 rows cannot be swapped") in found.take_illegal()
        assert (candidate("fast", 128, True), "128 rows cannot be swapped") not in (
            found.take_illegal()
        )

    def test_a_pruned_candidate_is_not_proposed_again_nor_among_the_best(self):
        found = search()
        found.enqueue([candidate("fast", 64)])
        (asked,) = found.ask(1)
        found.tell_pruned(asked, "crashed: SIGKILL")
        assert text(asked) not in run(found, trials=USABLE - 1)
        assert all(best != asked for _, best in found.best(100))

    def test_a_candidate_of_an_unknown_variant_or_value_is_not_asked_for_as_such(self):
        found = search()
        found.enqueue([candidate("gone", 64), candidate("fast", 48)])
        assert all(each.config["BLOCK"] != 48 for each in found.ask(3))

    def test_the_best_come_fastest_first(self):
        found = search()
        run(found, trials=USABLE)
        assert found.best(2) == [(10, candidate("fast", 64)), (15, candidate("fast", 64, True))]


class TestSeeds:
    def test_the_same_seed_and_times_give_the_same_trials(self):
        runs = [run(search(seed=5), trials=12) for _ in range(2)]
        assert runs[0] == runs[1]

    def test_another_seed_gives_others(self):
        assert len({tuple(run(search(seed=seed), trials=10)) for seed in range(4)}) > 1


class TestResuming:
    """What a database knows is told to a new search."""

    @staticmethod
    def resumed(before, variants=None):
        again = search(variants=variants)
        for us, each in before.best(USABLE):
            again.learn(each, us)
        return again

    def test_what_was_measured_is_known_and_not_repeated(self):
        before = search()
        tried = run(before, trials=6)
        again = self.resumed(before)
        assert again.measured == 6
        assert again.best(1) == before.best(1)
        assert not set(run(again, trials=USABLE - 6)) & set(tried)
        assert again.measured == USABLE

    def test_what_was_pruned_is_for_others_to_remember(self):
        """What failed is in the database; what was refused may not be any more."""
        found = search()
        failed, refused = found.ask(2)
        found.tell_pruned(failed, "wrong")
        found.tell_pruned(refused, "spills")
        again = self.resumed(found)
        again.learn(failed, None)
        tried = run(again, trials=USABLE)
        assert text(failed) not in tried
        assert text(refused) in tried

    def test_what_a_variant_has_come_to_refuse_is_no_longer_known(self):
        before = search()
        run(before, trials=USABLE)
        strict = Knobs(1)
        strict.illegal_reason = lambda problem, hardware, config: "no"
        again = self.resumed(before, variants={"fast": strict, "slow": SLOW})
        again.learn(
            dataclasses.replace(candidate("slow", 64), config={"BLOCK": 64, "GONE": 1}), 1.0
        )
        assert {each.variant for _, each in again.best(USABLE)} == {"slow"}
        assert again.measured == USABLE // 2

    def test_trials_of_a_variant_that_is_gone_are_passed_over(self):
        before = search()
        run(before, trials=USABLE)
        assert self.resumed(before, variants={"fast": FAST}).measured == USABLE // 2
