"""Learners and syncer as processes: the parameters that threads come to, and refusals by hand."""

import shutil

import pytest

from ddiloco.launch.ports import reserved_port
from ddiloco.telemetry.files import write_json
from tests.integration.hand import LOOP
from tests.integration.remote_runs import STEADY, steps_of, summary_of
from tests.refusals import assert_refused

WAITING = (
    "--config.algorithm=diloco",
    "--config.sync.num_fragments=1",
    "--config.sync.quorum=None",
    "--config.sync.overlap=0",
    "--config.sync.max_run_ahead=0",
    "--config.train.steps=12",
    "--config.eval.every=None",
)


@pytest.fixture
def address():
    with reserved_port() as port:
        yield f"127.0.0.1:{port}"


def test_where_all_are_waited_for_processes_come_to_the_parameters_of_threads(
    programs, address, started, tmp_path
):
    settings = (LOOP, *WAITING, "--config.outer.update_codec=int4")  # learners make what the syncer has
    hashes = []
    for driver in ("local", "remote"):
        done = programs.run("train", *settings, f"--config.driver={driver}", f"--workdir={tmp_path / driver}")
        assert (done.returncode, done.stderr) == (0, "")
        summary = summary_of(tmp_path / driver)
        assert (summary["finished"], summary["inner_steps"]) == (True, {"0": 12, "1": 12})
        moved = summary["bytes_sent"], summary["bytes_received"]
        hashes.append((summary["params_sha256"], *moved))
    assert hashes[0] == hashes[1]
    # A syncer that is started after the end of its run ends again, and learners that look for it with it.
    workdir = tmp_path / "remote"
    changes = [*settings, f"--workdir={workdir}"]
    before = (workdir / "rounds.jsonl").read_text()
    late = [*changes, "--config.remote.longest_backoff=50"]
    roles = [started("syncer", *late, f"--listen={address}", "--resume=auto")]
    roles += [started("learner", *late, f"--syncer={address}", f"--learner_id={m}") for m in (0, 1)]
    ended = [programs.finish(role) for role in roles]
    assert [done.returncode for done in ended] == [0, 0, 0], ended
    assert ended[0].stderr.endswith(f"the run in {workdir} is over\n")
    assert (workdir / "rounds.jsonl").read_text() == before
    # A syncer killed after its learners have left: the next one saves what was merged, and waits for nobody.
    (workdir / "summary.json").unlink()
    done = programs.run("syncer", *changes, "--listen=127.0.0.1:0", "--resume", "--finish")
    assert (done.returncode, done.stderr) == (0, "")
    again = summary_of(workdir)
    assert (again["finished"], again["params_sha256"]) == (True, hashes[1][0])
    assert again["inner_steps"] == {"0": 12, "1": 12}
    # An engine does not say that they have left: none comes back to a run of which the last step is merged.
    shutil.rmtree(workdir / "checkpoints")
    write_json(workdir / "summary.json", {**again, "finished": False})
    brief = ["--config.remote.gather=0.5", "--config.remote.longest_backoff=0.5"]
    done = programs.run("syncer", *changes, *brief, "--listen=127.0.0.1:0", "--resume=auto")
    assert (done.returncode, done.stderr) == (0, "")
    again = summary_of(workdir)
    assert (again["finished"], again["params_sha256"]) == (True, hashes[1][0])
    assert [path.name for path in (workdir / "checkpoints").iterdir()] == ["12"]


@pytest.mark.slow
def test_processes_that_skip_nearly_all_steps_end_with_exit_code_1_and_one_line(programs, tmp_path):
    steps = 600
    changes = [*STEADY[:2], "--config.driver=remote"]
    changes += [f"--config.train.steps={steps}", "--config.sync.interval=12"]
    changes += ["--config.inner.learning_rate=1e6", "--config.inner.warmup_steps=0"]
    done = programs.train(tmp_path / "run", *changes)
    told = done.stderr.splitlines()
    assert done.returncode == 1 and told[-1].startswith("error: from step "), done
    assert "inner.learning_rate" in told[-1] and "Traceback" not in done.stderr
    assert "ended early" in done.stdout
    summary = summary_of(tmp_path / "run")
    assert not summary["finished"] and summary["step"] < steps / 2
    assert told[-1].removeprefix("error: ") in summary["alarms"]
    for learner in range(2):
        made = steps_of(tmp_path / "run", learner)
        assert sum(line["tokens"] for line in made) == summary["tokens"][str(learner)]
        assert sum(line.get("skipped", 0) for line in made) > 0.5 * len(made)
    [saved] = (tmp_path / "run" / "checkpoints").iterdir()
    assert int(saved.name) < steps / 2


def test_what_the_roles_cannot_do_is_told_in_one_line(programs):
    wrong = {
        "syncer --listen=0.0.0.0:7070": "listen: 0.0.0.0:7070 can be reached from other machines, ",
        "learner --learner_id=4": "learner_id: is 4, but must be below 4, by config.remote.max_learners",
    }
    running = {told: programs.start(*command.split()) for command, told in wrong.items()}
    for told, process in running.items():
        assert_refused(programs.finish(process), told)
