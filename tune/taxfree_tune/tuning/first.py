"""What searches ask for first, which is compiled before they do."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from taxfree import fingerprints
from taxfree.problems import recorded_problem
from taxfree_check.cross_compile.screen import Screen
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.variant import Problem, op_of
from taxfree_tune.measuring.trial import Candidate, key
from taxfree_tune.tuning.candidates import first_candidates, is_legal, variants_for
from taxfree_tune.tuning.history import trials_that_hold
from taxfree_tuning_db import Database, Record, neighbours, record_key, shipped_records

_NEIGHBOURS = 3


class FirstCandidates:
    """The first candidates of problems, by what is recorded of them and of similar ones.

    What was compiled ahead is asked for, whatever is recorded later. Threads may share it, each
    with a connection of its own to the database.

    Args:
        hardware: of the ranks.
        screen: compiles.
        only: names of variants to try; those that are searched by default.
    """

    def __init__(self, hardware: Hardware, screen: Screen, only: Sequence[str] | None) -> None:
        self._hardware, self._screen, self._only = hardware, screen, only
        self._fingerprint = fingerprints.hardware_fingerprint(hardware)
        self._begun: dict[Problem, list[Candidate]] = {}

    def of(self, database: Database, problem: Problem) -> list[Candidate]:
        """The candidates to try first, most promising first."""
        if problem in self._begun:
            return self._begun[problem]
        variants = variants_for(problem, self._hardware, self._only)
        nearby = self._winners_nearby(database, problem)
        first = first_candidates(variants, problem, self._hardware, nearby)
        return [*self._winners_of_other_versions(database, problem), *first]

    def compile_ahead(self, database: Database, problem: Problem, count: int) -> None:
        """Let the screen compile the first batch of a problem, unless it was begun."""
        if problem in self._begun:
            return
        op, variants = op_of(problem), variants_for(problem, self._hardware, self._only)
        self._begun[problem] = first = self.of(database, problem)
        trials = trials_that_hold(database, op, self._key(problem))
        tried = {key(candidate) for candidate, trial in trials if trial.state != "refused"}
        new = [
            (candidate.variant, candidate.config)
            for candidate in first
            if candidate.variant in variants
            and key(candidate) not in tried
            and is_legal(variants[candidate.variant], problem, self._hardware, candidate.config)
        ]
        self._screen.begin(op, problem, new[:count])

    def _key(self, problem: Problem) -> str:
        return record_key(op_of(problem), dataclasses.asdict(problem), self._fingerprint)

    def _winners_of_other_versions(self, database: Database, problem: Problem) -> list[Candidate]:
        """What the problem's own records name, measured with another version of its variant."""
        op = op_of(problem)
        versions = fingerprints.versions(op)
        winners = (record.winner for record in own_records(database, op, self._key(problem)))
        return [
            Candidate(winner.variant, winner.config)
            for winner in winners
            if winner.variant != "baseline" and winner.version != versions.get(winner.variant)
        ]

    def _winners_nearby(self, database: Database, problem: Problem) -> list[Candidate]:
        """Configs that won on the most similar problems, in the user's records and shipped ones."""
        op = op_of(problem)
        records = [
            record
            for record in (*database.records(), *shipped_records())
            if record.op == op and recorded_problem(op, record.problem) is not None
        ]
        nearest = neighbours(
            records,
            dataclasses.asdict(problem),
            self._fingerprint,
            fingerprints.interpolated_fields(op),
            fingerprints.ignored_fields(op),
        )
        winners = []
        for neighbour in nearest[:_NEIGHBOURS]:
            record = fingerprints.transferred(neighbour, problem)
            for measured in (record.winner, *record.runners_up):
                if measured.variant != "baseline":
                    winners.append(Candidate(measured.variant, measured.config))
        return winners


def own_records(database: Database, op: str, key: str) -> list[Record]:
    """The records of a problem on this hardware: the user's, then the shipped one."""
    alike = (record for record in shipped_records() if record.op == op)  # keys take a while
    shipped = (record for record in alike if record.key == key)
    return [record for record in (database.get(key), *shipped) if record]
