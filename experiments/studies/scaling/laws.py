"""Laws of the held-out loss in parameters N, tokens D and learners M, their fit, and how far to trust it.

After "Scaling Laws for DiLoCo" (arXiv 2503.09799), with its L = A N^alpha M^beta among them. The parameters
of a law minimise the Huber loss of its log residuals, as is usual for such laws (arXiv 2203.15556).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import pandas as pd
from scipy import optimize

from experiments.studies.scaling.measurements import SIZE, ScalingError, means, redrawn

HUBER = 1e-3  # residual of a log loss from which on it counts by its size, no longer by its square

_INDEPENDENT = 1e-3  # least eigenvalue of the correlations between the logarithms of N, D and M

_TOLERANCES = {"xtol": 1e-12, "ftol": 1e-12, "gtol": 1e-12}

Array = np.ndarray
Interval = tuple[float, float]
_FALLS = (-0.05, -0.3, -0.8)  # exponents of N and D to begin with
_SHARES = (0.2, 0.5, 0.8)  # of the loss that does not fall
_FLOOR = ("1",)


@dataclasses.dataclass(frozen=True)
class Law:
    """A sum of products of powers, times powers of M.

    Attributes:
      formula: as a reader writes it.
      parameters: their names, in the order of theta.
      distinct: of "N", "D" and "M" those that it has, with the number of values of each that it takes to
        determine its parameters.
      terms: of the sum, each by what its logarithm is linear in: "1", whose parameter is a level, and n, d, m
        (the logarithms of N, D, M) or the product nm.
      factor: the same of what the sum is multiplied by.
    """

    formula: str
    parameters: tuple[str, ...]
    distinct: Mapping[str, int]
    terms: tuple[tuple[str, ...], ...]
    factor: tuple[str, ...] = ()

    @property
    def levels(self) -> list[str]:
        """The parameters of which theta has the logarithm."""
        features = [name for term in self.terms for name in term]
        return [name for name, feature in zip(self.parameters, features, strict=False) if feature == "1"]

    def log_value(self, theta: Sequence[float], n: Array, d: Array, m: Array) -> Array:
        """log L, where n, d, m are arrays alike."""
        known, left = {"1": np.ones_like(n), "n": n, "d": d, "m": m, "nm": n * m}, iter(theta)
        logs = [sum(next(left) * known[name] for name in term) for term in self.terms]
        return np.logaddexp.reduce(logs) + sum(next(left) * known[name] for name in self.factor)

    def starts(self, n: float, d: float, log_loss: float) -> Iterator[list[float]]:
        """Values of theta that a fit may begin from, where n, d and log_loss are means."""
        falling = [term for term in self.terms if term != _FLOOR]
        exponents = [name for term in falling for name in term if name in ("n", "d")]
        floor = len(falling) < len(self.terms)
        for share in _SHARES if floor else (0.0,):
            for falls in itertools.product(_FALLS if floor else (-0.1,), repeat=len(exponents)):
                left, theta = iter(falls), []
                for term in self.terms:
                    slopes = [next(left) if name in ("n", "d") else 0.0 for name in term[1:]]
                    part = share if term == _FLOOR else (1 - share) / len(falling)
                    fallen = sum(
                        s * {"n": n, "d": d}.get(x, 0.0) for s, x in zip(slopes, term[1:], strict=True)
                    )
                    theta += [math.log(part) + log_loss - fallen, *slopes]
                yield [*theta, *(0.0 for _ in self.factor)]


LAWS: dict[str, Law] = {
    "power": Law("A N^alpha M^beta", ("A", "alpha", "beta"), {"N": 2, "M": 2}, (("1", "n", "m"),)),
    "floor": Law(
        "A N^alpha M^beta + E",
        ("A", "alpha", "beta", "E"),
        {"N": 3, "M": 2},
        (("1", "n", "m"), _FLOOR),
    ),
    "exponent": Law(
        "A N^(alpha + beta log M) + E",
        ("A", "alpha", "beta", "E"),
        {"N": 3, "M": 2},
        (("1", "n", "nm"), _FLOOR),
    ),
    "tokens": Law(
        "A N^alpha D^gamma M^beta",
        ("A", "alpha", "gamma", "beta"),
        {"N": 2, "D": 2, "M": 2},
        (("1", "n", "d", "m"),),
    ),
    "sum": Law(
        "(A N^alpha + B D^gamma + E) M^beta",
        ("A", "alpha", "B", "gamma", "E", "beta"),
        {"N": 3, "D": 3, "M": 2},
        (("1", "n"), ("1", "d"), _FLOOR),
        ("m",),
    ),
}
SINGLE = Law("A N^alpha", ("A", "alpha"), {"N": 2}, (("1", "n"),))  # at one M, or of data-parallel training
BY_LEARNERS = Law("A M^beta", ("A", "beta"), {"M": 2}, (("1", "m"),))  # at one N


@dataclasses.dataclass(frozen=True)
class Fit:
    """A law with its parameters."""

    law: Law  # the form
    theta: tuple[float, ...]  # as `law.log_value` takes it
    residual: float  # mean absolute difference of log L between the law and what was fitted: 0.01 is 1%

    def predict(self, places: pd.DataFrame) -> Array:
        """The loss at each place, nats per token."""
        return np.exp(self.law.log_value(np.asarray(self.theta), *_logs(places)))

    @property
    def parameters(self) -> dict[str, float]:
        """The law's parameters by the names in its formula."""
        named = zip(self.law.parameters, self.theta, strict=True)
        return {name: math.exp(t) if name in self.law.levels else t for name, t in named}


def fit(law: Law, losses: pd.DataFrame, begin: Sequence[float] | None = None) -> Fit:
    """The law's best parameters for the mean losses of the places of a table of `measurements`.

    Args:
      law: what is fitted; with an M, no place may be of data-parallel training.
      losses: at each place, of every seed.
      begin: theta to begin from; None: the best squares that any of the law's own starts leads to.

    Raises:
      ScalingError: the places do not determine the parameters.
    """
    places = means(losses)
    _check(law, places)
    n, d, m = _logs(places)
    observed = np.log(places.loss.to_numpy())

    def residuals(theta: Array) -> Array:
        return law.log_value(theta, n, d, m) - observed

    if begin is None:
        starts = law.starts(n.mean(), d.mean(), observed.mean())
        ends = [optimize.least_squares(residuals, start, x_scale="jac", max_nfev=400) for start in starts]
        begin = min(ends, key=lambda end: end.cost).x
    theta = _huber(residuals, begin)
    return Fit(law, tuple(theta.tolist()), float(np.mean(np.abs(residuals(theta)))))


def intervals(
    law: Law, losses: pd.DataFrame, rng: np.random.Generator, draws: int = 200
) -> dict[str, Interval]:
    """The 95% interval of each parameter of a fit, by the percentiles of a bootstrap over the seeds.

    Each draw has one set of seeds for all places, since a seed does alike to all of them. With three seeds
    the interval is too narrow, by about the root of 2/3; with one at every place there is none.

    Raises:
      ScalingError: the places do not determine the law, or none has a second seed.
    """
    middle = fit(law, losses)
    return percentiles([fit(law, one, middle.theta).parameters for one in redrawn(losses, rng, draws)])


def gaps_at(losses: pd.DataFrame, params: float) -> dict[str, float]:
    """How far M learners' loss is above data-parallel's at another size, by two laws that follow both here.

    Args:
      losses: at each place, of one M and of data-parallel, at one length of a run.
      params: the other size.

    Returns:
      `losses`: of each loss A N^alpha, as published (arXiv 2503.09799); `gaps`: of the gap A N^alpha, which
      never changes its sign, NaN where it does.

    Raises:
      ScalingError: there are fewer than two sizes, or data-parallel lacks one.
    """
    places = means(losses)
    baseline, learners = (places[(places.learners == 0) == own].set_index("params") for own in (True, False))
    gaps = learners.loss / baseline.loss.reindex(learners.index) - 1
    if len(gaps) < 2 or gaps.isna().any():
        raise ScalingError("needs two sizes, and of data-parallel as many")
    sizes, at = np.log(gaps.index.to_numpy(dtype=float)), math.log(params)

    def line(values: Array) -> float:
        return float(np.polyval(np.polyfit(sizes, np.log(values), 1), at))

    of_losses = line(learners.loss.to_numpy()) - line(baseline.loss.reindex(learners.index).to_numpy())
    positive = bool((gaps > 0).all())
    return {
        "losses": math.expm1(of_losses),
        "gaps": math.exp(line(gaps.to_numpy())) if positive else math.nan,
    }


def percentiles(samples: Sequence[Mapping[str, float]]) -> dict[str, Interval]:
    """The 95% interval of each figure over these draws of all."""
    return {name: tuple(np.percentile([one[name] for one in samples], (2.5, 97.5))) for name in samples[0]}


def hold_out_largest(law: Law, losses: pd.DataFrame) -> dict[str, float]:
    """Fits the law without the largest size, and compares its prediction for that one with the losses.

    Returns:
      `params`, the size, and `error`, the mean over its places of |log prediction - log mean loss|: 0.01 is
      1%.

    Raises:
      ScalingError: there is one size, or those that are left do not determine the law.
    """
    sizes = losses.params.unique()
    if len(sizes) < 2:
        raise ScalingError(f"sizes: there is {len(sizes)} size of a model, but holding one out needs two")
    largest = losses.params == max(sizes)
    fitted, unseen = fit(law, losses[~largest]), means(losses[largest])
    errors = np.abs(np.log(fitted.predict(unseen)) - np.log(unseen.loss))
    return {"params": int(max(sizes)), "error": float(errors.mean())}


def _huber(residuals: Callable[[Array], Array], theta: Sequence[float]) -> Array:
    """The least Huber loss from theta on, by way of ever less square ones: at once, the solver gets stuck."""
    for scale in (100 * HUBER, 30 * HUBER, 10 * HUBER, 3 * HUBER, HUBER):
        theta = optimize.least_squares(
            residuals, theta, loss="huber", f_scale=scale, x_scale="jac", max_nfev=400, **_TOLERANCES
        ).x
    return theta


def _logs(places: pd.DataFrame) -> tuple[Array, Array, Array]:
    n, d, m = np.log(places[SIZE].clip(lower=1).to_numpy(float)).T
    return n, d, m


def _check(law: Law, places: pd.DataFrame) -> None:
    if "M" in law.distinct and (places.learners < 1).any():
        raise ScalingError(f"{law.formula}: has an M, which data-parallel training has not")
    logs = dict(zip("NDM", _logs(places), strict=True))
    for name, count in law.distinct.items():
        known = len(np.unique(logs[name]))
        if known < count:
            raise ScalingError(f"{law.formula}: needs {count} values of {name}, but there are {known}")
    if len(places) < len(law.parameters):
        raise ScalingError(
            f"{law.formula}: has {len(law.parameters)} parameters, but there are {len(places)} places"
        )
    if len(law.distinct) > 1:
        together = np.corrcoef([logs[name] for name in law.distinct])
        if np.linalg.eigvalsh(together)[0] < _INDEPENDENT:
            names = ", ".join(law.distinct)
            raise ScalingError(f"{law.formula}: {names} do not vary independently of each other")
