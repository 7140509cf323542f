"""Where learners' data goes on: durable, written while nobody waits, dealt again to other learners."""

import concurrent.futures
import json
import os
import threading
import time

import pytest

from ddiloco.data.shards import reshard
from ddiloco.disk import checked_json
from ddiloco.remote.syncer.positions import Positions
from ddiloco.run.recipes import assembly_of
from tests.integration.programs import LIMIT
from tests.workbench import experiment

WITH_TWO = {"driver": "remote", "sync": {"num_learners": 2}}


@pytest.fixture(scope="module")
def two(data_dir):
    return experiment(data_dir, **WITH_TWO)


def test_positions_are_durable_and_damaged_ones_are_not_taken(tmp_path, two):
    positions = Positions(tmp_path)
    positions.put(3, '{"at": 7}')
    positions.flush()
    path = tmp_path / "positions.json"
    whole = path.read_bytes()
    again = Positions(tmp_path)
    assert again.load(two) is None
    assert (again.get(3), again.get(4)) == ('{"at": 7}', "")
    for damaged in (whole.replace(b"7", b"8"), whole[:-1], b"[]", b"{}", b"", b"[" * 9999):
        path.write_bytes(damaged)
        other = Positions(tmp_path)
        told = other.load(two)
        assert told is not None and str(path) in told and other.get(3) == ""
    path.unlink()
    assert Positions(tmp_path).load(two) is None  # nobody has said where it is


def test_nobody_waits_for_a_disk_that_takes_positions_slowly(tmp_path, monkeypatch, two):
    """Readers of all learners keep positions there; none may stand still with the disk."""
    positions, begun, go_on, real = Positions(tmp_path), threading.Event(), threading.Event(), os.fsync

    def slowly(file):
        begun.set()
        assert go_on.wait(LIMIT)
        real(file)

    monkeypatch.setattr(os, "fsync", slowly)
    monkeypatch.setattr("ddiloco.remote.syncer.positions.WRITE_EVERY", 0.0)

    def read(learner):
        positions.put(8, "at once")
        assert begun.wait(LIMIT)
        for step in range(50):
            positions.put(learner, f'{{"at": {step}}}')
            assert positions.get(learner) == f'{{"at": {step}}}'

    with concurrent.futures.ThreadPoolExecutor(8) as readers:
        reading = [readers.submit(read, learner) for learner in range(8)]
        late = concurrent.futures.wait(reading, LIMIT / 2).not_done
        go_on.set()
    assert not late and all(one.result() is None for one in reading)
    positions.flush()
    again = Positions(tmp_path)
    assert again.load(two) is None
    assert [again.get(learner) for learner in range(9)] == ['{"at": 49}'] * 8 + ["at once"]


def test_the_second_between_two_writes_of_positions_begins_with_the_first_ones_end(tmp_path, monkeypatch):
    """Else a disk that takes longer than that would be written to all the time."""
    now, positions, saved, real = [100.0], Positions(tmp_path), [], checked_json.save

    def save(path, values):
        now[0] += 10.0
        real(path, values)
        saved.append(dict(values))

    monkeypatch.setattr(checked_json, "save", save)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    positions.put(0, "1")
    positions._writer.join(LIMIT)
    positions.put(0, "2")
    positions._writer.join(LIMIT)
    assert saved == [{"0": "1"}]
    now[0] += 1.0
    positions.put(0, "3")
    positions._writer.join(LIMIT)
    assert saved == [{"0": "1"}, {"0": "3"}]
    positions.flush()
    assert len(saved) == 2, "it is there already"


@pytest.fixture
def said(two):
    """What two learners have said that have drawn one and two batches."""
    drawn = [assembly_of(two).batches((m,)) for m in range(2)]
    for batches in (drawn[0], drawn[1], drawn[1]):
        next(batches)
    return [batches.get_state() for batches in drawn]


def kept(folder, said):
    """A file of positions by learner."""
    positions = Positions(folder)
    for learner, position in enumerate(said):
        positions.put(learner, position if isinstance(position, str) else json.dumps(position))
    positions.flush()
    return Positions(folder)


def test_positions_are_dealt_again_to_other_learners_and_that_is_durable(tmp_path, data_dir, said):
    three = experiment(data_dir, driver="remote", sync={"num_learners": 3})
    assert kept(tmp_path, said).load(three) is None
    again = Positions(tmp_path)
    assert again.load(three) is None
    found = [json.loads(again.get(m)) for m in range(3)]
    assert found == reshard(said, 3) and again.get(3) == ""
    for m, position in enumerate(found):
        batches = assembly_of(three).batches((m,))
        batches.set_state(position)
        assert next(batches)


@pytest.mark.parametrize("lie", ["no JSON", "[" * 9999, '{"stream": {"num_shards": 3}}', '{"stream": 2}'])
def test_what_one_learner_says_of_the_data_takes_no_position_from_the_others(lie, tmp_path, two, said):
    positions = kept(tmp_path, [*said, lie])
    assert positions.load(two) is None
    assert [json.loads(positions.get(m)) for m in range(2)] == said


def test_what_cannot_be_dealt_again_is_told(tmp_path, data_dir, said):
    said[1]["stream"]["records"] += 1
    told = kept(tmp_path, said).load(experiment(data_dir, driver="remote", sync={"num_learners": 3}))
    assert "different streams" in told and told.endswith("learners that come again begin their data again")
