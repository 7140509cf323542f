"""Starts a run on an engine: `python -m experiments.launch --launcher=gke --config=FILE [--dry_run]`.

`ray` runs here until the run is over, in --workdir. The others write files to --output and give them to
`kubectl`, `sbatch`, `gcloud` or `sky`, whose engines then run it; with --dry_run they only write files
and print commands. A flag that the engine has no use for is refused.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import re
from typing import Any

from absl import flags

from experiments.cli import engines, exit_handling, program

_CONFIG = program.define_config("configs/dense.py")
_ENGINES = ("ray", "gke", "slurm", "cloud_tpu", "skypilot")
_LAUNCHER = flags.DEFINE_enum("launcher", None, _ENGINES, "The engine.")
# The meaning of a flag that only some engines have begins with these.
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "ray, slurm: the run's folder, for slurm on a disk that all nodes share."
)
_DRY_RUN = flags.DEFINE_bool(
    "dry_run", False, "gke, slurm, cloud_tpu, skypilot: only write the files, and print the commands."
)
_OUTPUT = flags.DEFINE_string(
    "output",
    None,
    "gke, slurm, cloud_tpu, skypilot: folder for the files of the engine. Default: runs/<name>.",
)
_NAME = flags.DEFINE_string(
    "name", "ddiloco", "gke, slurm, cloud_tpu, skypilot: of the run, lower case letters, digits and dashes."
)
_GRACE = flags.DEFINE_float(
    "grace", 25.0, "gke, cloud_tpu: seconds from the order to stop to a process's end.", lower_bound=0
)
_PORT = flags.DEFINE_integer(
    "port",
    7070,
    "The syncer's; the run takes the eleven after it too, and two more for each further shard of the syncer.",
    lower_bound=1,
    upper_bound=65000,
)
flags.DEFINE_bool("spot", False, "gke, cloud_tpu, skypilot: learners on spot capacity.")
_CHIPS = flags.DEFINE_integer("chips", 4, "gke, ray: TPU chips of a host.", lower_bound=1)
_IMAGE = flags.DEFINE_string("image", None, "gke: the container, with its registry.")
flags.DEFINE_string(
    "accelerator", "tpu-v5p-slice", "gke, cloud_tpu, skypilot: the label of the nodes, or the type."
)
_TOPOLOGY = flags.DEFINE_string("topology", "2x2x1", "gke, ray: the slice of one learner.")
_ADDRESS = flags.DEFINE_string("address", None, "ray: of the cluster. Default: $RAY_ADDRESS, else one here.")
_CPUS = flags.DEFINE_float("cpus", 1.0, "ray: cores of a learner's process.", lower_bound=0)
_GPUS = flags.DEFINE_float("gpus", 0.0, "ray: GPUs of a learner's process.", lower_bound=0)
_KEPT = flags.DEFINE_string(
    "kept", None, "ray: a learner's folder for its tape and copies; --workdir itself if all nodes share it."
)
_HOSTS = flags.DEFINE_integer(
    "hosts", 1, "ray, slurm, cloud_tpu, skypilot: hosts of a learner, with a process each.", lower_bound=1
)
_VERSION = flags.DEFINE_string("version", "", "ray: of TPUs, such as v5p: each learner has a slice of them.")
flags.DEFINE_bool("one_jobset", False, "gke: a single JobSet has all learners (JobSet 0.12).")
flags.DEFINE_string("queue", "", "gke: Kueue's local queue that learners wait in.")
_LEARNER_OPTIONS = flags.DEFINE_string("learner_options", "", "slurm: of sbatch, for a learner's nodes.")
_SYNCER_OPTIONS = flags.DEFINE_string("syncer_options", "", "slurm: of sbatch, for the syncer's node.")
flags.DEFINE_integer("notice", 60, "slurm: seconds before its end that a job is signalled.", lower_bound=2)
flags.DEFINE_string("setup", ":", "slurm, cloud_tpu, skypilot: shell command that makes the environment.")
flags.DEFINE_string("infra", "", "skypilot: where learners are, such as lambda. Default: what is cheapest.")
flags.DEFINE_string("syncer_infra", "", "skypilot: the same for the syncer.")
flags.DEFINE_string("zone", None, "cloud_tpu: where the resources are.")
flags.DEFINE_string("runtime", None, "cloud_tpu: version of the machines' software.")
flags.DEFINE_string("project", "", "cloud_tpu: whose resources they are. Default: gcloud's.")
_SYNCER = flags.DEFINE_string("syncer", None, "cloud_tpu: HOST:PORT of the syncer, started elsewhere.")

_OWN_DISKS = (
    "gke",
    "cloud_tpu",
    "skypilot",
)  # each learner's, where the syncer finds no checkpoint of a snapshot
# In place of a flag that an engine has no use for.
_INSTEAD = {
    ("output", "ray"): "give the run's folder as --workdir",
    ("workdir", "gke"): "the run's folder is on the disk of the syncer's pod",
    ("workdir", "skypilot"): "the run's folder is on the disk of the syncer's cluster",
    ("workdir", "cloud_tpu"): "the run's folder is that of the syncer, which is started elsewhere",
    ("hosts", "gke"): "--topology and --chips give their number",
    ("grace", "slurm"): "--notice is how long before its end a job is warned",
}
# Settings that engines have no use for: which, and who decides instead.
_SETTINGS = {
    "remote.hosts": (_ENGINES, "--hosts says it, with gke --topology"),
    "remote.spares": (_ENGINES, "the engine starts what is to take another's place"),
    "remote.donor_port": (("gke", "skypilot"), "it follows from --port"),
    "remote.restarts": (
        ("gke", "slurm", "cloud_tpu", "skypilot"),
        "the engine decides how often it starts a process again",
    ),
}


def main(_) -> int:
    from ddiloco.config import ConfigError
    from ddiloco.launch.plan import LaunchedRun

    if not _LAUNCHER.value:
        raise program.UsageError(f"launcher: is missing; give --launcher={'|'.join(_ENGINES)}")
    _refuse_idle()
    experiment = _CONFIG.experiment(driver="remote")
    if not re.fullmatch("[a-z][a-z0-9-]*", _NAME.value):
        raise ConfigError(f"name: is {_NAME.value!r}, but must be lower case letters, digits and dashes")
    elsewhere = "://" in experiment.recovery.checkpoint_folder
    if _LAUNCHER.value in _OWN_DISKS and (every := experiment.snapshot.every) and not elsewhere:
        must = f"must be 0 with --launcher={_LAUNCHER.value} without a bucket in recovery.checkpoint_folder"
        raise ConfigError(f"config.snapshot.every: is {every}, but {must}")
    fleet = LaunchedRun(
        _NAME.value,
        [argument for argument in program.config_arguments() if not argument.startswith("--config.driver=")],
        experiment.max_learners,
        processes=_HOSTS.value,
        grace=_GRACE.value,
        port=_PORT.value,
        shards=experiment.syncer_shards,
    )
    if _LAUNCHER.value == "ray":
        return _ray(experiment)
    folder = program.writable_folder("output", _OUTPUT.value or f"runs/{fleet.name}")
    makers = {"gke": _gke, "slurm": _slurm, "cloud_tpu": _cloud_tpu, "skypilot": _skypilot}
    plan = makers[_LAUNCHER.value](fleet, experiment)
    with program.os_errors_as_usage("output", folder):
        plan.write(folder)
    for name in plan.files:
        program.print_err(f"{folder / name}")
    if _DRY_RUN.value:
        program.print_err(f"to start it, in {folder}:")
        print(plan.shown())
        return 0
    with program.os_errors_as_usage("launcher", pathlib.Path(plan.commands[0][0])):
        return plan.carry_out(folder)


def _refuse_idle() -> None:
    """Raises UsageError for a flag or setting of the command line that this engine has no use for."""
    engine = _LAUNCHER.value
    engines.refuse_others(engine, _ENGINES, _INSTEAD)
    if engine == "ray" and not _VERSION.value:
        program.refuse_flags(["topology", "chips"], "has no use without --version, which has Ray place TPUs")
    elif engine == "ray" and _TOPOLOGY.value:
        program.refuse_flags(
            ["hosts", "chips", "cpus", "gpus"], "has no use with --version; --topology says what there is"
        )
    for path, (those, instead) in _SETTINGS.items():
        if engine in those and program.has_override(path):
            raise program.UsageError(f"config.{path}: has no use with --launcher={engine}; {instead}")


def _ray(experiment) -> int:
    try:
        import ray
    except ImportError:
        raise program.UsageError("launcher: ray is not installed; pip install 'ddiloco[ray]'") from None
    from ddiloco.launch.on_ray import RayRun, Resources
    from experiments.cli.role_main import exit_code

    workdir = program.ensure_folder("workdir", _WORKDIR.value or exit_handling.new_workdir())
    stop, received = exit_handling.stop_on_signals(saving=f"saving model and summary in {workdir}")
    with (
        exit_handling.shielded()
    ):  # Ray's own processes outlive a terminal that closes, until the run is saved
        ray.init(address=_ADDRESS.value)
    resources = Resources(
        cpus=_CPUS.value,
        gpus=_GPUS.value,
        tpus=_CHIPS.value if _VERSION.value else 0.0,
        processes=_HOSTS.value,
        topology=_TOPOLOGY.value if _VERSION.value else "",
        version=_VERSION.value,
        port=_PORT.value if flags.FLAGS["port"].present else 0,
    )
    kept = pathlib.Path(_KEPT.value) if _KEPT.value else None
    own = {name: value for name, value in os.environ.items() if name.startswith(engines.PASSED_ON)}
    code = RayRun(experiment, workdir, resources, exit_code, program.print_err, own, kept).run(stop)
    ray.shutdown()
    return 128 + received[0] if received else code


def _gke(fleet, experiment):
    from ddiloco.launch import gke

    if not _IMAGE.value:
        raise program.UsageError(
            "image: is missing; give --image=REGISTRY/NAME:TAG, made of scripts/Dockerfile"
        )
    scored = experiment.eval.every is not None
    return gke.plan(fleet, _settings_of(gke.Gke, evaluator=scored, **_syncer_pod(experiment)))


def _settings_of(kind: type, **given: Any) -> Any:
    """An engine's settings: those that are not given have the values of the flags of their names."""
    names = {field.name for field in dataclasses.fields(kind)} - given.keys()
    return kind(**given, **{name: flags.FLAGS[name].value for name in names})


def _slurm(fleet, experiment):
    from ddiloco.launch import slurm

    if not _WORKDIR.value:
        raise program.UsageError("workdir: is missing; give --workdir=DIR on a disk that all nodes share")
    nodes = _settings_of(
        slurm.Slurm,
        folder=os.getcwd(),
        workdir=os.path.abspath(_WORKDIR.value),
        learner=_LEARNER_OPTIONS.value,
        syncer=_SYNCER_OPTIONS.value,
        evaluator=experiment.eval.every is not None,
    )
    return slurm.plan(fleet, nodes)


def _cloud_tpu(fleet, experiment):
    from ddiloco.launch import cloud_tpu
    from experiments.cli.credentials import check_address

    del experiment
    for name in ("zone", "runtime", "syncer"):
        if not flags.FLAGS[name].value:
            raise program.UsageError(f"{name}: is missing, but cloud_tpu needs it")
    syncer = check_address(_SYNCER.value, "syncer")
    return cloud_tpu.plan(fleet, _settings_of(cloud_tpu.CloudTpu, syncer=syncer))


def _skypilot(fleet, experiment):
    from ddiloco.launch import skypilot

    if not flags.FLAGS["accelerator"].present:
        raise program.UsageError(
            "accelerator: is missing; give --accelerator=NAME:COUNT of a learner's machine"
        )
    scored = experiment.eval.every is not None
    pod = _syncer_pod(experiment)
    memory = pod["syncer_memory"] + scored * pod["evaluator_memory"]
    given = {"folder": os.getcwd(), "syncer_memory": memory, "syncer_disk": pod["syncer_disk"]}
    return skypilot.plan(fleet, _settings_of(skypilot.SkyPilot, evaluator=scored, **given))


def _syncer_pod(experiment) -> dict[str, int]:
    """Memory and disk of the syncer's pod, in bytes, by the names of `Gke`.

    Memory: what `--dry_run` says, which is about what a process takes (docs/running.md), 15% to spare, and
    4 GiB of programs. Disk: the versions kept, with the optimizer's state, and as much again for tapes and
    records.
    """
    from ddiloco.launch.gke import GIB
    from ddiloco.run import resources
    from ddiloco.run.recipes import assembly_of

    layout, shards = assembly_of(experiment).layout, range(1, experiment.syncer_shards)
    syncer = resources.syncer_needs(experiment, layout).most
    shard = max((resources.syncer_needs(experiment, layout, s).most for s in shards), default=0)
    evaluator = resources.evaluator_needs(experiment, layout).most if experiment.eval.every is not None else 0
    roles = {"syncer_memory": syncer, "shard_memory": shard, "evaluator_memory": evaluator}
    memory = {name: math.ceil(1.15 * most) + 4 * GIB for name, most in roles.items()}
    return memory | {
        "syncer_disk": 4 * (experiment.recovery.keep_versions + 1) * sum(layout.bytes) + 20 * GIB
    }


if __name__ == "__main__":
    program.run(main)
