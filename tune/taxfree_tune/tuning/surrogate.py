"""A surrogate of the measurements: predicts the time of candidates from those that have one.

A Gaussian process over the logarithm of times. Two configs are alike if their meta-parameters are;
variants share what they call by the same name. It proposes what is expected to improve most on the
fastest so far.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from taxfree_kernels.variant import Space
from taxfree_tune.measuring.trial import Candidate

_NOISE = 0.02  # of a time, relative
_LENGTHS = (0.5, 1.0, 2.0, 4.0, 16.0)  # in coordinates, which are powers of two
_LEAST = 1e-6  # of a variance
_SLOW = 3.0  # times the fastest: how much slower does not matter

Array = np.ndarray[Any, Any]


class Surrogate:
    """Predictions for the variants of one problem.

    Args:
        spaces: variant -> its space.
    """

    def __init__(self, spaces: Mapping[str, Space]) -> None:
        self._variants = list(spaces)
        self._parameters = list(dict.fromkeys(itertools.chain(*spaces.values())))
        self._text = {
            name: sorted({str(v) for space in spaces.values() for v in space.get(name, ())})
            for name in self._parameters
        }
        self._lengths: Array | None = None

    def propose(
        self,
        measured: Sequence[tuple[Candidate, float]],
        failed: Sequence[Candidate],
        pool: Sequence[Candidate],
        count: int,
    ) -> list[Candidate]:
        """The most promising `count` of the pool.

        Args:
            measured: candidates with microseconds, at least two.
            failed: candidates without a time; the more alike, the less promising.
            pool: other candidates.
        """
        if not pool:
            return []
        known = [candidate for candidate, _ in measured]
        fastest = min(us for _, us in measured)
        x = self._coordinates(known)
        y = np.log([min(us, _SLOW * fastest) for _, us in measured])
        mean, spread = y.mean(), max(y.std(), 1e-3)
        z = (y - mean) / spread
        self._lengths = lengths = _fitted(x, z, self._lengths, _NOISE / spread)
        points = self._coordinates(pool)
        best = z.min()
        chance = np.ones(len(pool))
        if failed:
            chance -= _kernel(points, self._coordinates(failed), lengths).max(axis=1)
        chosen: list[int] = []
        for _ in range(min(count, len(pool))):
            mu, sigma = _posterior(x, z, points, lengths, _NOISE / spread)
            gain = chance * _expected_gain(best, mu, sigma)
            gain[chosen] = -1.0
            index = int(gain.argmax())
            chosen.append(index)
            x, z = (
                np.vstack([x, points[index]]),
                np.append(z, mu[index]),
            )  # as if it were as predicted
        return [pool[index] for index in chosen]

    def _coordinates(self, candidates: Sequence[Candidate]) -> Array:
        """[candidates, variants + parameters]; what a variant lacks is 0."""
        rows = []
        for candidate in candidates:
            row = [2.0 * (name == candidate.variant) for name in self._variants]
            row += [self._coordinate(name, candidate.config.get(name)) for name in self._parameters]
            rows.append(row)
        return np.array(rows)

    def _coordinate(self, name: str, value: Any) -> float:
        if value is None:
            return 0.0
        if isinstance(value, str):
            texts = self._text[name]  # a record may have one that no space has now
            return float(texts.index(value)) if value in texts else -1.0
        return math.log2(1 + value) if isinstance(value, bool) or value < 1 else math.log2(value)


def _kernel(x: Array, y: Array, lengths: Array) -> Array:
    """Correlations of points: a product over coordinates, of exponentials."""
    distance: Array = np.abs(x[:, None, :] - y[None, :, :]) @ (1.0 / lengths)
    return np.exp(-distance)


def _likelihood(x: Array, z: Array, lengths: Array, noise: float) -> float:
    k = _kernel(x, x, lengths) + (noise**2 + 1e-6) * np.eye(len(x))
    try:
        factor = np.linalg.cholesky(k)
    except np.linalg.LinAlgError:
        return -math.inf
    alpha = np.linalg.solve(factor, z)
    variance = max(float(alpha @ alpha) / len(z), _LEAST)  # the one that fits best
    return float(-0.5 * len(z) * math.log(variance) - np.log(np.diag(factor)).sum())


def _fitted(x: Array, z: Array, begin: Array | None, noise: float) -> Array:
    """Lengths of all coordinates, each the most likely in turn."""
    lengths = np.full(x.shape[1], 4.0) if begin is None else begin.copy()
    for column in range(x.shape[1]):
        if np.ptp(x[:, column]) == 0:
            continue
        scores = []
        for length in _LENGTHS:
            lengths[column] = length
            scores.append(_likelihood(x, z, lengths, noise))
        lengths[column] = _LENGTHS[int(np.argmax(scores))]
    return lengths


def _posterior(
    x: Array, z: Array, points: Array, lengths: Array, noise: float
) -> tuple[Array, Array]:
    """Mean and standard deviation at points."""
    factor = np.linalg.cholesky(_kernel(x, x, lengths) + (noise**2 + 1e-6) * np.eye(len(x)))
    cross = np.linalg.solve(factor, _kernel(x, points, lengths))
    weights = np.linalg.solve(factor, z)
    scale = max(float(weights @ weights) / len(z), _LEAST)
    sigma = np.sqrt(scale * np.maximum(1.0 - (cross**2).sum(axis=0), _LEAST))
    return cross.T @ weights, sigma


def _expected_gain(best: float, mean: Array, sigma: Array) -> Array:
    """Expected improvement of normal variables over `best`."""
    u = (best - mean) / sigma
    density = np.exp(-0.5 * u**2) / math.sqrt(2 * math.pi)
    below = 0.5 * (1.0 + np.vectorize(math.erf)(u / math.sqrt(2)))
    gain: Array = sigma * (u * below + density)
    return gain
