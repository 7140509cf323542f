"""A real Ray cluster on this machine, whose nodes come, drain and are lost."""

import contextlib
import subprocess

import pytest
import ray
from ray.cluster_utils import Cluster


@contextlib.contextmanager
def begun_in_time():
    """Ray gives a node 30 seconds to begin, which a machine busy with other tests may not have."""
    try:
        yield
    except Exception as error:  # Ray raises a bare one
        if "timed out during startup" not in str(error):
            raise
        pytest.skip("a node of Ray did not begin within Ray's 30 seconds")


class Nodes:
    """A cluster whose head has the workdir and no room for learners; each other node has room for one."""

    def __init__(self):
        with begun_in_time():
            head = {"num_cpus": 0, "no_monitor": True, "include_log_monitor": False}  # nobody asks either
            self.cluster = Cluster(initialize_head=True, head_node_args=head)
        ray.init(address=self.cluster.address, logging_level="warning", log_to_driver=False)
        self.nodes = []

    def have(self, count):
        """Adds nodes until there are so many."""
        while len(self.nodes) < count:
            with begun_in_time():
                self.nodes.append(self.cluster.add_node(num_cpus=1))

    def remove(self, node):
        self.nodes.remove(node)
        self.cluster.remove_node(node)

    def drain(self, node):
        """As a notice of preemption does."""
        why = ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=a notice"]
        command = ["ray", "drain-node", f"--address={self.cluster.address}", f"--node-id={node.node_id}"]
        done = subprocess.run(
            [*command, *why, "--deadline-remaining-seconds=600"], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr

    def of(self, actor):
        node, *_ = ray.get(actor.where.remote())
        return next(one for one in self.nodes if one.node_id == node)

    def close(self):
        ray.shutdown()
        self.cluster.shutdown()
