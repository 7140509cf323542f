"""What each process of a run gets of the machine: devices and cores."""

from ddiloco.launch import processes
from ddiloco.launch.supervisor import learner_environment, syncer_environment


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
