"""A run by SkyPilot: a cluster for the syncer, a managed job for each learner, on clouds that have room.

A managed job whose spot machines are taken away gets others, on which the learner joins again. On a machine
the task itself restarts a learner that fails. Syncer and learners meet over the public network: with mutual
TLS and tokens, which `submit.sh` makes once the syncer's address is known.
"""

from __future__ import annotations

import dataclasses

from ddiloco.config import CORRUPT, ConfigError
from ddiloco.launch.assignment import ASKED, FINAL, PREFIX
from ddiloco.launch.plan import GIB, LaunchedRun, LaunchPlan, filled

CREDENTIALS = "ddiloco-credentials"  # folder at home on every machine


@dataclasses.dataclass(frozen=True)
class SkyPilot:
    """The machines of learners and syncer."""

    folder: str  # the code here, which every machine gets
    accelerator: str  # of a learner's machine, such as H100:8
    infra: str = ""  # of learners, such as aws/us-east-1, lambda or runpod; empty: wherever it is cheapest
    syncer_infra: str = ""  # the same for the syncer
    setup: str = ":"  # a shell command that sets up the environment, in the code's folder
    spot: bool = False  # whether learners' machines may be taken away
    syncer_memory: int = 16 * GIB  # bytes, with the evaluator's
    syncer_disk: int = 100 * GIB  # bytes
    evaluator: bool = True  # whether one runs beside the syncer


def plan(fleet: LaunchedRun, sky: SkyPilot) -> LaunchPlan:
    """The tasks, and the script that launches them; raises ConfigError for a syncer of several processes."""
    if fleet.shards > 1:
        problem = f"is {fleet.shards}, but must be 1 with --launcher=skypilot: a cluster has one address"
        raise ConfigError(f"config.remote.syncer_shards: {problem}")
    values = {
        "fleet": fleet,
        "sky": sky,
        "CREDENTIALS": CREDENTIALS,
        "PREFIX": PREFIX,
        "FINAL": FINAL,
        "ASKED": ASKED,
        "CORRUPT": CORRUPT,
    }
    learners = range(fleet.learners)
    files = {f"learner-{m}.yaml": filled("skypilot_learner.yaml", learner=m, **values) for m in learners}
    files |= {name: filled(f"skypilot_{name}", **values) for name in ("syncer.yaml", "submit.sh")}
    return LaunchPlan(files, [["./submit.sh"]])
