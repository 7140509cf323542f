"""What a launcher says in the environment is what the role's program reads there."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from ddiloco.launch.assignment import Assignment

READ = """
import dataclasses, json, sys
from absl import flags
from experiments import {role}
from experiments.front import role_main
def told(assignment, experiment, security, *rest, **more):
    print(json.dumps([dataclasses.asdict(assignment), security.token, len(security.tokens)], default=str))
    return 0
role_main.role_main = told
from experiments.front import cli
cli.run({role}.main)
"""
WORKDIR = pathlib.Path("/data/run")
CASES = [
    Assignment("syncer", syncer="10.0.0.1:7070", workdir=WORKDIR, resume=None, health="0.0.0.0:8080"),
    Assignment("syncer", workdir=WORKDIR, grace=25.0, resume=True),
    Assignment("learner", learner=0, syncer="syncer:7070"),
    Assignment("learner", 3, 1, 4, "host-0:8476", "syncer:7070", WORKDIR, health=":8080", grace=2.5),
    Assignment("evaluator", workdir=WORKDIR, health="[::]:8080"),
]


def program(role, environment, *arguments):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DDILOCO_")}
    return subprocess.run(
        [sys.executable, "-c", READ.format(role=role), *arguments],
        env=clean | environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("given", CASES, ids=lambda given: given.name)
def test_the_program_reads_what_the_launcher_says(given):
    done = program(given.role, given.environment())
    assert done.returncode == 0, done.stderr
    read = json.loads(done.stdout)[0]
    if given.role == "evaluator":
        read["syncer"] = given.syncer  # it needs none
    read["workdir"] = read["workdir"] and pathlib.Path(read["workdir"])
    assert Assignment(**read) == given


def test_a_flag_goes_before_the_environment():
    done = program("learner", {"DDILOCO_LEARNER": "3"}, "--learner_id=5")
    assert json.loads(done.stdout)[0]["learner"] == 5


def test_a_token_may_be_in_the_environment():
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
def test_what_is_wrong_in_the_environment_is_told_in_one_line(environment, told):
    done = program("learner", environment)
    assert done.returncode == 2
    assert done.stderr.startswith(told) and done.stderr.count("\n") == 1
