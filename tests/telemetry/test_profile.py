"""When a trace begins and ends, and that there is something to open."""

import gzip
import json

import jax
import jax.numpy as jnp
import pytest

from ddiloco.telemetry.records import StepDone
from ddiloco.telemetry.watches import StepProfile


@pytest.fixture
def profiled(tmp_path):
    """Runs a small program at each of the steps, given as (learner, step), and returns what was told."""

    def profiled(*steps, first, last):
        told, passed = [], []
        profile = StepProfile(tmp_path, first, last, told.append)
        record = profile.watching(passed.append)
        for learner, step in steps:
            jax.block_until_ready(jax.jit(lambda x: x @ x)(jnp.ones((8, 8))))
            record(StepDone(learner, step, 0.0, 1, {}))
        profile.close()
        assert [(one.learner, one.step) for one in passed] == list(steps)
        return told

    return profiled


def test_the_steps_leave_a_trace_and_a_line_that_says_how_to_open_it(profiled, tmp_path):
    [line] = profiled((0, 1), (1, 1), (0, 2), (1, 2), (1, 3), (0, 3), (0, 4), first=2, last=3)
    [path] = tmp_path.rglob("perfetto_trace.json.gz")
    assert str(path) in line and "https://ui.perfetto.dev" in line
    assert line.startswith("steps 2 to 3 are profiled in ")
    assert json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def test_a_run_that_ends_too_early_leaves_what_there_is(profiled, tmp_path):
    assert len(profiled((0, 1), (0, 2), first=2, last=100)) == 1
    assert list(tmp_path.rglob("*.xplane.pb"))


def test_a_run_that_resumes_behind_the_steps_or_never_comes_to_them_leaves_none(profiled, tmp_path):
    assert profiled((0, 7), (0, 8), first=2, last=5) == []
    assert profiled((0, 1), first=3, last=5) == []
    assert list(tmp_path.iterdir()) == []
