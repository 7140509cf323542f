"""The assignment of one process of a run: its role, and the addresses of the others.

A process is started in one way, on any engine:

    flags, else DDILOCO_* of the environment  ->  Assignment  ->  role_main  ->  exit code

`role_main` is in `experiments/cli/role_main.py`. The programs `experiments.syncer`, `experiments.learner`
and `experiments.evaluator` call it; engines with Python processes of their own, such as Ray, do it too.
The exit code says what an engine should do:

    0    the run is over, or the learner was retired: do not restart it
    2    a setting is wrong, or the syncer refuses it: do not restart it. A process that was restarted before
         ends with 1 instead: its settings were accepted once, so that the cause may pass
    3    a learner's devices compute wrong: restart it on another node
    124  a learner's step hangs: restart it
    129, 130, 143  a signal asked it to end, such as a notice of preemption: restart it where there is room
    else, or killed by a signal: restart it
"""

from __future__ import annotations

import dataclasses
import pathlib
import signal

from ddiloco.config import REFUSED

PREFIX = "DDILOCO_"
SYNCER, LEARNER, EVALUATOR = "syncer", "learner", "evaluator"
SIGNALLED = 128  # plus the signal's number: the exit code of a program that a signal asked to end
DONE, FAILED, PREEMPTED = 0, 1, 143  # exit codes; others are in ddiloco/config.py
ASKED = tuple(SIGNALLED + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM))
FINAL = (DONE, REFUSED)  # after which a process is not restarted


@dataclasses.dataclass(frozen=True)
class Assignment:
    """One process of a run, and where it finds the others."""

    role: str  # SYNCER, LEARNER or EVALUATOR
    learner: int = 0  # a learner's number, from 0
    process: int = 0  # which of the learner's processes this is, from 0
    processes: int = 1  # how many the learner has
    coordinator: str = ""  # HOST:PORT of the learner's process 0, where it has several
    # HOST:PORT: where a shard of the syncer listens; for a learner, where the first shard does
    syncer: str = "127.0.0.1:7070"
    # The run's folder, for syncer and evaluator; for a learner that of its own files, None: it writes none
    workdir: pathlib.Path | None = None
    # Whether a syncer resumes the run in the workdir, or a snapshot to resume; None: it does if there is one
    resume: bool | int | None = False
    health: str = ""  # HOST:PORT at which probes are answered; empty: nowhere
    grace: float = 0.0  # seconds from the order to stop to the end of the process; 0: as many as it takes
    shard: int = 0  # which process of the syncer this is, from 0
    refused: int = REFUSED  # exit code of a refusal: FAILED once an engine has restarted the process

    @property
    def name(self) -> str:
        """Name of the process in messages."""
        if self.role != LEARNER:
            return f"{self.role} {self.shard}" if self.shard else self.role
        return f"learner {self.learner}" + (f".{self.process}" if self.process else "")
