"""The syncer of a run: `python -m experiments.syncer --config=FILE --workdir=DIR --listen=HOST:PORT`."""

from __future__ import annotations

import pathlib

from absl import flags

from ddiloco.launch.assignment import PART, SYNCER
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
_PART = roles.define(
    flags.DEFINE_integer,
    "part",
    None,
    "With config.remote.parts: be this part of the syncer, from 0, instead of its authority.",
    lower_bound=0,
)
_AUTHORITY = roles.define(
    flags.DEFINE_string, "authority", "127.0.0.1:7070", "With --part: HOST:PORT of the authority."
)
roles.define_resume()
roles.define_role()
roles.define_security()


def main(_) -> int:
    security = roles.security()
    from experiments.cli.role_main import role_main

    if _PART.value is None:
        program.refuse_flags(["authority"], "has no use without --part")
    else:
        program.refuse_flags(["finish", "resume"], "has no use with --part; it is for the authority")
    workdir = pathlib.Path(_WORKDIR.value or exit_handling.new_workdir())
    if _PART.value is None:
        assignment = roles.assignment(SYNCER, syncer=_LISTEN.value, workdir=workdir)
    else:
        where = {"syncer": _AUTHORITY.value, "listen": _LISTEN.value}
        assignment = roles.assignment(PART, part=_PART.value, workdir=workdir, **where)
    if _FINISH.value and assignment.resume is False:
        raise program.UsageError("finish: needs --resume, since there is nothing to save otherwise")
    experiment = _CONFIG.experiment(driver="remote")
    stop, received = exit_handling.stop_on_signals(assignment.grace, f"saving model and summary in {workdir}")
    return role_main(assignment, experiment, security, stop, received, finish=_FINISH.value)


if __name__ == "__main__":
    program.run(main, refused=roles.refused)
