"""The tasks of a run by SkyPilot: as its schemas have them, and run for real beside a recorded sky."""

import json
import pathlib

import jsonschema
import pytest
import yaml

from ddiloco.config import ConfigError
from ddiloco.launch import skypilot
from ddiloco.launch.plan import LaunchedRun
from tests.integration.programs import ROOT
from tests.launch.recorded import Commands

SCHEMAS = json.loads((pathlib.Path(__file__).parent / "schemas" / "skypilot.json").read_text())
CONFIG = ["--config=configs/dense.py:2b", "--config.sync.num_learners=2", "--config.inner.betas=(0.9, 0.95)"]
MACHINES = skypilot.SkyPilot(str(ROOT), "H100:8", "runpod", setup="pip install -e .\ntrue", spot=True)


def written(folder, processes=1, machines=MACHINES):
    """The tasks by name."""
    skypilot.plan(LaunchedRun("reading", CONFIG, 2, processes), machines).write(folder)
    return {path.stem: yaml.safe_load(path.read_text()) for path in folder.glob("*.yaml")}


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(
    ("infra", "accelerator"),
    [("aws/us-east-1", "A100-80GB:8"), ("lambda", "H100:8"), ("runpod", "H100:8"), ("", "tpu-v5p-8")],
)
def test_every_task_is_as_the_schemas_have_it(tmp_path, processes, infra, accelerator):
    machines = skypilot.SkyPilot(str(ROOT), accelerator, infra, "aws")
    tasks = written(tmp_path, processes, machines)
    assert sorted(tasks) == ["learner-0", "learner-1", "syncer"]
    for task in tasks.values():
        jsonschema.validate(task, SCHEMAS["task"])
        jsonschema.validate(task["resources"], SCHEMAS["resources"])
    assert tasks["learner-0"]["resources"].get("infra", "") == infra
    assert tasks["learner-0"]["num_nodes"] == processes


def test_learners_may_be_preempted_and_the_syncer_not(tmp_path):
    tasks = written(tmp_path)
    assert [tasks[name]["resources"]["use_spot"] for name in sorted(tasks)] == [True, True, False]
    assert tasks["syncer"]["resources"]["ports"] == 7070


def ran(commands, tmp_path, task, codes, **variables):
    """The exit code of a task whose program ends with these codes in turn, and its calls."""
    counted = tmp_path / "count"
    ends = " ".join(f"{n}) exit {code};;" for n, code in enumerate(codes, start=1))
    commands.add("python", f'echo >> {counted}; case "$(wc -l < {counted})" in {ends} esac')
    commands.add("sleep")
    script = tmp_path / "run.sh"
    script.write_text(task["run"])
    (tmp_path / "ddiloco-credentials").mkdir(exist_ok=True)
    (tmp_path / "ddiloco-credentials" / "ready").touch()
    told = {name: value for name, value in task["envs"].items() if value} | variables
    code, _, err = commands.run(str(script), tmp_path, HOME=str(tmp_path), **told)
    assert err == ""
    return code, commands.calls("python")


@pytest.mark.parametrize(
    ("codes", "last"), [([1, 139, 124, 0], 0), ([2], 2), ([1, 3], 3), ([143], 143)]
)  # failed, hung and done; refused; devices that compute wrong, for another machine; asked to end
def test_a_machine_restarts_its_learner_unless_another_start_is_of_no_use(tmp_path, codes, last):
    commands = Commands(tmp_path / "commands")
    task = written(tmp_path / "made")["learner-1"]
    code, calls = ran(commands, tmp_path, task, codes, DDILOCO_SYNCER="10.1.1.1:7070")
    assert (code, len(calls)) == (last, len(codes))
    assert calls[0] == ["-m", "experiments.learner", *CONFIG, "--config.remote.donor_port=None"]
    given = commands.environment("python")
    assert given["DDILOCO_RESTARTS"] == f"{len(codes) - 1}"
    assert (given["DDILOCO_LEARNER"], given["DDILOCO_SYNCER"]) == ("1", "10.1.1.1:7070")
    assert given["DDILOCO_TOKEN_FILE"] == f"{tmp_path}/ddiloco-credentials/token"
    assert task["resources"]["job_recovery"] == {"recover_on_exit_codes": [3]}


def test_the_hosts_of_a_learner_find_each_other(tmp_path):
    commands, task = Commands(tmp_path / "commands"), written(tmp_path / "made", 2)["learner-0"]
    nodes = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    code, calls = ran(commands, tmp_path, task, [0], **nodes)
    given = commands.environment("python")
    told = [given[f"DDILOCO_{name}"] for name in ("PROCESS", "PROCESSES", "COORDINATOR")]
    assert (code, told) == (0, ["1", "2", "10.0.0.1:7072"])
    assert "--config.remote.hosts=2,2," in calls[0]


def test_a_restarted_syncer_goes_on_with_its_run(tmp_path):
    commands = Commands(tmp_path / "commands")
    machines = skypilot.SkyPilot(str(ROOT), "H100:8", evaluator=False)
    code, calls = ran(commands, tmp_path, written(tmp_path / "made", machines=machines)["syncer"], [1, 0])
    assert (code, len(calls)) == (0, 2)
    assert calls[1] == ["-m", "experiments.syncer", *CONFIG, "--resume=auto"]
    assert commands.environment("python")["DDILOCO_RESTARTS"] == "1"


def test_one_command_makes_credentials_for_the_syncers_address_and_launches_all(tmp_path):
    commands, folder = Commands(tmp_path / "commands"), tmp_path / "made"
    written(folder)
    commands.add("sky", '[ "$1" != status ] || echo 203.0.113.7:41234')
    commands.add("rsync", f'cp -r "${{@:2:$#-2}}" {tmp_path}')
    commands.add("ssh")
    code, out, err = commands.run(str(folder / "submit.sh"), tmp_path)
    assert (code, err) == (0, "")
    assert out.splitlines()[-1].startswith("the syncer is at 203.0.113.7:41234; ")
    launched = [call for call in commands.calls("sky") if "launch" in call]
    assert launched[0] == ["launch", "-y", "-d", "-c", "reading-syncer", "syncer.yaml"]
    assert [call[-1] for call in launched[1:]] == ["learner-0.yaml", "learner-1.yaml"]
    assert all("DDILOCO_SYNCER=203.0.113.7:41234" in call for call in launched[1:])
    mounts = yaml.safe_load((folder / "learner-1.yaml").read_text())["file_mounts"].values()
    assert all((folder / path).exists() for path in mounts)
    assert len((tmp_path / "tokens").read_text().splitlines()) == 3  # two learners and the operator
    made = (folder / "credentials" / "tls" / "syncer" / "cert.pem").read_bytes()
    assert commands.run(str(folder / "submit.sh"), tmp_path)[0] == 0
    assert (folder / "credentials" / "tls" / "syncer" / "cert.pem").read_bytes() == made


def test_a_syncer_of_several_processes_is_refused():
    with pytest.raises(ConfigError, match=r"remote\.syncer_shards: is 2, but must be 1 with --launcher=sky"):
        skypilot.plan(LaunchedRun("reading", CONFIG, 2, shards=2), MACHINES)
