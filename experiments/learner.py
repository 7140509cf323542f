"""A learner of a run: `python -m experiments.learner --config=FILE --syncer=HOST:PORT --learner_id=N`."""

from __future__ import annotations

import dataclasses
import sys

from absl import flags

from experiments import cli, ending, roles

_CONFIG = cli.define_config("configs/dense.py")
_SYNCER = flags.DEFINE_string("syncer", "127.0.0.1:7070", "HOST:PORT of the syncer.")
_LEARNER_ID = flags.DEFINE_integer("learner_id", None, "Its number, from 0.", lower_bound=0, required=True)
roles.define_security()


def main(_) -> int:
    security = roles.begin()
    from ddiloco.runtime import platform
    from ddiloco.runtime.experiment import parse
    from ddiloco.runtime.remote.learner_role import run_learner
    from ddiloco.runtime.remote.security import check_address

    experiment = dataclasses.replace(parse(_CONFIG.value), driver="remote")
    address = check_address(_SYNCER.value, "syncer")
    platform.prepare()
    stop, received = ending.stop_on_signals()
    learner = _LEARNER_ID.value

    def note(line) -> None:
        print(f"learner {learner}: {line}", file=sys.stderr, flush=True)

    failure = run_learner(experiment, learner, address, security, stop, note)
    if failure is not None:
        print(f"error: learner {learner}: {failure}", file=sys.stderr)
        return 1
    return 128 + received[0] if received else 0


if __name__ == "__main__":
    cli.run(main)
