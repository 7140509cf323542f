"""An evaluator that follows a syncer's durable fragments, and the syncer that asks it for the last score."""

import contextlib
import dataclasses
import errno
import threading

import jax
import numpy as np
import pytest

from ddiloco.outer.fragments import take
from ddiloco.outer.global_model import GlobalModel
from ddiloco.protocol.messages import RoundId
from ddiloco.remote.evaluator import EvaluatorProcess, FollowedModel
from ddiloco.remote.syncer.scoring import Scoring
from ddiloco.run.recipes import assembly_of
from ddiloco.storage.durable import FOLDER, DurableState
from ddiloco.storage.score_files import Scores, Wanted
from ddiloco.telemetry import records
from ddiloco.telemetry.files import write_json
from ddiloco.training.mesh import MeshConfig, carve
from tests.remote.ends import until
from tests.workbench import experiment


@dataclasses.dataclass
class Syncer:
    """As much of a syncer as writes fragments: every merge moves all of a fragment by one half."""

    assembly: object
    workdir: object

    def __post_init__(self):
        layout = self.assembly.layout
        e = self.assembly.experiment
        initial = self.assembly.initial_parameters()
        self.model = GlobalModel(layout, initial, e.outer, e.sync.num_learners)
        self.durable = DurableState(
            self.workdir / FOLDER, layout, pytest.fail, threading.Event(), run="this run"
        )
        self.durable.begin(self.model)
        self.durable.complete()
        self.recorded, self.stop = [], threading.Event()
        self.scoring = Scoring(self.assembly, self.workdir, "this run", self.record, self.stop)

    def record(self, record):
        if isinstance(record, records.Flush):
            write_json(self.workdir / "summary.json", {"tokens": {"0": 500, "1": 400}})
            record.done()
        else:
            self.recorded.append(record)

    def merge(self, fragment, step):
        pieces = take(self.model.layout, fragment, self.model.parameters())
        moved = [np.asarray(piece) + 0.5 for piece in pieces]
        self.model.merge(fragment, [self.model.read(fragment, moved)], [(1, 10)])
        assert self.durable.commit(RoundId(step, fragment), self.model)

    @property
    def versions(self):
        return tuple(self.model.state(p).version for p in range(self.model.layout.num_fragments))

    def last(self, step):
        return self.scoring.last(step, self.versions, self.model.parameters())

    def end(self, steps=100):
        write_json(self.workdir / "summary.json", {"step": steps, "finished": True})

    def score(self):
        one = carve(jax.devices()[:1], 1, MeshConfig())[0]
        return self.assembly.scorer(one)(self.model.parameters()).loss

    def scores(self):
        self.scoring.take()
        return [(r.step, r.tokens) for r in self.recorded if isinstance(r, records.Evaluated)]


@contextlib.contextmanager
def evaluator(assembly, workdir):
    """Runs in a thread; gives the thread and what it has noted."""
    stop, notes = threading.Event(), []
    process = EvaluatorProcess(assembly, workdir, notes.append)
    thread = threading.Thread(target=process.run, args=(stop,))
    thread.start()
    try:
        yield thread, notes
    finally:
        stop.set()
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture
def make(data_dir, tmp_path):
    def make(every=10, **groups):
        groups = {"train": {"steps": 100}, "eval": {"every": every, "batch_size": 8}, **groups}
        assembly = assembly_of(experiment(data_dir, driver="remote", **groups))
        return Syncer(assembly, tmp_path), assembly

    return make


def test_it_scores_the_beginning_each_multiple_and_what_is_left_at_the_end(make, tmp_path):
    syncer, assembly = make()
    with evaluator(assembly, tmp_path) as (thread, notes):
        until(lambda: syncer.scores() == [(0, 0)])
        assert syncer.recorded[0].loss == pytest.approx(syncer.score(), rel=1e-5)
        write_json(tmp_path / "summary.json", {"tokens": {"0": 30, "1": 4}})
        syncer.merge(0, step=9)
        syncer.merge(1, step=12)
        until(lambda: len(syncer.scores()) == 2)
        assert syncer.scores()[1] == (12, 34)
        syncer.merge(2, step=19)
        last = syncer.last(19)
        syncer.end()
        thread.join(60)  # by itself
        assert not thread.is_alive() and notes == []
    assert last.loss == pytest.approx(syncer.score(), rel=1e-5) and last.problem is None
    assert syncer.scores() == [(0, 0), (12, 34), (19, 900)]


def test_it_stays_for_the_next_syncer_of_a_run_that_was_interrupted(make, tmp_path):
    syncer, assembly = make()
    with evaluator(assembly, tmp_path) as (thread, notes):
        until(lambda: syncer.scores() == [(0, 0)])
        syncer.merge(0, step=5)
        syncer.last(5)
        syncer.merge(1, step=12)
        until(lambda: [step for step, _ in syncer.scores()] == [0, 5, 12])
        syncer.merge(2, step=19)
        syncer.last(19)
        syncer.end()
        thread.join(60)
        assert not thread.is_alive() and notes == []


def test_one_that_begins_after_the_end_of_a_run_waits_for_another_but_not_for_ever(
    make, tmp_path, monkeypatch
):
    syncer, assembly = make()
    syncer.end()
    assert not EvaluatorProcess(assembly, tmp_path, pytest.fail)._look()
    monkeypatch.setattr("ddiloco.remote.evaluator._MAX_WAIT", 0.0)
    with evaluator(assembly, tmp_path) as (thread, _):
        thread.join(60)
        assert not thread.is_alive()
    syncer.end(steps=99)  # of a run that goes on for longer
    assert not EvaluatorProcess(assembly, tmp_path, pytest.fail)._look()
    assert syncer.scores() == [(0, 0)]


def test_after_a_rollback_it_scores_from_where_the_run_is_again(make, tmp_path):
    syncer, assembly = make()
    process, scored = EvaluatorProcess(assembly, tmp_path, pytest.fail), []
    process._evaluated = lambda record: scored.append(record.step)

    def look():
        process._refresh(syncer.durable)
        process._score_if_due()

    look()
    syncer.merge(0, step=22)
    look()
    process._model._steps[1], process._model._seen[1] = 60, None  # a version that is undone since
    process._score_if_due()
    look()
    syncer.merge(1, step=35)
    look()
    assert scored == [0, 22, 60, 35]


def test_the_model_that_it_follows_is_sharded_and_takes_in_only_what_has_changed(make, monkeypatch):
    syncer, assembly = make()
    mesh = carve(jax.devices(), 1, MeshConfig(data=1, fsdp=-1))[0]
    model, read = FollowedModel(assembly, mesh), []
    fragment = DurableState.fragment
    monkeypatch.setattr(DurableState, "fragment", lambda self, p: (read.append(p), fragment(self, p))[1])
    model.refresh(syncer.durable)
    assert sorted(read) == [0, 1, 2]
    syncer.merge(1, step=7)
    model.refresh(syncer.durable)
    assert read[3:] == [1] and (model.step, model.versions) == (7, (0, 1, 0))
    for name, value in syncer.model.parameters().items():
        np.testing.assert_array_equal(model.params[name], value, err_msg=name)
    assert model.params["layers/0/mlp/up/kernel"].sharding.spec != jax.sharding.PartitionSpec()


def test_without_an_evaluator_the_syncer_scores_itself_at_the_end(make):
    syncer, _ = make(sample={"tokens": 3})
    last = syncer.last(0)
    assert last.loss == pytest.approx(syncer.score()) and last.sample is not None
    assert syncer.scores() == [(0, 900)]


@pytest.mark.parametrize("told", ["to stop", "nothing, for an hour"])
def test_an_evaluator_that_never_answers_does_not_keep_a_run_from_its_end(told, make, tmp_path, monkeypatch):
    syncer, _ = make()
    if told == "to stop":
        syncer.stop.set()
    else:
        monkeypatch.setattr("ddiloco.remote.syncer.scoring._LONGEST", 0.5)
    with Scores(tmp_path).attending():
        assert syncer.last(5).loss == pytest.approx(syncer.score())


def test_a_folder_in_which_nothing_can_be_asked_does_not_keep_the_syncer_from_saving(
    make, tmp_path, monkeypatch
):
    syncer, _ = make()

    def want(scores, wanted):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Scores, "want", want)
    with Scores(tmp_path).attending():
        assert syncer.last(5).loss == pytest.approx(syncer.score())
    [alarm] = [r for r in syncer.recorded if isinstance(r, records.Alarm)]
    assert alarm.sentence == "the evaluator cannot be asked: No space left on device"


def test_with_evaluation_and_sampling_off_nobody_is_asked(make, tmp_path):
    syncer, _ = make(every=None)
    with Scores(tmp_path).attending():
        assert syncer.last(0) == (None, None, None)


def test_an_evaluation_that_fails_at_the_end_is_told_and_ends_it(make, tmp_path):
    syncer, assembly = make(every=0)

    def failing(mesh):
        def score(params):
            raise MemoryError("no room")

        return score

    assembly.scorer = failing
    with evaluator(assembly, tmp_path) as (_, notes):
        until(lambda: notes)
        last = syncer.last(5)
    assert notes == ["at step 0: MemoryError: no room"]
    assert last == (None, None, "at step 5: MemoryError: no room")


def test_fragments_that_are_seen_late_are_waited_for_as_long_by_each_that_asks(make, tmp_path, monkeypatch):
    monkeypatch.setattr("ddiloco.remote.evaluator._TRIES", 3)
    syncer, assembly = make(every=0)
    process, scores = EvaluatorProcess(assembly, tmp_path, pytest.fail), Scores(tmp_path)
    for step in (5, 6):
        first, *others = syncer.versions
        wanted = Wanted("this run", f"at {step}", step, 900, (first + 1, *others))
        scores.want(wanted)
        for _ in range(2):
            process._look()
        assert scores.new() == []
        syncer.merge(0, step)
        process._look()
        [scored] = scores.new()
        assert (scored.answers, scored.problem) == (wanted.ask, None)


def test_scores_that_an_earlier_syncer_of_the_run_has_taken_do_not_come_twice(make, tmp_path):
    syncer, assembly = make()
    with evaluator(assembly, tmp_path):
        until(lambda: syncer.scores() == [(0, 0)])
        syncer.last(5)  # it was told to end, and another goes on
    write_json(tmp_path / "summary.json", {"eval_history": [{"step": 0}, {"step": 5}]})
    taken = []
    Scoring(assembly, tmp_path, "this run", taken.append, syncer.stop).take()
    Scoring(assembly, tmp_path, "another run", taken.append, syncer.stop).take()
    assert taken == []


def test_a_second_evaluator_waits_until_the_first_has_ended(tmp_path):
    first, second = Scores(tmp_path), Scores(tmp_path)
    assert first.attended() is None
    with first.attending() as alone:
        assert alone and second.attended()
        with second.attending() as also:
            assert not also
    assert first.attended() is False
