"""From tapes to what the arrays went through: who made what, who needed it, in which order it can be had."""

import dataclasses
import pathlib
import re
import tempfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddiloco.protocol import events
from ddiloco.protocol.messages import RoundId, Watermark
from ddiloco.protocol.state import SyncerState
from ddiloco.protocol.syncer import SyncerCore
from ddiloco.storage.tape.entries import Adopted, End, Entry
from ddiloco.storage.tape.file import TapeError
from ddiloco.storage.tape.recorder import learner_tape, syncer_tape
from ddiloco.virtual.availability import Change
from experiments.studies.replay import plan as plans
from experiments.studies.replay import works
from experiments.studies.replay.order import Uses, perform, perform_all
from experiments.studies.replay.reading import read_run
from tests.long import times
from tests.workbook import POLICY, fleet_tapes, lose

STEPS = 40


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run in which learner 1 dies and comes back: its folder, and what its observer was told."""
    workdir = tmp_path_factory.mktemp("run")
    return workdir, fleet_tapes(workdir, steps=STEPS, changes=lose(1, 12.0, 15.0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fleets")


@pytest.fixture(scope="module")
def tapes(run):
    return read_run(run[0])


@pytest.fixture(scope="module")
def plan(tapes):
    return plans.make_plan(tapes, POLICY, STEPS)


def merges_of(plan):
    return [merge for merges in plan.merges for merge in merges]


def order_of(plan):
    done = []
    perform_all(plan, lambda actor, work: done.append((actor, work)))
    return done


def test_every_process_has_a_tape_and_every_round_is_a_merge_of_the_plan(run, tapes, plan):
    assert [len(lives) for lives in tapes.learners.values()] == [1, 2, 1]
    merged = [(w.round.step, w.round.fragment, w.version) for w in merges_of(plan)]
    assert merged == [(r["step"], r["fragment"], r["version"]) for r in run[1].rounds]
    given = [[key.learner for _, key in w.given] for w in merges_of(plan)]
    assert given == [r["learners"] for r in run[1].rounds]
    assert {w.sha256 for w in merges_of(plan)} == {bytes(32)}


def test_all_works_are_done_each_after_what_it_needs_and_always_in_one_order(plan):
    made = {works.VersionId(p, 0) for p in range(POLICY.num_fragments)}
    done = order_of(plan)
    for _, work in done:
        assert made.issuperset(work.needs)
        if work.makes is not None:
            made.add(work.makes)
    assert len(done) == sum(len(actor.works) for actor in plan.actors)
    assert done == order_of(plan)


def test_a_plan_without_needless_works_makes_the_same_versions_of_the_same_snapshots(plan):
    lean = plans.without_needless(plan)
    kept = [work for actor in lean.learners for work in actor.works]
    taken = {w.id for w in kept if isinstance(w, works.OfferWork)}
    assert taken == {key for work in merges_of(plan) for key in work.needs}
    for actor, whole in zip(lean.learners, plan.learners, strict=True):
        assert [w for w in whole.works if w in actor.works] == actor.works
        assert not actor.works or isinstance(actor.works[-1], works.OfferWork)
    assert [w for _, w in order_of(lean) if isinstance(w, works.MergeWork)] == merges_of(plan)


@settings(max_examples=times(14, 60))
@given(
    lives=st.lists(
        st.tuples(
            st.floats(0.5, 45.0),
            st.integers(0, 2),
            st.sampled_from(["fail", "recover", "leave", "detect", "step"]),
        ),
        max_size=8,
    ),
    crashes=st.lists(st.integers(1, 12).map(lambda n: 4.0 * n + 0.37), max_size=4, unique=True),
    quorum=st.sampled_from([1, 2, None]),
    shards=st.integers(1, 3),
)
def test_whatever_befalls_a_fleet_all_that_it_merged_is_made_again_in_order(
    folder, lives, crashes, quorum, shards
):
    policy = dataclasses.replace(POLICY, num_fragments=3, quorum=quorum)
    policy = dataclasses.replace(policy, max_run_ahead=2 if quorum is None else None)
    changes = [Change(time, learner, event) for time, learner, event in sorted(lives)]
    workdir = pathlib.Path(tempfile.mkdtemp(dir=folder))
    taped = fleet_tapes(workdir, policy, STEPS, changes, crashes, shards)
    plan = plans.without_needless(plans.make_plan(read_run(workdir), policy, STEPS))
    done = [w for _, w in order_of(plan) if isinstance(w, works.MergeWork)]
    merged = [(w.round.step, w.round.fragment, w.version) for w in done]
    for p in range(policy.num_fragments):
        assert [m for m in merged if m[1] == p] == [made for made in taped.made if made[1] == p]
    if shards == 1:
        assert merged == [(r["step"], r["fragment"], r["version"]) for r in taped.rounds]


def test_what_nobody_needs_any_more_is_told_once(plan):
    lean = plans.without_needless(plan)
    uses = Uses(lean.actors)
    gone = [key for _, work in order_of(lean) for key in uses.done(work)]
    assert len(gone) == len(set(gone))
    assert set(gone) == {key for actor in lean.actors for work in actor.works for key in work.needs}


def test_a_missing_tape_is_told_by_what_it_would_have_made(run, tapes):
    without = dataclasses.replace(tapes, learners={m: t for m, t in tapes.learners.items() if m != 2})
    with pytest.raises(TapeError, match=r"learner 2's offer of fragment . after .* steps .* is on no tape"):
        plans.make_plan(without, POLICY, STEPS)
    syncer = dataclasses.replace(tapes.syncers[0], entries=tapes.syncers[0].entries[:60])
    cut = plans.make_plan(dataclasses.replace(tapes, syncers=[syncer]), POLICY, STEPS)
    assert perform(cut, lambda actor, work: None)
    with pytest.raises(TapeError, match=r"learner . needs version . of fragment ., which is on no tape"):
        order_of(cut)


def test_a_tape_that_its_core_cannot_have_been_told_is_refused(tapes):
    life = tapes.learners[0][0]
    entries = [e for e in life.entries if not isinstance(e.content, events.Welcomed)]
    wrong = dataclasses.replace(tapes, learners={0: [dataclasses.replace(life, entries=entries)]})
    with pytest.raises(TapeError, match=r"learner-0-1\.tape: entry \d+: "):
        plans.make_plan(wrong, POLICY, STEPS)


def test_two_offers_of_one_step_before_and_after_an_update_are_two(tapes):
    """The second is of another version: what it needs cannot be had before that was merged."""
    life = tapes.learners[0][0]
    begun = next(n for n, entry in enumerate(life.entries) if isinstance(entry.content, Adopted)) + 1
    step = [events.StepStarted(5), events.StepFinished()]
    told = [
        *step,
        events.OfferAsked(RoundId(1, 0), 0, 1),
        *step,
        events.OfferAsked(RoundId(1, 0), 0, 2),
        events.UpdateArrived(0, 1, 1, Watermark(1, 1)),
        events.OfferAsked(RoundId(5, 0), 1, 2),
    ]
    now = life.entries[begun - 1].now or 0.0
    entries = [*life.entries[:begun], *(Entry(now, event) for event in told)]
    policy = dataclasses.replace(POLICY, rebase=True)
    did = plans.life(dataclasses.replace(life, entries=entries), policy, STEPS).works
    offers = [work.id for work in did if isinstance(work, works.OfferWork)]
    assert [(offer.steps, offer.since.steps) for offer in offers] == [(1, 0), (2, 0), (2, 1)]
    assert len(set(offers)) == 3
    [update] = [work for work in did if isinstance(work, works.Apply)]
    assert update.merged == offers[0] and update.rebase


def halves(tapes, committed):
    """The syncer's tape as if it had been killed with a merge under way, which was `committed` or not."""
    [tape] = tapes.syncers
    begun = next(
        i
        for i, entry in enumerate(tape.entries)
        if i > 100 and isinstance(entry.content, events.MergeFinished)
    )
    entries = tape.entries[:begun]
    finished = tape.entries[begun].content.round
    core = SyncerCore(POLICY, STEPS, tape.header.state)
    for entry in entries:
        if entry.now is not None:
            core.handle(entry.content, entry.now)
    state = core.state()
    state = state.after(finished) if committed else state
    header = dataclasses.replace(tape.header, process=2, state=state, sha256=("ff" * 32,) * 2)
    second = dataclasses.replace(tape, header=header, entries=[])
    return [dataclasses.replace(tape, entries=entries), second], finished, state


@pytest.mark.parametrize("committed", [True, False])
def test_a_merge_of_which_a_killed_syncer_never_heard_counts_if_the_next_one_begins_from_it(tapes, committed):
    syncers, finished, state = halves(tapes, committed)
    plan = plans.make_plan(dataclasses.replace(tapes, syncers=syncers), POLICY, STEPS)
    versions = [max((w.version for w in merges_of(plan) if w.round.fragment == p), default=0) for p in (0, 1)]
    assert tuple(versions) == state.versions
    last = merges_of(plan)[-1]
    assert (last.round == finished) is committed
    if committed:
        assert last.sha256 == b"\xff" * 32


def test_a_syncer_that_begins_from_what_nobody_merged_is_told(tapes):
    syncers, _, state = halves(tapes, committed=False)
    state = SyncerState((state.versions[0] + 1, state.versions[1] + 1), state.merged_steps)
    syncers[1] = dataclasses.replace(syncers[1], header=dataclasses.replace(syncers[1].header, state=state))
    with pytest.raises(TapeError, match=r"ends at version \d+ of fragment \d, but \d+ followed"):
        plans.make_plan(dataclasses.replace(tapes, syncers=syncers), POLICY, STEPS)


def test_a_run_whose_first_syncer_has_no_tape_is_told(tapes):
    state = SyncerState((3, 3), (6, 6))
    later = dataclasses.replace(
        tapes.syncers[0], header=dataclasses.replace(tapes.syncers[0].header, state=state)
    )
    with pytest.raises(TapeError, match="does not begin with the run"):
        plans.make_plan(dataclasses.replace(tapes, syncers=[later]), POLICY, STEPS)


def test_tapes_in_a_folder_are_read_by_actor_and_a_torn_one_is_cut_with_a_warning(run, tapes, tmp_path):
    folder = tmp_path / "tape"
    folder.mkdir()
    for path in (run[0] / "tape").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    torn = learner_tape(folder, 2, 1)
    torn.write_bytes(torn.read_bytes()[:-3])
    learner_tape(folder, 2, 1001).write_bytes(b"ddilo")
    found = read_run(tmp_path)
    cut, empty = found.warnings
    assert re.fullmatch(rf"{torn}: [1-9]\d* bytes of a record that was being written are cut off", cut)
    assert empty == f"{learner_tape(folder, 2, 1001)}: is empty: its process was killed at once"
    whole = tapes.learners[2][0].entries
    left = found.learners[2][0].entries
    assert left == whole[: len(left)]
    assert len(left) < len(whole)
    assert isinstance(found.syncers[0].entries[-1].content, End)
    assert found.syncers[0].ended


def test_a_folder_without_tapes_is_told(tmp_path):
    with pytest.raises(TapeError, match="holds no tapes; baselines and runs without arrays write none"):
        read_run(tmp_path)
    path = syncer_tape(tmp_path / "tape", 1)
    path.parent.mkdir()
    path.write_bytes(b"")
    with pytest.raises(TapeError, match="holds no tape of a syncer"):
        read_run(tmp_path)


def test_the_end_of_a_process_is_no_version_of_the_same_numbers():
    """A run of many restarts reached both: what needed the version went on when the process had ended."""
    assert works.ProcessId(0, 7) != works.VersionId(0, 7)
    assert len({works.ProcessId(0, 7), works.VersionId(0, 7), works.ProcessId(0, 7)}) == 2
