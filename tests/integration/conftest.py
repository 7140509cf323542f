"""A run by hand."""

import pytest

from tests.integration.hand import UNENDING, Job


@pytest.fixture
def job(programs, tmp_path, request):
    """A run by hand that does not end by itself, with the settings of the module's CHANGES."""
    made = Job(programs, tmp_path / "run", (*UNENDING, *request.module.CHANGES))
    yield made
    made.kill_all()
