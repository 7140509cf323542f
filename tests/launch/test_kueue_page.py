"""The queues and the commands of the pages on Kueue and xpk fit what the launcher writes."""

import pathlib
import re
import shlex

import yaml

from ddiloco.launch import gke
from ddiloco.launch.plan import LaunchedRun
from tests.launch.test_gke import pods

DOCS = pathlib.Path(__file__).parents[2] / "docs"


def test_the_quota_of_the_page_is_of_the_chips_and_the_nodes_that_learners_ask_for():
    (text,) = re.findall(r"```yaml\n(.*?)```", (DOCS / "kueue.md").read_text(), re.S)
    flavor, queue, local = yaml.safe_load_all(text)
    (group,) = queue["spec"]["resourceGroups"]
    assert group["flavors"][0]["name"] == flavor["metadata"]["name"]
    assert local["spec"]["clusterQueue"] == queue["metadata"]["name"]
    nodes = gke.Gke("image", "tpu-v5p-slice", "4x4x4", queue=local["metadata"]["name"])
    [learner] = yaml.safe_load_all(gke.plan(LaunchedRun("reading", [], 1), nodes).files["learners.yaml"])
    assert learner["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    pod = learner["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert flavor["spec"]["nodeLabels"] == pod["nodeSelector"]
    assert set(pod["containers"][0]["resources"]["limits"]) == set(group["coveredResources"])


def arguments_of_the_cluster():
    return re.search(r"xpk cluster create (.*)", (DOCS / "xpk.md").read_text())[1].split()


def test_the_command_for_a_cluster_of_xpk_is_one(programs, tmp_path):
    (line,) = re.findall(r"python -m experiments\.(launch .*)", (DOCS / "xpk.md").read_text())
    name, *arguments = shlex.split(line)
    done = programs.run(name, *arguments, "--dry_run", f"--output={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert 'kueue.x-k8s.io/queue-name: "multislice-queue"' in (tmp_path / "learners.yaml").read_text()
    (highmem,) = (word for word in arguments_of_the_cluster() if "n2-highmem" in word)
    cores = int(highmem.rpartition("-")[2])
    (pod,) = pods(yaml.safe_load_all((tmp_path / "syncer.yaml").read_text()))
    asked = [container["resources"]["requests"] for container in pod["containers"]]
    assert sum(int(one["memory"].removesuffix("Gi")) for one in asked) < 8 * cores
    assert sum(int(one["cpu"]) for one in asked) < cores
