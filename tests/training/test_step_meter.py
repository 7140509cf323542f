"""What is measured of a step, and when it is not known."""

import jax
import pytest

from ddiloco.training.chips import peak_flops
from ddiloco.training.step_meter import StepMeter


class Device:
    """A device of this process with a memory that is known."""

    process_index = 0

    def __init__(self, number, peak):
        self.id, self._peak = number, peak

    def memory_stats(self):
        return {"peak_bytes_in_use": self._peak}


def meter(times, devices=(), step_flops=50.0, peak=100.0):
    return StepMeter(devices, step_flops, peak, iter(times).__next__)


def test_a_step_takes_from_the_end_of_the_one_before():
    of = meter([10.0, 12.0, 13.0])
    assert of.finished(0.1) == {}
    assert of.finished(0.5) == {"step_seconds": 2.0, "data_wait_seconds": 0.5, "mfu": 0.25}
    assert of.finished(9.0) == {"step_seconds": 1.0, "data_wait_seconds": 1.0, "mfu": 0.5}


def test_a_step_after_an_interruption_has_no_time():
    of = meter([1.0, 2.0, 3.0])
    of.finished(0.0)
    of.interrupted()
    assert of.finished(0.0) == {}
    assert of.finished(0.0)["step_seconds"] == 1.0


@pytest.mark.parametrize(("step_flops", "peak"), [(None, 1.0), (1.0, None)])
def test_without_the_operations_of_both_there_is_no_mfu(step_flops, peak):
    of = meter([1.0, 2.0], step_flops=step_flops, peak=peak)
    of.finished(0.0)
    assert of.finished(0.0) == {"step_seconds": 1.0, "data_wait_seconds": 0.0}


def test_memory_is_told_by_device():
    of = meter([1.0], [Device(4, 17), Device(5, 18)])
    assert of.finished(0.0) == {"peak_bytes/4": 17.0, "peak_bytes/5": 18.0}


def test_of_cpu_devices_neither_memory_nor_peak_is_known():
    of = StepMeter(jax.devices(), 1.0, peak_flops(jax.devices()[0].device_kind))
    of.finished(0.0)
    assert set(of.finished(0.0)) == {"step_seconds", "data_wait_seconds"}


@pytest.mark.parametrize(
    ("kind", "tera"),
    [
        ("TPU v4", 275),
        ("TPU v5p", 459),
        ("TPU v5 lite", 197),
        ("TPU v6 lite", 918),
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
    ],
)
def test_the_peak_goes_by_the_kind_of_device(kind, tera):
    assert peak_flops(kind) == tera * 1e12


@pytest.mark.parametrize("kind", ["cpu", "TPU v4 lite", "NVIDIA GeForce RTX 4090"])
def test_what_is_not_in_the_table_has_no_peak(kind):
    assert peak_flops(kind) is None
