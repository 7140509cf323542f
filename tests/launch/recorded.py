"""Scripts of launchers run for real, beside commands of an engine that write down how they are called."""

import os
import shlex
import subprocess

RECORD = """#!/bin/bash
line={name}; for word in "$@"; do line+=$'\\t'"$word"; done
printf '%s\\n' "$line" >> {log}  # at once: others may be recorded beside it
env | grep -E '^(DDILOCO|SRUN)_' | sort > {log}.{name}
{then}
"""


class Commands:
    """A folder of commands in front of the PATH, and what they were called with."""

    def __init__(self, folder):
        self.folder, self.log = folder, folder / "log"
        folder.mkdir()

    def add(self, name, then="true"):
        """A command, which after it has been written down does this."""
        path = self.folder / name
        path.write_text(RECORD.format(name=name, log=shlex.quote(str(self.log)), then=then))
        path.chmod(0o755)

    def calls(self, name=None):
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        found = [line.split("\t") for line in lines]
        return [call[1:] for call in found if call[0] == name] if name else found

    def environment(self, name):
        """The DDILOCO_* and SRUN_* variables of the last call."""
        lines = (self.folder / f"log.{name}").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines)

    def start(self, script, folder, **variables):
        environment = {**os.environ, "PATH": f"{self.folder}:{os.environ['PATH']}", **variables}
        return subprocess.Popen(
            ["bash", script],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, script, folder, **variables):
        process = self.start(script, folder, **variables)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err
