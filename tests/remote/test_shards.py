"""What the shards of a syncer know of each other, and how learners and records find them."""

import dataclasses
import time

import pytest

from ddiloco.protocol import events
from ddiloco.remote.learner.client import ShardBook
from ddiloco.remote.syncer.shard_records import RecordsLink
from ddiloco.remote.syncer.shards import Shards
from ddiloco.remote.wire.security import Security
from ddiloco.storage import shard_states
from ddiloco.storage.run_mark import RunMark
from ddiloco.telemetry import records
from tests.remote.ends import CONFIG, TERMS, TIMEOUT, LearnerEnd, SyncerEnd, ended, until

TWO = dataclasses.replace(TERMS, shards=2)
MARK = RunMark("run", "start")
STEPS = 12


@pytest.fixture
def shards(tmp_path):
    MARK.save(tmp_path)

    def begin(shard, mark=MARK, count=2, steps=STEPS):
        made = Shards(tmp_path, mark, shard, count, steps)
        made.announce(f"host{shard}:1")
        made.look()
        return made

    return begin


def test_the_run_is_over_once_all_have_finished_also_in_an_earlier_process(shards):
    first, other = shards(0), shards(1)
    first.finish()
    first.look()
    assert first.has_finished and not first.finished and not first.ended.is_set()
    first = shards(0)
    assert first.has_finished and first.addresses == ["host0:1", "host1:1"]
    other.finish()
    for one in (first, other):
        one.look()
        assert one.finished and one.ended.is_set()
    assert not shards(0, steps=2 * STEPS).has_finished, "the run goes on for more steps"
    assert not shards(0, mark=RunMark("run", "another start")).has_finished
    assert not shards(0, count=1).has_finished


def test_a_shard_ends_with_the_first_unless_that_had_ended_before_it_began(shards):
    first, other = shards(0), shards(1)
    first.end([3])
    other.look()
    assert other.ended.is_set() and not other.finished
    late = shards(1)
    assert not late.ended.is_set()
    first = shards(0)
    late.look()
    assert not late.ended.is_set()
    first.end([3])
    late.look()
    assert late.ended.is_set()
    late.end([5])
    assert {s: state.versions for s, state in first.wait_for_others(TIMEOUT).items()} == {1: (5,)}


def test_a_shard_of_a_run_that_was_started_again_ends(shards, tmp_path):
    other = shards(1)
    RunMark("run", "another").save(tmp_path)
    other.look()
    assert other.superseded and other.ended.is_set()


def test_a_state_that_cannot_be_read_is_none(tmp_path):
    for damaged in ("", "[]", '{"start": 1}', "[" * 100_000):
        (tmp_path / f"{shard_states.PREFIX}0001.json").write_text(damaged)
        assert shard_states.load(tmp_path, 1) is None


def test_a_learner_finds_the_other_shards_by_the_first_and_loses_one_alone():
    first, other = SyncerEnd(TWO), SyncerEnd(TWO, shard=1)
    book = ShardBook(first.address, 0, 100, 2)
    with ended(
        first,
        other,
        to_other := LearnerEnd("", terms=TWO, shard=1, book=book),
        LearnerEnd("", terms=TWO, book=book),
    ) as (*_, to_first):
        assert to_first.client.accepted.wait(TIMEOUT)
        assert not to_other.client.accepted.is_set(), "nobody has said where it is"
        first.server.send_addresses([first.address, other.address])
        assert to_other.client.accepted.wait(TIMEOUT)
        to_other.send(events.LearnerJoined(0, 100))
        assert other.next(events.LearnerJoined).incarnation == 100
        other.die()
        until(lambda: to_other.client.waiting == 0 and to_other.client._connection is None, "the loss")
        assert to_first.client._connection is not None


@pytest.mark.parametrize(
    ("terms", "shard", "why"),
    [
        (TERMS, 0, "config.remote.syncer_shards: the syncer has 2, the learner 1"),
        (TWO, 1, "this is shard 0 of the syncer, and the learner looks for shard 1"),
    ],
)
def test_a_learner_with_another_number_of_shards_or_at_another_one_is_refused(terms, shard, why):
    first = SyncerEnd(TWO)
    book = ShardBook(first.address, 0, 100, terms.shards)
    book.at([first.address] * terms.shards)
    with ended(first, learner := LearnerEnd("", terms=terms, shard=shard, book=book)):
        assert learner.client.accepted.wait(TIMEOUT)
        assert learner.client.refusal == why


def test_records_of_another_shard_come_to_the_first_and_wait_while_it_is_away():
    where = [""]
    link = RecordsLink(lambda: where[0], 1, TWO, Security(), CONFIG, "")
    link.start()
    for step in range(3):
        link.record(records.Noted("round", {"step": step}, time.time()))
    first = SyncerEnd(TWO)
    where[0] = first.address
    until(lambda: len(first.noted("round")) == 3, "the records")
    link.record(records.Alarm("the disk is full", 5.0))
    link.finish(TIMEOUT)
    assert first.noted("round") == [{"step": step} for step in range(3)]
    assert first.alarms() == ["the disk is full"]
    wrong = RecordsLink(lambda: first.address, 1, dataclasses.replace(TWO, shards=3), Security(), CONFIG, "")
    wrong.start()
    told = "shard 1 of the syncer is refused: it is shard 1 of 3, where there are 2"
    until(lambda: told in first.alarms(), "the refusal")
    wrong.finish(0.0)
    first.server.stop(0.0)
