"""Two machines without a shared disk, played on one: each has a folder of its own, and they meet by sockets.

    python -m experiments.examples.two_machines FOLDER

On real ones the commands are these, with the address of the east in the place of 127.0.0.1 (docs/running.md).
"""

import json
import pathlib
import shlex
import shutil
import subprocess
import sys

from ddiloco.launch.ports import reserved_port

SETTINGS = (
    "--config=configs/loop.py",
    "--config.model.factory=experiments.examples.plain_loop:make_loop",
    "--config.sync.num_learners=2",
    "--config.train.steps=120",
    "--config.train.min_step_seconds=(0.05,0.05)",
    "--config.eval.every=None",
)


def start(module: str, *arguments: str) -> subprocess.Popen:
    """Starts a program of this project, and prints the command."""
    print(shlex.join(["python", "-m", f"experiments.{module}", *arguments]), flush=True)
    return subprocess.Popen([sys.executable, "-m", f"experiments.{module}", *arguments])


def run(east: pathlib.Path, west: pathlib.Path) -> dict:
    """Syncer and learner 0 in the east, learner 1 in the west; the run's summary."""
    west.mkdir(parents=True)
    if start("make_tokens", "--learners=2", f"--output={east / 'tokens'}").wait():
        raise SystemExit("no tokens were made")
    shutil.copy(east / "tokens/learner-1", west / "token")  # all that the west needs: scp, once
    with reserved_port("127.0.0.1") as port:
        address = f"127.0.0.1:{port}"
        tokens = f"--token_file={east / 'tokens/tokens'}"
        syncer = start("syncer", *SETTINGS, f"--workdir={east / 'run'}", f"--listen={address}", tokens)
        own = [east / "tokens/learner-0", west / "token"]
        learners = [
            start(
                "learner",
                *SETTINGS,
                f"--syncer={address}",
                f"--learner_id={number}",
                f"--token_file={own[number]}",
                f"--workdir={folder}",
            )
            for number, folder in enumerate((east / "learner", west / "learner"))
        ]
        codes = [process.wait() for process in (*learners, syncer)]
    if any(codes):
        raise SystemExit(f"exit codes of learner 0, learner 1 and syncer: {codes}")
    return json.loads((east / "run/summary.json").read_text())


if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "runs/two_machines")
    summary = run(folder / "east", folder / "west")
    print(f"{summary['inner_steps']} steps by learner, {summary['merged_share']:.0%} of their work merged")
