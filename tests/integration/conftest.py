"""The programs, with the data and the compiled programs of all tests."""

import pytest

from tests import workbench
from tests.integration.hand import UNENDING, Job
from tests.integration.programs import Programs


@pytest.fixture(scope="session")
def programs():
    made = Programs(workbench.data_folder())
    yield made
    made.kill_all()


@pytest.fixture
def job(programs, tmp_path, request):
    """A run by hand that does not end by itself, with the settings of the module's CHANGES."""
    made = Job(programs, tmp_path / "run", (*UNENDING, *request.module.CHANGES))
    yield made
    made.kill_all()
