"""Fuzzes what reads bytes that another wrote: `python -m tests.fuzz [TARGET...] [--seconds=60]`.

Without a target: all of tests/fuzz/targets.py. Ends with 0 if nothing was found, and else with the bytes.
"""

import argparse
import os
import sys
import traceback

from tests.fuzz import blind, targets


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(targets.TARGETS)}")
    parser.add_argument("--seconds", type=float, default=60.0)
    asked = parser.parse_args()
    if unknown := set(asked.targets) - set(targets.TARGETS):
        parser.error(f"no target {', '.join(sorted(unknown))}")
    found = 0
    try:
        counts = blind.explore(asked.targets or list(targets.TARGETS), asked.seconds)
        print(f"{sum(counts.values())} inputs, nothing found")
        print(", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    except KeyboardInterrupt:
        pass
    except AssertionError:
        traceback.print_exc()
        found = 1
    sys.stdout.flush()
    os._exit(found)  # nobody waits for the threads of the servers


if __name__ == "__main__":
    main()
