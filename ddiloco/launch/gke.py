"""A run on Google Kubernetes Engine: a StatefulSet for the syncer, a JobSet for each learner, or one for all.

Kubernetes restarts what fails and places what it can; nothing of ours runs beside the roles. A learner's
processes live and die together, which is what a JobSet is for. Names that stand in more than one object:

    NAME-syncer       the StatefulSet, and the Service at which learners find it
    NAME-learner-3    the JobSet of learner 3, and the domain of its hosts
    NAME-learners     the JobSet of all, and their domain, where there is one
    NAME-tokens       the Secret of `experiments.make_tokens`: `tokens`, `learner-0`, `learner-1` and so on
"""

from __future__ import annotations

import dataclasses
import math

from ddiloco.config import REFUSED, ConfigError
from ddiloco.launch.assignment import ASKED, PREFIX
from ddiloco.launch.plan import GIB, LaunchedRun, LaunchPlan, filled

CACHE = "/cache"  # compiled programs, prepared data, a learner's copies of its inner state
RUN = "/run/ddiloco"  # the syncer's disk
TOKEN = "/var/run/ddiloco-token"  # a learner's own, where one JobSet has all


@dataclasses.dataclass(frozen=True)
class Gke:
    """The nodes, and the syncer's resources."""

    image: str  # of the container, with its registry
    accelerator: str  # the nodes' label `cloud.google.com/gke-tpu-accelerator`, such as tpu-v5p-slice
    topology: str  # the slice of one learner, such as 2x2x4
    chips: int = 4  # of a host
    spot: bool = False  # whether learners run on spot nodes
    syncer_memory: int = 16 * GIB  # bytes
    shard_memory: int = 16 * GIB  # bytes, of each shard of the syncer beside the first
    evaluator_memory: int = 16 * GIB  # bytes
    syncer_disk: int = 100 * GIB  # bytes
    evaluator: bool = True  # whether one runs beside the syncer, on its CPUs
    one_jobset: bool = (
        False  # of all learners, whose jobs restart alone: JobSet 0.12 with its gate RestartJob
    )
    queue: str = ""  # Kueue's local queue that the learners wait in; empty: they do not

    @property
    def hosts(self) -> int:
        """Hosts of one learner; raises ConfigError if the chips do not make up the slice."""
        sizes = self.topology.split("x")
        if not all(size.isdecimal() and int(size) for size in sizes):
            raise ConfigError(f"topology: is {self.topology!r}, but must be such as 2x2x4")
        chips = math.prod(map(int, sizes))
        if chips % self.chips:
            raise ConfigError(
                f"topology: {self.topology} has {chips} chips, no multiple of {self.chips} a host"
            )
        return chips // self.chips


def plan(fleet: LaunchedRun, gke: Gke) -> LaunchPlan:
    """The manifests, and the commands that give them to the cluster; raises ConfigError."""
    fleet = dataclasses.replace(fleet, processes=gke.hosts)
    values = {
        "fleet": fleet,
        "gke": gke,
        "stop": math.ceil(fleet.grace) + 5,
        "PREFIX": PREFIX,
        "REFUSED": REFUSED,
        "ASKED": [*ASKED],
        "TOKEN": TOKEN,
        "CACHE": CACHE,
        "RUN": RUN,
    }
    files = {f"{name}.yaml": filled(f"gke_{name}.yaml", **values) for name in ("syncer", "learners")}
    return LaunchPlan(files, [["kubectl", "apply", "-f", name] for name in files])
