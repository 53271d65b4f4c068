"""What is tried next, in an Optuna study that knows the trials.

First come the candidates that were enqueued, with random ones where these are few. Then a surrogate
of what was measured proposes: of the neighbours of the fastest, and of drawn candidates, those that
are expected to gain most. The variant is one choice of a trial, and each of its meta-parameters
another, all categorical. A random one that the variant refuses is told as pruned and another is
asked for, before anything is compiled. Failures are also told as pruned, and duplicates as what
they duplicate. What is known of a candidate is what its last trial in the study says.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.trial import FrozenTrial, Trial, TrialState

from taxfree_kernels.hardware import Hardware
from taxfree_kernels.variant import Problem, Variant
from taxfree_tune.measuring.trial import Candidate, key
from taxfree_tune.tuning.candidates import is_legal
from taxfree_tune.tuning.surrogate import Surrogate

_ASKS_PER_CANDIDATE = 50  # if so many are refused or known, the space counts as exhausted
_LEAST_KNOWN, _MOST_KNOWN = 4, 200  # measurements that the surrogate learns from
_STARTS, _DRAWN = 8, 400  # fastest candidates whose neighbours are judged, and drawn ones

optuna.logging.set_verbosity(optuna.logging.ERROR)


class Search:
    """A study over all variants of one problem, in memory.

    Args:
        variants: name -> variant; those that can serve the problem.
        problem, hardware: what they are asked to serve.
        seed: of the sampler; with the same measurements it gives the same trials.
    """

    def __init__(
        self,
        variants: Mapping[str, Variant],
        problem: Problem,
        hardware: Hardware,
        seed: int,
    ) -> None:
        self._variants, self._problem, self._hardware = variants, problem, hardware
        spaces = {name: variant.space(problem, hardware) for name, variant in variants.items()}
        # variant -> parameter -> choice as text -> its value
        self._spaces = {
            name: {
                parameter: {str(value): value for value in values}
                for parameter, values in space.items()
            }
            for name, space in spaces.items()
        }
        self._surrogate = Surrogate(spaces)
        self._random = random.Random(seed)
        self._asked: dict[str, Trial] = {}
        self._illegal: list[tuple[Candidate, str]] = []
        self._candidates: dict[int, tuple[str, Candidate] | None] = {}  # of ended trials, by number
        sampler = optuna.samplers.RandomSampler(seed=seed)
        self._study = optuna.create_study(direction="minimize", sampler=sampler)

    def _trials(self, *states: TrialState) -> Iterator[tuple[FrozenTrial, str, Candidate]]:
        """Ended trials, with those of their candidates that have all of today's meta-parameters."""
        for trial in self._study.get_trials(deepcopy=False, states=states):
            if trial.number not in self._candidates:
                candidate = self._candidate(trial.params)
                named = None if candidate is None else (key(candidate), candidate)
                self._candidates[trial.number] = named
            if (named := self._candidates[trial.number]) is not None:
                yield trial, *named

    def _is_legal(self, candidate: Candidate) -> bool:
        if candidate.variant not in self._variants:
            return False
        variant = self._variants[candidate.variant]
        return is_legal(variant, self._problem, self._hardware, candidate.config)

    def _known(self) -> dict[str, float | None]:
        """Candidates whose fate is known -> microseconds; None for those that cannot be used."""
        ended = self._trials(TrialState.COMPLETE, TrialState.PRUNED)
        return {text: trial.value for trial, text, _ in ended}

    @property
    def measured(self) -> int:
        """Candidates with a time."""
        return sum(value is not None for value in self._known().values())

    def learn(self, candidate: Candidate, median_us: float | None) -> None:
        """Take over what is known from elsewhere: a time, or None for one that cannot be used.

        What does not serve today is passed over.
        """
        known = self._known()
        is_told = key(candidate) in known and known[key(candidate)] == median_us
        if is_told or not self._is_legal(candidate):
            return
        spaces = self._spaces[candidate.variant]
        choices = {f"{candidate.variant}.{name}": list(space) for name, space in spaces.items()}
        choices["variant"] = list(self._variants)
        trial = optuna.trial.create_trial(
            state=TrialState.PRUNED if median_us is None else TrialState.COMPLETE,
            value=median_us,
            params=self._parameters(candidate),
            distributions={name: CategoricalDistribution(texts) for name, texts in choices.items()},
        )
        self._study.add_trial(trial)

    def knows(self, candidate: Candidate) -> bool:
        """Whether a candidate has a time that holds for today's kernels."""
        return self._known().get(key(candidate)) is not None

    @property
    def has_tried(self) -> bool:
        """Whether the fate of any candidate is known."""
        return bool(self._known())

    def enqueue(self, candidates: Sequence[Candidate]) -> None:
        """Try these first, in their order, unless they are known or wait already."""
        known = self._known()
        waiting = [trial.system_attrs.get("fixed_params") for trial in self._waiting()]
        for candidate in candidates:
            if candidate.variant not in self._spaces or key(candidate) in known:
                continue
            parameters = self._parameters(candidate)
            if parameters not in waiting:
                waiting.append(parameters)
                self._study.enqueue_trial(parameters)

    def _waiting(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False, states=[TrialState.WAITING])

    def _parameters(self, candidate: Candidate) -> dict[str, str]:
        """A candidate in the study's form; values that the space no longer has stay as they are."""
        values = {
            f"{candidate.variant}.{parameter}": str(candidate.config[parameter])
            for parameter, choices in self._spaces[candidate.variant].items()
            if candidate.config.get(parameter) in choices.values()
        }
        return {"variant": candidate.variant, **values}

    def ask(self, count: int) -> list[Candidate]:
        """Up to `count` candidates that are new and that no variant refuses."""
        batch: list[Candidate] = []
        if not self._variants:
            return batch
        known = self._known()
        self._enqueue_next(count, known.keys() | self._asked.keys())
        for _ in range(_ASKS_PER_CANDIDATE * count):
            if len(batch) == count:
                break
            trial = self._study.ask()
            candidate = self._suggest(trial)
            if key(candidate) in self._asked:
                self._study.tell(trial, state=TrialState.FAIL)
            elif key(candidate) in known:
                self._tell(trial, known[key(candidate)])
            else:
                variant = self._variants[candidate.variant]
                reason = variant.illegal_reason(self._problem, self._hardware, candidate.config)
                if reason is None:
                    self._asked[key(candidate)] = trial
                    batch.append(candidate)
                else:
                    self._illegal.append((candidate, reason))
                    known[key(candidate)] = None
                    self._prune(trial, reason)
        return batch

    def _enqueue_next(self, count: int, known: Set[str]) -> None:
        """Let `count` candidates wait, where so many can be proposed."""
        missing = count - len(self._waiting())
        if missing <= 0 or self.measured < _LEAST_KNOWN:
            return
        measured = [(candidate, us) for us, candidate in self.best(_MOST_KNOWN)]
        pruned = [candidate for *_, candidate in self._trials(TrialState.PRUNED)]
        failed = [candidate for candidate in pruned if self._is_legal(candidate)][-_MOST_KNOWN:]
        pool = self._pool([candidate for candidate, _ in measured[:_STARTS]], known)
        for candidate in self._surrogate.propose(measured, failed, pool, missing):
            self._study.enqueue_trial(self._parameters(candidate))

    def _pool(self, fastest: Sequence[Candidate], known: Set[str]) -> list[Candidate]:
        """Unknown candidates that no variant refuses: near the fastest ones, and drawn ones."""
        pool: dict[str, Candidate] = {}

        def add(variant: str, config: dict[str, Any]) -> None:
            candidate = Candidate(variant, config)
            text = key(candidate)
            if text in known or text in pool:
                return
            asked = (self._problem, self._hardware, config)
            if self._variants[variant].illegal_reason(*asked) is None:
                pool[text] = candidate

        for candidate in fastest:
            space = self._spaces[candidate.variant]
            for name, values in space.items():
                for value in values.values():
                    changed = {**candidate.config, name: value}
                    add(candidate.variant, changed)
                    other = self._random.choice(list(space))
                    another = self._random.choice(list(space[other].values()))
                    add(candidate.variant, {**changed, other: another})
        for _ in range(_DRAWN):
            variant = self._random.choice(list(self._spaces))
            space = self._spaces[variant]
            add(variant, {n: self._random.choice(list(v.values())) for n, v in space.items()})
        return list(pool.values())

    def take_illegal(self) -> list[tuple[Candidate, str]]:
        """Candidates that variants refused since the last call, each with the reason."""
        taken, self._illegal = self._illegal, []
        return taken

    def _suggest(self, trial: Trial) -> Candidate:
        name = trial.suggest_categorical("variant", list(self._variants))
        config = {
            parameter: choices[trial.suggest_categorical(f"{name}.{parameter}", list(choices))]
            for parameter, choices in self._spaces[name].items()
        }
        return Candidate(name, config)

    def _candidate(self, parameters: Mapping[str, Any]) -> Candidate | None:
        name = parameters.get("variant")
        if name not in self._spaces:
            return None
        config = {}
        for parameter, choices in self._spaces[name].items():
            text = parameters.get(f"{name}.{parameter}")
            if text not in choices:
                return None
            config[parameter] = choices[text]
        return Candidate(name, config)

    def tell(self, candidate: Candidate, median_us: float) -> None:
        """A candidate was measured, in the mode that decides."""
        self._tell(self._asked.pop(key(candidate)), median_us)

    def ask_again(self, candidate: Candidate) -> None:
        """A candidate's time cannot be trusted: it is not learned, and asked for anew."""
        self._study.tell(self._asked.pop(key(candidate)), state=TrialState.FAIL)
        self._study.enqueue_trial(self._parameters(candidate))

    def tell_pruned(self, candidate: Candidate, reason: str) -> None:
        """A candidate cannot be used."""
        self._prune(self._asked.pop(key(candidate)), reason)

    def _prune(self, trial: Trial, reason: str) -> None:
        trial.set_user_attr("reason", reason)
        self._tell(trial, None)

    def _tell(self, trial: Trial, median_us: float | None) -> None:
        state = TrialState.PRUNED if median_us is None else TrialState.COMPLETE
        self._study.tell(trial, median_us, state=state)

    def best(self, count: int) -> list[tuple[float, Candidate]]:
        """The fastest candidates so far and their microseconds, fastest first."""
        times = [(value, text) for text, value in self._known().items() if value is not None]
        return [(value, Candidate(**json.loads(text))) for value, text in sorted(times)[:count]]
