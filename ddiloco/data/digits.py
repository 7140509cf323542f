"""A TFDS builder of real images that needs no network: the handwritten digits that come with scikit-learn.

Importing this module imports TFDS and registers the builder as `digits`.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from PIL import Image

from ddiloco.data.tfds_builder import LocalBuilder, one_in

TEST_ONE_IN = 5
_LARGEST = 16  # value of a pixel as scikit-learn has it


def split_of(index: int) -> str:
    """`train` or `test` (about one image in 5), by a hash of the image's index."""
    return "test" if one_in(TEST_ONE_IN, f"digits {index}") else "train"


def images() -> Iterator[tuple[int, np.ndarray, int]]:
    """All 1,797 images in order: (index, image (8, 8) uint8 with ink 255 on 0, label 0 to 9)."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    for index, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        yield index, np.round(pixels * (255 / _LARGEST)).astype(np.uint8), int(label)


class Digits(LocalBuilder):
    """1,797 digits of 43 writers, 8x8, after "Optical Recognition of Handwritten Digits" (UCI).

    Features: `image` (8, 8, 1) uint8 and `label`. Splits: `train` and `test`, by `split_of`.
    """

    SPLITS = ("train", "test")

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description="Handwritten digits.",
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(shape=(8, 8, 1), encoding_format="png", doc="ink on 0"),
                    "label": tfds.features.ClassLabel(num_classes=10, doc="the digit"),
                }
            ),
            supervised_keys=("image", "label"),
            disable_shuffling=True,
        )

    def _generate_examples(self, split: str) -> Iterator[tuple[int, dict[str, Any]]]:
        for index, image, label in images():
            if split_of(index) == split:
                encoded = io.BytesIO()  # TFDS would need TensorFlow to encode an array
                Image.fromarray(image).save(encoded, "PNG")
                yield index, {"image": encoded.getvalue(), "label": label}
