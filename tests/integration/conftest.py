"""Runs by hand, whose processes end with the test."""

import pytest

from tests.integration.hand import UNENDING, Job


@pytest.fixture
def new_job(programs, tmp_path):
    """Makes a run by hand, with these settings."""
    made = []

    def make(settings, **more):
        made.append(Job(programs, tmp_path / "run", settings, **more))
        return made[-1]

    yield make
    for job in made:
        job.kill_all()


@pytest.fixture
def job(new_job, request):
    """One that does not end by itself, with the settings of the module's CHANGES."""
    return new_job((*UNENDING, *request.module.CHANGES))
