"""Real processes under real faults: nothing committed is lost, nothing is counted twice, and all is told."""

import json

import pytest

from tests.integration.programs import LIMIT, SMALLEST
from tests.refusals import assert_refused

LEARNERS = 3
SHORT = (
    f"--config.sync.num_learners={LEARNERS}",
    f"--config.train.min_step_seconds={(0.1,) * LEARNERS}",
    "--config.train.steps=180",  # at least 12 s: the clock may count steps of 0.1 s up to 1.5 times
    "--chaos.steady_seconds=1",
    "--chaos.seconds=7",
    "--chaos.learner_every=5",
    "--chaos.syncer_every=7",
    "--chaos.seed=354",  # a partition, a kill and a hang of learners, and a kill of the syncer
)


def smallest():
    """The model and the data of the smallest run, not its steps."""
    kept = ("--config.model.", "--config.data.", "--config.eval.num", "--config.eval.batch")
    return [argument for argument in SMALLEST if argument.startswith(kept)]


@pytest.mark.slow
def test_a_run_of_processes_survives_its_killer_and_tells_of_it(programs, tmp_path):
    data = f"--config.data.data_dir={programs.data_dir}"
    where = f"--workdir={tmp_path}"
    config = "--config=configs/chaos_processes.py:quick"
    process = programs.start("chaos", config, *smallest(), data, *SHORT, where)
    out, err = process.communicate(timeout=3 * LIMIT)
    report = json.loads((tmp_path / "chaos.json").read_text())
    assert report["outer_steps"]["problems"] == report["work"]["problems"] == [], err
    assert report["outer_steps"]["lost"] == report["outer_steps"]["twice"] == 0
    assert report["work"]["twice_tokens"] == 0
    assert report["outer_steps"]["committed"] > 0 < report["work"]["contributions"]
    assert process.returncode == (0 if report["uptime"] == 1 else 1), err
    assert sum(report["faults"].values()) >= 3
    assert 0 < report["goodput"] < 1
    assert report["loss"] > 0
    faults = [json.loads(line) for line in (tmp_path / "faults.jsonl").read_text().splitlines()]
    struck = sum(line["event"] in ("kill", "hang", "partition") for line in faults)
    assert struck == sum(report["faults"].values())
    killed = sum(line["event"] == "kill" for line in faults)
    assert killed, "the seed's plan has kills"
    starts = sum(line["event"] == "start" for line in faults)
    assert starts >= 1 + LEARNERS + killed - 1  # the run may end before the last one is started again
    assert "| outer steps |" in out
    assert (tmp_path / "chaos.png").stat().st_size > 10_000


@pytest.mark.slow
def test_hostile_peers_beside_the_killer_end_nothing_and_are_named(programs, tmp_path):
    """The last of four learners lies with credentials of its own, and a stranger has none."""
    data = f"--config.data.data_dir={programs.data_dir}"
    more = (
        f"--config.sync.num_learners={LEARNERS + 1}",
        f"--config.train.min_step_seconds={(0.1,) * (LEARNERS + 1)}",
        "--chaos.hostile=True",
    )
    where = f"--workdir={tmp_path}"
    config = "--config=configs/chaos_processes.py:quick"
    process = programs.start("chaos", config, *smallest(), data, *SHORT[2:], *more, where)
    out, err = process.communicate(timeout=3 * LIMIT)
    report = json.loads((tmp_path / "chaos.json").read_text())
    assert report["outer_steps"]["problems"] == report["work"]["problems"] == report["crashes"] == [], err
    assert report["outer_steps"]["lost"] == 0 < report["outer_steps"]["committed"]
    attacked = report["hostile"]
    assert attacked["failures"] == []
    assert not [deed for deed in attacked["deeds"] if "ANSWERED" in deed]
    assert sum(attacked["deeds"].values()) > 100
    assert attacked["drops"]["wire: wrong token"] > 0
    assert sum(attacked["drops"].values()) > 100
    alarms = "\n".join(attacked["alarms"])
    assert f"learner {LEARNERS}" in alarms and "without the join token was refused" in alarms
    assert all(m not in attacked["quarantined"] for m in range(LEARNERS))
    assert 0 < report["loss"] < 4, "untrained it is 6.2"
    assert "| deeds of the hostile |" in out


def test_what_it_cannot_do_is_told_in_one_line(programs):
    wrong = {
        "--config=configs/dense.py --config.driver=remote": "config: configs/dense.py: has no get_chaos()",
        "--config.driver=local": "config.driver: is local, but must be remote",
        "--chaos.hostile=True --config.sync.num_learners=1 --config.train.min_step_seconds=(0.1,)": (
            "chaos.hostile: takes a learner's place, but config.sync.num_learners is 1"
        ),
    }
    running = {told: programs.start("chaos", *arguments.split()) for arguments, told in wrong.items()}
    for told, process in running.items():
        assert_refused(programs.finish(process), told)
