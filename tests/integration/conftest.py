"""The programs, with the data and the compiled programs of all tests."""

import pytest

from tests import workbench
from tests.integration.programs import Programs


@pytest.fixture(scope="session")
def programs():
    made = Programs(workbench.data_folder())
    yield made
    made.kill_all()
