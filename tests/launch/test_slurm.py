"""The batch scripts of a run under Slurm, run for real beside recorded sbatch, srun and scontrol."""

import shlex
import signal

import pytest

from ddiloco.launch import slurm
from ddiloco.launch.plan import LaunchedRun
from tests.integration.programs import ROOT
from tests.launch.recorded import Commands
from tests.remote.ends import until

CONFIG = ["--config=configs/dense.py:2b", "--config.sync.num_learners=3", "--config.inner.betas=(0.9, 0.95)"]
# As where a node's name is that of its loopback on the node itself.
HOSTNAME = 'case "$1" in -i) echo 127.0.1.1;; -I) echo 10.1.0.5 172.17.0.1;; *) echo node5.cluster;; esac'


@pytest.fixture
def commands(tmp_path):
    made = Commands(tmp_path / "commands")
    made.add("sbatch", "echo 17")
    made.add("hostname", HOSTNAME)
    made.add("scontrol")
    return made


@pytest.fixture
def written(tmp_path):
    def write(processes=1, **more):
        nodes = slurm.Slurm(str(ROOT), str(tmp_path / "shared run"), **more)
        folder = tmp_path / "scripts"
        slurm.plan(LaunchedRun("reading", CONFIG, 3, processes), nodes).write(folder)
        return folder

    return write


def options(script):
    return [line.removeprefix("#SBATCH ") for line in script.read_text().splitlines() if "#SBATCH" in line]


def learner(commands, folder, tmp_path, **variables):
    address = tmp_path / "shared run.launch"
    address.mkdir(exist_ok=True)
    (address / "address").write_text("node9:7070\n")
    told = {"SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_JOB_ID": "17"}
    return commands.run("learners.sbatch", folder, **told, **variables)


def test_one_command_submits_the_syncer_and_an_array_of_learners(commands, written):
    folder = written()
    code, out, _ = commands.run("submit.sh", folder)
    assert (code, out) == (0, "syncer 17, learners 17; to end the run: scancel 17 17\n")
    assert commands.calls("sbatch") == [["--parsable", "syncer.sbatch"], ["--parsable", "learners.sbatch"]]
    commands.add("sbatch", "ls $2 >/dev/null && echo 17")
    assert commands.run(str(folder / "submit.sh"), folder.parent)[:2] == (code, out), "from anywhere"


def test_jobs_are_put_back_and_told_before_they_end(written):
    folder = written(processes=2, notice=90, learner="--gpus-per-node=8 --partition=big")
    for script in ("syncer.sbatch", "learners.sbatch"):
        assert {"--requeue", "--signal=B:TERM@90"} <= set(options(folder / script))
    asked = options(folder / "learners.sbatch")
    assert {"--array=0-2", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1"} <= set(asked)
    assert {"--gpus-per-node=8", "--partition=big"} <= set(asked)
    assert "--config.remote.hosts=2,2,2," in (folder / "syncer.sbatch").read_text()


def test_a_learner_is_told_all_in_its_environment(commands, written, tmp_path):
    commands.add("srun")
    code, _, err = learner(commands, written(), tmp_path)
    assert (code, err) == (0, "")
    run = str(tmp_path / "shared run")
    assert commands.environment("srun") == {
        "DDILOCO_LEARNER": "2",
        "DDILOCO_SYNCER": "node9:7070",
        "DDILOCO_TOKEN_FILE": f"{run}.tokens/learner-2",
        "DDILOCO_WORKDIR": run,
        "DDILOCO_GRACE": "48",
        "DDILOCO_RESTARTS": "0",
    }
    (call,) = commands.calls("srun")
    assert call[:3] == ["--kill-on-bad-exit=1", "bash", "-c"]
    words = shlex.split(call[3])
    assert words[:4] == ["exec", "python", "-m", "experiments.learner"]
    assert words[4:7] == CONFIG  # as they were given, spaces and all


def test_roles_begin_in_the_folder_that_the_paths_of_their_settings_are_of(commands, written, tmp_path):
    """Slurm itself has them begin where they were submitted from."""
    commands.add("srun", f"pwd >> {shlex.quote(str(tmp_path / 'pwd'))}")
    learner(commands, written(setup="test -d configs || exit 9"), tmp_path)
    commands.run("syncer.sbatch", tmp_path / "scripts", SLURM_JOB_ID="16")
    assert set((tmp_path / "pwd").read_text().split()) == {str(ROOT)}


def test_a_task_of_a_node_without_the_shared_disk_is_put_back(commands, tmp_path):
    nodes = slurm.Slurm(str(tmp_path / "not mounted"), str(tmp_path / "run"))
    slurm.plan(LaunchedRun("reading", CONFIG, 3), nodes).write(tmp_path / "scripts")
    assert commands.run("syncer.sbatch", tmp_path / "scripts", SLURM_JOB_ID="16")[0] == 1
    assert commands.calls() == [["scontrol", "requeue", "16"]]


def test_a_syncer_says_where_it_is_once_the_disk_has_room_for_that(commands, written, tmp_path):
    address = tmp_path / "shared run.launch" / "address"
    commands.add("sleep")
    commands.add("mv", '[ "$(grep -c ^mv "$(dirname "$0")/log")" -gt 2 ] && exec /bin/mv "$@"')
    commands.add("srun", "exit 1")
    commands.run("syncer.sbatch", written(evaluator=False), SLURM_JOB_ID="16")
    assert address.read_text() == "10.1.0.5:7070\n"
    assert commands.calls("sleep") == [["5"], ["5"]]


def test_a_task_has_the_cores_that_its_job_asked_for(commands, written, tmp_path):
    commands.add("srun")
    learner(commands, written(), tmp_path, SLURM_CPUS_PER_TASK="12")
    assert commands.environment("srun")["SRUN_CPUS_PER_TASK"] == "12"


def test_hosts_of_a_learner_are_told_who_they_are(commands, written, tmp_path):
    commands.add("python")
    commands.add("srun", 'shift; SLURM_PROCID=1 "$@"')
    assert learner(commands, written(processes=2), tmp_path)[0] == 0
    given = commands.environment("python")
    assert (given["DDILOCO_PROCESS"], given["DDILOCO_PROCESSES"]) == ("1", "2")
    # Not at the name of its first node, which that may have for its loopback. Each learner has two ports.
    assert given["DDILOCO_COORDINATOR"] == "10.1.0.5:7086"


@pytest.mark.parametrize(("code", "again"), [(0, False), (2, False), (1, True), (143, True), (137, True)])
def test_what_may_be_started_again_is_put_back_into_the_queue(commands, written, tmp_path, code, again):
    commands.add("srun", f"exit {code}")
    learner(commands, written(), tmp_path)
    assert commands.calls("scontrol") == ([["requeue", "17_2"]] if again else [])


@pytest.mark.parametrize("notices", [1, 2])
def test_the_notice_reaches_the_learner_as_sigterm(commands, written, tmp_path, notices):
    """An srun that gets SIGTERM kills its tasks at once, as Slurm's does; scancel tells the tasks."""
    begun, told, ended = (shlex.quote(str(tmp_path / name)) for name in ("begun", "told", "ended"))
    task = f"trap 'touch {told}' TERM; touch {begun}; until [ -e {ended} ]; do sleep 0.02; done; exit 143"
    commands.add(
        "srun",
        f"bash -c {shlex.quote(task)} & echo $! > {begun}.pid; trap 'kill -9 $!; exit 137' TERM\nwait $!",
    )
    commands.add("scancel", f"kill -TERM $(cat {begun}.pid) 2>/dev/null")
    address = tmp_path / "shared run.launch"
    address.mkdir()
    (address / "address").write_text("node9:7070\n")
    known = {"SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_JOB_ID": "17", "SLURM_JOB_ID": "20"}
    process = commands.start("learners.sbatch", written(), **known)
    until((tmp_path / "begun").exists, "the learner to begin")
    for n in range(notices):
        process.send_signal(signal.SIGTERM)  # as --signal=B:TERM does, and Slurm again when time is up
        until(lambda n=n: len(commands.calls("scancel")) == n + 1, "scancel")
    until((tmp_path / "told").exists, "the learner to be told")
    (tmp_path / "ended").touch()
    _, err = process.communicate(timeout=60)
    assert err == "exit code 143: back into the queue\n"
    assert commands.calls("scancel") == [["--signal=TERM", "17_2"]] * notices
    assert commands.calls("scontrol") == [["requeue", "17_2"]]


def test_a_learner_whose_time_is_up_before_there_is_a_syncer_is_put_back_too(commands, written, tmp_path):
    commands.add("sleep", "/bin/sleep 0.05")
    known = {"SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_JOB_ID": "17", "SLURM_JOB_ID": "20"}
    process = commands.start("learners.sbatch", written(), **known)
    until(lambda: commands.calls("sleep"), "the learner to wait")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert commands.calls("scontrol") == [["requeue", "17_2"]]


def test_a_syncer_that_comes_back_on_another_node_is_found_by_learners_that_begin_again(
    commands, written, tmp_path
):
    begun, told = (shlex.quote(str(tmp_path / name)) for name in ("begun", "told"))
    commands.add("srun", f"touch {begun}; until [ -e {told} ]; do /bin/sleep 0.02; done; exit 143")
    commands.add("scancel", f"touch {told}")
    commands.add("sleep", "/bin/sleep 0.05")
    address = tmp_path / "shared run.launch" / "address"
    address.parent.mkdir()
    address.write_text("node9:7070\n")
    known = {"SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_JOB_ID": "17", "SLURM_JOB_ID": "20"}
    process = commands.start("learners.sbatch", written(), **known)
    until((tmp_path / "begun").exists, "the learner to begin")
    address.write_text("")  # as a file system that is away for a moment may show it
    until(lambda: len(commands.calls("sleep")) > 1, "another look")
    assert not commands.calls("scancel")
    address.write_text("node4:7070\n")
    process.communicate(timeout=60)
    assert commands.calls("scancel") == [["--signal=TERM", "17_2"]]
    assert commands.calls("scontrol") == [["requeue", "17_2"]]


@pytest.mark.parametrize(
    ("says", "found"),
    [("-i) echo fe80::1%eth0 10.2.0.7;;", "10.2.0.7"), ("-i) exit 1;; -I) ;;", "node5.cluster")],
)
def test_a_node_is_found_by_its_names_address_or_where_there_is_none_by_its_name(
    commands, written, tmp_path, says, found
):
    commands.add("hostname", f'case "$1" in {says} *) echo node5.cluster;; esac')
    commands.add("srun", "exit 1")
    commands.run("syncer.sbatch", written(), SLURM_JOB_ID="16")
    assert (tmp_path / "shared run.launch" / "address").read_text() == f"{found}:7070\n"


def test_an_address_of_an_earlier_run_is_forgotten(commands, written, tmp_path):
    address = tmp_path / "shared run.launch" / "address"
    address.parent.mkdir()
    address.write_text("node9:7070\n")
    assert commands.run("submit.sh", written())[0] == 0
    assert not address.exists()


def test_the_syncer_says_where_it_is_and_goes_on_with_its_run(commands, written, tmp_path):
    both = shlex.quote(
        str(tmp_path / "both")
    )  # the syncer outlives its evaluator, as it waits for its scores
    commands.add(
        "srun", f'case "$*" in *evaluator*) touch {both};; *) until [ -e {both} ]; do sleep 0.02; done;; esac'
    )
    code, _, err = commands.run("syncer.sbatch", written(), SLURM_JOB_ID="16")
    assert (code, err) == (0, "")
    run, address = str(tmp_path / "shared run"), tmp_path / "shared run.launch" / "address"
    assert address.read_text() == "over\n"
    started = {call[4]: call[5:] for call in commands.calls("srun")}
    assert set(started) == {"experiments.evaluator", "experiments.syncer"}
    assert started["experiments.syncer"] == [
        *CONFIG,
        f"--workdir={run}",
        "--listen=10.1.0.5:7070",
        "--resume=auto",
    ]
    assert commands.environment("srun")["DDILOCO_TOKEN_FILE"] == f"{run}.tokens/tokens"


@pytest.mark.parametrize(("code", "starts"), [(1, 2), (137, 2), (2, 1)])
def test_an_evaluator_that_dies_is_started_again_beside_its_syncer_and_a_refused_one_is_not(
    commands, written, tmp_path, code, starts
):
    died, again = (shlex.quote(str(tmp_path / name)) for name in ("died", "again"))
    evaluator = f"if [ -e {died} ]; then touch {again}; else touch {died}; exit {code}; fi"
    seen = again if starts == 2 else died
    syncer = f"until [ -e {seen} ]; do /bin/sleep 0.02; done"
    commands.add("srun", f'case "$*" in *experiments.evaluator*) {evaluator};; *) {syncer};; esac')
    commands.add("sleep")
    assert commands.run("syncer.sbatch", written(), SLURM_JOB_ID="16")[0] == 0
    assert [call[4] for call in commands.calls("srun")].count("experiments.evaluator") == starts
    assert len(commands.calls("sleep")) == starts - 1


def test_a_syncer_that_will_be_back_leaves_its_address_and_one_that_will_not_leaves_word(
    commands, written, tmp_path
):
    folder, address = written(), tmp_path / "shared run.launch" / "address"
    for code, left in ((1, "10.1.0.5:7070"), (2, "over")):
        commands.add("srun", f"exit {code}")
        commands.run("syncer.sbatch", folder, SLURM_JOB_ID="16")
        assert address.read_text() == f"{left}\n"
    code, out, _ = commands.run("learners.sbatch", folder, SLURM_ARRAY_TASK_ID="2", SLURM_ARRAY_JOB_ID="17")
    assert (code, out) == (0, "")
    assert {call[-1] for call in commands.calls("scontrol")} == {"16"}  # nobody else is put back


def test_shards_of_the_syncer_are_an_array(commands, tmp_path):
    commands.add("srun")
    folder = tmp_path / "scripts"
    fleet = LaunchedRun("reading", CONFIG, 3, shards=3)
    slurm.plan(fleet, slurm.Slurm(str(ROOT), str(tmp_path / "run"), syncer="--mem=64G")).write(folder)
    assert {"--array=1-2", "--nodes=1", "--mem=64G"} <= set(options(folder / "shards.sbatch"))
    code, out, _ = commands.run("submit.sh", folder)
    assert (code, out.count("17")) == (0, 6)
    assert commands.calls("sbatch")[-1] == ["--parsable", "shards.sbatch"]
    told = {"SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_JOB_ID": "17"}
    code, _, err = commands.run("shards.sbatch", folder, **told, SLURM_RESTART_COUNT="3")
    assert (code, err) == (0, "")
    assert commands.environment("srun") == {
        "DDILOCO_SHARD": "1",
        "DDILOCO_TOKEN_FILE": f"{tmp_path}/run.tokens/tokens",
        "DDILOCO_GRACE": "48",
        "DDILOCO_RESTARTS": "3",
    }
    (call,) = commands.calls("srun")
    assert f"--workdir={tmp_path}/run" in call and call[-2:] == ["--listen=10.1.0.5:7082", "--resume=auto"]


# As srun --kill-on-bad-exit=1: the first task that fails has the others killed, and the highest code is told.
SRUN = """
shift; for SLURM_PROCID in 0 1; do export SLURM_PROCID; setsid "$@" & done
wait -n; kill -9 $(jobs -p | sed s/^/-/) 2>/dev/null; exit 137
"""


@pytest.mark.parametrize("code", [1, 2])
def test_a_learner_of_several_hosts_that_is_refused_does_not_go_round_the_queue(
    code, commands, written, tmp_path
):
    """One host is refused a moment before the others."""
    commands.add("srun", SRUN)
    commands.add("sleep", "/bin/sleep 0.05")
    commands.add("python", f'[ "$SLURM_PROCID" = 0 ] || exec /bin/sleep 60; exit {code}')
    folder = written(processes=2)
    assert learner(commands, folder, tmp_path, SLURM_JOB_ID="20")[0] == (2 if code == 2 else 0)
    assert commands.calls("scontrol") == [["requeue", "17_2"]][: code == 1]


def test_a_job_is_put_back_though_the_controller_is_away_for_a_moment(commands, written, tmp_path):
    away = tmp_path / "away"
    away.touch()
    commands.add("srun", "exit 143")
    commands.add("sleep")
    commands.add("scontrol", f"[ ! -e {away} ] || {{ rm {away}; exit 1; }}")
    assert learner(commands, written(), tmp_path)[0] == 0
    assert commands.calls("scontrol") == [["requeue", "17_2"]] * 2
