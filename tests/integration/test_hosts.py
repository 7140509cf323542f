"""A learner of two processes with one mesh of four devices, beside a learner of a single process."""

import collections
import contextlib
import functools
import os
import random
import signal
import time

import pytest

from ddiloco.dashboard.view import read_views
from ddiloco.launch.ports import reserved_ports
from experiments.studies.chaos.committed import check_work
from tests.integration.hand import TRANSFORMER
from tests.integration.programs import LIMIT
from tests.integration.remote_runs import UNENDING, lines, processes_of, steps_of, summary_of, wait_for
from tests.remote.ends import until

HOSTS = (
    "--config.driver=remote",
    "--config.mesh.fsdp=2",
    "--config.mesh.data=-1",
    "--config.train.batch_size=4",
)


def start(programs, workdir, *changes, hosts="(2, 1)", devices=8):
    flags = f"{programs.environment['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    given = [*programs.training(workdir), *HOSTS, f"--config.remote.hosts={hosts}", *changes]
    arguments = {setting.partition("=")[0]: setting for setting in given}.values()  # the last of each
    return programs.start_module("experiments.train", *arguments, XLA_FLAGS=flags)


CODECS = (
    "--config.outer.codec=int4",
    "--config.outer.update_codec=int8",
    "--config.inner.optimizer=muon",
)
PLAIN = ("--config.outer.codec=f32", "--config.outer.update_codec=f32", "--config.eval.every=None")
PACED = "--config.train.min_step_seconds=(0.1, 0.1)"


@pytest.mark.parametrize(
    ("devices", "more"),
    [pytest.param(n, more, marks=pytest.mark.slow) for n, more in ((4, PLAIN), (4, CODECS), (8, CODECS))],
)
def test_a_mesh_across_hosts_gives_the_numbers_of_one_process(programs, tmp_path, devices, more):
    blocking = ("--config.sync.max_run_ahead=0", "--config.sync.quorum=None", "--config.sync.num_fragments=1")
    alike = (*blocking, "--config.algorithm=diloco", "--config.train.sub_shards=2", *more)
    for name, hosts in (("two", "(2, 1)"), ("one", "(1, 1)")):
        run = start(programs, tmp_path / name, *alike, hosts=hosts, devices=devices)
        done = programs.finish(run)
        assert done.returncode == 0, done.stderr
    two, one = summary_of(tmp_path / "two"), summary_of(tmp_path / "one")
    assert two["tokens"] == one["tokens"]
    assert two["bytes_sent"] == one["bytes_sent"]  # each host its own blocks, none twice
    assert [r["learners"] for r in lines(tmp_path / "two" / "rounds.jsonl")] == [[0, 1]] * 3
    assert [view.hosts for view in read_views([tmp_path / "one"])[0].learners] == [[], []]
    hosts, _ = (view.hosts for view in read_views([tmp_path / "two"])[0].learners)
    assert [(at.host, at.state) for at in hosts] == [(0, "finished"), (1, "finished")]
    assert all("connected" in [span.state for span in at.lane] for at in hosts)
    # Sums over two devices have one order, whichever library adds; over four they may differ.
    if devices == 4:
        assert two["params_sha256"] == one["params_sha256"]
    if more == CODECS:
        assert two["eval_loss"] == pytest.approx(one["eval_loss"], abs=1e-5)
    if devices == 4 and more == CODECS:
        assert_replays(programs, tmp_path / "two")


@pytest.mark.parametrize("devices", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_a_loop_of_ones_own_across_hosts_learns_what_it_does_in_one_process(programs, tmp_path, devices):
    loop = ("--config=configs/loop.py:diloco", "--config.driver=remote", "--config.train.steps=24")
    loop += ("--config.model.factory=experiments.examples.sharded_loop:make_loop", "--config.mesh.fsdp=2")
    loop += ("--config.sync.num_learners=2", "--config.log.page=")
    flags = f"{programs.environment['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    found = {}
    for hosts in ("(2, 1)", "(1, 1)"):
        workdir = tmp_path / hosts
        given = [*loop, f"--config.remote.hosts={hosts}", f"--workdir={workdir}"]
        done = programs.finish(programs.start_module("experiments.train", *given, XLA_FLAGS=flags))
        assert done.returncode == 0, done.stderr
        found[hosts] = summary_of(workdir)
    two, one = found.values()
    assert (two["tokens"], two["rounds"]) == (one["tokens"], one["rounds"]) == ({"0": 1536, "1": 1536}, 3)
    # Hosts' rows come in another order, in which they are summed.
    assert two["eval_loss"] == pytest.approx(one["eval_loss"], rel=1e-4)


ALONE = ("--config.sync.num_learners=1", "--config.remote.hosts=(2,)", "--config.train.min_step_seconds=()")


def two_hosts(programs, job, affliction=None, changes=()):
    """Starts both processes of learner 0: something befalls the first, the second has other settings."""
    flags = f"{programs.environment['XLA_FLAGS']} --xla_force_host_platform_device_count=2"
    with reserved_ports(2) as port:
        place = ("--processes=2", f"--coordinator=127.0.0.1:{port}")
    first = job.learner(0, *place, "--process=0", affliction=affliction, XLA_FLAGS=flags)
    return first, job.learner(0, *place, "--process=1", *changes, XLA_FLAGS=flags)


@pytest.mark.slow
def test_host_0_ends_where_it_fails_alone_and_the_others_with_it(programs, new_job):
    job = new_job((*TRANSFORMER, *HOSTS, *ALONE, "--config.recovery.checkpoint_every=0"))
    syncer, hosts = job.syncer(), two_hosts(programs, job, affliction="step:5")
    (code, _, err), (other, _, told) = (job.left(process) for process in hosts)
    assert (code, other) == (1, 1), err + told
    assert "error: learner 0: MemoryError: no more of it" in err
    assert "error: host 1: " in told
    job.wait_for(lambda: len(job.steps(0)) == 4, "what it had to say is with the syncer")
    assert job.end(syncer)[0] == 143


def test_a_host_whose_data_are_not_there_ends_at_once_though_the_other_waits_for_it(programs, new_job):
    job = new_job((*TRANSFORMER, *HOSTS, *ALONE))
    _, follows = two_hosts(programs, job, changes=["--config.data.name=nowhere"])
    code, _, err = job.left(follows)
    assert code == 2 and "error: host 1: config.data.name: TFDS knows no data set 'nowhere'" in err


def sources(workdir, learner):
    """Where the learner had its inner state from, each time."""
    return [r["inner_state"] for r in lines(workdir / "recoveries.jsonl") if r["learner"] == learner]


def assert_replays(programs, workdir):
    """Plays the run again, with the learner of two hosts in one process, to the same bits."""
    done = programs.finish(programs.start("replay", f"--workdir={workdir}"), 1800.0)
    assert (done.returncode, "the same as the run's" in done.stdout) == (0, True), done.stderr


ENDS = ((signal.SIGSTOP, "0.1"), (signal.SIGTERM, "0"))  # hung, and preempted


@pytest.mark.slow
def test_all_processes_of_a_learner_end_with_one_and_come_back_as_one(programs, tmp_path):
    changes = (*UNENDING, "--config.recovery.checkpoint_every=0.5", "--config.remote.host_timeout=3.0", PACED)
    changes += (
        "--config.remote.donor_port=None",
        f"--config.recovery.checkpoint_folder={tmp_path}/copies",
    )  # no peer gives
    process = start(programs, tmp_path, *changes, devices=4)

    wait = functools.partial(wait_for, [process])

    def kept():
        """Copies of the inner state that both hosts have."""
        files = list((tmp_path / "copies" / "learners" / "0").glob("state.*"))
        own = [{path.suffix for path in files if path.stem.endswith(f".{host}")} for host in (0, 1)]
        return own[0] & own[1]

    def back_since(moment):
        wait(
            lambda: any(r["time"] > moment and 0 in r["learners"] for r in lines(tmp_path / "rounds.jsonl")),
            "a merge of learner 0",
        )
        wait(lambda: len(sources(tmp_path, 0)) == 2 + len(seen), "the record of its recovery")

    wait(lambda: len(steps_of(tmp_path, 0)) > 10 and kept(), "steps and copies of learner 0")
    own, seen = processes_of(process), []
    for number, name in ENDS:
        before = processes_of(process)
        os.kill(before[name], number)
        wait(lambda b=before: not {b["0"], b["0.1"]} & set(processes_of(process).values()), "both to end")
        wait(lambda: "0" in processes_of(process), "another")
        back_since(time.time())
        seen.append(processes_of(process))
    assert {run["1"] for run in seen} == {own["1"]}
    assert {run["syncer"] for run in seen} == {own["syncer"]}
    process.send_signal(signal.SIGTERM)
    done = programs.finish(process)
    assert done.returncode == 143
    assert sources(tmp_path, 0) == ["fresh", *["checkpoint"] * len(ENDS)]
    assert (summary_of(tmp_path)["uptime"], summary_of(tmp_path)["failures"]) == (1.0, [])


KILLS = int(os.environ.get("KILLS", "40"))
FEWER = ("--config.remote.min_hosts=1", "--config.remote.host_timeout=5.0")  # now one of two, now both
FEWER += ("--config.mesh.fsdp=-1", "--config.mesh.data=1")


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("shards", "fewer"), [(1, ()), (2, ()), (1, FEWER)])
def test_processes_that_are_killed_at_any_time_lose_no_outer_step_and_no_token_and_replay(
    programs, tmp_path, shards, fewer
):
    rng, killed = random.Random(0), collections.Counter()
    often = (f"--config.remote.restarts={KILLS}", f"--config.remote.syncer_shards={shards}", *fewer)
    scored = ("--config.eval.every=12", "--config.recovery.checkpoint_every=0.5")
    begin = functools.partial(start, programs, tmp_path, *UNENDING, *scored, *often, PACED, devices=4)
    process, rounds = begin(), tmp_path / "rounds.jsonl"
    running = ["syncer", "0", "0", "0.1", "0.1", "1", "evaluator"]
    running += [f"syncer-{shard}" for shard in range(1, shards)]
    merges = lambda: [r for r in lines(rounds) if 0 in r["learners"] or not fewer]  # noqa: E731
    while killed.total() < KILLS:
        until(lambda p=process: set(running) <= set(processes_of(p)), "all processes", LIMIT)
        here, merged = processes_of(process), len(merges())
        name = rng.choice([*running, "launcher"])
        time.sleep(rng.uniform(0, 4))  # at any time: while they start, join, train or save
        with contextlib.suppress(ProcessLookupError, KeyError):  # it ends or begins by itself
            os.kill(process.pid if name == "launcher" else here[name], signal.SIGKILL)
            killed[name] += 1
        if name == "launcher":
            process.wait(LIMIT)
            process = begin("--resume")
        until(lambda merged=merged: len(merges()) > merged + rng.randrange(6), "more merges", LIMIT)
    process.send_signal(signal.SIGTERM)
    assert programs.finish(process).returncode == 143
    assert set(killed) == {*running, "launcher"}
    work = check_work(lines(rounds))
    assert (work.twice_tokens, work.problems) == (0, [])
    for fragment in range(3):
        made = [r["version"] for r in lines(rounds) if r["fragment"] == fragment]
        assert made == sorted(set(made))  # none twice; a line may die with the syncer, its version does not
    last = {p: max(r["version"] for r in lines(rounds) if r["fragment"] == p) for p in range(3)}
    assert all(n >= last[int(p)] for p, n in summary_of(tmp_path)["outer_steps"].items())
    assert_replays(programs, tmp_path)
