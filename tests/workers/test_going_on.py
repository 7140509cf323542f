"""A learner goes on with a checkpoint of its whole state: to the bit, and only where that can be merged."""

import dataclasses

import jax
import numpy as np
import pytest

from ddiloco.outer.fragments import take
from ddiloco.protocol.messages import NOTHING_MERGED, Watermark
from ddiloco.protocol.work import FragmentWork, LearnerWork
from ddiloco.remote.learner.host_arrays import needs_of
from ddiloco.run.recipes import assembly_of
from ddiloco.storage.learner_state import LearnerState, LearnerStates, StateHeader
from ddiloco.storage.tape.entries import InnerOrigin
from ddiloco.workers.learner_arrays import TrainingArrays
from ddiloco.workers.resuming import about_states, from_checkpoint, inner_of
from tests import workbench

WORK = LearnerWork(7, 9, 8, tuple(FragmentWork(version, 5) for version in (2, 3, 4)), {6: 4})
POSITION = {"batches": 8}


def differing(ours, theirs):
    return [
        name
        for name, array in theirs.items()
        if not np.array_equal(np.asarray(ours[name]), np.asarray(array))
    ]


@pytest.mark.parametrize(
    ("codec", "feedback", "rebase"),
    [
        ("f32", False, False),
        ("int8", True, True),
        pytest.param("f32", False, True, marks=pytest.mark.slow),
        pytest.param("int4", False, False, marks=pytest.mark.slow),
    ],
)
def test_what_follows_on_a_checkpoint_is_what_followed_on_the_state(
    codec, feedback, rebase, data_dir, tmp_path, one_device
):
    """With updates that hold offers of before, one that holds none, and an offer that is sent again."""
    outer, sync = {"codec": codec, "error_feedback": feedback}, {"rebase": rebase, "mixing": 0.0}
    assembly = assembly_of(workbench.experiment(data_dir, outer=outer, sync=sync))
    params = assembly.initial_parameters()
    fragments = [take(assembly.layout, p, params) for p in range(assembly.layout.num_fragments)]
    learner = TrainingArrays(assembly.own_equipment(0))
    learner.adopt(fragments)
    learner.step(0)
    learner.offer(0, 1)
    learner.step(1)
    for p in range(3):
        learner.offer(p, 2)

    arrays, values = learner.state()
    states = LearnerStates(tmp_path, needs_of(assembly.own_equipment(0)))  # as one of several hosts
    header = StateHeader("run", "", (codec, feedback, rebase), WORK, values["position"], 2, 2, 0, 2)
    states.save(5, arrays, dataclasses.asdict(header))
    assert states.numbers() == [5]
    found = LearnerStates(tmp_path).newest("run")
    again = TrainingArrays(assembly.own_equipment(0))
    again.restore(found.arrays, {"position": found.header.position, "steps": found.header.steps})

    for one, other in zip(learner.offered(2, 2).arrays, again.offered(2, 2).arrays, strict=True):
        np.testing.assert_array_equal(one, other)
    updates = [[piece + np.float32(0.25) for piece in pieces] for pieces in fragments]
    for one in (learner, again):
        one.step(2)
        one.apply(0, 0.0, updates[0], 1, rebase)
        one.apply(1, 0.0, updates[1], None, rebase)
        one.apply(2, 0.0, updates[2], 2, rebase)
        one.offer(0, 3)
        one.step(3)
    (ours, at), (theirs, there) = again.state(), learner.state()
    assert ours.keys() == theirs.keys() and at == there
    assert not differing(ours, theirs)
    sent = [one.offered(0, 3).arrays for one in (learner, again)]
    assert all(jax.tree.leaves(jax.tree.map(lambda x, y: bool((x == y).all()), *sent)))


@pytest.fixture(scope="module")
def about(data_dir):
    assembly = assembly_of(workbench.experiment(data_dir))
    return about_states(assembly.experiment, assembly.layout, "run", 0)


def state(about, **changes):
    header = StateHeader(
        **about, work=WORK, position=POSITION, trained=5, tokens=70, steps=8, origin=(0, 9, 4)
    )
    return LearnerState(dataclasses.replace(header, **changes), {"inner/0": np.ones(3)})


def test_its_data_go_on_behind_all_that_may_be_merged(about):
    known = state(about)
    for began, position in (
        (NOTHING_MERGED, POSITION),
        (Watermark(9, 7, '{"batches": 7}'), POSITION),
        (Watermark(9, 11, '{"batches": 11}'), {"batches": 11}),
        (Watermark(9, 11), None),
        (Watermark(6, 4, '{"batches": 4}'), POSITION),
    ):
        resumed = from_checkpoint(known, about, [NOTHING_MERGED, began], (2, 9, 9))
        assert resumed.values == {"position": position, "steps": 8}
        assert resumed.begins_with.work == WORK
        assert resumed.begins_with.began == (WORK.reached if position == POSITION else began)
        assert resumed.begins_with.origin == InnerOrigin(0, 9, 4)
        assert (resumed.tokens, resumed.trained) == (70, 5)


@pytest.mark.parametrize("mark", [Watermark(10, 3), Watermark(6, 5), Watermark(7, 1)])
def test_work_that_another_process_went_on_with_is_not_merged_again(mark, about):
    assert from_checkpoint(state(about), about, [mark, NOTHING_MERGED], (2, 9, 9)) is None


@pytest.mark.parametrize(
    "changes",
    [{"num_shards": 3}, {"codec": ("int8", False, False)}, {"layout": "ab"}, {"run": "another"}],
)
def test_where_data_or_offers_are_others_only_the_inner_state_is_used(changes, about):
    assert from_checkpoint(state(about, **changes), about, [NOTHING_MERGED], (2, 3, 4)) is None
    inner = inner_of(state(about, **changes))
    assert (inner.step, inner.versions, inner.trained) == (7, (2, 3, 4), 5)
    assert inner.origin == InnerOrigin(0, 9, 4)


def test_where_all_fragments_have_newer_versions_nothing_of_it_can_be_merged(about):
    assert from_checkpoint(state(about), about, [NOTHING_MERGED], (3, 4, 5)) is None
    assert from_checkpoint(state(about), about, [NOTHING_MERGED], (3, 3, 5)) is not None
    assert from_checkpoint(state(about), about, [NOTHING_MERGED], (1, 2, 3)) is not None  # an older disk
