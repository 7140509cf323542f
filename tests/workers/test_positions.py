"""Where learners' data go on: as the durable rounds have it, dealt again to other learners."""

import json
import threading

import pytest

from ddiloco.data.shards import reshard
from ddiloco.protocol.messages import RoundId, Watermark
from ddiloco.protocol.state import SyncerState
from ddiloco.run.recipes import assembly_of
from ddiloco.storage.durable import DurableState
from ddiloco.workers.positions import reshard_or_reset, resharded, with_positions
from tests.workbench import experiment

WITH_TWO = {"driver": "remote", "sync": {"num_learners": 2}}


@pytest.fixture(scope="module")
def two(data_dir):
    return experiment(data_dir, **WITH_TWO)


@pytest.fixture
def said(two):
    """What two learners have said that have drawn one and two batches."""
    drawn = [assembly_of(two).batches((m,)) for m in range(2)]
    for batches in (drawn[0], drawn[1], drawn[1]):
        next(batches)
    return [batches.get_state() for batches in drawn]


def merged(said):
    """The state after a merge of two fragments, of which the second has later work of learner 0."""
    early = {m: Watermark(5, 3, "earlier") for m in range(len(said))}
    texts = [at if isinstance(at, str) else json.dumps(at) for at in said]
    late = {m: Watermark(5, 4, text) for m, text in enumerate(texts)}
    return SyncerState((1, 1), (3, 4), watermarks=(early, late))


def test_a_versions_positions_are_as_durable_as_the_version(tmp_path, two, said):
    assembly = assembly_of(two)
    disk = DurableState(tmp_path / "syncer", assembly.layout, print, threading.Event(), run="ab")
    model = assembly.global_model(assembly.initial_parameters())
    disk.begin(model)
    marks = {0: Watermark(5, 4, json.dumps(said[0])), 1: Watermark(7, 2)}
    assert disk.commit(RoundId(4, 1), model, marks)
    again = DurableState(tmp_path / "syncer", assembly.layout, print, threading.Event(), run="ab")
    for state in (again.restore(model), again.state()):
        assert state.watermarks[1] == marks and not state.watermarks[0]
        assert json.loads(state.furthest(0).position) == said[0] and state.furthest(1).position == ""


def test_positions_of_the_runs_own_shards_stay_and_the_furthest_counts(two, said):
    state = resharded(merged(said), two)
    assert [json.loads(state.furthest(m).position) for m in range(2)] == said
    assert [[known[m] for m in range(2)] for known in state.watermarks] == [
        [Watermark(5, steps)] * 2 for steps in (3, 4)
    ], "how far work is merged is as it was"


def test_positions_are_dealt_again_to_other_learners_and_one_version_makes_that_durable(data_dir, said):
    three = experiment(data_dir, driver="remote", sync={"num_learners": 3})
    state = resharded(merged(said), three)
    found = [json.loads(state.furthest(m).position) for m in range(3)]
    assert found == reshard(said, 3)
    for m, position in enumerate(found):
        batches = assembly_of(three).batches((m,))
        batches.set_state(position)
        assert next(batches)
    # One fragment's file has been written since, the other is as it was.
    half = SyncerState((2, 1), (6, 4), watermarks=(state.watermarks[0], merged(said).watermarks[1]))
    again = resharded(half, three)
    assert [json.loads(again.furthest(m).position) for m in range(3)] == found


@pytest.mark.parametrize("lie", ["no JSON", "[" * 9999, '{"stream": {"num_shards": 3}}', '{"stream": 2}'])
def test_what_one_learner_says_of_the_data_takes_no_position_from_the_others(lie, two, said):
    state = resharded(merged([*said, lie]), two)
    assert [json.loads(state.furthest(m).position) for m in range(2)] == said


def test_what_cannot_be_dealt_again_is_told(data_dir, said):
    said[1]["stream"]["records"] += 1
    three, told = experiment(data_dir, driver="remote", sync={"num_learners": 3}), []
    state = reshard_or_reset(merged(said), three, told.append)
    [alarm] = told
    assert "different streams" in alarm.sentence
    assert alarm.sentence.endswith("rejoining learners start their data over")
    assert [state.furthest(m).position for m in range(3)] == [""] * 3


def test_where_nothing_is_merged_data_may_go_on_all_the_same(two):
    state = with_positions(SyncerState.initial(2), {1: "there"})
    assert state.furthest(1) == Watermark(0, 0) and state.furthest(1).position == "there"
