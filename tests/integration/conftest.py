"""The programs, with one prepared data set and one folder of compiled programs for all tests."""

import pytest

from tests import workbench
from tests.integration.programs import Programs


@pytest.fixture(scope="session")
def programs(tmp_path_factory):
    base = tmp_path_factory.getbasetemp()
    return Programs(workbench.data_folder(base), base / "programs_jax")
