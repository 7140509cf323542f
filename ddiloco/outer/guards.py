"""Guards: which outer gradients are merged, and which learners are in quarantine.

A gate is a pure function of a few figures of each offer in a round, and of the rounds before; it names the
offers that are out of line. `Guard` applies the gates, puts learners that were out of line too often in
quarantine, and releases them once enough of their offers in a row would have passed.

Learners are compared with each other, so only a minority of liars is found. With fewer than three learners
only impossible offers are. docs/security.md says what is found when.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ddiloco.config import setting

_FACTOR = 5.0  # honest learners of a round were found within 2.3: docs/results/security.md
_DISPUTED = 100.0  # the same if half of a round have about the same norm: either half may be right
_SPREADS = 6.0  # median absolute deviations, where the others differ more than that
_GROWTH = 0.75  # norms grow with the steps to a power between 1/2 (a random walk) and 1 (a straight line)
_WARM_UP = 6  # rounds of a fragment before offers are judged by those of earlier rounds
_STRIKES = 3  # offers left out, of the last 12, that put a learner in quarantine
_RELEASE = 24  # offers in a row that would have passed, after which a learner is let in again
_RECENT = 3  # rounds of a fragment after which an offer is no measure: the learning rate may have changed
_RECALL = 24  # rounds of a fragment in which what passed is no reason to leave out as much again
_STILL = 1e-7  # root mean square of the largest piece, below which a fragment did not move: rare rows do not
_LONGEST = 30.0  # times the parameters themselves: a longer outer gradient is no training
_OPPOSED = 0.25  # the typical cosine of a round from which one that turns away is plain at once
_SCORES = 256  # rounds over which cosines are averaged; a single one is noise late in training
_TURNS = 3  # of each fragment before an average counts, since rounds that are close share their data
_STRETCH = 24  # rounds at least in which a learner must have turned away: an honest one may meet odd data
_NOWHERE = 0.1  # of the others' average; honest learners came down to 0.16 ...
_CLEAR = 3.0  # ... of rounds times the others' average squared: where that is small, few rounds say little


class Offered(NamedTuple):
    """A learner's offer as the gates see it."""

    learner: int  # its number
    steps: int  # inner steps that the offer stands for
    norm: float  # of the outer gradient
    peak: float  # the largest root mean square of one piece of it
    # The median of its cosines with the other offers of the round; None where there are not two
    cosine: float | None = None
    tokens: int = 0  # claimed tokens of the steps

    @property
    def normalized(self) -> tuple[float, float]:
        """Logarithms of norm and peak, less the growth expected of so many steps."""
        longest = _GROWTH * math.log(max(1, self.steps))
        return _log(self.norm) - longest, _log(self.peak) - longest

    @property
    def moved(self) -> bool:
        """Whether it is more than rounding; rows of an embedding that no token called for do not move."""
        return self.peak > _STILL


@dataclasses.dataclass(frozen=True)
class Past:
    """Earlier rounds that a gate may compare with."""

    rounds: int = 0  # of this fragment so far
    fragments: int = 1  # of which there were rounds
    # By learner, its newest offer of this fragment in the last rounds before this one
    newest: Mapping[int, Offered] = dataclasses.field(default_factory=dict)
    # By learner, its newest cosines in rounds of any fragment
    scores: Mapping[int, Sequence[float]] = dataclasses.field(default_factory=dict)
    # The largest `Offered.normalized` that has passed in the fragment's last rounds
    passed: tuple[float, float] = (-math.inf, -math.inf)
    # Gives that of the fragment's parameters before the round, for which they are read
    length: Callable[[], float] = lambda: 0.0
    step_tokens: int | None = None  # the most that a step of any learner can have; None: not known


@dataclasses.dataclass(frozen=True)
class GuardConfig:
    """Rules for leaving out offers."""

    gates: tuple[str, ...] = setting(
        ("tokens", "norm", "direction"), "what offers are judged by; (): all that are finite are merged"
    )

    def __post_init__(self) -> None:
        unknown = [name for name in self.gates if name not in GATES]
        if unknown:
            raise ValueError(f"gates: {unknown[0]!r} is none; there are {', '.join(GATES)}")


Gate = Callable[[Sequence[Offered], Past], dict[int, str]]


def tokens(offers: Sequence[Offered], past: Past) -> dict[int, str]:
    """Finds offers that claim more tokens than their steps can have had: they would outweigh all others.

    Example:
      >>> tokens([Offered(0, 24, 1.0, 0.1, tokens=2**53)], Past(step_tokens=2048))
      {0: 'it claims more tokens than its steps can have had'}
    """
    if past.step_tokens is None:
        return {}
    why = "it claims more tokens than its steps can have had"
    return {offer.learner: why for offer in offers if offer.tokens > offer.steps * past.step_tokens}


def norm(offers: Sequence[Offered], past: Past) -> dict[int, str]:
    """Finds outer gradients far longer than those of the others, as a whole or in one piece.

    Each is compared with the other offers of the round, or, where there are fewer than two and the fragment
    is past its warm-up, with the others' newest offers of the three rounds before too. The bound is five
    times their upper median, or six median absolute deviations where they differ by more; a hundred times
    where half of a round are about as long: two of four may have met a token that the others did not. Short
    ones pass, and so does what is no longer than what passed before. Those that did not move are no measure.

    Example:
      >>> offers = [Offered(0, 24, 1.0, 0.1), Offered(1, 24, 1.2, 0.1), Offered(2, 24, 1e6, 0.1)]
      >>> norm(offers, Past())
      {2: 'its outer gradient is far longer than those of others'}
    """
    here = {offer.learner: offer for offer in offers if offer.moved}
    if len(here) >= 3:
        columns = np.array([offer.normalized for offer in here.values()]).T
        too_long = np.zeros(len(here), bool)
        for values, passed in zip(columns, past.passed, strict=True):
            too_long |= values > np.maximum(passed, _bounds(values, together=True))
        found = [m for m, long in zip(here, too_long, strict=True) if long]
    else:
        found = [m for m, offer in here.items() if _is_long_alone(offer, here, past)]
    return dict.fromkeys(found, "its outer gradient is far longer than those of others")


def _is_long_alone(offer: Offered, here: Mapping[int, Offered], past: Past) -> bool:
    """Whether an offer with fewer than two others in its round is far longer than what came before."""
    others = [other for m, other in here.items() if m != offer.learner]
    if past.rounds >= _WARM_UP:
        others += [other for m, other in past.newest.items() if m != offer.learner and m not in here]
    if len(others) < 2:
        return 0 < past.length() * _LONGEST < offer.norm
    columns = np.array([offer.normalized, *(other.normalized for other in others)]).T
    bounds = (max(passed, _bounds(v, False)[0]) for v, passed in zip(columns, past.passed, strict=True))
    return any(values[0] > bound for values, bound in zip(columns, bounds, strict=True))


def direction(offers: Sequence[Offered], past: Past) -> dict[int, str]:
    """Finds outer gradients that point away from the others', and learners whose own point nowhere.

    In one round, an offer is out of line if the others' cosines are large and its own is as far on the other
    side of zero as half of theirs; but for some turns of every fragment an honest learner may have met odd
    data, so that the average over its last turns must be a quarter on the other side too. Later in training
    cosines are small: then a longer average is compared with the median of the others'.

    Example:
      >>> offers = [Offered(m, 24, 1.0, 0.1, cosine) for m, cosine in enumerate([0.6, 0.5, -0.5])]
      >>> direction(offers, Past())
      {2: 'its outer gradient points away from those of others'}
    """
    found = {}
    here = {offer.learner: offer.cosine for offer in offers if offer.cosine is not None}
    turns = min(_SCORES, _TURNS * past.fragments)
    averages = {m: statistics.fmean(scores) for m, scores in past.scores.items() if len(scores) >= turns}
    of_others, average_of_others = (
        dict(zip(known, medians_of_others(np.array([*known.values()])).tolist(), strict=True))
        if len(known) >= 3
        else {}
        for known in (here, averages)
    )
    for offer in offers:
        m = offer.learner
        if m in of_others:
            typical = of_others[m]
            lately = statistics.fmean(list(past.scores.get(m, ()))[-max(_STRETCH, turns) :] or [here[m]])
            if typical > _OPPOSED and here[m] < -typical / 2 and lately < -typical / 4:
                found[m] = "its outer gradient points away from those of others"
        if m in average_of_others:
            typical = average_of_others[m]
            clear = typical > 0 and len(past.scores[m]) * typical**2 > _CLEAR
            if clear and averages[m] < _NOWHERE * typical:
                found[m] = "its outer gradients point elsewhere than those of others"
    return found


GATES: dict[str, Gate] = {"tokens": tokens, "norm": norm, "direction": direction}


class Notice(NamedTuple):
    """An action on a learner: `kind` is "unsound", "left_out", "quarantined" or "released"."""

    kind: str
    learner: int
    why: str

    @property
    def alarm(self) -> str:
        """The same as a sentence for the run's operator."""
        done = {
            "unsound": "sent what cannot be merged",
            "left_out": "has an offer left out of a merge",
            "quarantined": "is in quarantine: none of its offers is merged",
            "released": "is out of quarantine",
        }
        return f"learner {self.learner} {done[self.kind]}: {self.why}"


class Verdict(NamedTuple):
    """The left-out learners of a round, and the notices about it."""

    left_out: frozenset[int]
    notices: tuple[Notice, ...]


@dataclasses.dataclass
class _Standing:
    """A guard's state of a learner."""

    out_of_line: collections.deque[bool] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=12)
    )
    scores: collections.deque[float] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=_SCORES)
    )
    passed: int | None = None  # in quarantine, its offers in a row that would have passed


class Guard:
    """Judges the offers of every round, in the order of the merges; decisions depend on those alone.

    It begins again with each process of the syncer. Nothing of it is durable: offers are compared with each
    other from the first round on, so that a liar is found again as quickly as it was the first time.
    """

    def __init__(self, config: GuardConfig, step_tokens: int | None = None) -> None:
        """`step_tokens`: the most that a step of any learner can have; None: not known."""
        self._config = config
        self._step_tokens = step_tokens
        self._standings: dict[int, _Standing] = {}
        self._recent: dict[int, collections.deque[list[Offered]]] = collections.defaultdict(
            lambda: collections.deque(maxlen=_RECENT)
        )  # by fragment, the offers of its last rounds
        self._passed: dict[int, collections.deque[tuple[float, float]]] = collections.defaultdict(
            lambda: collections.deque([(-math.inf, -math.inf)], maxlen=_RECALL)
        )  # by fragment, the largest `normalized` that passed in its last rounds
        self._rounds: collections.Counter[int] = collections.Counter()

    @property
    def quarantined(self) -> frozenset[int]:
        """The learners of which no offer is merged."""
        return frozenset(m for m, standing in self._standings.items() if standing.passed is not None)

    def judge(
        self, fragment: int, offers: Sequence[Offered], length: Callable[[], float] = lambda: 0.0
    ) -> Verdict:
        """Takes the next round; `length` as in `Past`."""
        for offer in offers:
            standing = self._standings.setdefault(offer.learner, _Standing())
            if offer.cosine is not None:
                standing.scores.append(offer.cosine)
        bad = self._out_of_line(fragment, offers, length)
        notices = [Notice("left_out", m, why) for m, why in bad.items()]
        for offer in offers:
            notices += self._stands(offer.learner, bad.get(offer.learner))
        self._recent[fragment].append(list(offers))
        passed = [offer.normalized for offer in offers if offer.learner not in bad]
        if passed:
            self._passed[fragment].append(tuple(map(max, zip(*passed, strict=True))))
        self._rounds[fragment] += 1
        here = {offer.learner for offer in offers}
        return Verdict(frozenset(bad) | (self.quarantined & here), tuple(notices))

    def _out_of_line(
        self, fragment: int, offers: Sequence[Offered], length: Callable[[], float]
    ) -> dict[int, str]:
        """Why each that is out of line is; learners in quarantine are judged, but by the others alone."""
        away = self.quarantined
        bad: dict[int, str] = {}
        trusted = [offer for offer in offers if offer.learner not in away]
        past = Past(
            self._rounds[fragment],
            max(1, len(self._rounds)),
            {
                o.learner: o
                for earlier in self._recent[fragment]
                for o in earlier
                if o.learner not in away and o.moved
            },
            {m: s.scores for m, s in self._standings.items() if m not in away},
            tuple(map(max, zip(*self._passed[fragment], strict=True))),
            length,
            self._step_tokens,
        )
        for name in self._config.gates:
            bad |= GATES[name](trusted, past)
            for offer in offers:
                if offer.learner in away:
                    own = {offer.learner: self._standings[offer.learner].scores}
                    with_own = dataclasses.replace(past, scores={**past.scores, **own})
                    found = GATES[name]([*trusted, offer], with_own)
                    bad |= {m: why for m, why in found.items() if m == offer.learner}
        return bad

    def _stands(self, learner: int, why: str | None) -> list[Notice]:
        """Counts an offer for or against its learner."""
        standing = self._standings[learner]
        if standing.passed is not None:
            standing.passed = 0 if why else standing.passed + 1
            if standing.passed < _RELEASE:
                return []
            standing.passed = None
            standing.out_of_line.clear()
            return [Notice("released", learner, f"its last {_RELEASE} offers would have passed")]
        standing.out_of_line.append(why is not None)
        if why is None or sum(standing.out_of_line) < _STRIKES:
            return []
        # If half of them are out of line, either half may be right.
        if 2 * (len(self.quarantined) + 1) >= len(self._standings):
            return []
        standing.passed = 0
        return [Notice("quarantined", learner, why)]


def offered(
    learners: Sequence[int],
    counts: Sequence[tuple[int, int]],
    norms: np.ndarray,
    sizes: Sequence[int],
    cosines: np.ndarray,
) -> list[Offered]:
    """The numbers that gates judge by; `counts`: steps and tokens, `sizes`: elements of each piece.

    Args:
      norms: (pieces, M), of each piece of each outer gradient.
      cosines: (M, witnesses), as of `sampled_cosines`.
    """
    exact = np.asarray(norms, np.float64)
    lengths = np.sqrt(np.square(exact).sum(0))
    peaks = (exact / np.sqrt(np.maximum(sizes, 1))[:, None]).max(0)
    ordered, known = np.sort(cosines, axis=1), np.isfinite(cosines).sum(axis=1)  # NaN is last
    found = []
    for i, learner in enumerate(learners):
        row, count = ordered[i], int(known[i])
        middle = float(row[(count - 1) // 2] + row[count // 2]) / 2 if count >= 2 else None
        steps, of_steps = counts[i]
        found.append(Offered(learner, steps, float(lengths[i]), float(peaks[i]), middle, of_steps))
    return found


def _bounds(values: np.ndarray, together: bool) -> np.ndarray:
    """For each value, the longest that passes beside the others; `together`: they are of the same round."""
    middles = medians_of_others(values, high=True)
    spreads = np.zeros_like(values)
    for middle in np.unique(middles):  # two at most
        spreads = np.where(middles == middle, medians_of_others(np.abs(values - middle)), spreads)
    ordered, near = np.sort(values), math.log(_FACTOR)
    alike = np.searchsorted(ordered, values + near) - np.searchsorted(ordered, values - near, side="right")
    disputed = together & (2 * alike > len(values) - 1)
    factors = np.where(disputed, math.log(_DISPUTED), math.log(_FACTOR))
    return middles + np.maximum(factors, _SPREADS * 1.4826 * spreads)


def medians_of_others(values: np.ndarray, high: bool = False) -> np.ndarray:
    """For each value the median of the others; `high`: of an even number of them the upper of the middle two.

    Example:
      >>> print(medians_of_others(np.array([1.0, 2.0, 10.0])))
      [6.  5.5 1.5]
    """
    order = np.argsort(values)
    ordered, rank = values[order], np.empty(len(values), int)
    rank[order] = np.arange(len(values))
    count = len(values) - 1

    def at(place: int) -> np.ndarray:  # of the others, in order
        found: np.ndarray = ordered[place + (rank <= place)]
        return found

    upper = at(count // 2)
    return upper if high else (at((count - 1) // 2) + upper) / 2


def _log(value: float) -> float:
    return math.log(max(value, 1e-38))


SAMPLE = 1 << 13  # elements of a fragment on which cosines are measured
WITNESSES = 64  # offers with which each of a round is compared: all with all would be quadratic
LINE = 128  # neighbours that are read together, since each line that is touched may cost a page


def sample_counts(sizes: Sequence[int]) -> list[int | None]:
    """How many lines of each piece of so many elements are in a sample; None: the whole piece."""
    total = sum(sizes)
    return [
        None if total <= SAMPLE or size < LINE else max(1, SAMPLE * size // (total * LINE)) for size in sizes
    ]


def sample_lines(sizes: Sequence[int], norms: np.ndarray) -> list[np.ndarray | None]:
    """Which lines of each piece are in the sample of a round; None: the whole piece.

    This depends on the bits of all norms. So it is the same in a replay, but no learner can know it in time
    to behave well there alone, since it does not know the others' norms.

    Args:
      sizes: elements of each piece.
      norms: (pieces, M) of the outer gradients, float32.
    """
    rng, counts = _random(norms), zip(sizes, sample_counts(sizes), strict=True)
    return [None if count is None else rng.integers(0, size // LINE, count) for size, count in counts]


def draw_witnesses(norms: np.ndarray) -> list[int]:
    """The offers of a round with which each is compared, by place: all, or some that depend on all norms."""
    count = np.shape(norms)[1]
    if count <= WITNESSES:
        return list(range(count))
    return sorted(_random(norms).choice(count, WITNESSES, replace=False).tolist())


def _random(norms: np.ndarray) -> np.random.Generator:
    seed = hashlib.sha256(np.asarray(norms, np.float32).tobytes()).digest()
    return np.random.default_rng(int.from_bytes(seed[:8], "little"))


def sampled_cosines(sampled: Callable[[int], np.ndarray], count: int, witnesses: Sequence[int]) -> np.ndarray:
    """Cosines between samples of outer gradients, float64, (count, witnesses).

    `sampled`: the sample of one. NaN where one is zero, and of a witness with itself.
    """
    known = {m: sampled(m) for m in witnesses}
    those, cosines = np.stack([*known.values()]), np.empty((count, len(witnesses)))
    for first in range(0, count, WITNESSES):  # so that few samples are in memory
        block = range(first, min(count, first + WITNESSES))
        rows = np.stack([known[m] if m in known else sampled(m) for m in block])
        lengths = np.outer(np.linalg.norm(rows, axis=1), np.linalg.norm(those, axis=1))
        with np.errstate(divide="ignore", invalid="ignore"):
            cosines[block.start : block.stop] = rows @ those.T / lengths
    cosines[list(witnesses), range(len(witnesses))] = np.nan
    return cosines
