"""Whole runs in which learners send encoded outer gradients: what travels, and what comes of it."""

import numpy as np
import pytest

from ddiloco.outer.encoding import encoded_bytes, traffic
from ddiloco.run.recipes import assembly_of
from ddiloco.telemetry import records
from tests.virtual_runs import run_virtual, virtual

pytestmark = pytest.mark.slow

STEPS = {"steps": 8}
# Bytes a second, at which a fragment in f32 takes some tenths of a step and one in int4 an eighth of that.
SLOW = {"bandwidth": (40_000.0,), "step_seconds": (1.0,)}


@pytest.fixture(scope="module")
def runs(data_dir):
    """The same virtual run with each codec."""
    outers = {
        "f32": {},
        "int4": {"codec": "int4", "error_feedback": True},
        "int4 down": {"update_codec": "int4"},
        "by learner": {"codec": ("f32", "int4"), "error_feedback": True},
    }
    return {
        name: run_virtual(virtual(data_dir, train=STEPS, outer=outer, virtual=SLOW))
        for name, outer in outers.items()
    }


def moved(run):
    """Bytes up and down in all."""
    taken = run.of(records.Transferred)
    return sum(record.sent for record in taken), sum(record.received for record in taken)


def test_what_learners_send_shrinks_as_the_codec_says_and_what_they_get_does_not(runs):
    plain, run = runs["f32"], runs["int4"]
    sizes = encoded_bytes(assembly_of(run.experiment).layout, run.experiment.outer.codec)
    offers = [record.sent for record in run.of(records.Transferred) if record.sent]
    first, *others = run.noted("round")  # to the first one of the two is late
    merged = [sizes[v["fragment"]] * len(v["learners"]) for v in others]
    assert sum(offers) == 2 * sizes[first["fragment"]] + sum(merged)
    assert len(offers) == len([record for record in plain.of(records.Transferred) if record.sent])
    received, whole = ({record.received for record in one.of(records.Transferred)} for one in (run, plain))
    assert received == whole, "updates are of the same sizes"
    assert moved(run)[0] < moved(plain)[0] / 6


def test_updates_come_as_differences_once_a_learner_has_a_version(runs):
    plain, run = runs["f32"], runs["int4 down"]
    assert moved(run)[0] == moved(plain)[0]
    sizes = traffic(assembly_of(run.experiment).layout, run.experiment.outer)
    learners = run.experiment.sync.num_learners
    updates = sum(learners * sizes.difference[v["fragment"]] for v in run.noted("round"))
    assert moved(run)[1] == learners * sum(sizes.version) + updates


def test_an_upload_takes_the_time_of_its_encoded_bytes(runs):
    for name, run in runs.items():
        each = traffic(assembly_of(run.experiment).layout, run.experiment.outer).offers
        sizes = tuple(map(min, *each, *each))  # of a quorum of one
        timed = [values for values in run.noted("round") if values["step"] < run.experiment.train.steps]
        for values in timed:
            assert values["quorum_seconds"] == pytest.approx(sizes[values["fragment"]] / 40_000.0), name


def test_each_learner_sends_in_its_own_codec(runs):
    run, plain = runs["by learner"], runs["f32"]
    sizes = traffic(assembly_of(run.experiment).layout, run.experiment.outer)
    for m in (0, 1):
        sent = {record.sent for record in run.of(records.Transferred) if record.learner == m and record.sent}
        assert sent and sent <= {*sizes.offer(m)}
    assert sum(sizes.offer(1)) < sum(sizes.offer(0)) / 6 and sizes.offer(0) == sizes.version
    assert sizes.offer(7) == sizes.offer(1), "who joins beyond the list is as its last"
    assert moved(run)[0] < 0.6 * moved(plain)[0]


@pytest.mark.parametrize("name", ["int4", "int4 down", "by learner"])
def test_the_parameters_come_close_to_those_of_the_run_in_f32(name, runs):
    ours, plain = runs[name].outcome, runs["f32"].outcome
    assert ours.finished
    differences = [np.abs(ours.params[key] - plain.params[key]).max() for key in plain.params]
    assert 0 < max(differences) < 5e-3
    assert ours.eval_loss == pytest.approx(plain.eval_loss, abs=0.02)


@pytest.mark.parametrize("name", ["int4", "int4 down"])
def test_the_same_rounds_are_merged_as_in_f32(name, runs):
    assert runs[name].noted("drop") == runs["f32"].noted("drop")
    rounds = [v["learners"] for v in runs[name].noted("round")]
    assert rounds[1:6] == [[0, 1]] * 5
