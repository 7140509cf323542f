"""A run of real processes of which a learner and the syncer were killed: done again, the same parameters."""

import json
import os
import re
import signal
import time

import pytest

from tests.integration.programs import LIMIT
from tests.integration.test_remote import UNENDING, lines, processes_of, steps_of
from tests.remote.ends import until

OFTEN = "--config.remote.checkpoint_every=1.0"


@pytest.fixture(scope="module")
def killed(programs, tmp_path_factory):
    """The folder of a run in which learner 0 was killed, then the syncer, and which then was stopped."""
    workdir = tmp_path_factory.mktemp("killed")
    changes = ["--config.driver=remote", *UNENDING, OFTEN]
    process = programs.start("train", *programs.training(workdir), *changes)

    def merged_after(moment, learner):
        return any(r["time"] > moment and learner in r["learners"] for r in lines(workdir / "rounds.jsonl"))

    def wait_for(condition, told):
        def look():
            assert process.poll() is None, process.communicate()
            return condition()

        until(look, told, LIMIT)

    try:
        wait_for(lambda: all(len(steps_of(workdir, m)) > 20 for m in (0, 1)), "twenty steps of both")
        for victim in ("0", "syncer"):
            os.kill(processes_of(process)[victim], signal.SIGKILL)
            back = time.time() + 1.0
            wait_for(lambda back=back: all(merged_after(back, m) for m in (0, 1)), f"merges after {victim}")
        process.send_signal(signal.SIGTERM)
        done = programs.finish(process)
        assert done.returncode == 143
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    return workdir


def test_a_run_with_killed_processes_replays_to_its_own_parameters(programs, killed):
    names = {path.name.partition("-")[0] for path in (killed / "tape").glob("*.tape")}
    assert names == {"learner", "syncer"}
    assert len(list((killed / "tape").glob("learner-0-*.tape"))) == 2
    assert len(list((killed / "tape").glob("syncer-*.tape"))) == 2
    done = programs.run("replay", f"--workdir={killed}")
    assert done.returncode == 0, done.stderr
    summary = json.loads((killed / "summary.json").read_text())
    assert f"params_sha256 {summary['params_sha256']}\nthe same as the run's" in done.stdout
    count, compared = map(int, re.findall(r"(\d+) (?:versions|of them)", done.stdout))
    heard_of = sum(summary["outer_steps"].values())  # of a merge under way as the run was stopped it was not
    assert heard_of <= compared <= count <= heard_of + 1


def test_the_timeline_of_such_a_run_shows_who_was_killed_and_who_went_on(programs, killed):
    done = programs.run("tape", f"--workdir={killed}", "--learner=0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("its tape ends here: killed, or still running") == 2
    assert re.search(r"goes on with inner state \d+ of learner 1's process", done.stdout)
    assert not re.search(r"^\S+  learner 1 ", done.stdout, re.MULTILINE)
