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
from collections.abc import Sequence
from typing import Any

import yaml

from ddiloco.config import ConfigError
from ddiloco.launch.assignment import EVALUATOR, LEARNER, PREFIX, REFUSED, SYNCER, Assignment
from ddiloco.launch.plan import Fleet, Plan

Object = dict[str, Any]

PROBE_SECONDS = 10
RESTARTS = 1000  # of a learner's JobSet; preemptions count too
GIB = 1 << 30
CACHE = "/cache"  # compiled programs, prepared data, a learner's copies of its inner state
RUN = "/run/ddiloco"  # the syncer's disk


@dataclasses.dataclass(frozen=True)
class Gke:
    """What the nodes are, and what the syncer needs.

    Attributes:
      image: of the container, with its registry.
      accelerator: the nodes' label `cloud.google.com/gke-tpu-accelerator`, such as tpu-v5p-slice.
      topology: the slice of one learner, such as 2x2x4.
      chips: of a host.
      spot: whether learners run on spot nodes.
      syncer_memory: bytes.
      syncer_disk: bytes.
      syncer_cpus: cores.
      evaluator: whether one runs beside the syncer, on its CPUs.
      queue: Kueue's local queue that the learners wait in; empty: they do not.
    """

    image: str
    accelerator: str
    topology: str
    chips: int = 4
    spot: bool = False
    syncer_memory: int = 16 * GIB
    syncer_disk: int = 100 * GIB
    syncer_cpus: int = 8
    evaluator: bool = True
    queue: str = ""

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
    common = [*priorities(fleet), service(fleet), syncer(fleet, gke)]
    learners = [learner(fleet, gke, m) for m in range(fleet.learners)]
    files = {"syncer.yaml": _text(common), "learners.yaml": _text(learners)}
    return Plan(files, [["kubectl", "apply", "-f", name] for name in files])


def priorities(fleet: Fleet) -> list[Object]:
    """The syncer displaces others where there is no room, its learners do not."""
    return [
        {
            "apiVersion": "scheduling.k8s.io/v1",
            "kind": "PriorityClass",
            "metadata": {"name": f"{fleet.name}-{role}"},
            "value": value,
            "preemptionPolicy": policy,
            "description": f"of the {role} of {fleet.name}",
        }
        for role, value, policy in ((SYNCER, 1000, "PreemptLowerPriority"), (LEARNER, 100, "Never"))
    ]


def service(fleet: Fleet) -> Object:
    """An address of the syncer that stays when its pod moves."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": f"{fleet.name}-syncer", "labels": _labels(fleet, SYNCER)},
        "spec": {
            "selector": _labels(fleet, SYNCER),
            "ports": [{"name": "grpc", "port": fleet.port, "targetPort": "grpc"}],
        },
    }


def syncer(fleet: Fleet, gke: Gke) -> Object:
    """One pod with a disk of its own, which goes on with the run wherever it is started again."""
    place = {"workdir": RUN, "health": f"0.0.0.0:{fleet.health_port}", "grace": fleet.grace}
    one = Assignment(SYNCER, syncer=f"0.0.0.0:{fleet.port}", resume=None, **place)
    disk = [{"name": "run", "mountPath": RUN}, {"name": "cache", "mountPath": CACHE}]
    containers = [
        _container(
            fleet,
            gke,
            one,
            ports={"grpc": fleet.port, "health": fleet.health_port},
            token="tokens",
            mounts=disk,
            resources={
                "requests": {"cpu": str(gke.syncer_cpus), "memory": _gib(gke.syncer_memory)},
                "limits": {"memory": _gib(gke.syncer_memory)},
            },
        )
    ]
    if gke.evaluator:
        beside = Assignment(EVALUATOR, **{**place, "health": f"0.0.0.0:{fleet.health_port + 1}"})
        containers.append(
            _container(
                fleet,
                gke,
                beside,
                ports={"eval-health": fleet.health_port + 1},
                mounts=disk,
                resources={"requests": {"cpu": str(gke.syncer_cpus), "memory": _gib(gke.syncer_memory)}},
                more_env=[{"name": "JAX_PLATFORMS", "value": "cpu"}],
            )
        )
    claim = {
        "metadata": {"name": "run"},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": _gib(gke.syncer_disk)}},
        },
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": f"{fleet.name}-syncer", "labels": _labels(fleet, SYNCER)},
        "spec": {
            "serviceName": f"{fleet.name}-syncer",
            "replicas": 1,
            "selector": {"matchLabels": _labels(fleet, SYNCER)},
            "template": {
                "metadata": {"labels": _labels(fleet, SYNCER)},
                "spec": {
                    **_pod(fleet, SYNCER),
                    "containers": containers,
                    "volumes": [{"name": "cache", "emptyDir": {}}],
                },
            },
            "volumeClaimTemplates": [claim],
        },
    }


def learner(fleet: Fleet, gke: Gke, number: int) -> Object:
    """One slice: its pods are started again together, unless one says that it is refused or done."""
    name = f"{fleet.name}-learner-{number}"
    one = Assignment(
        LEARNER,
        learner=number,
        processes=fleet.processes,
        coordinator=f"{name}-slice-0-0.{name}:{fleet.coordinator_port}",
        syncer=f"{fleet.name}-syncer:{fleet.port}",
        workdir=f"{CACHE}/{fleet.name}",
        health=f"0.0.0.0:{fleet.health_port}",
        grace=fleet.grace,
    )
    container = _container(
        fleet,
        gke,
        one,
        ports={"donor": fleet.donor_port, "health": fleet.health_port},
        token=f"learner-{number}",
        mounts=[{"name": "cache", "mountPath": CACHE}],
        resources={"limits": {"google.com/tpu": gke.chips}},
        more=["--config.remote.donor_host=$(POD_IP)", f"--config.remote.donor_port={fleet.donor_port}"],
        more_env=[{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
    )
    pod = {
        **_pod(fleet, LEARNER),
        "restartPolicy": "Never",
        "nodeSelector": {
            "cloud.google.com/gke-tpu-accelerator": gke.accelerator,
            "cloud.google.com/gke-tpu-topology": gke.topology,
            **({"cloud.google.com/gke-spot": "true"} if gke.spot else {}),
        },
        "containers": [container],
        "volumes": [
            {"name": "cache", "hostPath": {"path": "/var/cache/ddiloco", "type": "DirectoryOrCreate"}}
        ],
    }
    refused = {
        "action": "FailJob",
        "onExitCodes": {"containerName": LEARNER, "operator": "In", "values": [REFUSED]},
    }
    job = {
        "parallelism": fleet.processes,
        "completions": fleet.processes,
        "completionMode": "Indexed",
        "backoffLimit": 0,  # one pod alone is never started again
        "podFailurePolicy": {"rules": [refused]},
        "template": {"metadata": {"labels": _labels(fleet, LEARNER)}, "spec": pod},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": name,
            "labels": _labels(fleet, LEARNER)
            | ({"kueue.x-k8s.io/queue-name": gke.queue} if gke.queue else {}),
            # One slice is one node pool: two learners never share a pool of several hosts.
            "annotations": {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"},
        },
        "spec": {
            "failurePolicy": {
                "maxRestarts": RESTARTS,
                "restartStrategy": "BlockingRecreate",
                "rules": [
                    {"name": "refused", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
                ],
            },
            "replicatedJobs": [{"name": "slice", "replicas": 1, "template": {"spec": job}}],
        },
    }


def _pod(fleet: Fleet, role: str) -> Object:
    return {
        "priorityClassName": f"{fleet.name}-{role}",
        "terminationGracePeriodSeconds": math.ceil(fleet.grace) + 5,  # the process itself ends before
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
    }


def _container(
    fleet: Fleet,
    gke: Gke,
    one: Assignment,
    *,
    ports: dict[str, int],
    mounts: Sequence[Object],
    resources: Object,
    token: str = "",
    more: Sequence[str] = (),
    more_env: Sequence[Object] = (),
) -> Object:
    env = [{"name": name, "value": value} for name, value in one.environment().items()]
    if one.processes > 1:
        index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        env = [entry for entry in env if entry["name"] != f"{PREFIX}PROCESS"]
        env.append({"name": f"{PREFIX}PROCESS", "valueFrom": {"fieldRef": {"fieldPath": index}}})
    if token:
        secret = {"name": f"{fleet.name}-tokens", "key": token}
        env.append({"name": f"{PREFIX}TOKEN", "valueFrom": {"secretKeyRef": secret}})
    env += [
        {"name": "JAX_COMPILATION_CACHE_DIR", "value": f"{CACHE}/jax"},
        {"name": "TFDS_DATA_DIR", "value": f"{CACHE}/data"},
        *more_env,
    ]
    health = next(name for name in ports if name.endswith("health"))
    probe = {"periodSeconds": PROBE_SECONDS, "timeoutSeconds": 5}
    return {
        "name": one.role,
        "image": gke.image,
        "command": ["python", "-m", one.module],
        "args": [*fleet.config, *more],
        "env": env,
        "ports": [{"name": name, "containerPort": port} for name, port in ports.items()],
        "resources": resources,
        "volumeMounts": list(mounts),
        "readinessProbe": {**probe, "httpGet": {"path": "/ready", "port": health}},
        "livenessProbe": {**probe, "httpGet": {"path": "/live", "port": health}, "failureThreshold": 6},
        # Nothing answers before Python has imported everything.
        "startupProbe": {**probe, "httpGet": {"path": "/live", "port": health}, "failureThreshold": 60},
    }


def _labels(fleet: Fleet, role: str) -> dict[str, str]:
    return {"app.kubernetes.io/part-of": fleet.name, "app.kubernetes.io/component": role}


def _gib(size: int) -> str:
    return f"{math.ceil(size / GIB)}Gi"


def _text(objects: Sequence[Object]) -> str:
    return yaml.dump_all(objects, Dumper=_Plain, sort_keys=False, width=110)


class _Plain(yaml.SafeDumper):
    """Says everything where it stands, with no references to what was said above."""

    def ignore_aliases(self, data: object) -> bool:
        """Of everything."""
        del data
        return True
