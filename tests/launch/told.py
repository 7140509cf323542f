"""`python -m tests.launch.told ROLE [FLAG ...]` tells what the program of a role reads, and does no more."""

import dataclasses
import importlib
import json
import sys

from experiments.front import cli, role_main


def told(assignment, experiment, security, *rest, **more):
    print(json.dumps([dataclasses.asdict(assignment), security.token, len(security.tokens)], default=str))
    return 0


if __name__ == "__main__":
    role_main.role_main = told
    cli.run(importlib.import_module(f"experiments.{sys.argv.pop(1)}").main)
