"""The page of runs, live or over: `python -m experiments.dashboard --workdir=DIR [--workdir=DIR ...]`."""

from __future__ import annotations

import pathlib

from absl import flags

from experiments.cli import exit_handling, program, roles
from experiments.cli.workdirs import runs_in

_WORKDIRS = flags.DEFINE_multi_string(
    "workdir", [], "Folder of a run, or of several, such as a sweep's: shown side by side, 16 at most."
)
_LISTEN = flags.DEFINE_string(
    "listen", "127.0.0.1:7071", "HOST:PORT. Other hosts than this one's loopback need --token_file or --tls."
)
roles.define_security()


def main(_) -> int:
    from ddiloco.dashboard.server import PageServer
    from ddiloco.dashboard.visitors import Visitors

    security = roles.security()
    visitors = Visitors(security.admits_token if security.asks else None, security.tls)
    workdirs = runs_in(map(pathlib.Path, program.required(_WORKDIRS)))
    server = PageServer(program.required(_LISTEN), workdirs, visitors, share=0.1, setting="listen")
    stop, _ = exit_handling.stop_on_signals()
    server.start()
    program.print_err(f"{server.url} (Ctrl-C ends it)")
    stop.wait()
    server.stop()
    return 0


if __name__ == "__main__":
    program.run(main)
