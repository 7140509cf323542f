"""The virtual driver with arrays: it repeats to the bit, keeps its books, and agrees with the local one."""

import functools
import json
import re
import threading
from unittest import mock

import numpy as np
import pytest

from ddiloco.config import ConfigError
from ddiloco.goodput.accounting import State
from ddiloco.outer.global_model import parameters_sha256
from ddiloco.protocol.schedule import Schedule
from ddiloco.run.job import with_steps
from ddiloco.run.recipes import ModelRecipe, assembly_of
from ddiloco.telemetry import records
from ddiloco.virtual.availability import Change, write_trace
from ddiloco.virtual.run import VirtualRun as FleetRun
from ddiloco.workers.learner_arrays import TrainingArrays
from ddiloco.workers.learner_worker import LearnerWorker
from tests.integration.remote_runs import lines
from tests.virtual_runs import run_job, run_timed, run_virtual, virtual
from tests.workbench import assert_equal, devices, experiment, run_local

MERGE = ("step", "fragment", "version", "learners", "tokens")
STRICT = {"sync": {"max_run_ahead": 0}}  # streaming in which the arrays too cannot but repeat
TROUBLE = {
    "sync": {"silence_timeout": 8.0, "offer_timeout": 4.0, "resend_timeout": 4.0},
    "virtual": {
        "step_seconds": (1.0, 1.4),
        "step_variation": 0.2,
        "latency": (0.1,),
        "bandwidth": (1e5,),
        "jitter": (0.2,),
        "loss": (0.1,),
        "merge_seconds": 0.1,
        "recovery_seconds": 3.0,
        "availability": "failures",
        "num_chips": 8,
        "failures": {
            "mtbi_years": 4e-6,  # of 8 chips: an interruption every 16 s
            "chips_per_slice": 2,
            "detection_seconds": 0.5,
            "downscale_seconds": 0.5,
            "upscale_seconds": 0.5,
            "upscale_wait_seconds": 1.0,
            "return_seconds": 5.0,
            "restart_seconds": 2.0,
            "step_seconds": 1.0,
        },
    },
}


@pytest.fixture(scope="module")
def run(data_dir):
    """Runs an experiment; one that has been run is not run again."""

    @functools.cache
    def once(algorithm, groups):
        return run_virtual(virtual(data_dir, algorithm, **json.loads(groups)))

    return lambda algorithm="decoupled", **groups: once(algorithm, json.dumps(groups, sort_keys=True))


@pytest.fixture(scope="module")
def again(data_dir):
    """Runs an experiment again."""
    return lambda algorithm="decoupled", **groups: run_virtual(virtual(data_dir, algorithm, **groups))


@pytest.fixture(scope="module")
def locally(data_dir):
    def once(algorithm, **groups):
        with devices(1):
            return run_local(assembly_of(experiment(data_dir, algorithm, **groups)))

    return once


# Determinism.


@pytest.mark.parametrize("groups", [{}, TROUBLE], ids=["steady", "failures, loss and jitter"])
def test_the_same_seed_gives_the_same_records_and_parameters_to_the_bit(groups, run, again):
    first, second = run(**groups), again(**groups)
    assert first.sha256 == second.sha256
    assert_equal(first.outcome.params, second.outcome.params)
    assert first.outcome.eval_loss == second.outcome.eval_loss
    kept = (records.StateChanged, records.Noted, records.Transferred, records.Evaluated)
    for kind in kept:
        assert first.of(kind) == second.of(kind)
    assert [(r.learner, r.step, r.time, r.tokens) for r in first.of(records.StepDone)] == [
        (r.learner, r.step, r.time, r.tokens) for r in second.of(records.StepDone)
    ]


def test_the_troubled_run_is_one(run):
    troubled = run(**TROUBLE)
    states = {state for m in (0, 1) for _, state, _ in troubled.states(m)}
    assert {State.DETECTING, State.RECONFIGURING, State.REPLAYING} <= states
    assert troubled.merges(*MERGE) != run().merges(*MERGE)
    assert troubled.outcome.finished
    assert troubled.seconds > 12 * 1.4


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["decoupled", "data_parallel"])
def test_stacked_layers_train_as_if_each_were_by_itself(algorithm, run):
    models = (
        {"num_layers": 2, "scan_layers": scan, "logits_chunk": 32 if scan else None} for scan in (False, True)
    )
    by_itself, stacked = (run(algorithm, model=model) for model in models)
    assert stacked.outcome.eval_loss == pytest.approx(by_itself.outcome.eval_loss, rel=1e-5)
    assert stacked.outcome.params.keys() == by_itself.outcome.params.keys()
    for name, value in by_itself.outcome.params.items():
        np.testing.assert_allclose(stacked.outcome.params[name], value, rtol=1e-3, atol=1e-4, err_msg=name)


# The local driver.


@pytest.mark.parametrize(
    ("algorithm", "groups"), [("diloco", {}), ("streaming", STRICT)], ids=["diloco", "streaming"]
)
def test_changing_only_the_driver_changes_neither_merges_nor_parameters(algorithm, groups, run, locally):
    ours, theirs = run(algorithm, **groups), locally(algorithm, **groups)
    merges = [
        tuple(tuple(v) if isinstance(v, list) else v for v in map(values.get, MERGE))
        for values in theirs.noted("round")
    ]
    assert sorted(ours.merges(*MERGE)) == sorted(merges)  # the last rounds come in any order
    assert ours.sha256 == parameters_sha256(theirs.outcome.params)
    assert ours.outcome.eval_loss == pytest.approx(theirs.outcome.eval_loss, rel=1e-6)


def test_a_learner_that_is_late_at_the_start_of_a_streaming_run_is_waited_for(run, locally):
    """Learner 1 begins only once learner 0 stands still for want of it."""
    stands_still = threading.Event()
    adopt, enter = TrainingArrays.adopt, LearnerWorker._enter

    def late(arrays, *args):
        if threading.current_thread().name == "learner-1":
            assert stands_still.wait(60.0)
        adopt(arrays, *args)

    def told(worker, state):
        if state is State.WAITING_FOR_PEERS:
            stands_still.set()
        enter(worker, state)

    with mock.patch.object(TrainingArrays, "adopt", late), mock.patch.object(LearnerWorker, "_enter", told):
        theirs = locally("streaming", **STRICT)
    assert {tuple(values["learners"]) for values in theirs.noted("round")} == {(0, 1)}
    assert run("streaming", **STRICT).sha256 == parameters_sha256(theirs.outcome.params)


# What a run is.


@pytest.mark.parametrize("algorithm", ["decoupled", "streaming", "diloco"])
def test_on_instant_links_every_round_is_merged_when_it_is_due_with_everybody(algorithm, run):
    done = run(algorithm)
    sync = done.experiment.sync
    schedule = Schedule(sync.num_fragments, sync.interval, 12)
    due = [(t, p) for t in range(1, 13) for p in schedule.due(t)]
    assert done.merges("step", "fragment") == due
    # As long as no step has been timed a decoupled syncer has no grace: the first report is merged alone.
    first = (0,) if algorithm == "decoupled" else (0, 1)
    assert done.merges("learners") == [(first,)] + [((0, 1),)] * (len(due) - 1)
    assert [r.time for r in done.of(records.Noted) if r.name == "round"] == [float(t) for t, _ in due]
    assert (done.outcome.finished, done.outcome.failure, done.outcome.step) == (True, None, 12)


def test_metrics_of_the_outer_step_are_in_the_record_of_a_merge(run):
    assert all(values["outer_gradient_norm"] > 0 for values in run().noted("round"))


def test_evaluations_carry_virtual_seconds_and_the_last_belongs_to_the_final_parameters(again):
    done = again(eval={"every": 4}, virtual={"step_seconds": (0.5,)})
    found = [(e.step, e.time) for e in done.of(records.Evaluated)]
    assert found == [(0, 0.0), (4, 2.0), (8, 4.0), (12, 6.0)]
    first, *_, last = done.of(records.Evaluated)
    assert last.tokens == sum(done.tokens.values())
    assert last.loss < first.loss
    with devices(1):
        assembly = assembly_of(done.experiment)
        score = assembly.scorer(assembly.evaluation_mesh())
        assert score(done.outcome.params).loss == last.loss == done.outcome.eval_loss


def test_the_steps_that_follow_an_update_have_it_among_their_metrics(run):
    steps = run("diloco").steps(0)
    assert [step.step for step in steps if step.metrics.get("updates") == 1] == [5, 9]


def test_a_stop_ends_a_run_with_a_sound_outcome(data_dir):
    stop = threading.Event()
    stop.set()
    done = run_virtual(virtual(data_dir), stop)
    assert (done.outcome.finished, done.outcome.failure, done.outcome.step) == (False, None, 0)


def test_streaming_learners_of_other_speeds_wait_as_long_as_the_closed_form_says(run):
    done = run("streaming", virtual={"step_seconds": (1.0, 2.0)})
    schedule = Schedule(3, 4, 12)
    due = [t for t in range(1, 13) if schedule.due(t)]
    now = 0.0
    for clock in range(12):  # it may not take a step while a round two steps back waits for the slow one
        awaited = [2.0 * t for t in due if t <= clock - 2]
        now = max([now, *awaited]) + 1.0
    assert done.steps(0)[-1].time == now
    assert done.steps(1)[-1].time == 24.0
    assert done.timelines.goodput(done.seconds) == pytest.approx((12 + 24) / (now + 24), rel=1e-12)
    assert done.timelines.blocked_seconds(done.seconds) == pytest.approx(now - 12, rel=1e-12)


def test_decoupled_learners_of_other_speeds_never_wait(run):
    done = run(virtual={"step_seconds": (1.0, 2.5)})
    assert done.timelines.goodput(done.seconds) == 1.0
    assert done.timelines.blocked_seconds(done.seconds) == 0.0


# What a run leaves behind.


@pytest.fixture(scope="module")
def left(data_dir, tmp_path_factory):
    """The files of the run with failures, loss and jitter, and its result."""
    folder = tmp_path_factory.mktemp("troubled")
    return folder, run_job(virtual(data_dir, **TROUBLE), folder)


def test_step_files_carry_virtual_seconds(left, run):
    folder, _ = left
    for m in (0, 1):
        expected = [{"time": r.time, "step": r.step, "tokens": r.tokens} for r in run(**TROUBLE).steps(m)]
        written = lines(folder / "learners" / str(m) / "steps.jsonl")
        assert [{name: line[name] for name in ("time", "step", "tokens")} for line in written] == expected


def test_rounds_are_written_as_they_were_merged(left, run):
    folder, _ = left
    written = lines(folder / "rounds.jsonl")
    merges = [tuple(tuple(v) if isinstance(v, list) else v for v in map(line.get, MERGE)) for line in written]
    assert merges == run(**TROUBLE).merges(*MERGE)
    assert [line["time"] for line in written] == sorted(line["time"] for line in written)


def test_the_summary_agrees_with_the_records_and_the_files(left, run):
    folder, result = left
    summary, done = json.loads((folder / "summary.json").read_text()), run(**TROUBLE)
    assert summary == result.summary
    assert summary["params_sha256"] == done.sha256
    assert (summary["driver"], summary["finished"], summary["failures"]) == ("virtual", True, [])
    for m in (0, 1):
        steps = lines(folder / "learners" / str(m) / "steps.jsonl")
        assert summary["tokens"][str(m)] == sum(step["tokens"] for step in steps)
        assert summary["inner_steps"][str(m)] == len(steps)
    timelines = done.timelines
    assert summary["goodput"] == pytest.approx(timelines.goodput(done.seconds), rel=1e-12)
    assert summary["uptime"] == pytest.approx(timelines.uptime(done.seconds), rel=1e-12)
    assert summary["lost"] == pytest.approx(timelines.lost(done.seconds), rel=1e-12)
    assert summary["goodput"] + sum(summary["lost"].values()) == pytest.approx(1.0, rel=1e-12)
    assert 0 < summary["goodput"] < 1
    assert summary["wall_seconds"] == pytest.approx(done.seconds)


def test_the_lives_of_a_run_played_back_as_a_trace_give_the_same_parameters(left, again):
    folder, result = left
    trace = {**TROUBLE["virtual"], "availability": "trace", "trace": str(folder / "availability.csv")}
    assert len((folder / "availability.csv").read_text().splitlines()) > 10
    assert again(**{**TROUBLE, "virtual": trace}).sha256 == result.summary["params_sha256"]


def test_a_trace_that_would_be_set_aside_is_refused_before_anything_is(data_dir, tmp_path):
    write_trace(tmp_path / "availability.csv", [])
    trace = {"availability": "trace", "trace": str(tmp_path / "availability.csv")}
    with pytest.raises(ConfigError, match=r"^config\.virtual\.trace: .* is in the workdir"):
        run_job(virtual(data_dir, virtual=trace), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["availability.csv"]


def test_a_learner_that_returns_goes_on_with_the_inner_state_of_a_peer(data_dir, tmp_path):
    write_trace(tmp_path / "availability.csv", [Change(5.5, 1, "fail"), Change(6.0, 1, "recover")])
    quick = {"failures": {"detection_seconds": 0.5}, "recovery_seconds": 1.25}
    trace = {"availability": "trace", "trace": str(tmp_path / "availability.csv"), **quick}
    taken, begun = [], []

    def count():
        """The steps that each inner state has taken in."""
        inner = [fleet.learners[m].inner() for m in (0, 1)]
        begun.extend({int(leaf) for leaf in leaves if leaf.dtype == np.int32} for leaves in inner)

    with devices(1):
        fleet = FleetRun(assembly_of(virtual(data_dir, virtual=trace)), taken.append, threading.Event())
        fleet._fleet.calendar.at(9.5, count)
        assert fleet.run().finished
    # It joins at 7.25, when the other has begun its eighth step, and begins its own third at 9.25.
    assert begun == [{10}, {8 + 3}]
    noted = [record for record in taken if isinstance(record, records.Noted) and record.name == "recovered"]
    given = [(record.time, record.values["learner"], record.values["inner_state"]) for record in noted]
    assert given == [(0.0, 0, "fresh"), (0.0, 1, "fresh"), (7.25, 1, "peer")]


@pytest.mark.parametrize(
    ("go", "come", "train", "seconds"),  # seconds of a step; to start takes 30
    [
        ("leave", "join", {}, 1.0),
        ("leave", "join", {"tokens": 12 * 2 * 2 * 32}, 0.01),
        ("fail", "recover", {"tokens": 12 * 2 * 2 * 32}, 1.0),
        ("fail", "recover", {}, 0.01),
    ],
)
def test_a_fleet_in_which_everybody_is_away_for_long_goes_on_when_they_return(
    go, come, train, seconds, data_dir, tmp_path
):
    changes = [(3.5 * seconds, 0, go), (4.25 * seconds, 1, go), (1e5, 0, come), (1e5, 1, come)]
    write_trace(tmp_path / "availability.csv", [Change(*change) for change in changes])
    trace = {"availability": "trace", "trace": str(tmp_path / "availability.csv"), "step_seconds": (seconds,)}
    e = virtual(data_dir, virtual=trace, train=train)
    run = run_timed(with_steps(e, lambda: assembly_of(e)))
    assert run.outcome.failure is None and run.outcome.finished
    assert run.seconds > 1e5


def test_a_fleet_that_never_comes_to_the_end_has_failed_and_says_when(again, tmp_path):
    write_trace(tmp_path / "availability.csv", [Change(3.5, 0, "detect")])
    trace = {"availability": "trace", "trace": str(tmp_path / "availability.csv")}
    done = again("streaming", virtual=trace, sync={"silence_timeout": 1e6})
    assert re.fullmatch(
        r"nothing has been merged from [\d.]+ to [\d.]+ virtual seconds", done.outcome.failure
    )


class Noted:
    """Batches that note what is drawn."""

    def __init__(self, batches, shards, drawn):
        self._batches, self._shards, self._drawn = batches, tuple(shards), drawn
        self.get_state, self.set_state = batches.get_state, batches.set_state

    def __iter__(self):
        return self

    def __next__(self):
        batch = next(self._batches)
        self._drawn.append((self._shards, *(array.tobytes() for array in batch.values())))
        return batch


def test_a_learner_that_dies_and_returns_draws_again_what_was_lost_and_nothing_that_is_merged(
    again, tmp_path
):
    """It dies in its fourth step, when its first two are merged."""
    write_trace(tmp_path / "availability.csv", [Change(3.5, 1, "fail"), Change(5.25, 1, "recover")])
    trace = {"availability": "trace", "trace": str(tmp_path / "availability.csv")}
    drawn, make = [], ModelRecipe.batches
    noted = lambda recipe, shards: Noted(make(recipe, shards), shards, drawn)  # noqa: E731
    with mock.patch.object(ModelRecipe, "batches", noted):
        noticed = {"failures": {"detection_seconds": 1.0}, "recovery_seconds": 1.0}
        done = again(virtual={**trace, **noticed})
    assert [r.time for r in done.steps(1)][:5] == [1.0, 2.0, 3.0, 7.25, 8.25]
    assert done.merges("step", "learners")[-1] == (12, (0, 1))
    own = [batch for shards, *batch in drawn if shards == (1,)]
    assert len(own) == len(done.steps(1)) + 1  # that of the step under way when it died
    before = [(step, who) for step, who in done.merges("step", "learners") if step <= 3 and 1 in who]
    lost = len(own) - len({tuple(batch) for batch in own})
    assert own[4 : 4 + lost] == own[4 - lost : 4] and lost == 4 - max(step for step, _ in before)
