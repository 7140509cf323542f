"""A run on Cloud TPU: a queued resource for each learner, and a machine of its own for the syncer.

A queued resource that was preempted does not come back by itself: `keep.sh`, which a cron job or a person
runs every so often, deletes what is suspended or has failed, and requests it again. On each of its machines a
startup script makes the learner a systemd service, restarted as its exit code says; at a notice of preemption
the machine shuts down, systemd ends the service with SIGTERM, and the learner leaves.
"""

from __future__ import annotations

import dataclasses

from ddiloco.config import REFUSED
from ddiloco.launch.assignment import PREFIX
from ddiloco.launch.plan import LaunchedRun, LaunchPlan, filled


@dataclasses.dataclass(frozen=True)
class CloudTpu:
    """The requested resources."""

    zone: str  # such as us-east5-a
    accelerator: str  # such as v5p-16
    runtime: str  # such as v2-alpha-tpuv5
    syncer: str  # HOST:PORT of the syncer, which runs elsewhere
    setup: str = ":"  # a shell command that puts the code into /opt/ddiloco, its environment in .venv there
    project: str = ""  # empty: gcloud's own
    spot: bool = False  # whether it may be preempted


def plan(fleet: LaunchedRun, tpu: CloudTpu) -> LaunchPlan:
    """The startup script, the script that asks for the resources, and the command that runs it first."""
    where = [f"--zone={tpu.zone}", *([f"--project={tpu.project}"] if tpu.project else [])]
    what = [f"--accelerator-type={tpu.accelerator}", f"--runtime-version={tpu.runtime}"]
    what += ["--spot"] if tpu.spot else []
    values = {"fleet": fleet, "tpu": tpu, "where": where, "what": what, "PREFIX": PREFIX, "REFUSED": REFUSED}
    files = {name: filled(f"cloud_tpu_{name}", **values) for name in ("startup.sh", "keep.sh")}
    return LaunchPlan(files, [["./keep.sh"]])
