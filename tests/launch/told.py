"""`python -m tests.launch.told ROLE [FLAG ...]` tells what the program of a role reads, and does no more."""

import dataclasses
import json
import runpy
import sys

from experiments.cli import role_main


def told(assignment, experiment, security, *rest, **more):
    print(json.dumps([dataclasses.asdict(assignment), security.token, len(security.tokens)], default=str))
    return 0


if __name__ == "__main__":
    role_main.role_main = told
    runpy.run_module(f"experiments.{sys.argv.pop(1)}", run_name="__main__", alter_sys=True)
