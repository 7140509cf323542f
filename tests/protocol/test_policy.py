"""Settings of the policy that may not be joined, and the sentences that say so."""

import pytest

from ddiloco.protocol.policy import SyncPolicy


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_learners": 2, "quorum": 3}, "quorum: is 3, but must be at most num_learners, 2"),
        (
            {"quorum": 2, "max_run_ahead": 1},
            r"max_run_ahead: is bounded, so quorum must be None \(all live learners\); "
            "with a quorum of 2 the learners would wait forever once fewer are live",
        ),
        (
            {"quorum": None, "interval": 2, "max_run_ahead": 2},
            "max_run_ahead: is 2, but must be below interval, 2: "
            "a fragment is due again by then, so the bound would never bind",
        ),
        (
            {"rebase": True, "mixing": 0.5},
            "mixing: is 0.5, but must be 0 with rebase, which keeps own work too",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused_by_name(values, message):
    with pytest.raises(ValueError, match=message):
        SyncPolicy(**values)


def test_a_blocked_learner_speaks_well_before_it_would_be_taken_for_silent():
    policy = SyncPolicy(silence_timeout=8.0)
    assert policy.heartbeat == 2.0


@pytest.mark.parametrize(("quorum", "interval", "band"), [(1, 24, 12), (2, 5, 2), (1, 1, 0), (None, 24, 0)])
def test_the_band_is_half_an_interval_and_nothing_where_all_are_waited_for(quorum, interval, band):
    assert SyncPolicy(quorum=quorum, interval=interval).band == band
