"""What of learners' work is merged, and whether their steps are real, in fleets that are slow, far or uneven.

A step takes a second unless told otherwise. A learner's share is what of its tokens is in merges, averaged
over fragments; its real steps are those that it took, and not jumped over, of the run's.
"""

import itertools
import random

import pytest

from ddiloco.protocol.policy import SyncPolicy
from ddiloco.virtual.array_ports import CountingLearner
from ddiloco.virtual.fleet import Durations, Fleet
from ddiloco.virtual.from_settings import spread
from ddiloco.virtual.learner_process import VirtualPlace
from ddiloco.virtual.links import Link, LinkQuality
from experiments.studies.schedules.shares import Shares
from tests.long import times
from tests.studies.schedules.witness import Witness, join_all
from tests.virtual.small_fleet import LeavingOut

STEPS = 480
TOKENS = 10


class Watch(Witness):
    """What is merged of whom, and in which rounds."""

    def __init__(self, fragments: int) -> None:
        super().__init__()
        self.shares = Shares(fragments)

    def merged(self, merge, left_out, now):
        super().merged(merge, left_out, now)
        self.shares.merged(merge, left_out, now)

    def learner_handled(self, learner, event, out, now):
        super().learner_handled(learner, event, out, now)
        self.shares.learner_handled(learner, event, out, now)

    def rounds_of(self, fragment: int) -> list[set[int]]:
        """Whose offers were in each merge of the fragment."""
        return [{c.learner for c in m.contributions} for m in self.merges if m.round.fragment == fragment]


def run(
    learners=4,
    *,
    fragments=12,
    seconds=(),
    variation=0.0,
    merge=0.0,
    latency=(),
    starts=None,
    steps=STEPS,
    refused=frozenset(),
    **policy,
):
    """Plays a fleet to its end; the `seconds` of a step and the `latency` are those of the last learners."""
    settings = {"num_learners": learners, "num_fragments": fragments, "interval": 24, "rebase": True} | policy
    means = [1.0] * (learners - len(seconds)) + list(seconds)
    delays = [0.0] * (learners - len(latency)) + list(latency)
    watch = Watch(fragments)

    def place(learner: int) -> VirtualPlace:
        rng = random.Random(learner)
        links = [Link(LinkQuality(latency=delays[learner]), rng) for _ in range(2)]
        return VirtualPlace(lambda: means[learner] * spread(rng, variation), *links)

    fleet = Fleet(
        SyncPolicy(**settings),
        steps,
        {learner: place(learner) for learner in range(learners)},
        lambda learner: CountingLearner(lambda: TOKENS),
        LeavingOut((0,) * fragments, refused),
        takes=Durations(lambda: merge),
        observer=watch,
    )
    join_all(fleet, starts or [0.0] * learners)
    fleet.run(max_events=2_000_000)
    assert fleet.over
    return watch


@pytest.mark.parametrize(
    ("merge", "together"),
    [(2.2, 0.85), *(pytest.param(s, 0.97, marks=pytest.mark.slow) for s in (1.0, 1.5, 1.7, 1.9))],
)
def test_equal_learners_do_not_lock_into_phases_in_which_some_are_never_merged(merge, together):
    """Started 0.3 s apart, with merges longer than a step, three of four once were in 2 of 240 rounds."""
    watch = run(merge=merge, starts=[0.0, 0.3, 0.6, 0.9])
    rounds = [len(m.contributions) for m in watch.merges]
    assert rounds.count(4) >= together * len(rounds)
    assert len(rounds) >= 0.97 * STEPS / max(2, merge)  # a round is due every other step


@pytest.mark.parametrize(
    ("overlap", "seconds"),
    [(1, (3.0,)), (2, ()), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((1, ()), (2, (3.0,))))],
)
def test_where_merges_take_longer_than_an_interval_the_work_of_all_is_merged(overlap, seconds):
    """Rounds opened late, and the first offer was merged alone: a quarter of the work, with K = 1."""
    watch = run(
        fragments=2, interval=8, overlap=overlap, merge=10.0, seconds=seconds, variation=0.05, quorum=1
    )
    assert watch.shares.share() >= 0.9
    assert min(watch.shares.share(m) for m in range(4)) >= 0.85
    assert len(watch.merges) >= 0.95 * STEPS / 10


FLEETS = {
    "all alike": ({}, 0.94, 1.0),
    "steps that vary": ({"variation": 0.3}, 0.91, 0.985),
    "merges longer than a step": ({"merge": 1.5, "variation": 0.05}, 0.87, 0.99),
    "and steps that vary": ({"merge": 1.5, "variation": 0.2}, 0.86, 0.98),
    "links of over half a step": ({"latency": (0.6,) * 4, "variation": 0.1}, 0.84, 0.99),
    "many fragments": ({"learners": 8, "fragments": 24, "merge": 0.9, "variation": 0.1}, 0.88, 0.97),
    "a fragment at each step, far away": (
        {"fragments": 24, "latency": (3.0,) * 4, "variation": 0.1},
        0.88,
        0.99,
    ),
    "and long merges": ({"fragments": 24, "merge": 2.5, "variation": 0.1}, 0.88, 0.99),
    "many learners": ({"learners": 32, "variation": 0.3}, 0.89, 0.95),
}
OFTEN = ("steps that vary", "links of over half a step")


@pytest.mark.parametrize(
    "fleet", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in FLEETS]
)
def test_most_of_what_learners_do_is_merged_and_their_steps_are_real(fleet):
    settings, share, real = FLEETS[fleet]
    watch = run(**settings)
    assert watch.shares.share() >= share
    assert watch.shares.steps.total() >= real * STEPS * settings.get("learners", 4)


@pytest.mark.parametrize(("seconds", "share"), [(3.0, 0.8), pytest.param(2.0, 0.85, marks=pytest.mark.slow)])
def test_a_slow_learner_has_its_part_in_the_merges_of_every_fragment(seconds, share):
    watch = run(seconds=(seconds,), steps=2 * STEPS)
    assert watch.shares.share(3) >= share
    assert watch.shares.share(0, 1, 2) >= 0.93
    for fragment in range(12):
        assert any(3 in given for given in watch.rounds_of(fragment))


@pytest.mark.slow
def test_a_learner_that_is_far_away_is_merged_and_takes_nothing_from_the_others():
    """A round trip of two intervals."""
    watch = run(learners=8, latency=(24.0,), steps=960)
    assert watch.shares.share(7) >= 0.85
    assert watch.shares.share(*range(7)) >= 0.93


@pytest.mark.parametrize("seed", range(times(1, 8)))
def test_in_no_window_is_a_learner_left_out_nor_do_merges_stop_nor_is_old_work_merged(seed):
    """Fleets that nobody chose: other speeds, delays and merge times, and up to 12 learners."""
    rng = random.Random(seed)
    learners = rng.randint(2, 12)
    delays = tuple(rng.choice([0.0, 0.3, 1.0]) for _ in range(learners))
    speeds = tuple(rng.uniform(1.0, 1.6) for _ in range(learners))
    merge = rng.choice([0.0, 0.5, 1.5])
    watch = run(
        learners,
        latency=delays,
        seconds=speeds,
        variation=rng.choice([0.0, 0.1, 0.3]),
        merge=merge,
        starts=[rng.uniform(0.0, 3.0) for _ in range(learners)],
        steps=360,
    )
    for learner in range(learners):
        windows = watch.shares.in_windows(learner, 72)
        assert min(windows) >= 0.6, (learner, windows)
    gaps = [later - at for at, later in itertools.pairwise(watch.merge_times)]
    usual = 2 * max(speeds)  # a fragment is due every other step
    assert max(gaps) <= 3 * usual + merge + 2 * max(delays)
    assert max(watch.shares.behind) <= 24, "an interval"


@pytest.mark.parametrize("seconds", [1.0, *(pytest.param(s, marks=pytest.mark.slow) for s in (0.4, 0.1))])
@pytest.mark.parametrize("honest", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_learner_of_whom_nothing_is_merged_keeps_nobody_elses_work_out(honest, seconds):
    """With K=1 it completes rounds alone, however quick it is, and sets their speed."""
    policy = {"quorum": 1, "variation": 0.1, "merge": 0.2}
    alone = run(honest, **policy).shares.share()
    quick = {"seconds": (seconds,), "steps": int(STEPS / seconds)}
    beside_its_like = run(honest + 1, **policy, **quick).shares.share(*range(honest))
    beside = run(honest + 1, **policy, **quick, refused=frozenset({honest}))
    assert beside.shares.share(*range(honest)) >= min(alone, beside_its_like) - 0.02
    assert not any(given == {honest} for p in range(12) for given in beside.rounds_of(p))
