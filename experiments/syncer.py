"""The syncer of a run: `python -m experiments.syncer --config=FILE --workdir=DIR --listen=HOST:PORT`."""

from __future__ import annotations

import functools
import pathlib
import sys

from absl import flags

from experiments.front import cli, ending, roles

_CONFIG = cli.define_config("configs/dense.py")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run. Default: runs/<time>.")
_LISTEN = flags.DEFINE_string(
    "listen",
    "127.0.0.1:7070",
    "HOST:PORT for learners. Other hosts than this one's loopback need --token_file or --tls.",
)
_RESUME = roles.define_resume()
_FINISH = flags.DEFINE_bool(
    "finish", False, "With --resume: all learners have left after their last step; only save what was merged."
)
roles.define_security()


def main(_) -> int:
    security = roles.security()
    from ddiloco.disk.durable import FOLDER, DurableStateError
    from ddiloco.disk.run_mark import RunMarkError
    from ddiloco.page.visitors import Visitors, check_page
    from ddiloco.remote.syncer.listening import Listening, take_descriptors
    from ddiloco.remote.syncer.process import run_syncer
    from ddiloco.remote.wire.security import check_reach
    from ddiloco.run.job import run_job
    from ddiloco.settings.experiment import parse
    from ddiloco.training import platform
    from experiments.front.credentials import check_address

    if _FINISH.value and _RESUME.value == "false":
        raise cli.UsageError("finish: needs --resume, since there is nothing to save otherwise")
    config = _CONFIG.value
    config.driver = "remote"
    experiment = parse(config)
    address = check_address(_LISTEN.value, "listen")
    check_reach(address, security)
    visitors = Visitors(security.admits_token if security.asks else None, security.tls)
    check_page(experiment.log.page, visitors)
    take_descriptors()
    platform.prepare()
    platform.compute_on_cpu()  # whatever accelerators there are, they are for learners
    roles.name_process("syncer")
    workdir = pathlib.Path(_WORKDIR.value or ending.new_workdir())
    stop, received = ending.stop_on_signals()
    listening = Listening(address, security, experiment.remote, experiment.sync.num_learners)
    runner = functools.partial(
        run_syncer, listening=listening, security=security, folder=workdir / FOLDER, alone=_FINISH.value
    )
    resume = {"true": True, "false": False, "auto": None}[_RESUME.value]
    try:
        result = run_job(
            experiment,
            workdir,
            stop,
            ending.is_live(),
            runner,
            resume,
            claim=listening.claim,
            visitors=visitors,
        )
    except (DurableStateError, RunMarkError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return ending.tell(result, workdir, received)


if __name__ == "__main__":
    cli.run(main)
