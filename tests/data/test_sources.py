"""Opening data sets by name: what is there is opened, what is not is told in one line and soon."""

import pathlib
import pickle
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tensorflow_datasets as tfds

from ddiloco.data import sources
from ddiloco.data.errors import DataError
from ddiloco.data.sources import open_text


class TinyPoems(tfds.core.GeneratorBasedBuilder):
    """Stands for any data set of TFDS with its own text feature."""

    VERSION = tfds.core.Version("2.1.0")
    code_path = None

    def _info(self):
        features = {"poem": tfds.features.Text(), "year": tfds.features.Scalar(np.int32)}
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        for index in range(7):
            yield index, {"poem": f"poem {index}", "year": index}


@pytest.fixture
def poems(tmp_path):
    builder = TinyPoems(data_dir=tmp_path, file_format="array_record")
    builder.download_and_prepare()
    return tmp_path


@pytest.fixture
def no_network(monkeypatch):
    monkeypatch.setattr(sources, "_network_answers", lambda: False)


def one_line(error):
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_prepared_data_set_is_opened_by_name_and_feature(poems):
    source = open_text("tiny_poems", "train", poems, feature="poem")
    texts = {source[index]["text"] for index in range(len(source))}
    assert texts == {f"poem {index}".encode() for index in range(7)}


def test_a_prepared_version_is_opened_without_the_builders_code(poems, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    shutil.copytree(poems / "tiny_poems", tmp_path / "elsewhere" / "renamed_poems")
    info = tmp_path / "elsewhere/renamed_poems/2.1.0/dataset_info.json"
    info.write_text(info.read_text().replace("tiny_poems", "renamed_poems"))
    for file in info.parent.glob("tiny_poems-*"):
        file.rename(file.with_name(file.name.replace("tiny_poems", "renamed_poems")))
    source = open_text("renamed_poems:2.1.0", "train", tmp_path / "elsewhere", feature="poem")
    assert len(source) == 7
    assert source.full_name == "renamed_poems/2.1.0"


def test_a_part_of_a_split_can_be_opened(data_dir):
    whole = open_text("stdlib_text", "train", data_dir)
    part = open_text("stdlib_text", "train[:20]", data_dir)
    assert len(part) == 20
    assert [part[i] for i in range(20)] == [whole[i] for i in range(20)]


def test_a_source_survives_pickling(data_dir):
    source = open_text("stdlib_text", "validation", data_dir)
    again = pickle.loads(pickle.dumps(source))
    assert again[-1] == source[len(source) - 1]
    with pytest.raises(IndexError):
        source[len(source)]


def test_a_data_set_out_of_reach_says_how_to_get_it(tmp_path, no_network):
    with pytest.raises(DataError) as error:
        open_text("c4/en", "train", tmp_path)
    message = one_line(error)
    assert f"open_text('c4/en', 'train', '{tmp_path}')" in message
    assert f"{tmp_path}/c4/en/" in message


def test_a_download_that_fails_is_told_in_one_line(tmp_path, monkeypatch):
    def refuse(self, **options):
        raise ConnectionError("server said no\nand much more")

    monkeypatch.setattr(sources, "_network_answers", lambda: True)
    monkeypatch.setattr(tfds.core.DatasetBuilder, "download_and_prepare", refuse)
    with pytest.raises(DataError, match=r"^config\.data: preparing lm1b .* failed: server said no$") as error:
        open_text("lm1b", "train", tmp_path)
    one_line(error)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("stdlib_txt", "did you mean stdlib_text"),
        ("nothing_of_this_name", "TFDS knows no data set"),
        ("c4/klingon", "klingon"),
        ("lm1b:9.9.9", "9.9.9"),
        ("not a name!", "TFDS cannot open"),
        ("", "TFDS cannot open"),
    ],
)
def test_an_unknown_name_is_told_in_one_line(name, says, tmp_path, no_network):
    with pytest.raises(DataError) as error:
        open_text(name, "train", tmp_path)
    assert one_line(error).startswith("config.data.name: ") and says in one_line(error)


def test_an_unknown_split_names_the_splits_there_are(data_dir):
    with pytest.raises(
        DataError, match=r"^config.data.train_split: .*; its splits: train, validation"
    ) as error:
        open_text("stdlib_text", "test", data_dir)
    one_line(error)


@pytest.mark.parametrize("feature", ["year", "text"])
def test_a_feature_without_text_names_those_that_have_it(feature, poems):
    with pytest.raises(DataError, match=r"^config.data.text_feature: .*; its text features: poem") as error:
        open_text("tiny_poems", "train", poems, feature=feature)
    one_line(error)


def test_a_wrong_feature_is_told_before_anything_is_downloaded(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_ensure_prepared", lambda *_: pytest.fail("began to prepare"))
    with pytest.raises(DataError, match="no text feature 'body'"):
        open_text("lm1b", "train", tmp_path, feature="body")


def test_damaged_files_are_told_in_one_line(data_dir, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(pathlib.Path(data_dir, "stdlib_text"), copy / "stdlib_text")
    (records,) = copy.rglob("*train.array_record*")
    records.write_bytes(records.read_bytes()[:100_000])
    with pytest.raises(DataError, match="cannot be read") as error:
        open_text("stdlib_text", "train", copy)
    one_line(error)
    (info,) = copy.rglob("dataset_info.json")
    info.write_text("{")
    with pytest.raises(DataError, match="is damaged") as error:
        open_text("stdlib_text", "train", copy)
    one_line(error)


def test_the_data_folder_is_the_given_one_else_the_environments(monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", "/from/environment")
    assert sources.data_root("/given") == "/given"
    assert sources.data_root(None) == "/from/environment"
    monkeypatch.delenv("TFDS_DATA_DIR")
    assert sources.data_root(None) == str(pathlib.Path.home() / "tensorflow_datasets")


def test_importing_the_package_imports_neither_tfds_nor_grain():
    code = "import sys, ddiloco.data; print({'tensorflow_datasets', 'grain', 'jax'} & set(sys.modules))"
    root = str(pathlib.Path(__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_bucket_of_data_sets_is_refused_in_a_line(monkeypatch):
    told = (
        r"^config.data.data_dir: gs://bucket/tfds: must be a folder; mount the bucket, or copy the data set$"
    )
    with pytest.raises(DataError, match=told):
        open_text("stdlib_text", "train", "gs://bucket/tfds")
    monkeypatch.setenv("TFDS_DATA_DIR", "gs://bucket/tfds")
    with pytest.raises(DataError, match=told):
        open_text("stdlib_text", "train")
