"""Which variables of libtpu a process takes over."""

import pytest

from ddiloco.config import ConfigError
from ddiloco.training.platform import check_slices
from tests.refusals import refusal

OF_FOUR = {"MEGASCALE_PORT": "8080", "MEGASCALE_NUM_SLICES": "4", "MEGASCALE_SLICE_ID": "3"}


def test_a_learner_of_one_slice_is_none_of_the_slices_of_its_allocation():
    variables = {**OF_FOUR, "TPU_WORKER_HOSTNAMES": "a,b", "HOME": "/home"}
    assert check_slices(1, 2, variables) == sorted(OF_FOUR)
    assert variables == {"TPU_WORKER_HOSTNAMES": "a,b", "HOME": "/home"}


def test_a_learner_of_all_slices_takes_the_variables_as_they_are():
    variables = {**OF_FOUR, "TPU_WORKER_HOSTNAMES": "a,b"}
    assert check_slices(4, 8, variables) == []
    assert variables.items() >= OF_FOUR.items()
    assert check_slices(4, 8, {}) == []  # no TPUs here


@pytest.mark.parametrize(
    ("slices", "hosts", "changed", "name"),
    [
        (2, 2, {}, "MEGASCALE_NUM_SLICES: is 4, but must be of a learner of 2 slices"),
        (4, 4, {"MEGASCALE_SLICE_ID": "4"}, "MEGASCALE_SLICE_ID: is 4, but must be of a learner of 4 slices"),
        (4, 4, {"MEGASCALE_SLICE_ID": ""}, "MEGASCALE_SLICE_ID: is missing"),
        (1, 2, {"TPU_WORKER_HOSTNAMES": "a,b,c"}, "TPU_WORKER_HOSTNAMES: names 3 hosts, but"),
        (4, 4, {"TPU_WORKER_HOSTNAMES": "a,b"}, "TPU_WORKER_HOSTNAMES: names 2 hosts, but a"),
    ],
)
def test_variables_of_another_job_are_refused_by_name(slices, hosts, changed, name):
    assert refusal(ConfigError, check_slices, slices, hosts, {**OF_FOUR, **changed}).startswith(name)
