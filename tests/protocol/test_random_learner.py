"""Random words to a learner's core whose driver keeps several steps in flight: it counts truly even so."""

import random

import pytest

from ddiloco.protocol import actions, events
from ddiloco.protocol.learner import LearnerCore
from ddiloco.protocol.messages import NOTHING_MERGED, RoundId, Watermark
from ddiloco.protocol.policy import SyncPolicy
from experiments.studies.schedules.ledger import ProcessLedger
from tests.long import times

TOTAL = 60
PER_CHUNK = times(25, 100)


def draw_event(rng, core, in_flight):
    """Something that may happen to the learner now; None where what was drawn may not."""
    kinds = ["start"] * 3 + ["finish"] * 2 + ["ask"] * 2 + ["update", "clock", "word", "welcome"]
    match rng.choice(kinds):
        case "start":
            may = core.recovered and not core.done and not core.blocked and in_flight < 3
            return events.StepStarted(rng.randint(1, 100)) if may else None
        case "finish":
            return events.StepFinished(skipped=rng.random() < 0.3) if in_flight else None
        case "update":
            fragment = rng.randrange(core.policy.num_fragments)
            held = core.versions[fragment] if core.recovered else 0
            step = min(TOTAL, max(1, core.clock + rng.randint(-3, 3)))
            work = core.work
            within = Watermark(work.life, max(0, work.steps - rng.randint(0, 2)))
            mark = rng.choice([NOTHING_MERGED, within])
            return events.UpdateArrived(fragment, held + rng.choice([0, 1, 1, 2]), step, mark)
        case "ask":
            fragment = rng.randrange(core.policy.num_fragments)
            held = core.versions[fragment] if core.recovered else 0
            due = max(1, core.clock + rng.randint(-2, 4))
            version = max(0, held + rng.choice([-1, 0, 0, 0, 1]))
            return events.OfferAsked(RoundId(due, fragment), version, max(0, due - rng.randint(0, 3)))
        case "clock":
            return events.ClockSet(min(TOTAL, core.clock + rng.randint(-1, 2)))
        case "word":
            incarnation = core.incarnation - rng.choice([0, 1])
            return rng.choice([events.NotMember(incarnation), events.Heartbeat()])
        case "welcome":
            versions = (rng.randint(0, 5),) * core.policy.num_fragments
            step = rng.randint(0, 10)
            incarnation = core.incarnation - rng.choice([0, 0, 1])
            return events.Welcomed(incarnation, step, versions, (step,) * len(versions))


@pytest.mark.parametrize("chunk", range(4))
def test_counters_offers_and_reports_are_true_whatever_comes_between(chunk):
    """The ledger counts apart from the core, and every word of the core is held against it."""
    sent = 0
    for seed in range(chunk * PER_CHUNK, (chunk + 1) * PER_CHUNK):
        rng = random.Random(seed)
        bounded = rng.random() < 0.3
        interval = rng.choice([1, 2, 5])
        policy = SyncPolicy(
            num_fragments=rng.choice([1, 2, 4]),
            interval=interval,
            overlap=rng.randint(0, 3),
            quorum=None if bounded else 1,
            max_run_ahead=rng.randrange(interval) if bounded else None,
            rebase=rng.random() < 0.5,
        )
        core, ledger = LearnerCore(0, 1, policy, TOTAL), ProcessLedger()
        started = 0
        for _ in range(150):
            event = draw_event(rng, core, started)
            if event is None:
                continue
            out = core.handle(event, 0.0)
            ledger.handled(core, event, out)
            started += isinstance(event, events.StepStarted) - isinstance(event, events.StepFinished)
            for action in out:
                if isinstance(action, actions.SendOffer):
                    sent += 1
                    ledger.span(action.contribution)
                    assert started <= 3
    assert sent > 3 * PER_CHUNK
