"""Who supervises a run's processes: restarts, gives up, stops, and leaves none behind."""

import errno
import json
import os
import signal
from multiprocessing import forkserver

import pytest

from ddiloco.launch import processes, supervisor
from ddiloco.settings.remote import backoff
from ddiloco.storage import operator_orders
from ddiloco.storage.durable import FOLDER
from ddiloco.telemetry.waits import PROCESS
from tests.launch.supervised import CONFIG, ENDS_AT_THE_WORD, STANDS, Run
from tests.remote.ends import alive, until


@pytest.fixture(autouse=True, scope="module")
def fork_server():
    """One that holds back the order to stop, as one that `tests.warm` started before does not."""
    forkserver._forkserver._stop()
    processes.warm_up()


@pytest.fixture(autouse=True)
def importable(tmp_path, monkeypatch):
    """What stands in the test's folder can be imported."""
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture
def run(tmp_path):
    made = []

    def start(*programs, **more):
        made.append(Run(tmp_path, *programs, **more))
        return made[-1]

    yield start
    for one in made:
        one.stop.set()
        one.end()


def test_a_killed_learner_is_started_again_and_the_others_are_left_alone(run):
    it = run(ENDS_AT_THE_WORD, STANDS, STANDS)
    until(lambda: len(it.starts("learner 0")) and len(it.starts("learner 1")))
    it.kill("learner 0")
    until(lambda: len(it.starts("learner 0")) == 2)
    assert it.told == ["the process of learner 0 was killed by SIGKILL; another is started in 0.25 s"]
    assert len(it.starts("learner 1")) == len(it.starts("syncer")) == 1
    first, second = (int(words[0]) for words in it.starts("learner 0"))
    observed = [(pid, code) for name, pid, code in it.observed if name == "learner 0"]
    assert observed == [(first, None), (first, -signal.SIGKILL), (second, None)]


def test_a_killed_syncer_is_started_again_to_go_on(run):
    it = run(ENDS_AT_THE_WORD, STANDS)
    until(lambda: it.starts("syncer"))
    it.kill("syncer")
    until(lambda: len(it.starts("syncer")) == 2)
    assert [words[1:] for words in it.starts("syncer")] == [[], ["again"]]


def test_where_no_process_can_be_started_for_a_moment_the_others_go_on(run, monkeypatch):
    it = run(ENDS_AT_THE_WORD, STANDS, STANDS)
    until(lambda: len(it.starts("learner 0")) and len(it.starts("learner 1")))
    start, refusals = processes.start, [OSError(errno.EAGAIN, "Resource temporarily unavailable"), EOFError()]

    def short_of_processes(*args, **more):
        if refusals:
            raise refusals.pop()
        return start(*args, **more)

    monkeypatch.setattr(processes, "start", short_of_processes)
    it.kill("learner 0")
    until(lambda: len(it.starts("learner 0")) == 2)
    assert it.told[1:] == [
        "learner 0 cannot be started now: EOFError",
        "learner 0 cannot be started now: Resource temporarily unavailable",
    ]
    assert len(it.starts("learner 1")) == len(it.starts("syncer")) == 1


def test_a_killed_shard_of_the_syncer_is_started_again_and_one_that_cannot_be_ends_the_run(run):
    it = run(ENDS_AT_THE_WORD, STANDS, shard=STANDS)
    for again in range(1, 4):  # restarts + 1
        until(lambda again=again: len(it.starts("shard")) == again)
        it.kill("shard")
    assert it.end() == 1
    assert it.told[-1] == "a shard of the syncer cannot be started any more"
    assert len(it.starts("syncer")) == len(it.starts("learner 0")) == 1


def test_the_word_to_stop_goes_to_the_syncer_and_all_end(run):
    it = run(ENDS_AT_THE_WORD, STANDS)
    until(lambda: it.starts("syncer") and it.starts("learner 0"))
    it.stop.set()
    assert it.end() == 143


SAVES = """
import time
def save(*_):
    open({told!r}, "w").close()
    while not os.path.exists({saved!r}): time.sleep(0.01)
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {{signal.SIGTERM}})
signal.pause()
"""


def test_a_syncer_has_as_long_as_it_takes_to_save_all(run, tmp_path, monkeypatch):
    monkeypatch.setattr(PROCESS, "_shown_after", 0.0)
    told, saved = tmp_path / "told.txt", tmp_path / "saved.txt"
    it = run(SAVES.format(told=str(told), saved=str(saved)), "sys.exit(0)")
    try:
        until(lambda: it.starts("syncer") and it.ends, "the learner's end")
        it.stop.set()
        until(told.exists, "the word")
        until(lambda: "for the syncer to save and leave" in str(PROCESS.reason()), "why it takes so long")
    finally:
        saved.touch()
    assert it.end() == 143
    assert it.told == []


@pytest.mark.parametrize("code", [0, 2])
def test_the_run_ends_as_its_syncer_does(run, code):
    it = run(f"sys.exit({code})", STANDS)
    assert it.end() == code
    assert len(it.starts("syncer")) == 1


def test_a_syncer_that_ends_with_an_error_is_started_again_up_to_the_limit(run):
    it = run("sys.exit(1)", STANDS)
    assert it.end() == 1
    assert [words[1:] for words in it.starts("syncer")] == [[], *[["again"]] * CONFIG.restarts]
    assert it.told[-1] == "the process of syncer ended with exit code 1 and is given up"


def test_a_syncer_whose_run_has_failed_for_good_is_not_started_again(run, tmp_path):
    (tmp_path / "run" / FOLDER).mkdir(parents=True)
    operator_orders.fail(tmp_path / "run" / FOLDER, "all steps were skipped")
    it = run("sys.exit(1)", STANDS)
    assert it.end() == 1
    assert len(it.starts("syncer")) == 1 and it.told == []


@pytest.mark.parametrize("gets_on", [True, False])
def test_failures_are_forgotten_only_where_the_run_gets_on_between_them(gets_on, run, tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "STEADY_SECONDS", 0.0)
    summary = tmp_path / "run" / "summary.json"
    summary.parent.mkdir()
    it = run(ENDS_AT_THE_WORD, STANDS)
    for again in range(1, CONFIG.restarts + 2):
        until(lambda again=again: len(it.starts("syncer")) == again)
        summary.write_text(json.dumps({"rounds": again if gets_on else 1}))
        it.kill("syncer")
    if gets_on:
        until(lambda: len(it.starts("syncer")) == CONFIG.restarts + 2)
    else:
        assert it.end() == 1
        assert it.told[-1] == "the process of syncer was killed by SIGKILL and is given up"


def test_a_syncer_that_dies_right_after_it_was_looked_after_is_started_again(run):
    it = run(ENDS_AT_THE_WORD, STANDS)
    look_after, killed = it.supervisor._look_after, []

    def kill_the_syncer_first(role):
        if role.name == "learner 0" and not killed and it.starts("syncer"):
            killed.append(it.starts("syncer")[0][0])
            it.kill("syncer")
            it.supervisor._roles.syncer.process.join()
        look_after(role)

    it.supervisor._look_after = kill_the_syncer_first
    until(lambda: len(it.starts("syncer")) == 2, "another syncer")
    assert it.starts("syncer")[1][1:] == ["again"]
    assert it.told == ["the process of syncer was killed by SIGKILL; another is started in 0.25 s"]


def test_a_syncer_killed_before_its_run_has_begun_begins_it_again(run):
    it = run(ENDS_AT_THE_WORD, STANDS)
    it.supervisor._roles.syncer.begun = lambda: False
    until(lambda: it.starts("syncer"))
    it.kill("syncer")
    until(lambda: len(it.starts("syncer")) == 2)
    assert [words[1:] for words in it.starts("syncer")] == [[], []]


def test_a_syncer_that_fails_once_all_learners_have_left_is_not_tried_again(tmp_path):
    waits = "import time\nwhile not os.path.exists({0!r}): time.sleep(0.01)\nsys.exit(1)"
    run = Run(tmp_path, waits.format(str(tmp_path / "go.on")), "sys.exit(0)")
    until(lambda: run.starts("syncer") and run.ends, "the learner's end")
    (tmp_path / "go.on").touch()
    assert run.end() == 1
    assert len(run.starts("syncer")) == 1


def test_a_learner_that_was_refused_ends_the_run_as_a_usage_error(run):
    it = run(ENDS_AT_THE_WORD, STANDS, "sys.exit(2)")
    assert it.end() == 2
    assert len(it.starts("learner 1")) == 1


def test_so_does_one_of_whose_hosts_a_later_one_was_refused(run):
    it = run(ENDS_AT_THE_WORD, "sys.exit(2) if '--process=1' in sys.argv else signal.pause()", hosts=2)
    assert it.end() == 2
    assert len(it.starts("learner 0")) == 2


def test_a_learner_that_cannot_start_again_is_given_up_alone(run, tmp_path):
    it = run(
        ENDS_AT_THE_WORD,
        STANDS,
        f"sys.exit(1) if os.path.exists({str(tmp_path / 'no.data')!r}) else signal.pause()",
    )
    until(lambda: it.starts("learner 0") and it.starts("learner 1"))
    (tmp_path / "no.data").touch()
    it.kill("learner 1")
    until(lambda: it.told and it.told[-1].endswith("is given up"))
    assert len(it.starts("learner 1")) == 1 + CONFIG.restarts
    assert len(it.starts("learner 0")) == len(it.starts("syncer")) == 1
    assert alive(int(it.starts("learner 0")[-1][0]))


def test_learners_that_die_again_and_again_are_given_up(run):
    it = run(ENDS_AT_THE_WORD, "sys.exit(1)")
    assert it.end() == 1
    assert len(it.starts("learner 0")) == 1 + CONFIG.restarts
    assert it.told[-2:] == [
        "the process of learner 0 ended with exit code 1 and is given up",
        "every learner has died or left, and none is restarted any more",
    ]


def test_a_run_whose_last_learner_is_given_up_after_others_were_drained_ends(run, monkeypatch, tmp_path):
    monkeypatch.setattr(supervisor, "LEAVE_SECONDS", 2.0)
    waits = "import time\nwhile not os.path.exists({0!r}): time.sleep(0.01)\nsys.exit(1)"
    it = run(ENDS_AT_THE_WORD, "sys.exit(0)", waits.format(str(tmp_path / "go.on")))
    until(lambda: "learner 0" in it.ends, "the end of who was drained")
    (tmp_path / "go.on").touch()
    assert it.end() == 1
    assert it.told[-1] == "every learner has died or left, and none is restarted any more"
    assert len(it.starts("syncer")) == 1


def test_a_learner_given_up_before_does_not_keep_the_others_from_ending_the_run(run, tmp_path):
    waits = "import time\nwhile not os.path.exists({0!r}): time.sleep(0.01)\nsys.exit(0)"
    done = "sys.exit(0) if 'alone' in sys.argv else signal.pause()"
    it = run(done, "sys.exit(1)", waits.format(str(tmp_path / "go.on")))
    until(lambda: it.told and it.told[-1].endswith("is given up"))
    (tmp_path / "go.on").touch()
    until(lambda: "learner 1" in it.ends, "the last learner's end")
    it.kill("syncer")
    assert it.end() == 0
    assert [words[1:] for words in it.starts("syncer")] == [[], ["again", "alone"]]


@pytest.mark.slow
def test_a_dead_fork_server_is_started_again_with_everybody(run):
    it = run(ENDS_AT_THE_WORD, STANDS)
    until(lambda: it.starts("syncer") and it.starts("learner 0"))
    os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)
    until(lambda: len(it.starts("syncer")) == len(it.starts("learner 0")) == 2, "all to start again")
    assert it.starts("syncer")[1][1:] == ["again"]


def test_waits_between_tries_grow_up_to_their_bound():
    assert [backoff(n, 15.0) for n in (1, 2, 3, 7, 1000)] == [0.25, 0.5, 1.0, 15.0, 15.0]


BECOMES = """
line = sys.stdin.readline().split()
with open({folder!r} + "/learner " + line[0], "a") as file:
    file.write(" ".join([str(os.getpid()), *line]) + chr(10))
signal.pause()
"""


def test_a_spare_takes_a_dead_learner_s_place_and_another_spare_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr("ddiloco.launch.supervisor.SPARE_SECONDS", 0.0)
    run = Run(tmp_path, ENDS_AT_THE_WORD, STANDS, STANDS, spare=BECOMES.format(folder=str(tmp_path)))
    until(lambda: all(run.starts(name) for name in ("learner 0", "learner 1", "spare")), "all to start")
    run.kill("learner 1")
    until(lambda: len(run.starts("learner 1")) == 2, "the spare in its place")
    assert run.starts("learner 1")[1] == [run.starts("spare")[0][0], "1", "somewhere:1"]
    until(lambda: len(run.starts("spare")) == 2, "another spare")
    run.kill("learner 1")  # who was a spare is replaced as any other
    until(lambda: len(run.starts("learner 1")) == 3, "the other spare in its place")
    told = ["the process of learner 1 was killed by SIGKILL; a spare takes its place"] * 2
    until(lambda: run.told == told, "the line on each")
    run.stop.set()
    assert run.end() == 143


def test_without_a_spare_at_hand_a_learner_is_started_anew(tmp_path):
    run = Run(tmp_path, ENDS_AT_THE_WORD, STANDS, STANDS, spare=BECOMES.format(folder=str(tmp_path)))
    until(lambda: all(run.starts(name) for name in ("learner 0", "learner 1", "spare")), "all to start")
    run.kill("learner 0")
    until(lambda: len(run.starts("learner 0")) == 2, "the spare")
    run.kill("learner 1")
    until(lambda: len(run.starts("learner 1")) == 2, "another process")
    assert len(run.starts("learner 1")[1]) == 1
    assert "another is started in 0.25 s" in run.told[1]
    run.stop.set()
    assert run.end() == 143


def test_a_syncer_that_dies_while_a_learner_is_left_waits_for_it(tmp_path):
    run = Run(tmp_path, ENDS_AT_THE_WORD, "sys.exit(0)", STANDS)
    until(lambda: run.starts("syncer") and run.starts("learner 1"), "all to start")
    run.kill("syncer")
    until(lambda: len(run.starts("syncer")) == 2, "another syncer")
    assert run.starts("syncer")[1][1:] == ["again"]
    run.stop.set()
    assert run.end() == 143


def test_where_the_syncer_is_dead_as_the_run_is_stopped_another_saves_all(run, monkeypatch):
    monkeypatch.setattr(supervisor, "backoff", lambda tries, longest: 600.0)
    it = run(f"'again' in sys.argv or os.kill(os.getpid(), signal.SIGKILL)\n{ENDS_AT_THE_WORD}", STANDS)
    until(lambda: it.told, "the syncer's death")
    it.stop.set()
    assert it.end() == 143
    assert [words[1:] for words in it.starts("syncer")] == [[], ["again"]]


def test_where_that_one_dies_too_the_run_has_failed(run):
    it = run("os.kill(os.getpid(), signal.SIGKILL)", STANDS)
    until(lambda: it.told and it.starts("learner 0"), "the syncer's death")
    it.stop.set()
    it.kill("learner 0")  # which nobody tells that the run is over
    assert it.end() == 1


def test_the_word_to_stop_may_go_to_all_processes_and_before_they_can_take_it(run, tmp_path):
    waits = "import time\nwhile not os.path.exists({0!r}): time.sleep(0.01)\n"
    it = run(waits.format(str(tmp_path / "go.on")) + ENDS_AT_THE_WORD, ENDS_AT_THE_WORD)
    until(lambda: it.starts("syncer") and it.starts("learner 0"))
    os.kill(forkserver._forkserver._forkserver_pid, signal.SIGTERM)
    for name in ("syncer", "learner 0"):
        it.kill(name, signal.SIGTERM)
    until(lambda: "learner 0" in it.ends, "the learner's end")
    it.stop.set()
    (tmp_path / "go.on").touch()
    assert it.end() == 143
    assert len(it.starts("syncer")) == 1
