"""What each process of a run gets of the machine: devices, cores and TPU chips."""

import pytest

from ddiloco.config import ConfigError
from ddiloco.launch import processes
from ddiloco.launch.supervisor import learner_environment, share_of_chips, syncer_environment


def test_processes_see_their_share_of_the_devices():
    flags = {"XLA_FLAGS": "--a=1 --xla_force_host_platform_device_count=8 --b", "HOME": "/"}
    share = "--a=1 --xla_force_host_platform_device_count=2 --b"
    given = learner_environment(1, 4, flags)
    assert (given["XLA_FLAGS"], given["HOME"]) == (share, "/")
    assert learner_environment(0, 16, flags)["XLA_FLAGS"].count("device_count=1 ") == 1
    assert "device_count" not in syncer_environment(flags)["XLA_FLAGS"]
    assert syncer_environment(flags)["JAX_PLATFORMS"] == "cpu"
    gpus = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    seen = [learner_environment(m, 2, gpus)["CUDA_VISIBLE_DEVICES"] for m in range(2)]
    assert seen == ["0,1", "2,3"]
    seen = [learner_environment(m, 8, gpus)["CUDA_VISIBLE_DEVICES"] for m in range(8)]
    assert seen == ["0", "1", "2", "3"] * 2


def test_processes_compute_in_their_share_of_the_cores(monkeypatch):
    def threads(learners, cores, **given):
        monkeypatch.setattr(processes, "_own_cores", lambda: cores)
        return learner_environment(0, learners, given)["PJRT_NPROC"]

    assert [threads(4, cores) for cores in (1, 2, 4, 7, 8)] == ["1", "1", "1", "1", "2"]
    assert threads(4, 8, PJRT_NPROC="3") == threads(4, 8, NPROC="3") == "3"


def test_learners_have_chips_of_their_own():
    given = {"TPU_VISIBLE_CHIPS": "0,1,2,3"}
    shares = [learner_environment(m, 2, given) for m in range(2)]
    assert [share["TPU_VISIBLE_CHIPS"] for share in shares] == ["0,1", "2,3"]
    assert all(share["TPU_CHIPS_PER_PROCESS_BOUNDS"] == "1,2,1" for share in shares)
    assert all(share["TPU_PROCESS_BOUNDS"] == "1,1,1" for share in shares)


def test_processes_of_four_chips_do_not_keep_each_other_out():
    shares = [share_of_chips(m, 2, {"TPU_VISIBLE_CHIPS": "0,1,2,3,4,5,6,7"}) for m in range(2)]
    assert [share["TPU_VISIBLE_CHIPS"] for share in shares] == ["0,1,2,3", "4,5,6,7"]
    # libtpu takes these bounds for all chips of a host, and lets in one process, unless it is told.
    assert all(share["TPU_CHIPS_PER_PROCESS_BOUNDS"] == "2,2,1" for share in shares)
    assert all(share["ALLOW_MULTIPLE_LIBTPU_LOAD"] == "1" for share in shares)


def test_a_share_is_of_a_shape_that_the_runtime_knows():
    shares = [share_of_chips(m, 2, {"TPU_VISIBLE_CHIPS": "0,1,2,3,4,5,6"}) for m in range(2)]
    assert [share["TPU_VISIBLE_CHIPS"] for share in shares] == ["0,1", "2,3"]  # three would be no rectangle


def test_one_learner_has_what_there_is():
    assert share_of_chips(0, 1, {"TPU_VISIBLE_CHIPS": "0,1,2,3"}) == {}
    assert share_of_chips(0, 4, {}) == {}


def test_a_chip_is_not_shared():
    with pytest.raises(ConfigError, match="lists 2 chips for 4 learners"):
        share_of_chips(0, 4, {"TPU_VISIBLE_CHIPS": "0,1"})
