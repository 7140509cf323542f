"""What engines need of a process: told all by the environment, probed over HTTP, ended by SIGTERM."""

import signal
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from tests.integration.hand import UNENDING, free_port
from tests.integration.programs import ROOT

STUCK = """
import signal, sys, threading
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
from experiments.cli.exit_handling import stop_on_signals
stop, received = stop_on_signals(float(sys.argv[1]))
if len(sys.argv) > 2:
    stop.set()
print("begun", flush=True)
stop.wait()
print("told", flush=True)
threading.Event().wait()
"""
COMPILING = """
import ctypes, sys
from experiments.cli.exit_handling import stop_on_signals
stop, received = stop_on_signals(float(sys.argv[1]), "saving all")
mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
libc.pthread_mutex_lock(mutex)
print("begun", flush=True)
libc.pthread_mutex_lock(mutex)  # for ever, and not in Python
"""


def ready(port):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready") as answer:
            return answer.status == 200
    except urllib.error.URLError:
        return False


def test_roles_that_the_environment_tells_all_are_ready_and_preempted(job):
    ports = [free_port(), free_port()]
    health = [f"127.0.0.1:{port}" for port in ports]
    syncer = job.syncer(DDILOCO_RESUME="auto", DDILOCO_HEALTH=health[0])
    job.wait_for(lambda: ready(ports[0]), "the syncer to be ready", [syncer])
    told = {"DDILOCO_LEARNER": "1", "DDILOCO_SYNCER": job.address, "DDILOCO_HEALTH": health[1]}
    learner = job._start("experiments.learner", [], **told)
    job.wait_for(lambda: ready(ports[1]), "the learner to be ready", [syncer, learner])
    job.wait_for(lambda: job.merges(1), "a merge of learner 1", [syncer, learner])
    assert job.end(syncer)[0] == 143
    gone = max(r["time"] for r in job.rounds())
    syncer = job.syncer(DDILOCO_RESUME="auto")
    job.wait_for(lambda: job.merges(1, gone), "a merge of the learner that was not told", [syncer, learner])
    assert job.end(learner)[0] == 143
    assert job.end(syncer)[0] == 143
    assert job.summary()["failures"] == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_process_that_cannot_end_in_its_grace_counts_as_preempted(number, code):
    command = [sys.executable, "-c", STUCK, "0.2"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "begun\n"
    process.send_signal(number)
    assert process.stdout.readline() == "told\n"
    process.send_signal(number)  # an engine may tell it twice
    _, told = process.communicate(timeout=60)
    assert process.returncode == code
    assert told == "not done 0.2 s after the order to stop: the process ends as it is\n"


@pytest.fixture
def compiling():
    """Starts a process with so many seconds of grace, whose main thread is in other code than Python's.

    As while a step compiles; the handler of a signal runs only once that is done.
    """
    started = []

    def start(grace):
        command = [sys.executable, "-c", COMPILING, grace]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(subprocess.Popen(command, cwd=ROOT, text=True, **pipes))
        assert started[-1].stdout.readline() == "begun\n"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_process_that_compiles_ends_in_its_grace(compiling):
    process = compiling("0.2")
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 143


def test_a_ctrl_c_is_answered_at_once_and_a_second_one_ends_what_compiles(compiling):
    process = compiling("0")
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline() == "saving all; a second Ctrl-C ends this at once, unsaved\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130


def test_seconds_of_grace_are_counted_from_the_signal_where_somebody_else_said_stop_before():
    command = [sys.executable, "-c", STUCK, "0.2", "stopped"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "begun\n"
    assert process.stdout.readline() == "told\n"
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 143
    assert told == "not done 0.2 s after the order to stop: the process ends as it is\n"


def test_learners_are_drained_and_join_beyond_the_first_ones_and_the_run_is_stopped_by_command(
    programs, new_job
):
    step_time = "--config.train.min_step_seconds=(0.05, 0.05, 0.05)"
    job = new_job((*UNENDING, step_time, "--config.remote.max_learners=3"))
    syncer = job.syncer()
    learners = [job.learner(m) for m in range(2)]
    job.wait_for(lambda: job.merges(0) and job.merges(1), "merges of both", [syncer, *learners])

    def control(*words):
        done = programs.run("control", f"--syncer={job.address}", job.token, *words)
        return done.returncode, done.stdout.strip(), done.stderr.strip()

    assert control("add") == (0, "2", "")
    beyond = job.learner(2)
    job.wait_for(lambda: job.merges(2), "a merge of a third learner", [syncer, *learners, beyond])
    assert control("drain", "1") == (0, "learner 1 ends after its step", "")
    assert job.left(learners[1])[0] == 0
    assert control("drain", "2")[0] == 0
    left = job.left(beyond)
    assert left[0] == 0, left
    code, told, _ = control("status")
    assert code == 0 and told.endswith("learners: 0 of 3; drained: 1, 2")
    assert control("add") == (0, "1", "")
    began = max(r["time"] for r in job.rounds())
    again = job.learner(1)
    job.wait_for(lambda: job.merges(1, began), "a merge of the learner that came back", [syncer, again])
    assert control("snapshot")[0] == 0
    complete = lambda: list((job.workdir / "snapshots").glob("*/snapshot.json"))  # noqa: E731
    job.wait_for(complete, "a snapshot", [syncer, again])
    assert control("stop")[0] == 0
    assert [job.left(process)[0] for process in (syncer, learners[0], again)] == [0, 0, 0]
    summary = job.summary()
    assert summary["interrupted"] and summary["tokens"]["2"] > 0


@pytest.mark.parametrize("words", [[], ["drain", "x"], ["stop", "3"]])
def test_what_is_no_command_is_told_in_one_line(programs, words):
    done = programs.run("control", *words)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
