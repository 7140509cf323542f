"""What a run ran on is written down."""

import json
import platform

import jax

from ddiloco.run.environment import write_environment


def test_versions_and_devices_are_told(tmp_path):
    write_environment(tmp_path, {"TPU v5p", "cpu"})
    told = json.loads((tmp_path / "environment.json").read_text())
    assert (told["python"], told["packages"]["jax"]) == (platform.python_version(), jax.__version__)
    assert told["devices"] == ["TPU v5p", "cpu"] and told["cores"] >= 1
