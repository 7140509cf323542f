"""The syncer of a run: `python -m experiments.syncer --config=FILE --workdir=DIR --listen=HOST:PORT`."""

from __future__ import annotations

import pathlib

from absl import flags

from ddiloco.launch.assignment import SYNCER
from experiments.cli import exit_handling, program, roles

_CONFIG = program.define_config("configs/dense.py")
_WORKDIR = roles.define(flags.DEFINE_string, "workdir", None, "Folder of the run. Default: runs/<time>.")
_LISTEN = roles.define(
    flags.DEFINE_string,
    "listen",
    "127.0.0.1:7070",
    "HOST:PORT for learners. Other hosts than this one's loopback need --token_file or --tls.",
)
_FINISH = flags.DEFINE_bool(
    "finish", False, "With --resume: all learners have left after their last step; only save what was merged."
)
_SHARD = roles.define(
    flags.DEFINE_integer,
    "shard",
    0,
    "With config.remote.syncer_shards: which of these processes this is; 0 begins the run.",
    lower_bound=0,
)
roles.define_resume()
roles.define_role()
roles.define_security()


def main(_) -> int:
    security = roles.security()
    from experiments.cli.role_main import role_main

    if _SHARD.value:
        program.refuse_flags(["finish"], "has no use with --shard; it is for the first")
        if not _WORKDIR.value:
            raise program.UsageError("workdir: is missing, but must be that of the first shard")
    workdir = pathlib.Path(_WORKDIR.value or exit_handling.new_workdir())
    assignment = roles.assignment(SYNCER, shard=_SHARD.value, syncer=_LISTEN.value, workdir=workdir)
    if _FINISH.value and assignment.resume is False:
        raise program.UsageError("finish: needs --resume, since there is nothing to save otherwise")
    experiment = _CONFIG.experiment(driver="remote")
    stop, received = exit_handling.stop_on_signals(assignment.grace, f"saving model and summary in {workdir}")
    return role_main(assignment, experiment, security, stop, received, finish=_FINISH.value)


if __name__ == "__main__":
    program.run(main, refused=roles.refused)
