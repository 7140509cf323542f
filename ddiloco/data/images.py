"""Batches of labelled images: cropped, augmented, resized.

Images stay uint8 up to the devices, a quarter of the bytes of float32; the model normalises them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from PIL import Image

from ddiloco.config import ConfigError
from ddiloco.data.batches import Batch, Batches, Selection
from ddiloco.data.examples import (
    Example,
    Record,
    held_out_examples,
    make_example_batches,
)
from ddiloco.data.settings import ClassificationConfig
from ddiloco.data.sources import ImageSource, open_images

_ASPECTS = (3 / 4, 4 / 3)  # of parts of an image, width over height
_TRIES = 10  # to find a part that fits


def make_image_batches(
    config: ClassificationConfig, size: int, channels: int, num_classes: int, selection: Selection
) -> Batches:
    """The endless training batches of the selected shards, of augmented images.

    A batch is `image` (B, size, size, channels) uint8, `label` (B,) int32 and `weights` (B,) int32, all 1.

    Raises:
      ConfigError: the data set has more than `num_classes` classes.
      DataError: the data set cannot be opened, or has fewer images than shards.
    """
    source = _open(config, config.train_split, channels, num_classes)

    def example(record: Record, others: Sequence[Record], rng: np.random.Generator) -> Example:
        del others
        return _example(augmented(record["image"], size, config, rng), record["label"])

    identity = {
        "image": [size, size, channels],
        "augmentation": [config.crop, config.padding, config.smallest_area, config.flip],
    }
    return make_example_batches(config, source, selection, example, identity)


def held_out_images(
    config: ClassificationConfig,
    size: int,
    channels: int,
    num_classes: int,
    batch_size: int,
    num_batches: int,
) -> list[Batch]:
    """The held-out batches, the same for every learner: images evenly spaced over the eval split.

    They are not augmented. A split with fewer images gives fewer batches, the last one padded; none is scored
    twice. Raises as `make_image_batches` does.
    """
    source = _open(config, config.eval_split, channels, num_classes)

    def example(index: int) -> Example:
        record = source[index]
        return _example(squared(record["image"], size, config.central_share), record["label"])

    return held_out_examples(example, len(source), batch_size, num_batches)


def augmented(
    image: np.ndarray, size: int, config: ClassificationConfig, rng: np.random.Generator
) -> np.ndarray:
    """An (H, W, C) image as (size, size, C) uint8, randomly cropped, moved and flipped as configured."""
    if config.crop == "resized":
        image = bordered(image, config.padding)
        image = resized(image, part_of(image.shape[:2], config.smallest_area, rng), size)
    else:
        image = squared(image, size, config.central_share)
        if config.crop == "padded" and config.padding:
            top, left = config.padding - rng.integers(-config.padding, config.padding + 1, 2)
            image = bordered(image, config.padding)[top : top + size, left : left + size]
    if config.flip and rng.random() < 0.5:
        image = image[:, ::-1]
    return np.ascontiguousarray(image)


def bordered(image: np.ndarray, padding: int) -> np.ndarray:
    """An (H, W, C) image with a black border of so many pixels on each side."""
    return np.pad(image, ((padding, padding), (padding, padding), (0, 0)))


def part_of(
    shape: tuple[int, int], smallest_area: float, rng: np.random.Generator
) -> tuple[int, int, int, int]:
    """A random part (top, left, height, width) of an image, of random area and shape.

    As for Inception (arXiv 1409.4842, section 6): a share of the area from `smallest_area` to 1, and a width
    over height from 3/4 to 4/3. If some tries do not fit in the image, the largest central part that does.
    """
    height, width = shape
    for _ in range(_TRIES):
        area = height * width * rng.uniform(smallest_area, 1.0)
        aspect = math.exp(rng.uniform(math.log(_ASPECTS[0]), math.log(_ASPECTS[1])))
        rows, columns = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
        if 0 < rows <= height and 0 < columns <= width:
            top, left = rng.integers(0, height - rows + 1), rng.integers(0, width - columns + 1)
            return int(top), int(left), rows, columns
    rows = min(height, round(width / _ASPECTS[0]))
    columns = min(width, round(height * _ASPECTS[1]))
    return (height - rows) // 2, (width - columns) // 2, rows, columns


def squared(image: np.ndarray, size: int, central_share: float) -> np.ndarray:
    """The central square of an image, `central_share` of its shorter side, at (size, size, C)."""
    height, width = image.shape[:2]
    side = max(1, round(min(height, width) * central_share))
    return resized(image, ((height - side) // 2, (width - side) // 2, side, side), size)


def resized(image: np.ndarray, part: tuple[int, int, int, int], size: int) -> np.ndarray:
    """A part (top, left, height, width) of an image at (size, size, C), by Pillow's bilinear filter."""
    top, left, height, width = part
    cut = image[top : top + height, left : left + width]
    if (height, width) == (size, size):
        return cut
    channels = image.shape[-1]
    picture = Image.fromarray(np.ascontiguousarray(cut[..., 0] if channels == 1 else cut))
    scaled = np.asarray(picture.resize((size, size), Image.Resampling.BILINEAR))
    return scaled.reshape(size, size, channels)


def _example(image: np.ndarray, label: int) -> Example:
    return {"image": image, "label": np.int32(label), "weights": np.int32(1)}


def _open(config: ClassificationConfig, split: str, channels: int, num_classes: int) -> ImageSource:
    source = open_images(config, split, channels)
    if source.num_classes > num_classes:
        raise ConfigError(
            f"config.model.num_classes: is {num_classes}, but {source.full_name} has {source.num_classes}"
        )
    return source
