"""The embedded data sets, and settings of them."""

import pytest

from ddiloco.data.settings import DataConfig
from ddiloco.data.sources import open_text


@pytest.fixture(scope="session")
def train_texts(data_dir):
    source = open_text("stdlib_text", "train", data_dir)
    return [source[index]["text"] for index in range(len(source))]


@pytest.fixture
def config(data_dir):
    return DataConfig(data_dir=data_dir, sequence_length=64)
