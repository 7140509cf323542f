"""One learner's core and what is done with it, in a word each."""

from ddiloco.protocol import actions, events
from ddiloco.protocol.learner import LearnerCore
from ddiloco.protocol.messages import RoundId
from ddiloco.protocol.policy import SyncPolicy


def welcomed(total_steps=None, *, at_step=0, **policy):
    core = LearnerCore(0, 1, SyncPolicy(**policy), total_steps)
    fragments = core.policy.num_fragments
    core.handle(events.Welcomed(1, at_step, (0,) * fragments, (0,) * fragments), 0.0)
    return core


def start(core, tokens=10, waiting=0):
    return core.handle(events.StepStarted(tokens, waiting), 0.0)


def finish(core):
    return core.handle(events.StepFinished(), 0.0)


def step(core, tokens=10):
    """A step from its start to its end; what follows at the end."""
    start(core, tokens)
    return finish(core)


def ask(core, clock, *, fragment=0, version=0, due=None):
    """The question for a fragment, in the round that is due at `due`, or at `clock`."""
    which = RoundId(clock if due is None else due, fragment)
    return core.handle(events.OfferAsked(which, version, clock), 0.0)


def made(out):
    return [action.contribution for action in out if isinstance(action, actions.MakeOffer)]


def sent(out):
    return [action.contribution for action in out if isinstance(action, actions.SendOffer)]
