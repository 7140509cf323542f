"""A run on a real Ray cluster of several nodes, whose actors, processes and nodes die, join and leave."""

import contextlib
import json
import os
import signal
import threading

import pytest

ray = pytest.importorskip("ray")
from ddiloco.launch import on_ray  # noqa: E402
from ddiloco.launch.assignment import Assignment  # noqa: E402
from ddiloco.launch.on_ray import RayRun, Resources  # noqa: E402
from ddiloco.launch.ports import reserved_ports  # noqa: E402
from ddiloco.remote.wire.security import Security  # noqa: E402
from ddiloco.settings.experiment import parse  # noqa: E402
from experiments.cli import program  # noqa: E402
from experiments.cli.role_main import exit_code  # noqa: E402
from tests import workbench  # noqa: E402
from tests.integration.hand import UNENDING, assert_counted_once, assert_nothing_twice  # noqa: E402
from tests.integration.programs import ROOT, SMALLEST  # noqa: E402
from tests.integration.remote_runs import lines, steps_of, summary_of  # noqa: E402
from tests.launch import ray_mains  # noqa: E402
from tests.launch.ray_mains import Bare  # noqa: E402
from tests.launch.ray_nodes import Nodes  # noqa: E402
from tests.remote.ends import until  # noqa: E402

LIMIT = 900.0


def given(*more):
    """Values by setting, of which the last is taken."""
    folder = f"--config.data.data_dir={workbench.data_folder()}"
    found = [*SMALLEST, *UNENDING, "--config.eval.every=None", folder, *more]
    return dict(setting.removeprefix("--config.").split("=", 1) for setting in found)


def settings(*more):
    values = given(*more)
    return parse(program.resolve(str(ROOT / "configs" / "dense.py"), [*values.items(), ("driver", "remote")]))


def of_loop(*more):
    """Settings of the small loop, which costs next to nothing to compile."""
    values = dict(setting.removeprefix("--config.").split("=", 1) for setting in (*UNENDING, *more))
    file = ROOT / "tests" / "integration" / "small_loop.py"
    return parse(program.resolve(str(file), [*values.items(), ("driver", "remote")]))


@pytest.fixture(scope="module")
def nodes():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT}:{os.environ.get('PYTHONPATH', '')}")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_worker_niceness", "0")  # Ray's 15 leaves actors no time beside other tests
        patch.setenv("XLA_FLAGS", "")  # in the tests it simulates devices, and each learner has one here
        made = Nodes()
        yield made
        made.close()


class Run:
    """A run in a thread, with what it has written so far."""

    def __init__(self, experiment, workdir, kept=None, processes=1):
        self.workdir, self.told, self.codes, self.stop = workdir, [], [], threading.Event()
        with reserved_ports(2) as port:
            resources = Resources(processes=processes, coordinators=port)
        self.ray_run = RayRun(experiment, workdir, resources, exit_code, self.told.append, kept=kept)
        self._thread = threading.Thread(target=lambda: self.codes.append(self.ray_run.run(self.stop)))
        self._thread.start()

    def learner(self, m):
        return self.ray_run.actors[f"learner {m}"]

    def rounds(self):
        return lines(self.workdir / "rounds.jsonl")

    def incarnations(self, m):
        """Of the learner, whose work was merged."""
        return sorted({c[1] for r in self.rounds() for c in r["contributions"] if c[0] == m})

    def wait(self, condition, told):
        def look():
            assert not self.codes, (self.codes, self.told)
            return condition()

        until(look, told, LIMIT)

    def another(self, m, since):
        """Waits until the work of a later process of the learner is merged."""
        newest = max(since, default=0)
        self.wait(lambda: max(self.incarnations(m), default=0) > newest, f"a merge of learner {m} again")

    def ended(self):
        self._thread.join(LIMIT)
        return self.codes

    def end(self):
        self.stop.set()
        return self.ended()

    def steps(self, m):
        return steps_of(self.workdir, m)

    def summary(self):
        return summary_of(self.workdir)


def assert_nothing_lost(run, learners):
    """Every version is made once and nobody's work is in it twice; every step that was taken is counted."""
    assert_nothing_twice(run)
    assert_counted_once(run, range(learners))
    assert run.summary()["failures"] == []


@contextlib.contextmanager
def running(*args, **more):
    run = Run(*args, **more)
    try:
        yield run
    finally:
        run.end()


ONE = ("--config.sync.num_learners=1", "--config.train.min_step_seconds=(0.05,)")


@pytest.mark.slow
def test_a_process_dies_and_comes_back_and_nothing_is_lost(nodes, tmp_path):
    nodes.have(1)
    with running(of_loop(*ONE), tmp_path / "run") as run:
        run.wait(lambda: run.incarnations(0), "a merge")
        before = run.incarnations(0)
        os.kill(ray.get(run.learner(0).where.remote())[2], signal.SIGKILL)
        run.another(0, before)
        assert run.end() == [143]
    assert_nothing_lost(run, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("main", "whose"),
    [(ray_mains.refused_once, "learner 0"), (ray_mains.syncer_refused_once, "syncer")],
)
def test_a_refusal_of_a_node_ends_no_run_that_has_settled(main, whose, nodes, tmp_path, monkeypatch):
    nodes.have(1)
    monkeypatch.setattr(on_ray, "PAUSE", 0.0)
    monkeypatch.setattr(on_ray, "LATE_SECONDS", 0.1)
    for seconds, codes in ((0.0, 0), (600.0, 2)):
        monkeypatch.setattr(on_ray, "SETTLED_SECONDS", seconds)
        workdir, told = tmp_path / str(seconds), []
        workdir.mkdir()
        run = RayRun(Bare(), workdir, Resources(), main, told.append, kept=workdir)
        assert run.run(threading.Event()) == codes, told
        assert f"{whose} has ended with exit code 2" in told


@pytest.mark.slow
def test_a_run_that_is_told_to_stop_does_so_though_its_syncer_fails_meanwhile(nodes, tmp_path):
    nodes.have(1)
    stop, codes = threading.Event(), []
    run = RayRun(Bare(), tmp_path, Resources(), ray_mains.saved_at_the_second_try, print)
    thread = threading.Thread(target=lambda: codes.append(run.run(stop)), daemon=True)
    thread.start()
    stop.set()
    until((tmp_path / "told").exists, "the order to stop", LIMIT)
    ray.get(run.actors["syncer"].where.remote())  # the word was answered before
    (tmp_path / "go_on").touch()
    until(lambda: codes == [143], "the end", 180.0)


@pytest.mark.slow
def test_a_syncer_that_fails_again_and_again_without_a_merge_between_ends_the_run(nodes, tmp_path):
    nodes.have(1)
    told, codes = [], []
    run = RayRun(Bare(), tmp_path, Resources(), ray_mains.merging_once, told.append)
    threading.Thread(target=lambda: codes.append(run.run(threading.Event())), daemon=True).start()
    until(lambda: codes == [1], "the end", LIMIT)
    assert told == ["the syncer fails again and again, and nothing is merged meanwhile"]
    assert (tmp_path / "starts").read_text().count("another") >= 4


@pytest.mark.slow
def test_learners_that_all_fail_again_and_again_without_a_merge_between_end_the_run(
    nodes, tmp_path, monkeypatch
):
    nodes.have(1)
    monkeypatch.setattr(on_ray, "PAUSE", 0.0)
    monkeypatch.setattr(on_ray, "SETTLED_SECONDS", 0.0)
    told, codes = [], []
    run = RayRun(Bare(2), tmp_path, Resources(cpus=0.5), ray_mains.never_begun, told.append)
    threading.Thread(target=lambda: codes.append(run.run(threading.Event())), daemon=True).start()
    until(lambda: codes == [1], "the end", LIMIT)
    assert told[-1] == "every learner fails again and again, and nothing is merged meanwhile"


class Unpacked(Exception):
    """What cannot be unpacked where an actor begins before there is a folder."""

    def __reduce__(self):
        return (os.listdir, self.args)


@pytest.mark.slow
def test_an_actor_that_a_node_cannot_unpack_is_told_and_begun_again(nodes, tmp_path, monkeypatch):
    nodes.have(1)
    monkeypatch.setattr(on_ray, "PAUSE", 0.0)
    (tmp_path / "refused").touch()
    told, folder = [], tmp_path / "code"

    def note(line):
        told.append(line)
        folder.mkdir(exist_ok=True)  # the node has what it needs from then on

    run = RayRun(Bare(), tmp_path, Resources(), ray_mains.refused_once, note)
    for role, security in (("syncer", Security()), ("learner", Unpacked(str(folder)))):
        run._start(Assignment(role, workdir=tmp_path), security, {"num_cpus": 0})
    assert run._wait(threading.Event()) == 0
    run._close()
    assert told[0].startswith("learner 0 cannot begin: ")
    assert sorted(told[1:]) == [f"{name} has ended with exit code 0" for name in ("learner 0", "syncer")]


@pytest.mark.slow
def test_a_node_is_lost_and_its_learner_comes_back_on_another(nodes, tmp_path):
    nodes.have(2)
    with running(settings("--config.train.min_step_seconds=(0.1, 0.1)"), tmp_path / "run") as run:
        run.wait(lambda: run.incarnations(0) and run.incarnations(1), "merges of both learners")
        gone, before = nodes.of(run.learner(1)), run.incarnations(1)
        nodes.remove(gone)
        made = len(run.rounds())
        run.wait(lambda: len(run.rounds()) > made + 3, "merges while one learner has no node")
        assert run.incarnations(1) == before
        nodes.have(2)
        run.another(1, before)
        assert run.end() == [143]
    assert_nothing_lost(run, 2)


@pytest.mark.slow
def test_a_learner_of_several_processes_comes_to_the_end_and_a_refusal_ends_a_run(nodes, tmp_path):
    nodes.have(2)
    meshes = ("--config.mesh.fsdp=2", "--config.mesh.data=-1")
    with running(settings(*ONE, *meshes, "--config.train.steps=8"), tmp_path / "run", processes=2) as run:
        assert run.ended() == [0]
        assert run.told[-1].endswith("exit code 0")
    assert run.summary()["finished"] and run.summary()["inner_steps"] == {"0": 8}
    with running(settings(*ONE, "--config.data.name=no_such_text"), tmp_path / "wrong") as run:
        assert run.ended() == [2]


@pytest.mark.slow
def test_processes_of_a_learner_die_and_come_back_together(nodes, tmp_path):
    nodes.have(2)
    more = ("--config.mesh.fsdp=2", "--config.mesh.data=-1", "--config.tape.enabled=true")
    with running(settings(*ONE, *more), tmp_path / "run", tmp_path / "run", processes=2) as run:
        for lost in ("learner 0.1", "learner 0"):
            run.wait(lambda: run.incarnations(0), "a merge")
            before = run.incarnations(0)
            os.kill(ray.get(run.ray_run.actors[lost].where.remote())[2], signal.SIGKILL)
            run.another(0, before)
        gone, before = nodes.of(run.ray_run.actors["learner 0.1"]), run.incarnations(0)
        nodes.remove(gone)
        nodes.have(2)
        run.another(0, before)
        assert run.end() == [143]
    assert_nothing_lost(run, 1)


@pytest.mark.slow
def test_a_part_of_the_syncer_dies_and_its_fragments_are_merged_again(nodes, tmp_path):
    nodes.have(2)
    more = ("--config.train.min_step_seconds=(0.1, 0.1)", "--config.remote.syncer_shards=2")
    with running(settings(*more), tmp_path / "run") as run:
        of_shard = lambda: [r for r in run.rounds() if r["fragment"] % 2 == 1]  # noqa: E731
        run.wait(of_shard, "a merge of the second shard")
        os.kill(ray.get(run.ray_run.actors["syncer 1"].where.remote())[2], signal.SIGKILL)
        made = len(of_shard())
        run.wait(lambda: len(of_shard()) > made + 1, "merges of the shard that came back")
        assert run.end() == [143]
    assert_nothing_lost(run, 2)


FOUR = (  # waits as long as they are by default, since a machine with so many processes is slow
    "--config.sync.num_learners=4",
    "--config.sync.quorum=3",
    "--config.sync.offer_timeout=60",
    "--config.sync.silence_timeout=60",
    "--config.sync.resend_timeout=30",
    "--config.remote.gather=300",
    "--config.eval.num_batches=8",
    "--config.tape.enabled=true",
)


@pytest.mark.slow
def test_four_learners_reach_the_loss_of_an_undisturbed_run_though_nodes_die_drain_and_join(
    nodes, programs, tmp_path
):
    """docs/results/chaos.md has the figures."""
    nodes.have(4)
    steps, workdir, calm = 600, tmp_path / "run", tmp_path / "undisturbed"
    step_time = "--config.train.min_step_seconds=(0.1, 0.1, 0.1, 0.1)"
    with running(settings(*FOUR, step_time, f"--config.train.steps={steps}"), workdir, workdir) as run:

        def at(step):
            return lambda: any(r["step"] >= step for r in run.rounds())

        run.wait(at(steps // 5), "a fifth of the run")
        before = run.incarnations(3)
        nodes.remove(nodes.of(run.learner(3)))
        run.wait(at(2 * steps // 5), "merges without the node")
        nodes.have(4)
        run.another(3, before)
        before, node = run.incarnations(2), nodes.of(run.learner(2))
        nodes.drain(node)
        nodes.have(5)
        run.another(2, before)
        assert nodes.of(run.learner(2)) is not node
        nodes.remove(node)
        assert run.ended() == [0], run.told
    assert_nothing_lost(run, 4)
    tokens = sum(run.summary()["tokens"].values())
    values = given(*FOUR, "--config.train.min_step_seconds=()", f"--config.train.tokens={tokens}")
    alike = [f"--config.{name}={value}" for name, value in values.items() if name != "train.steps"]
    done = programs.run("train", *alike, f"--workdir={calm}")
    assert done.returncode == 0, done.stderr

    def loss(of):
        scored = programs.run(
            "evaluate", f"--checkpoint={of / 'checkpoints'}", f"--output={of / 'score.json'}"
        )
        assert scored.returncode == 0, scored.stderr
        return json.loads((of / "score.json").read_text())["eval_loss"]

    summary, undisturbed = run.summary(), json.loads((calm / "summary.json").read_text())
    figures = ("goodput", "merged_share", "mean_quorum", "rounds", "inner_steps", "inner_states")
    for one in (summary, undisturbed):
        print({name: one.get(name) for name in figures})
    print(f"loss {loss(workdir)} with nodes lost, {loss(calm)} without, {tokens} tokens")
    assert loss(workdir) == pytest.approx(loss(calm), rel=0.02)
    replayed = programs.run("replay", f"--workdir={workdir}")
    print(replayed.stdout)
    assert (replayed.returncode, "the same as the run's" in replayed.stdout) == (0, True), replayed.stderr
