"""Runs done again from their tapes: the same parameters to the bit, or a line on what is not the same."""

import dataclasses
import functools
import json
import os
import subprocess
import sys
import threading
from unittest import mock

import pytest

from ddiloco.local import run as local
from ddiloco.outer import guards
from ddiloco.outer.global_model import parameters_sha256
from ddiloco.protocol import events
from ddiloco.protocol.messages import RoundId, Watermark
from ddiloco.run.recipes import assembly_of
from ddiloco.settings.experiment import to_json
from ddiloco.storage.tape.entries import Committed, Entry
from ddiloco.storage.tape.file import TapeError
from ddiloco.storage.tape.recorder import learner_tape
from ddiloco.telemetry.files import read_json
from ddiloco.training import platform
from ddiloco.virtual.availability import Change, write_trace
from experiments.studies.replay import again as command
from experiments.studies.replay import execution as replay
from experiments.studies.replay import plan as plans
from experiments.studies.replay import recorded as reading
from experiments.studies.replay import works
from experiments.studies.replay.reading import read_run, read_tape
from tests import workbench
from tests.virtual_runs import run_job, virtual

CODEC = {"codec": "int4", "error_feedback": True}
LINKS = {
    "step_seconds": (1.0, 1.4),
    "latency": (0.1,),
    "jitter": (0.2,),
    "loss": (0.1,),
    "merge_seconds": 0.1,
}
WAITS = {"silence_timeout": 8.0, "offer_timeout": 4.0, "resend_timeout": 4.0}
CHANGES = [
    Change(4.0, 0, "detect"),
    Change(6.0, 0, "step"),
    Change(6.5, 1, "fail"),
    Change(9.0, 1, "recover"),
    Change(14.0, 0, "leave"),
    Change(17.0, 0, "join"),
]


@pytest.fixture(scope="module")
def recorded(data_dir, tmp_path_factory):
    """The folder and the settings of a virtual run in which learners pause, die, leave and come back."""

    @functools.cache
    def run(algorithm="decoupled", codec=True):
        workdir = tmp_path_factory.mktemp(algorithm)
        write_trace(workdir / "trace.csv", CHANGES)
        trace = {"availability": "trace", "trace": str(workdir / "trace.csv"), "recovery_seconds": 1.0}
        e = virtual(
            data_dir,
            algorithm,
            train={"steps": 24},
            sync=WAITS,
            virtual={**LINKS, **trace},
            outer=CODEC if codec else {},
        )
        run_job(e, workdir / "run")
        return workdir / "run", e

    return run


def again(workdir, experiment, until=None, change=lambda tapes: tapes):
    """The run in a folder, done again."""
    plan = replay.make_plan(experiment, change(read_run(workdir)))
    with workbench.devices(1):
        return replay.Replay(assembly_of(experiment), plan, until).run()


@pytest.mark.parametrize(
    ("algorithm", "codec"),
    [
        pytest.param("decoupled", False, marks=pytest.mark.slow),
        ("decoupled", True),
        pytest.param("streaming", True, marks=pytest.mark.slow),
        pytest.param("diloco", False, marks=pytest.mark.slow),
    ],
)
def test_a_virtual_run_with_failures_comes_to_its_parameters_again(algorithm, codec, recorded):
    workdir, e = recorded(algorithm, codec)
    tapes = read_run(workdir)
    assert [len(lives) for lives in tapes.learners.values()] == [2, 2]
    done = again(workdir, e)
    assert done.sha256 == read_json(workdir / "summary.json")["params_sha256"]
    assert done.merges == done.compared > 0
    if codec:
        did = [work for actor in replay.make_plan(e, tapes).learners for work in actor.works]
        applied = [work.merged is not None for work in did if isinstance(work, works.Apply)]
        assert True in applied and (False in applied or algorithm != "decoupled")


def test_a_run_whose_timing_changes_and_whose_codecs_differ_comes_to_its_parameters_again(data_dir, tmp_path):
    timings = ((8.0, "interval", 3.0), (8.0, "overlap", 1.0), (20.0, "interval", 8.0))
    sync = {**WAITS, "rebase": True, "interval": 4}
    fleet = {**LINKS, "timings": timings}
    outer = {**CODEC, "codec": ("f32", "int4")}
    e = virtual(data_dir, "decoupled", train={"steps": 36}, sync=sync, virtual=fleet, outer=outer)
    run_job(e, tmp_path)
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    changes = [line for line in map(json.loads, lines) if line["event"] == "timing_set"]
    assert [(line["interval"], line["overlap"]) for line in changes] == [(3, 1), (8, 1)]
    (merges,) = replay.make_plan(e, read_run(tmp_path)).merges
    assert {work.interval for work in merges} == {4, 3, 8}, "and so the weights of late steps"
    done = again(tmp_path, e)
    assert done.sha256 == read_json(tmp_path / "summary.json")["params_sha256"]
    assert done.merges == done.compared > 8


@pytest.mark.parametrize("codec", [pytest.param("f32", marks=pytest.mark.slow), "int4"])
def test_a_run_with_rebase_comes_to_its_parameters_again(codec, data_dir, tmp_path):
    outer = CODEC if codec == "int4" else {}
    e = virtual(data_dir, train={"steps": 24}, sync={**WAITS, "rebase": True}, virtual=LINKS, outer=outer)
    run_job(e, tmp_path)
    plan = replay.make_plan(e, read_run(tmp_path))
    assert any(w.rebase for actor in plan.learners for w in actor.works if isinstance(w, works.Apply))
    done = again(tmp_path, e)
    assert done.sha256 == read_json(tmp_path / "summary.json")["params_sha256"]
    assert done.merges == done.compared > 0


def early(offers, past):
    """A gate: none of the first offers of learner 0 are in line."""
    return {offer.learner: "too early" for offer in offers if past.rounds < 3 and offer.learner == 0}


def test_a_run_with_merges_of_which_nothing_came_comes_to_its_parameters_again(
    data_dir, tmp_path, monkeypatch
):
    """Learner 0 is the quicker one, and a quorum alone."""
    monkeypatch.setitem(guards.GATES, "early", early)
    outer = {"guard": {"gates": ("early",)}}
    quick = {**LINKS, "step_seconds": (0.5, 1.0)}
    e = virtual(data_dir, train={"steps": 24}, sync={**WAITS, "quorum": 1}, virtual=quick, outer=outer)
    run_job(e, tmp_path)
    [did] = replay.make_plan(e, read_run(tmp_path)).merges
    empty = [work for work in did if work.empty]
    assert empty and {c.learner for work in empty for c, _ in work.given} == {0}
    done = again(tmp_path, e)
    assert done.sha256 == read_json(tmp_path / "summary.json")["params_sha256"]
    assert done.merges == len(did) == done.compared + len(empty)
    monkeypatch.setitem(guards.GATES, "early", lambda offers, past: {})
    with pytest.raises(replay.ReplayMismatch):
        again(tmp_path, e)


@pytest.mark.parametrize("algorithm", ["decoupled", pytest.param("streaming", marks=pytest.mark.slow)])
def test_a_run_of_threads_comes_to_its_parameters_again(algorithm, data_dir, tmp_path, one_device):
    train = {"min_step_seconds": (0.01, 0.013)}
    e = workbench.experiment(data_dir, algorithm, train=train, outer=CODEC, data={"prefetch": 2})
    assembly = assembly_of(e)
    outcome = local.LocalRun(assembly, lambda record: None, threading.Event(), tmp_path).run()
    plan = replay.make_plan(e, read_run(tmp_path))
    done = replay.Replay(assembly, plan).run()
    assert done.sha256 == parameters_sha256(outcome.params)
    assert done.merges == done.compared > 0


@pytest.mark.slow
def test_a_replay_up_to_a_round_after_the_last_is_compared_with_the_run_as_a_whole_one(
    recorded, monkeypatch, capsys
):
    workdir, e = recorded()
    monkeypatch.setattr(command.platform, "prepare", functools.partial(platform.prepare, cache=False))
    assert to_json(replay.recorded_experiment(workdir)) == to_json(e)
    with reading.recorded(str(workdir)) as run, workbench.devices(1):
        [whole] = run.plan.merges
        for until, is_all in ((RoundId(1000, 0), True), (whole[1].round, False)):
            assert command.again(run, until) == 0
            assert ("the same as the run's" in capsys.readouterr().out) == is_all
    with pytest.raises(TapeError, match="no round up to step 0 was merged"):
        again(workdir, e, until=RoundId(0, 0))


def with_sha256(tapes, number, header=None):
    """The tapes with another SHA-256 of the syncer's `number`th version, and learners' headers changed."""
    [syncer] = tapes.syncers
    at = [i for i, entry in enumerate(syncer.entries) if isinstance(entry.content, Committed)][number]
    entries = list(syncer.entries)
    entries[at] = Entry(None, dataclasses.replace(entries[at].content, sha256=bytes(32)))
    learners = {
        m: [dataclasses.replace(t, header=(header or (lambda h: h))(t.header)) for t in lives]
        for m, lives in tapes.learners.items()
    }
    return dataclasses.replace(
        tapes, syncers=[dataclasses.replace(syncer, entries=entries)], learners=learners
    )


def test_the_first_version_that_differs_is_told_with_its_round_its_learners_and_a_hint(recorded):
    workdir, e = recorded()
    wrong = replay.make_plan(e, read_run(workdir)).merges[0][2]
    learners = ", ".join(str(c.learner) for c, _ in wrong.given)
    where = f"round {wrong.round.step}, fragment {wrong.round.fragment}: version {wrong.version}, merged of "
    with pytest.raises(replay.ReplayMismatch) as caught:
        again(workdir, e, change=lambda tapes: with_sha256(tapes, 2))
    told = str(caught.value)
    assert told.startswith(f"{where}learners {learners}, is not the one of the run; platform, devices and ")
    assert "\n" not in told

    def older(header):
        packages = {**header.machine.packages, "jax": "0.1"}
        return dataclasses.replace(header, machine=dataclasses.replace(header.machine, packages=packages))

    with pytest.raises(replay.ReplayMismatch, match=r"; learner \d had jax 0\.1, here "):
        again(workdir, e, change=lambda tapes: with_sha256(tapes, 2, older))


def test_data_that_began_again_in_the_run_as_their_position_was_none_do_so_again(recorded):
    workdir, e = recorded()

    def strange(entry):
        if not isinstance(entry.content, events.Welcomed):
            return entry
        data = Watermark(life=1, steps=0, position='["no position"]')
        return dataclasses.replace(entry, content=dataclasses.replace(entry.content, data=data))

    def welcomed(tapes):
        first, *others = tapes.learners[0]
        lives = [dataclasses.replace(first, entries=[*map(strange, first.entries)]), *others]
        return dataclasses.replace(tapes, learners={**tapes.learners, 0: lives})

    assert again(workdir, e, change=welcomed).sha256 == read_json(workdir / "summary.json")["params_sha256"]


def test_other_settings_than_the_tapes_are_refused(recorded, data_dir):
    workdir, _ = recorded()
    with pytest.raises(TapeError, match=r"syncer-1\.tape: is of other settings than config\.json"):
        replay.make_plan(virtual(data_dir, train={"steps": 25}), read_run(workdir))


def test_a_baseline_is_told_to_be_repeated_by_its_seed(data_dir, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(to_json(virtual(data_dir, "lone_learner"))))
    with pytest.raises(TapeError, match="is of lone_learner, which needs no tape: run it again by its seed"):
        replay.recorded_experiment(tmp_path)


def test_what_is_offered_is_on_the_tape_before_the_syncer_can_have_it(data_dir, tmp_path, one_device):
    e = workbench.experiment(data_dir, train={"min_step_seconds": (0.01, 0.01)})
    send = local.LocalOffers._send
    missing, seen = [], []

    def looked(run, round_id, contribution, offer):
        tape = read_tape(learner_tape(tmp_path / "tape", contribution.learner, 1))
        taken = plans.life(tape, e.sync, e.train.steps).sent.values()
        (seen if contribution in taken else missing).append(contribution)
        send(run, round_id, contribution, offer)

    with mock.patch.object(local.LocalOffers, "_send", looked):
        outcome = local.LocalRun(assembly_of(e), lambda record: None, threading.Event(), tmp_path).run()
    assert outcome.finished
    assert missing == []
    assert seen


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["f32", "int4"])
def test_a_run_whose_learners_wait_and_of_whose_offers_all_are_left_out_comes_to_its_parameters_again(
    codec, data_dir, tmp_path, monkeypatch
):
    """Such a round's version is the one before once more, so that nobody waits for ever."""
    first = lambda offers, past: {o.learner: "too early" for o in offers if past.rounds < 2}  # noqa: E731
    monkeypatch.setitem(guards.GATES, "first", first)
    codecs = {**CODEC, "update_codec": "int4"} if codec == "int4" else {}
    outer = {"guard": {"gates": ("first",)}, **codecs}
    whole = {**LINKS, "loss": (0.0,)}
    e = virtual(data_dir, "diloco", train={"steps": 20}, virtual=whole, outer=outer)
    run_job(e, tmp_path)
    rounds = [json.loads(line) for line in (tmp_path / "rounds.jsonl").open()]
    assert [(line["version"], line["quorum"]) for line in rounds] == [(1, 0), (2, 0), (3, 2), (4, 2), (5, 2)]
    assert [line.get("left_out") for line in rounds] == [[0, 1], [0, 1], None, None, None]
    [did] = replay.make_plan(e, read_run(tmp_path)).merges
    assert [len(work.given) for work in did if not work.empty] == [0, 0, 2, 2, 2]
    done = again(tmp_path, e)
    summary = read_json(tmp_path / "summary.json")
    assert done.sha256 == summary["params_sha256"] and done.compared == 5
    assert summary["offers_left_out"] == {"0": 2, "1": 2} and summary["merged_share"] == 0.6


@pytest.mark.slow
def test_processes_with_a_share_of_the_cores_come_to_their_parameters_again(tmp_path):
    """With the default XLA flags and a model whose sums are large enough to be split by threads."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    overrides = ["--config.driver=remote", "--config.train.steps=4"]
    train = ["train", "--config=configs/dense.py", *overrides]
    for name, *options in (train, ["replay"]):
        program = [sys.executable, "-m", f"experiments.{name}", f"--workdir={tmp_path}", *options]
        done = subprocess.run(program, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert "the same as the run's" in done.stdout
