"""A sweep as an array of Slurm: its script run for real, beside recorded commands of Slurm."""

import pytest

from ddiloco.launch import slurm
from experiments.cli import program
from experiments.studies import on_slurm, runs
from tests.integration.programs import ROOT
from tests.launch.recorded import Commands

CONFIG = "configs/micro.py:dense"
NODES = slurm.Nodes(str(ROOT), options="--gpus-per-node=1 --time=60", at_once=2)


@pytest.fixture
def commands(tmp_path, monkeypatch):
    made = Commands(tmp_path / "commands")
    for name in ("scontrol", "scancel", "sleep"):
        made.add(name)
    made.add("sbatch", "echo '17;east'")
    made.add("squeue", f"cat {tmp_path}/queue 2>/dev/null || true")
    made.add("srun", 'shift; "$@"')
    monkeypatch.setenv("PATH", f"{made.folder}:/usr/bin:/bin")
    return made


@pytest.fixture
def told(monkeypatch):
    lines = []
    monkeypatch.setattr(program, "print_err", lines.append)
    return lines


def planned(tmp_path, driver="local"):
    """A run of each seed; the second has finished."""
    made = runs.of_each_seed("sweep", CONFIG, [("driver", driver)], tmp_path / "sweep", (0, 1, 2))
    return [Finished(run) if seed == 1 else run for seed, run in made.items()]


class Finished:
    """A run of which nothing is left to do."""

    def __init__(self, run):
        self.name = run.name

    def lacks(self):
        return None


def submit(tmp_path, driver="local", dry_run=False):
    return on_slurm.submit(planned(tmp_path, driver), NODES, tmp_path / "sweep" / "slurm", dry_run)


def task(commands, tmp_path, number, python="true", **variables):
    """Runs a task of the array; returns the exit code of its script."""
    commands.add("python", python)
    known = {"SLURM_ARRAY_TASK_ID": str(number), "SLURM_ARRAY_JOB_ID": "17", "SLURM_JOB_ID": f"{18 + number}"}
    return commands.run("runs.sbatch", tmp_path / "sweep" / "slurm", **known, **variables)[0]


def test_what_has_not_finished_is_submitted_as_one_array(commands, told, tmp_path):
    assert submit(tmp_path) == 0
    assert commands.calls("sbatch") == [["--parsable", "runs.sbatch"]]
    assert told[-1] == "array 17: 2 runs; to end them: scancel 17"
    script = (tmp_path / "sweep/slurm/runs.sbatch").read_text()
    for option in ("--array=0-1%2", "--gpus-per-node=1", "--time=60", "--requeue", "--signal=B:TERM@60"):
        assert f"#SBATCH {option}\n" in script


def test_each_task_is_one_of_the_runs(commands, told, tmp_path):
    submit(tmp_path)
    for number, seed in enumerate((0, 2)):
        assert task(commands, tmp_path, number) == 0
        (*_, call) = commands.calls("python")
        workdir = f"--workdir={tmp_path}/sweep/seed={seed}"
        given = ["--config.seed=" + str(seed), "--config.driver=local", "--resume=auto"]
        assert call == ["-m", "experiments.train", f"--config={CONFIG}", workdir, *given]
    assert not commands.calls("scontrol")


@pytest.mark.parametrize(("driver", "again"), [("local", ["--resume=auto"]), ("virtual", [])])
def test_a_task_that_was_in_the_queue_before_continues_where_it_can(commands, told, tmp_path, driver, again):
    submit(tmp_path, driver)
    assert task(commands, tmp_path, 1, SLURM_RESTART_COUNT="1") == 0
    (call,) = commands.calls("python")
    assert call[-1:] == (again or [f"--config.driver={driver}"]) and call.count("--resume=auto") == len(again)


@pytest.mark.parametrize(
    ("code", "restarts", "back"),
    [(143, 9, True), (1, 0, True), (1, 2, True), (1, 3, False), (137, 3, False), (2, 0, False)],
)
def test_who_is_told_to_leave_comes_back_and_who_fails_is_tried_three_times(
    commands, told, tmp_path, code, restarts, back
):
    submit(tmp_path)
    ended = task(commands, tmp_path, 0, f"exit {code}", SLURM_RESTART_COUNT=str(restarts))
    assert commands.calls("scontrol") == ([["requeue", "17_0"]] if back else [])
    assert back or ended == code


def test_the_same_call_submits_nothing_while_runs_are_in_the_queue(commands, told, tmp_path):
    submit(tmp_path)
    (tmp_path / "queue").write_text("17 RUNNING\n17 PENDING\n17 PENDING\n16 RUNNING\n")
    assert submit(tmp_path) == 0
    assert told[-1] == "array 17: 1 runs are under way, 2 wait in the queue"
    (tmp_path / "queue").write_text("16 RUNNING\n")
    assert submit(tmp_path) == 0
    assert len(commands.calls("sbatch")) == 2


def test_a_slurm_that_does_not_answer_may_still_have_the_runs(commands, told, tmp_path):
    submit(tmp_path)
    commands.add("squeue", "echo 'cannot be reached' >&2; exit 1")
    with pytest.raises(program.UsageError, match=r"^launcher: squeue: cannot be reached$"):
        submit(tmp_path)
    assert len(commands.calls("sbatch")) == 1


def test_a_dry_run_submits_nothing(commands, told, tmp_path, capsys):
    assert submit(tmp_path, dry_run=True) == 0
    assert capsys.readouterr().out == "sbatch --parsable runs.sbatch\n"
    assert not commands.calls() and (tmp_path / "sweep/slurm/runs.sbatch").is_file()


def test_a_machine_without_slurm_is_told(told, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(program.UsageError, match=r"^launcher: sbatch: No such file"):
        submit(tmp_path)


def test_settings_keep_their_spaces(commands, told, tmp_path):
    nodes = slurm.Nodes(str(ROOT))
    command = slurm.ArrayTask(["--config.virtual.latency=(0.1, 0.2)"], [])
    slurm.plan_runs("sweep", "experiments.train", [command], nodes).write(tmp_path / "sweep" / "slurm")
    assert task(commands, tmp_path, 0) == 0
    (call,) = commands.calls("python")
    assert call[-1] == "--config.virtual.latency=(0.1, 0.2)"
