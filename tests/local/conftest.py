"""A run that was stopped in the middle."""

import shutil

import pytest

from tests.local.stopped_runs import completed, run, settings


@pytest.fixture(scope="session")
def interrupted(data_dir, tmp_path_factory):
    """A run of two learners that was stopped after its second snapshot, and its folder."""
    workdir = tmp_path_factory.mktemp("interrupted")
    return run(settings(data_dir), workdir, until=completed(2)), workdir


@pytest.fixture
def folder(interrupted, tmp_path):
    """A copy of its folder, for another run to go on in."""
    return shutil.copytree(interrupted[1], tmp_path / "run")
