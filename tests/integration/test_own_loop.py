"""A loop of one's own as processes: a killed learner comes back with a peer's state and its own batches."""

import functools
import os
import signal
import time

from tests.integration.remote_runs import lines, merged_batches, processes_of, steps_of, summary_of, wait_for

SETTINGS = (
    "--config=configs/loop.py",
    "--config.driver=remote",
    "--config.sync.num_learners=2",
    "--config.train.steps=1000000",
    "--config.train.min_step_seconds=(0.02, 0.02)",
    "--config.eval.every=0",
)


def test_a_killed_learner_comes_back_with_the_state_of_a_peer_and_where_its_batches_were(
    programs, started, tmp_path
):
    process = started("train", *SETTINGS, f"--workdir={tmp_path}")

    wait = functools.partial(wait_for, [process])
    wait(lambda: all(len(steps_of(tmp_path, m)) > 20 for m in (0, 1)), "twenty steps of both")
    before = processes_of(process)
    os.kill(before["0"], signal.SIGKILL)
    killed_at = time.time()
    wait(lambda: steps_of(tmp_path, 0)[-1]["time"] > killed_at + 0.5, "a step of another process")
    back = time.time()
    rounds = tmp_path / "rounds.jsonl"
    wait(lambda: any(r["time"] > back and 0 in r["learners"] for r in lines(rounds)), "a merge with 0")
    assert processes_of(process)["0"] != before["0"]
    process.send_signal(signal.SIGTERM)
    done = programs.finish(process)
    assert done.returncode == 143
    summary = summary_of(tmp_path)
    # Of the two that begin, the later one may find the other stepping, and take its state over.
    assert summary["inner_states"] in ({"fresh": 2, "peer": 1}, {"fresh": 1, "peer": 2})
    assert summary["eval_loss"] < 0.3
    drawn = {learner: merged_batches(tmp_path, learner) for learner in ("0", "1")}
    taken = {str(m): len(steps_of(tmp_path, m)) for m in (0, 1)}
    # But for what was not merged yet, or lost with the kill: steps, and what was recorded of others.
    assert all(drawn[m] > 20 and abs(taken[m] - drawn[m]) <= 32 for m in ("0", "1")), (drawn, taken)
