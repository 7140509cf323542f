"""What a launcher says in the environment is what the role's program reads there."""

import json
import pathlib

import pytest

from ddiloco.launch.assignment import PREFIX, Assignment
from tests.integration.programs import ROOT
from tests.warm import Program

WORKDIR = pathlib.Path("/data/run")
PLACE = {"WORKDIR": "/data/run", "HEALTH": ":8080"}
CASES = [
    (
        {**PLACE, "LISTEN": "10.0.0.1:7070", "RESUME": "auto"},
        Assignment("syncer", syncer="10.0.0.1:7070", workdir=WORKDIR, resume=None, health=":8080"),
    ),
    (
        {"WORKDIR": "/data/run", "GRACE": "25", "RESUME": "true"},
        Assignment("syncer", workdir=WORKDIR, grace=25.0, resume=True),
    ),
    (
        {"SHARD": "1", "LISTEN": "10.0.0.2:7170", "WORKDIR": "/data/run"},
        Assignment("syncer", syncer="10.0.0.2:7170", shard=1, workdir=WORKDIR),
    ),
    ({"LEARNER": "0", "SYNCER": "syncer:7070"}, Assignment("learner", learner=0, syncer="syncer:7070")),
    (
        {**PLACE, "GRACE": "2.5", "LEARNER": "3", "SYNCER": "syncer:7070"}
        | {"PROCESS": "1", "PROCESSES": "4", "COORDINATOR": "host-0:8476"},
        Assignment("learner", 3, 1, 4, "host-0:8476", "syncer:7070", WORKDIR, health=":8080", grace=2.5),
    ),
    (PLACE, Assignment("evaluator", workdir=WORKDIR, health=":8080")),
]


@pytest.fixture
def program(programs):
    """Runs a role's program as far as it has read what it was told."""
    clean = {name: value for name, value in programs.environment.items() if not name.startswith("DDILOCO_")}

    def run(role, environment, *arguments):
        told = Program("tests.launch.told", [role, *arguments], environment=clean | environment, cwd=ROOT)
        return programs.finish(told)

    return run


@pytest.mark.parametrize(("environment", "told"), CASES, ids=[told.name for _, told in CASES])
def test_the_program_reads_what_the_launcher_says(environment, told, program):
    named = {PREFIX + name: value for name, value in environment.items()}
    done = program(told.role, named)
    assert done.returncode == 0, done.stderr
    read = json.loads(done.stdout)[0]
    if told.role == "evaluator":
        read["syncer"] = told.syncer  # it needs none
    read["workdir"] = read["workdir"] and pathlib.Path(read["workdir"])
    assert Assignment(**read) == told


def test_a_flag_goes_before_the_environment(program):
    done = program("learner", {"DDILOCO_LEARNER": "3"}, "--learner_id=5")
    assert json.loads(done.stdout)[0]["learner"] == 5


def test_a_token_may_be_in_the_environment(program):
    token = "a word of sixteen and more"
    assert json.loads(program("learner", {"DDILOCO_LEARNER": "0", "DDILOCO_TOKEN": token}).stdout)[1] == token
    lines = "0 aaaaaaaaaaaaaaaa\n1 bbbbbbbbbbbbbbbb\n"
    assert json.loads(program("syncer", {"DDILOCO_TOKEN": lines}).stdout)[2] == 2


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"DDILOCO_LEARNER": "three"}, "error: DDILOCO_LEARNER: flag --learner_id=three: "),
        (
            {"DDILOCO_LEARNER": "0", "DDILOCO_TOKEN": ""},
            "error: DDILOCO_TOKEN: must hold one line of at least",
        ),
        (
            {"DDILOCO_LEARNER": "0", "DDILOCO_PROCESSES": "2"},
            "error: coordinator: give --coordinator=HOST:PORT",
        ),
        (
            {"DDILOCO_LEARNER": "0", "DDILOCO_PROCESSES": "2", "DDILOCO_PROCESS": "2"},
            "error: process: is 2, but must be below --processes",
        ),
    ],
)
def test_what_is_wrong_in_the_environment_is_told_in_one_line(environment, told, program):
    done = program("learner", environment)
    assert done.returncode == 2
    assert done.stderr.startswith(told) and done.stderr.count("\n") == 1


@pytest.mark.parametrize(("restarts", "code"), [("0", 2), ("3", 1)])
def test_what_a_process_that_was_restarted_is_refused_with_may_pass(restarts, code, program):
    named = {"DDILOCO_LEARNER": "0", "DDILOCO_TOKEN_FILE": "/nowhere/tokens", "DDILOCO_RESTARTS": restarts}
    done = program("learner", named)
    assert (done.returncode, done.stderr.count("\n")) == (code, 1)
    assert done.stderr.startswith("error: token_file: /nowhere/tokens: cannot be read")
