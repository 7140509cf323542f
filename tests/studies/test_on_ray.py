"""A sweep on a real Ray cluster of eight machines, simulated on this one, of which one is lost."""

import json
import os

import pytest

pytest.importorskip("ray")
from tests.integration.programs import ROOT
from tests.launch.ray_nodes import Nodes
from tests.refusals import assert_refused
from tests.remote.ends import until

LIMIT = 500.0
SWEEP = """
import itertools


def get_sweep():
    run = {"config": "configs/loop.py", "train.steps": 200, "eval.every": 50}
    return [
        {
            **run,
            "sync.num_learners": learners,
            "outer.learning_rate": rate,
            "seed": seed,
            "train.min_step_seconds": (0.3,) * learners,  # slow enough that a node is lost in the middle
        }
        for learners, rate, seed in itertools.product((1, 2), (0.5, 1.0), (0, 1))
    ]
"""


@pytest.fixture(scope="module")
def nodes():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT}:{os.environ.get('PYTHONPATH', '')}")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_worker_niceness", "0")  # Ray's 15 leaves tasks no time beside other tests
        patch.setenv("XLA_FLAGS", "")
        made = Nodes()
        yield made
        made.close()


def summaries(folder):
    found = (json.loads(path.read_text()) for path in folder.glob("*/summary.json"))
    return [summary for summary in found if summary.get("finished")]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_runs_of_a_sweep_finish_though_a_machine_is_lost(nodes, programs, tmp_path):
    nodes.have(8)
    (tmp_path / "rates.py").write_text(SWEEP)
    folder = tmp_path / "sweep"
    given = [f"--sweep={tmp_path / 'rates.py'}", f"--output={folder}", "--launcher=ray"]
    given.append(f"--address={nodes.cluster.address}")
    sweep = programs.start("sweep", *given)

    def begun():
        assert sweep.poll() is None, sweep.communicate()
        return len([*folder.glob("*/learners/0/steps.jsonl")]) == 8

    until(begun, "all runs at once", LIMIT)
    nodes.remove(nodes.nodes[3])
    done = programs.finish(sweep, LIMIT)
    assert done.returncode == 0, done.stderr
    assert len(summaries(folder)) == 8
    assert "Best: " in done.stdout and "8 of 8 runs have finished" in (folder / "sweep.html").read_text()
    assert not [*folder.glob("*/previous")], "the run of the lost machine continues"
    again = programs.finish(programs.start("sweep", *given), LIMIT)
    assert again.returncode == 0 and "[1/8]" not in again.stderr, "nothing is left to do"


def test_a_flag_of_another_engine_is_refused(programs, tmp_path):
    more = ["--sweep=seed=0,1", f"--output={tmp_path}", "--launcher=slurm"]
    assert_refused(
        programs.run("sweep", *more, "--cpus=2"), "cpus: has no use with --launcher=slurm; it is for ray"
    )
