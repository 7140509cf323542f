"""A run on a real Slurm of one node, whose learners are killed, told to leave and put back into the queue."""

import contextlib
import json
import os
import pathlib
import secrets
import shutil
import signal
import subprocess
import sys

import pytest

from ddiloco.launch.ports import reserved_ports
from tests.integration.programs import ROOT, SMALLEST, Programs
from tests.remote.ends import until

DAEMONS = ("munged", "slurmctld", "slurmd")
PATHS = ("/usr/sbin", "/sbin")
LIMIT = 240.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or any(shutil.which(name, path=os.pathsep.join(PATHS)) is None for name in DAEMONS),
        reason="needs a Slurm that is installed, such as Debian's slurm-wlm and munge, and may be started",
    ),
]

CONF = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmdPort={node}
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,sched_min_interval=0
MpiDefault=none
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """The three daemons, and commands that find them."""

    def __init__(self, folder):
        self.folder, self._daemons = folder, []
        folder.mkdir()
        for name in ("state", "spool"):
            (folder / name).mkdir()
        host = subprocess.check_output(["hostname", "-s"], text=True).strip()
        with reserved_ports(2) as port:
            conf = CONF.format(folder=folder, host=host, control=port, node=port + 1)
        (folder / "slurm.conf").write_text(conf)
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        ends = {
            "socket": "socket",
            "pid-file": "pid",
            "log-file": "log",
            "seed-file": "seed",
            "key-file": "key",
        }
        paths = [f"--{what}={folder}/munge.{end}" for what, end in ends.items()]
        self._start("munged", "--foreground", "--force", f"--key-file={key}", *paths)
        until((folder / "munge.socket").exists, "munge")
        self._start("slurmctld", "-D")
        self._start("slurmd", "-D", "-N", host)
        until(lambda: "idle" in self.run("sinfo", "-h", "-o", "%T"), "a node", timeout=60.0)

    def _start(self, name, *arguments):
        program = shutil.which(name, path=os.pathsep.join(PATHS))
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._daemons.append(subprocess.Popen([program, *arguments], env=self.environment, **quiet))

    def run(self, *command, **more):
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=60, **more
        ).stdout

    def jobs(self):
        """By name of the job and number in its array: its id, while it runs."""
        lines = self.run("squeue", "-h", "-r", "-t", "R", "-o", "%j %K %i").splitlines()
        return {f"{name} {task}": job for name, task, job in map(str.split, lines)}

    def close(self):
        self.run("scancel", "--user=root")
        for daemon in reversed(self._daemons):
            daemon.terminate()
            daemon.wait(30)


@pytest.fixture
def slurm(tmp_path):
    made = Slurm(tmp_path / "slurm")
    yield made
    made.close()


def process_of(*variables):
    """The number of the Python process that has these variables in its environment."""
    wanted = {variable.encode() for variable in variables}
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            python = b"python" in (path / "cmdline").read_bytes().split(b"\0")[0]
            if python and wanted <= set((path / "environ").read_bytes().split(b"\0")):
                return int(path.name)
    raise AssertionError(f"no process has {variables}")


@pytest.mark.parametrize("shards", [1, 2])
def test_who_is_killed_or_told_to_leave_comes_back_and_the_run_ends(slurm, tmp_path, shards):
    programs = Programs(os.environ["TFDS_DATA_DIR"])
    run, scripts = tmp_path / "shared", tmp_path / "scripts"
    made = programs.run("make_tokens", "--learners=2", f"--output={run}.tokens")
    assert made.returncode == 0, made.stderr
    with reserved_ports(16) as port:
        smallest = [setting for setting in SMALLEST if "step" not in setting]
        steps = ["--config.train.steps=600", "--config.train.min_step_seconds=(0.15, 0.15)"]
        more = [f"--config.tape.enabled={shards == 1}", f"--config.remote.syncer_shards={shards}"]
        told = [*smallest, *steps, *more, f"--config.data.data_dir={programs.data_dir}"]
        engine = ["--launcher=slurm", "--dry_run", f"--workdir={run}", f"--output={scripts}", "--name=trial"]
        setup = f"--setup=export PATH={pathlib.Path(sys.executable).parent}:$PATH"
        written = programs.run("launch", *told, *engine, setup, f"--port={port}", "--notice=20")
        assert written.returncode == 0, written.stderr
    slurm.environment |= programs.environment | {"SLURM_CONF": slurm.environment["SLURM_CONF"]}
    slurm.run("bash", "submit.sh", cwd=scripts)

    def rounds():
        path = run / "rounds.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def merged(learner, after):
        return lambda: any(learner in r["learners"] for r in rounds()[after:])

    until(merged(1, 0), "a merge with learner 1", LIMIT)
    os.kill(process_of("DDILOCO_LEARNER=1", f"DDILOCO_WORKDIR={run}"), signal.SIGKILL)
    until(lambda: "trial-learner 1" not in slurm.jobs(), "Slurm noticed")
    gone = len(rounds())
    until(merged(1, gone), "the killed learner's return", LIMIT)
    begun = slurm.jobs()
    for told in (0, 1):  # one of them has the id of the whole array
        slurm.run("scancel", "--signal=TERM", "--batch", begun[f"trial-learner {told}"])  # as its notice does
        until(lambda name=f"trial-learner {told}": name not in slurm.jobs(), "a place in the queue", LIMIT)
        assert f"trial-learner {1 - told}" in slurm.jobs()
        gone = len(rounds())
        until(merged(told, gone), "the return of the learner that was told to leave", LIMIT)
    if shards > 1:
        made = lambda: sum(r["fragment"] % 2 for r in rounds())  # noqa: E731
        os.kill(process_of("DDILOCO_SHARD=1"), signal.SIGKILL)
        gone = made()
        until(lambda: made() > gone + 2, "merges of the shard that was killed", LIMIT)
    until(lambda: slurm.run("squeue", "-h") == "", "the end of all jobs", LIMIT)
    summary = json.loads((run / "summary.json").read_text())
    assert (
        summary["finished"] and summary["inner_states"].get("own", 0) + summary["inner_states"]["peer"] >= 2
    )
    if shards > 1:
        return
    replayed = programs.run("replay", f"--workdir={run}")
    assert "the same as the run's" in replayed.stdout, replayed.stderr


def test_a_sweep_is_an_array_of_which_a_task_is_told_to_leave_and_continues(slurm, tmp_path):
    programs = Programs(os.environ["TFDS_DATA_DIR"])
    folder, setup = tmp_path / "sweep", f"--setup=export PATH={pathlib.Path(sys.executable).parent}:$PATH"
    slurm.environment |= programs.environment | {"SLURM_CONF": slurm.environment["SLURM_CONF"]}
    settings = ["--config=configs/loop.py", "--config.train.steps=300", "--config.eval.every=100"]
    paced = "--config.train.min_step_seconds=(0.2, 0.2, 0.2, 0.2)"
    command = [sys.executable, "-m", "experiments.sweep", *settings, paced, f"--output={folder}"]
    command += ["--sweep=outer.learning_rate=0.5,1.0;seed=0,1", "--launcher=slurm", setup, "--notice=20"]

    def sweep():
        done = subprocess.run(command, cwd=ROOT, env=slurm.environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done

    assert "4 runs; to end them: scancel " in sweep().stderr
    workdir = folder / "outer.learning_rate=0.5,seed=1"
    until((workdir / "learners/0/steps.jsonl").exists, "the second run", LIMIT)
    assert " runs are under way, " in sweep().stderr, "the same command shows it, and submits nothing"
    slurm.run("scancel", "--signal=TERM", "--batch", slurm.jobs()["sweep-runs 1"])  # as its notice does
    until(lambda: "sweep-runs 1" not in slurm.jobs(), "a place in the queue", LIMIT)
    until(lambda: slurm.run("squeue", "-h") == "", "the end of all jobs", LIMIT)
    done = sweep()
    assert "Best: " in done.stdout and "scancel" not in done.stderr
    assert "4 of 4 runs have finished" in (folder / "sweep.html").read_text()
    assert not (workdir / "previous").exists(), "the run continued where it was"
