"""States of learners that are made of an inner state alone, with all else as small as can be."""

import dataclasses

from ddiloco.arrays.blocks import Cut
from ddiloco.protocol.work import FragmentWork, LearnerWork
from ddiloco.storage.learner_state import LearnerState, OfAllHosts, StateHeader, StateOfAllHosts, named


def needs_all(name, shape):
    """What one of several hosts needs that happens to need all."""
    return Cut.whole(shape)


def state_with(inner, run=""):
    """A learner's state with this InnerState."""
    fragments = tuple(FragmentWork(version, 0) for version in inner.versions)
    origin = None if inner.origin is None else dataclasses.astuple(inner.origin)
    work = LearnerWork(inner.step, 1, inner.step, fragments)
    header = StateHeader(run, "", ("f32", False, False), work, None, 1, inner.trained, 0, 0, origin)
    arrays = named("inner", inner.arrays)
    if isinstance(inner.arrays, OfAllHosts):
        arrays = StateOfAllHosts(arrays, inner.arrays.number)
    return LearnerState(header, arrays)
