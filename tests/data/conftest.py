"""One prepared copy of each embedded data set for all tests of the data package."""

import pytest

from ddiloco.data.settings import DataConfig
from ddiloco.data.sources import open_images, open_text


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tfds")
    open_text("stdlib_text", "train", folder)
    return str(folder)


@pytest.fixture(scope="session")
def train_texts(data_dir):
    source = open_text("stdlib_text", "train", data_dir)
    return [source[index]["text"] for index in range(len(source))]


@pytest.fixture
def config(data_dir):
    return DataConfig(data_dir=data_dir, sequence_length=64)


@pytest.fixture(scope="session")
def digits_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    open_images("digits", "train", folder, channels=1)
    return str(folder)
