"""The local driver, end to end: real steps, real threads, in each policy and with learners that fail."""

import collections
import functools
import itertools
import threading

import jax
import numpy as np
import pytest

from ddiloco.config import ConfigError
from ddiloco.local import run as local
from ddiloco.protocol.schedule import Schedule
from ddiloco.run.recipes import assembly_of
from ddiloco.telemetry import records
from tests.workbench import devices, experiment, run_local

PACED = {"min_step_seconds": (0.02, 0.02)}  # so that no learner is done before the other begins


def steps_of(run, learner):
    return [record for record in run.of(records.StepDone) if record.learner == learner]


def fragments_of(run, name):
    return [values["fragment"] for values in run.noted(name)]


@pytest.fixture(scope="module")
def plain(data_dir):
    """A run of each algorithm in which nothing happens."""

    @functools.cache
    def run(algorithm):
        with devices(1):
            return run_local(assembly_of(experiment(data_dir, algorithm, train=PACED)))

    return run


@pytest.mark.parametrize("algorithm", ["decoupled", "streaming", "diloco"])
def test_every_fragment_is_merged_as_often_as_it_is_due(algorithm, plain):
    run = plain(algorithm)
    sync = run.experiment.sync
    schedule = Schedule(sync.num_fragments, sync.interval, 12)
    due = collections.Counter(p for t in range(1, 13) for p in schedule.due(t))
    merged = fragments_of(run, "round")
    # A decoupled syncer that a busy machine keeps from its turn skips it, or finds learners that are done and
    # have nothing to give. One that is waited for does not, but for a last round before which learners have
    # given all their steps, as they were asked for those before late.
    late = [*run.noted("round_skipped"), *run.noted("round_abandoned")]
    assert {p: (merged + [values["fragment"] for values in late]).count(p) for p in due} == due
    assert set(merged) == set(due)
    assert (run.outcome.finished, run.outcome.failure) == (True, None)
    if algorithm != "decoupled":
        assert ([values for values in late if values["step"] < 12], run.outcome.step) == ([], 12)


@pytest.mark.parametrize("algorithm", ["streaming", "diloco"])
def test_with_all_live_learners_as_the_quorum_every_merge_has_all(algorithm, plain):
    run = plain(algorithm)
    regular = [
        values for values in run.noted("round") if values["step"] < 12
    ]  # at the last some have no work
    assert {tuple(values["learners"]) for values in regular} == {(0, 1)}
    assert [len(steps_of(run, m)) for m in range(2)] == [12, 12]


def test_decoupled_learners_never_wait_and_some_learner_always_steps(plain):
    state = plain("decoupled").state
    assert state.timelines.blocked_seconds(state.last_time) == 0.0
    assert state.timelines.uptime(state.last_time) == 1.0
    assert state.timelines.goodput(state.last_time) == 1.0


@pytest.mark.parametrize("algorithm", ["decoupled", "streaming", "diloco"])
def test_tokens_reported_are_those_of_the_batches_drawn(algorithm, plain):
    run = plain(algorithm)
    assert {m: one.tokens for m, one in run.state.learners.items()} == dict(run.drawn)
    assert all(tokens > 0 for tokens in run.drawn.values())
    assert run.of(records.Evaluated)[-1].tokens == sum(run.drawn.values())


def raises_at(step, batches, error):
    yield from itertools.islice(batches, step)
    raise error


def test_a_learner_that_raises_is_told_with_its_traceback_and_the_rest_finish(data_dir, one_device):
    def around(learner, batches):
        return raises_at(3, batches, ValueError("bad disk")) if learner == 1 else batches

    run = run_local(assembly_of(experiment(data_dir, sync={"num_learners": 3})), around=around)
    [death] = run.of(records.LearnerDied)
    assert death.learner == 1
    assert "raises_at" in death.traceback
    assert "ValueError: bad disk" in death.traceback
    assert run.noted("learner_lost")[0]["reason"] == "ValueError: bad disk"
    assert (run.outcome.finished, run.outcome.failure) == (True, None)
    assert max(steps_of(run, m)[-1].step for m in (0, 2)) == 12
    assert run.state.finished == {0, 2}


def test_where_all_are_waited_for_a_dead_learner_is_waited_for_no_more(data_dir, one_device):
    def around(learner, batches):
        return raises_at(3, batches, ValueError("bad disk")) if learner == 1 else batches

    run = run_local(assembly_of(experiment(data_dir, "streaming")), around=around)
    assert run.outcome.finished
    assert run.noted("round")[-1]["learners"] == [0]
    assert len(steps_of(run, 0)) == 12


def test_when_every_learner_raises_the_run_has_failed(data_dir, one_device):
    run = run_local(
        assembly_of(experiment(data_dir)),
        around=lambda m, batches: raises_at(2, batches, OSError(f"disk {m}")),
    )
    assert run.outcome.failure == "every learner failed, the first with OSError: disk 0"
    assert not run.outcome.finished
    assert {death.learner for death in run.of(records.LearnerDied)} == {0, 1}
    assert all(np.isfinite(value).all() for value in run.outcome.params.values())


def test_a_stop_in_mid_run_ends_it_with_a_sound_outcome(data_dir, one_device):
    stop = threading.Event()

    def around(learner, batches):
        for step, batch in enumerate(batches):
            if step == 9:
                stop.set()
            yield batch

    assembly = assembly_of(experiment(data_dir, train={"steps": 1_000_000}))
    run = run_local(assembly, around=around, stop=stop)
    assert (run.outcome.finished, run.outcome.failure) == (False, None)
    assert 9 <= max(len(steps_of(run, m)) for m in range(2)) < 1_000_000
    assert run.outcome.step == max((values["step"] for values in run.noted("round")), default=0)
    assert np.isfinite(run.outcome.eval_loss)
    assert run.state.finished == {0, 1}


def test_an_interrupt_of_the_caller_leaves_no_thread_that_trains(data_dir, one_device):
    stepped, before, caller = threading.Event(), set(threading.enumerate()), threading.current_thread()

    class Interrupted(threading.Event):
        def is_set(self):  # the evaluator's thread asks, too
            if threading.current_thread() is not caller:
                return False
            assert stepped.wait(60)
            raise KeyboardInterrupt

    def record(value):
        if isinstance(value, records.StepDone):
            stepped.set()

    assembly = assembly_of(experiment(data_dir, train={"steps": 10_000}))
    run = local.LocalRun(assembly, record, Interrupted())
    with pytest.raises(KeyboardInterrupt):
        run.run()
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert not left & {"learner-0", "learner-1", "syncer", "evaluator"}


def test_a_learner_that_hangs_stops_neither_the_others_nor_the_end(data_dir, one_device, monkeypatch):
    monkeypatch.setattr(local, "_LEAVE_SECONDS", 0.5)
    release = threading.Event()

    def hang(batches):
        yield from itertools.islice(batches, 2)
        release.wait()

    try:
        run = run_local(
            assembly_of(experiment(data_dir, "streaming", sync={"num_learners": 3, "silence_timeout": 1.0})),
            around=lambda learner, batches: hang(batches) if learner == 2 else batches,
        )
    finally:
        release.set()
    assert (run.outcome.finished, run.outcome.failure) == (True, None)
    assert max(steps_of(run, m)[-1].step for m in (0, 1)) == 12
    assert run.state.finished == {0, 1}
    assert len(steps_of(run, 2)) <= 2
    [death] = run.of(records.LearnerDied)
    assert (death.learner, death.traceback) == (2, "it did not leave within 0 s")
    assert run.noted("learner_silent") == [{"learner": 2}]
    regular = [
        values for values in run.noted("round") if values["step"] < 12
    ]  # at the last one may have none
    assert regular[-1]["learners"] == [0, 1]


def test_learners_may_draw_different_numbers_of_rows(data_dir, one_device):
    run = run_local(assembly_of(experiment(data_dir, "diloco", train={"batch_sizes": (1, 4)})))
    shares = [values["tokens"] for values in run.noted("round")]
    assert sum(shares) == sum(run.drawn.values())
    few, many = run.drawn[0], run.drawn[1]
    assert 12 * 28 < few <= 12 * 32
    assert 3.5 * few < many < 4.5 * few


@pytest.mark.slow
@pytest.mark.parametrize(("count", "each"), [(8, 2), (1, 1)])
def test_four_learners_divide_the_devices_or_share_them(count, each, data_dir):
    with devices(count):
        sync = {"num_learners": 4}
        assembly = assembly_of(experiment(data_dir, "diloco", sync=sync, train={"steps": 8}))
        assembly.check()
        assert [mesh.size for mesh in assembly.learner_meshes()] == [each] * 4
        run = run_local(assembly)
    assert run.outcome.finished
    assert [len(steps_of(run, m)) for m in range(4)] == [8] * 4
    assert {tuple(values["learners"]) for values in run.noted("round")} == {(0, 1, 2, 3)}


def test_idle_devices_evaluate_where_there_are_any(data_dir):
    assembly = assembly_of(experiment(data_dir, sync={"num_learners": 3}))
    with pytest.warns(UserWarning, match="2 of 8 devices stay idle"):
        mesh = assembly.evaluation_mesh()
    assert list(mesh.devices.flat) == jax.devices()[6:]
    assert assembly.mesh_on(jax.devices()[:3]).size == 1, "three do not divide the rows"


@pytest.mark.slow
def test_without_an_idle_device_a_sharded_learner_evaluates_between_its_steps(data_dir):
    assembly = assembly_of(
        experiment(
            data_dir,
            mesh={"data": 1, "fsdp": 2, "tensor": 2},
            eval={"every": 4},
            train={"batch_size": 4},
            sync={"num_learners": 1},
        )
    )
    threads, scorer = [], assembly.scorer

    def watched(mesh, *between):
        def noted(call):
            return between[0](lambda: (threads.append(threading.current_thread().name), call())[1])

        return scorer(mesh, *([noted] if between else []))

    assembly.scorer = watched
    with devices(4):
        assert assembly.evaluation_learner() == 0
        assert assembly.evaluation_mesh() == assembly.learner_meshes()[0]
        run = run_local(assembly)
    assert run.outcome.finished and run.outcome.failure is None
    assert "devices-0" in threads  # between the steps of learner 0
    assert set(threads) <= {"MainThread", "devices-0", "evaluator"}  # before its first, and after its last
    assert len(run.of(records.Evaluated)) > 2


def test_devices_kept_for_evaluation_are_no_learners(data_dir):
    settings = {"mesh": {"data": 1, "fsdp": 2}, "sync": {"num_learners": 1}}
    assembly = assembly_of(experiment(data_dir, eval={"devices": 4}, **settings))
    with devices(6):
        assert assembly.evaluation_learner() is None
        assert list(assembly.evaluation_mesh().devices.flat) == jax.devices()[2:]
        assert [list(mesh.devices.flat) for mesh in assembly.learner_meshes()] == [jax.devices()[:2]]
    with devices(5), pytest.raises(ConfigError, match=r"eval\.devices: is 3, but must divide the 8 rows"):
        assembly_of(experiment(data_dir, eval={"devices": 3, "batch_size": 8}, **settings)).check()
    with pytest.raises(ConfigError, match="must leave learners some of the 8 devices"):
        assembly_of(experiment(data_dir, eval={"devices": 8}, **settings)).learner_meshes()


def test_evaluation_can_be_off(data_dir, one_device):
    assembly = assembly_of(experiment(data_dir, eval={"every": None}))
    run = run_local(assembly)
    assert run.outcome.finished and run.outcome.eval_loss is None
    assert run.of(records.Evaluated) == []


@pytest.mark.parametrize(("working", "steps"), [(1, 12), (0, 10_000)])
def test_a_failing_evaluation_ends_a_run_only_if_it_is_the_first(data_dir, one_device, working, steps):
    assembly = assembly_of(experiment(data_dir, eval={"every": 4}, train={**PACED, "steps": steps}))
    score, scorer = [], assembly.scorer

    def failing(mesh, *between):
        real = scorer(mesh, *between)

        def scored(params):
            score.append(threading.current_thread().name)
            if not working or (score[-1] == "evaluator" and score.count("evaluator") > working):
                raise MemoryError("no room")
            return real(params)

        return scored

    assembly.scorer = failing
    run = run_local(assembly)
    assert "evaluator" in score
    assert run.outcome.finished is bool(working)
    assert run.outcome.failure.startswith("an evaluation failed at step ")
    assert run.outcome.failure.endswith("MemoryError: no room")
