"""The embedded images: all of scikit-learn's digits, each in one split, and opened like any TFDS name."""

import io
import pickle

import numpy as np
import pytest
import tensorflow_datasets as tfds
from PIL import Image

from ddiloco.data import digits
from ddiloco.data.errors import DataError
from ddiloco.data.settings import ImagesConfig
from ddiloco.data.sources import open_images


@pytest.fixture(scope="module")
def splits(data_dir):
    return {split: open_images(ImagesConfig(data_dir=data_dir), split, 1) for split in ("train", "test")}


def test_every_image_stands_in_just_one_split_as_scikit_learn_has_it(splits):
    from sklearn.datasets import load_digits  # here, since its import takes a second and more

    known = load_digits()
    place = {split: [i for i in range(1797) if digits.split_of(i) == split] for split in splits}
    for split, source in splits.items():
        assert len(source) == len(place[split])
        for record, index in zip(source, place[split], strict=True):
            assert (record["image"].shape, record["image"].dtype) == ((8, 8, 1), np.uint8)
            np.testing.assert_allclose(record["image"][..., 0] * (16 / 255), known.images[index], atol=0.04)
            assert record["label"] == known.target[index]
    assert sorted(place["train"] + place["test"]) == list(range(1797))


def test_a_source_survives_pickling_and_knows_its_classes(splits):
    again = pickle.loads(pickle.dumps(splits["test"]))
    np.testing.assert_array_equal(again[-1]["image"], splits["test"][len(again) - 1]["image"])
    assert (again.num_classes, again.full_name) == (10, "digits/1.0.0")
    with pytest.raises(IndexError):
        again[len(again)]


class TinyPaintings(tfds.core.GeneratorBasedBuilder):
    """Stands for any data set of TFDS: images of different sizes in colour, and features of its own names."""

    VERSION = tfds.core.Version("1.0.0")
    code_path = None

    def _info(self):
        features = {
            "painting": tfds.features.Image(shape=(None, None, 3), encoding_format="jpeg"),
            "school": tfds.features.ClassLabel(names=["delft", "haarlem"]),
            "title": tfds.features.Text(),
        }
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        for index in range(4):
            encoded = io.BytesIO()
            Image.new("RGB", (20 + index, 30), (200, 40, 90)).save(encoded, "JPEG")
            yield index, {"painting": encoded.getvalue(), "school": index % 2, "title": "view"}


@pytest.fixture
def paintings(tmp_path):
    TinyPaintings(data_dir=tmp_path, file_format="array_record").download_and_prepare()
    return tmp_path


def of_paintings(folder):
    return ImagesConfig("tiny_paintings", data_dir=folder)


def test_any_name_and_features_are_opened_in_colour_or_in_grey(paintings):
    config = of_paintings(paintings)
    colour = open_images(config, "train", 3)
    assert colour.num_classes == 2
    for record in colour:
        assert record["image"].shape[0] == 30 and record["image"].shape[2] == 3
        np.testing.assert_allclose(record["image"].reshape(-1, 3).mean(0), (200, 40, 90), atol=4)
    grey = open_images(config, "train", 1)
    assert grey[0]["image"].shape[2] == 1


def test_a_data_set_without_one_image_and_one_label_is_refused_in_a_line():
    found = ImagesConfig("stdlib_text")
    with pytest.raises(
        DataError, match=r"^config\.data\.name: stdlib_text must have one image feature"
    ) as error:
        open_images(found, "train", 3)
    assert "\n" not in str(error.value)


def test_a_damaged_image_is_told_in_one_line(paintings):
    source = open_images(of_paintings(paintings), "train", 3)
    source._records = [{"painting": b"no image", "school": 0}]
    with pytest.raises(DataError, match=r"record 0 of ImageSource\(tiny_paintings.*cannot be read") as error:
        source[0]
    assert "\n" not in str(error.value)
