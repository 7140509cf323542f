"""The scripts of a run on Cloud TPU, run for real beside a recorded gcloud."""

import subprocess

import pytest

from ddiloco.launch import cloud_tpu
from ddiloco.launch.plan import LaunchedRun
from tests.launch.recorded import Commands

CONFIG = ["--config=configs/dense.py:2b", "--config.sync.num_learners=2", "--config.inner.betas=(0.9, 0.95)"]
WHERE = ["--zone=us-east5-a", "--project=research"]
ASKED = cloud_tpu.CloudTpu(
    "us-east5-a", "v5p-16", "v2-alpha-tpuv5", "10.0.0.9:7070", project="research", spot=True
)


@pytest.fixture
def folder(tmp_path):
    cloud_tpu.plan(LaunchedRun("reading", CONFIG, 2, processes=2), ASKED).write(tmp_path / "scripts")
    return tmp_path / "scripts"


def kept(tmp_path, folder, states):
    """The calls of gcloud that change something, where the learners' resources are in these states."""
    commands = Commands(tmp_path / "commands")
    cases = " ".join(f'*reading-learner-{m}*) echo "{state}";;' for m, state in enumerate(states))
    commands.add("gcloud", f'case "$4 $5" in describe*) case "$5" in {cases} esac;; esac')
    code, _, err = commands.run("keep.sh", folder)
    assert (code, err) == (0, "")
    return [call[3:] for call in commands.calls("gcloud") if call[3] != "describe"]


def created(m, restarts=0):
    name = f"reading-learner-{m}"
    return [
        *("create", name, f"--node-id={name}", *WHERE),
        *("--accelerator-type=v5p-16", "--runtime-version=v2-alpha-tpuv5", "--spot"),
        f"--metadata=ddiloco-learner={m},ddiloco-restarts={restarts}",
        "--metadata-from-file=startup-script=startup.sh",
    ]


def test_a_resource_is_asked_for_for_each_learner(tmp_path, folder):
    assert kept(tmp_path, folder, ["", ""]) == [created(0), created(1)]


def test_what_waits_or_runs_is_left_alone(tmp_path, folder):
    assert kept(tmp_path, folder, ["ACTIVE", "WAITING_FOR_RESOURCES"]) == []


@pytest.mark.parametrize(("state", "restarts"), [("SUSPENDED", 1), ("FAILED", 0)])
def test_what_was_preempted_is_asked_for_anew_and_knows_that_it_ran(tmp_path, folder, state, restarts):
    """Where it did, a new machine without its data yet is no wrong setting, which would end it for good."""
    deleted = ["delete", "reading-learner-1", *WHERE, "--quiet", "--force"]
    assert kept(tmp_path, folder, ["ACTIVE", state]) == [deleted, created(1, restarts)]


def test_a_machine_runs_its_learner_as_a_service_that_is_told_all(tmp_path, folder):
    commands = Commands(tmp_path / "commands")
    answers = {
        "ddiloco-learner": "1",
        "ddiloco-restarts": "1",
        "agent-worker-number": "1",
        "worker-network-endpoints": "unknown:unknown:10.1.0.1,unknown:unknown:10.1.0.2",
    }
    cases = " ".join(f'*{name}) echo "{value}";;' for name, value in answers.items())
    commands.add("curl", f'case "${{!#}}" in {cases} *) exit 22;; esac')
    commands.add("hostname", "echo 10.1.0.2 172.17.0.1")
    failed = tmp_path / "failed"  # the first time, as a store of secrets may
    commands.add("gcloud", f"[ -e {failed} ] || {{ touch {failed}; exit 1; }}; echo a-token-of-sixteen")
    commands.add("sleep")
    commands.add("systemctl")
    script = (folder / "startup.sh").read_text()
    for place in ("/var/lib/ddiloco", "/etc/systemd/system"):
        script = script.replace(place, str(tmp_path / "root") + place)
    (tmp_path / "root/etc/systemd/system").mkdir(parents=True)
    (folder / "startup.sh").write_text(script)
    code, _, err = commands.run("startup.sh", folder)
    assert (code, err) == (0, "")
    state = tmp_path / "root/var/lib/ddiloco"
    given = dict(line.split("=", 1) for line in (state / "environment").read_text().splitlines())
    assert {name: value for name, value in given.items() if name.startswith("DDILOCO_")} == {
        "DDILOCO_LEARNER": "1",
        "DDILOCO_RESTARTS": "1",
        "DDILOCO_SYNCER": "10.0.0.9:7070",
        "DDILOCO_TOKEN_FILE": f"{state}/token",
        "DDILOCO_WORKDIR": f"{state}/run",
        "DDILOCO_GRACE": "25",
        "DDILOCO_PROCESS": "1",
        "DDILOCO_PROCESSES": "2",
        "DDILOCO_COORDINATOR": "10.1.0.1:7072",
    }
    assert (state / "token").read_text() == "a-token-of-sixteen\n"
    assert (state / "token").stat().st_mode & 0o077 == 0
    unit = (tmp_path / "root/etc/systemd/system/ddiloco.service").read_text()
    assert "RestartPreventExitStatus=2\n" in unit and "Restart=on-failure\n" in unit
    assert "echo DDILOCO_RESTARTS=1 > /run/ddiloco.restarts" in unit  # which is read before the next start
    assert commands.calls("systemctl") == [["daemon-reload"], ["restart", "ddiloco"]]
    secret = ["secrets", "versions", "access", "latest", "--secret=reading-learner-1"]
    assert commands.calls("gcloud") == [secret, secret]


def test_the_scripts_are_shell(folder):
    for script in folder.glob("*.sh"):
        subprocess.run(["bash", "-n", script], check=True)
