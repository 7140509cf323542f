"""A run on Google Kubernetes Engine: a StatefulSet for the syncer, a JobSet for each learner's slice.

Kubernetes restarts what fails and places what it can; nothing of ours runs beside the roles. A learner's
processes live and die together, which is what a JobSet is for. Names that stand in more than one object:

    NAME-syncer       the StatefulSet, and the Service at which learners find it
    NAME-learner-3    the JobSet of learner 3, and the domain of its hosts
    NAME-tokens       the Secret of `experiments.make_tokens`: `tokens`, `learner-0`, `learner-1` and so on
"""

from __future__ import annotations

import dataclasses
import math
import pathlib

from ddiloco.config import ConfigError
from ddiloco.launch.assignment import EVALUATOR, LEARNER, PART, PREFIX, REFUSED, SYNCER, Assignment
from ddiloco.launch.plan import GIB, Fleet, Plan, filled

CACHE = "/cache"  # compiled programs, prepared data, a learner's copies of its inner state
RUN = pathlib.Path("/run/ddiloco")  # the syncer's disk


@dataclasses.dataclass(frozen=True)
class Gke:
    """What the nodes are, and what the syncer needs."""

    image: str  # of the container, with its registry
    accelerator: str  # the nodes' label `cloud.google.com/gke-tpu-accelerator`, such as tpu-v5p-slice
    topology: str  # the slice of one learner, such as 2x2x4
    chips: int = 4  # of a host
    spot: bool = False  # whether learners run on spot nodes
    syncer_memory: int = 16 * GIB  # bytes
    part_memory: int = 16 * GIB  # bytes, of each part of the syncer
    evaluator_memory: int = 16 * GIB  # bytes
    syncer_disk: int = 100 * GIB  # bytes
    syncer_cpus: int = 8  # cores
    evaluator: bool = True  # whether one runs beside the syncer, on its CPUs
    queue: str = ""  # Kueue's local queue that the learners wait in; empty: they do not

    @property
    def hosts(self) -> int:
        """Of one learner; raises ConfigError where chips do not make up the slice."""
        sizes = self.topology.split("x")
        if not all(size.isdecimal() and int(size) for size in sizes):
            raise ConfigError(f"topology: is {self.topology!r}, but must be such as 2x2x4")
        chips = math.prod(map(int, sizes))
        if chips % self.chips:
            raise ConfigError(
                f"topology: {self.topology} has {chips} chips, no multiple of {self.chips} a host"
            )
        return chips // self.chips


def plan(fleet: Fleet, gke: Gke) -> Plan:
    """The manifests, and the commands that give them to the cluster; raises ConfigError."""
    fleet = dataclasses.replace(fleet, processes=gke.hosts)
    place = {"workdir": RUN, "health": f"0.0.0.0:{fleet.health_port}", "grace": fleet.grace}
    values = {
        "fleet": fleet,
        "gke": gke,
        "syncer": Assignment(SYNCER, syncer=f"0.0.0.0:{fleet.port}", resume=None, **place),
        "evaluator": Assignment(EVALUATOR, **{**place, "health": f"0.0.0.0:{fleet.health_port + 1}"}),
        "parts": [part(fleet, number) for number in fleet.parts],
        "learners": [learner(fleet, number) for number in range(fleet.learners)],
        "stop": math.ceil(fleet.grace) + 5,
        "PREFIX": PREFIX,
        "REFUSED": REFUSED,
        "CACHE": CACHE,
        "RUN": RUN,
    }
    files = {f"{name}.yaml": filled(f"gke_{name}.yaml", **values) for name in ("syncer", "learners")}
    return Plan(files, [["kubectl", "apply", "-f", name] for name in files])


def part(fleet: Fleet, number: int) -> Assignment:
    """What a part of the syncer is told, in a container of the syncer's pod; `$(POD)`: the pod's address."""
    port = fleet.parts_port + 2 * number
    return Assignment(
        PART,
        part=number,
        syncer=f"$(POD):{fleet.port}",
        listen=f"0.0.0.0:{port}",
        workdir=RUN,
        health=f"0.0.0.0:{port + 1}",
        grace=fleet.grace,
    )


def learner(fleet: Fleet, number: int) -> Assignment:
    """What each process of a learner is told, but for its number."""
    name = f"{fleet.name}-learner-{number}"
    return Assignment(
        LEARNER,
        learner=number,
        processes=fleet.processes,
        coordinator=f"{name}-slice-0-0.{name}:{fleet.coordinator_port}",
        syncer=f"{fleet.name}-syncer:{fleet.port}",
        workdir=pathlib.Path(CACHE, fleet.name),
        health=f"0.0.0.0:{fleet.health_port}",
        grace=fleet.grace,
    )
