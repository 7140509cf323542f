"""The manifests of a run on Kubernetes: as the published schemas have them, telling roles all they need."""

import dataclasses
import functools
import json
import pathlib
import re

import jsonschema
import pytest
import yaml

from ddiloco.config import ConfigError
from ddiloco.launch import gke
from ddiloco.launch.assignment import PREFIX
from ddiloco.launch.plan import GIB, LaunchedRun
from ddiloco.run import resources
from ddiloco.run.recipes import assembly_of
from ddiloco.settings.experiment import parse
from experiments.cli import program

ROOT = pathlib.Path(__file__).parent.parent.parent
SCHEMAS = json.loads((pathlib.Path(__file__).parent / "schemas" / "kubernetes.json").read_text())
FLEET = LaunchedRun("reading", ["--config=configs/dense.py:2b", "--config.sync.num_learners=3"], 3)
NODES = gke.Gke("registry/ddiloco:1", "tpu-v5p-slice", "2x2x4", spot=True, queue="research")


def objects(fleet=FLEET, nodes=NODES):
    files = gke.plan(fleet, nodes).files
    return [one for text in files.values() for one in yaml.safe_load_all(text)]


def of_kind(kind, *args):
    return [one for one in objects(*args) if one["kind"] == kind]


@functools.cache
def validator(kind):
    return jsonschema.Draft202012Validator({"$ref": f"#/$defs/{kind}", "$defs": SCHEMAS["$defs"]})


def check(one):
    validator(one["kind"]).validate(one)


def pods(found):
    for one in found:
        if one["kind"] == "StatefulSet":
            yield one["spec"]["template"]["spec"]
        if one["kind"] == "JobSet":
            for part in one["spec"]["replicatedJobs"]:
                yield part["template"]["spec"]["template"]["spec"]


def environment(container):
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container["env"]}


def learner_container(number, *args):
    pod = next(pods([of_kind("JobSet", *args)[number]]))
    return pod["containers"][0]


@pytest.mark.parametrize(("topology", "evaluator"), [("2x2x1", True), ("2x2x4", False)])
def test_every_object_is_as_the_schemas_have_it(topology, evaluator):
    nodes = gke.Gke("image", "tpu-v5p-slice", topology, evaluator=evaluator)
    found = objects(FLEET, nodes)
    assert [one["kind"] for one in found].count("JobSet") == 3
    for one in found:
        check(one)


def test_a_learner_of_several_hosts_is_told_which_process_it_is():
    given = environment(learner_container(2))
    assert given[f"{PREFIX}LEARNER"] == "2"
    assert given[f"{PREFIX}PROCESSES"] == "4"  # sixteen chips, four a host
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert given[f"{PREFIX}PROCESS"] == {"fieldRef": {"fieldPath": index}}
    assert given[f"{PREFIX}COORDINATOR"] == "reading-learner-2-slice-0-0.reading-learner-2:7072"
    job = of_kind("JobSet")[2]["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["parallelism"], job["completions"], job["completionMode"]) == (4, 4, "Indexed")


def test_all_are_told_the_hosts_of_learners_that_have_several():
    """Without them a syncer has no room for the calls of more than sixteen hosts."""
    wide = gke.plan(FLEET, gke.Gke("image", "tpu-v5p-slice", "4x4x8"))
    assert all('- "--config.remote.hosts=32,32,32,"' in text for text in wide.files.values())
    narrow = gke.plan(FLEET, gke.Gke("image", "tpu-v5p-slice", "2x2x1"))
    assert not any("remote.hosts" in text for text in narrow.files.values())


def test_a_learner_of_one_host_is_told_nothing_of_processes():
    given = environment(learner_container(0, FLEET, gke.Gke("image", "tpu-v5p-slice", "2x2x1")))
    assert not {f"{PREFIX}PROCESS", f"{PREFIX}PROCESSES", f"{PREFIX}COORDINATOR"} & set(given)


def test_tokens_are_references_and_each_learner_has_its_own():
    secrets = [environment(learner_container(m))[f"{PREFIX}TOKEN"]["secretKeyRef"] for m in range(3)]
    assert secrets == [{"name": "reading-tokens", "key": f"learner-{m}"} for m in range(3)]
    syncer = next(pods(of_kind("StatefulSet")))["containers"][0]
    assert environment(syncer)[f"{PREFIX}TOKEN"] == {
        "secretKeyRef": {"name": "reading-tokens", "key": "tokens"}
    }


def test_the_syncer_keeps_its_disk_and_goes_on_with_its_run():
    (syncer,) = of_kind("StatefulSet")
    container = syncer["spec"]["template"]["spec"]["containers"][0]
    given = environment(container)
    assert given[f"{PREFIX}RESUME"] == "auto"
    disk = syncer["spec"]["volumeClaimTemplates"][0]["metadata"]["name"]
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert given[f"{PREFIX}WORKDIR"] == mounted[disk]


def test_learners_find_the_syncer_at_its_service():
    (found,) = of_kind("Service")
    (syncer,) = of_kind("StatefulSet")
    port = found["spec"]["ports"][0]
    assert (
        environment(learner_container(0))[f"{PREFIX}SYNCER"] == f"{found['metadata']['name']}:{port['port']}"
    )
    assert found["spec"]["publishNotReadyAddresses"], "an evaluator that fails cuts nobody off"
    pod = syncer["spec"]["template"]
    assert found["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    named = {p["name"]: p["containerPort"] for p in pod["spec"]["containers"][0]["ports"]}
    assert (
        environment(pod["spec"]["containers"][0])[f"{PREFIX}LISTEN"] == f"0.0.0.0:{named[port['targetPort']]}"
    )


def test_who_is_refused_is_not_started_again_and_others_are_together():
    spec = of_kind("JobSet")[0]["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    (rule,) = job["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["values"]) == ("FailJob", [2])
    assert job["backoffLimit"] == 0  # so that what else fails is a matter of the JobSet
    (policy,) = spec["failurePolicy"]["rules"]
    assert (policy["action"], policy["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert rule["onExitCodes"]["containerName"] == learner_container(0)["name"]
    restarts = environment(learner_container(0))[f"{PREFIX}RESTARTS"]["fieldRef"]["fieldPath"]
    assert restarts == "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']"


def test_probes_ask_where_roles_answer_and_processes_end_before_they_are_killed():
    for pod in pods(objects()):
        for container in pod["containers"]:
            given = environment(container)
            ports = {port["name"]: port["containerPort"] for port in container["ports"]}
            for probe in ("readinessProbe", "livenessProbe", "startupProbe"):
                asked = container[probe]["httpGet"]
                assert given[f"{PREFIX}HEALTH"] == f"0.0.0.0:{ports[asked['port']]}"
            assert float(given[f"{PREFIX}GRACE"]) < pod["terminationGracePeriodSeconds"]


def test_a_slice_of_no_whole_number_of_hosts_is_refused():
    with pytest.raises(ConfigError, match="topology: 2x2x4 has 16 chips, no multiple of 3 a host"):
        gke.plan(FLEET, gke.Gke("image", "tpu-v5p-slice", "2x2x4", chips=3))
    with pytest.raises(ConfigError, match="topology: is 'big'"):
        gke.plan(FLEET, gke.Gke("image", "tpu-v5p-slice", "big"))


def test_the_image_has_what_its_file_names():
    lines = (ROOT / "scripts" / "Dockerfile").read_text().splitlines()
    copied = [source for line in lines if line.startswith("COPY") for source in line.split()[1:-1]]
    kept = {
        line.removeprefix("!")
        for line in (ROOT / "scripts" / "Dockerfile.dockerignore").read_text().splitlines()
    }
    assert copied and all((ROOT / source).exists() and source in kept for source in copied)
    module = learner_container(0)["command"][2]
    assert (ROOT / f"{module.replace('.', '/')}.py").exists()
    extra = re.search(r"ARG EXTRA=(\w+)", (ROOT / "scripts" / "Dockerfile").read_text())[1]
    assert f'"{extra}": [' in (ROOT / "setup.py").read_text()


def test_shards_of_the_syncer_are_containers_beside_it_with_ports_of_their_own():
    found = objects(dataclasses.replace(FLEET, shards=3))
    for one in found:
        check(one)
    (pod,) = pods(one for one in found if one["kind"] == "StatefulSet")
    shards = [container for container in pod["containers"] if container["name"].startswith("shard-")]
    for number, shard in enumerate(shards, start=1):
        given = environment(shard)
        assert given["POD_IP"] == {"fieldRef": {"fieldPath": "status.podIP"}}
        assert list(given).index("POD_IP") < list(given).index(f"{PREFIX}LISTEN"), "or it is not filled in"
        told = [given[f"{PREFIX}{name}"] for name in ("SHARD", "LISTEN", "RESUME")]
        assert told == [str(number), f"$(POD_IP):{7080 + 2 * number}", "auto"]
        assert {"name": "run", "mountPath": "/run/ddiloco"} in shard["volumeMounts"]
        assert shard["command"] == ["python", "-m", "experiments.syncer"]
    ports = [port["containerPort"] for one in pod["containers"] for port in one["ports"]]
    assert len(shards) == 2 and len(set(ports)) == len(ports)


def test_containers_have_the_memory_that_their_processes_need(programs, tmp_path):
    size, settings = "2b", {"sync.num_learners": 8, "remote.syncer_shards": 2, "model.num_layers": 2}
    done = programs.run(
        "launch",
        *("--launcher=gke", "--image=image", "--dry_run", f"--output={tmp_path}"),
        f"--config=configs/dense.py:{size}",
        *(f"--config.{name}={value}" for name, value in settings.items()),
    )
    assert done.returncode == 0, done.stderr
    config = program.load_config(f"configs/dense.py:{size}")
    config.update_from_flattened_dict({"driver": "remote", **settings})
    experiment = parse(config)
    layout = assembly_of(experiment).layout
    needed = {"syncer": resources.syncer_needs(experiment, layout)}
    needed["evaluator"] = resources.evaluator_needs(experiment, layout)
    needed["shard-1"] = resources.syncer_needs(experiment, layout, 1)
    (pod,) = pods(yaml.safe_load_all((tmp_path / "syncer.yaml").read_text()))
    given = {container["name"]: container["resources"] for container in pod["containers"]}
    assert set(given) == set(needed)
    for name, need in needed.items():
        for memory in (kind["memory"] for kind in given[name].values()):
            assert need.most < GIB * int(memory.removesuffix("Gi")) < 1.2 * need.most + 5 * GIB, name


def test_snapshots_are_refused_where_learners_do_not_share_the_syncers_workdir(programs, tmp_path):
    """None would ever be complete, and each would stay on the learners' disks."""
    done = programs.run(
        "launch",
        *("--launcher=gke", "--dry_run", f"--output={tmp_path / 'made'}", "--image=image"),
        *("--config=configs/dense.py:2b", "--config.snapshot.every=8"),
    )
    assert done.returncode == 2
    told = "is 8, but must be 0 with --launcher=gke without a bucket in recovery.checkpoint_folder"
    assert done.stderr.strip() == f"error: config.snapshot.every: {told}"
    assert not (tmp_path / "made").exists()


def test_a_machine_without_the_engine_s_command_is_told_in_one_line(programs, tmp_path):
    told = ["--launcher=gke", "--image=image", f"--output={tmp_path}", "--config=configs/dense.py:tiny"]
    done = programs.finish(programs.start_module("experiments.launch", *told, PATH=str(tmp_path)))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "error: launcher: kubectl: No such file or directory"


ONE = dataclasses.replace(NODES, one_jobset=True)


@pytest.mark.parametrize("topology", ["2x2x1", "2x2x4"])
def test_one_jobset_of_all_learners_restarts_each_alone_and_counts_no_preemption(topology):
    (one,) = of_kind("JobSet", FLEET, dataclasses.replace(ONE, topology=topology))
    check(one)
    spec = one["spec"]
    (job,) = spec["replicatedJobs"]
    assert job["replicas"] == FLEET.learners
    refused, preempted, failed = spec["failurePolicy"]["rules"]
    codes, asked, disrupted = job["template"]["spec"]["podFailurePolicy"]["rules"]
    assert (refused["action"], codes["onExitCodes"]["values"]) == ("FailJobSet", [2])
    # As Kubernetes says why a job has failed.
    says = (
        "Container learner for pod default/reading failed with exit code {} matching FailJob rule at index {}"
    )
    (pattern,) = refused["onJobFailureMessagePatterns"]
    assert re.search(pattern, says.format(2, 0)) and not re.search(pattern, says.format(143, 2))
    assert preempted["action"] == "RestartJobAndIgnoreMaxRestarts"
    assert asked["onExitCodes"]["values"] == [129, 130, 143]
    assert disrupted["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert failed == {"name": "failed", "action": "RestartJob"}


def test_a_learner_of_one_jobset_knows_its_number_and_its_token_alone():
    (one,) = of_kind("JobSet", FLEET, ONE)
    (pod,) = pods([one])
    (container,) = pod["containers"]
    given = environment(container)
    index = "metadata.annotations['jobset.sigs.k8s.io/job-index']"
    assert given[f"{PREFIX}LEARNER"] == {"fieldRef": {"fieldPath": index}}
    assert list(given).index(f"{PREFIX}LEARNER") < list(given).index(f"{PREFIX}COORDINATOR")
    coordinator = f"reading-learners-learner-$({PREFIX}LEARNER)-0.reading-learners:7072"
    assert given[f"{PREFIX}COORDINATOR"] == coordinator
    restarts = "metadata.annotations['jobset.sigs.k8s.io/job-restart-attempt']"
    assert given[f"{PREFIX}RESTARTS"] == {"fieldRef": {"fieldPath": restarts}}
    (mount,) = (m for m in container["volumeMounts"] if m["name"] == "tokens")
    assert mount["subPathExpr"] == f"learner-$({PREFIX}LEARNER)"
    assert mount["mountPath"] == given[f"{PREFIX}TOKEN_FILE"] and f"{PREFIX}TOKEN" not in given
    (secret,) = (volume["secret"] for volume in pod["volumes"] if volume["name"] == "tokens")
    assert (secret["secretName"], secret["defaultMode"]) == ("reading-tokens", 0o400)
