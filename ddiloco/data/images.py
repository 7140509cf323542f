"""Batches of labelled images, cropped, augmented and resized; and of canvases, several with a caption.

Images stay uint8 up to the devices, a quarter of the bytes of float32; the model normalises them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import grain
import numpy as np
from PIL import Image

from ddiloco.config import ConfigError
from ddiloco.data.batches import Batch, Batches, Selection, make_batches
from ddiloco.data.errors import DataError
from ddiloco.data.settings import CanvasConfig, ClassificationConfig, ImagesConfig
from ddiloco.data.sources import ImageSource, open_images
from ddiloco.data.tokenizers import ByteTokenizer

Example = dict[str, Any]
Record = dict[str, Any]


class Examples:
    """The endless examples of one shard; their position is the number of the next one."""

    def __init__(self, example: Callable[[int], Example]) -> None:
        """`example(n)` makes example n = 0, 1, ... without end, equal at each call."""
        self._example = example
        self.position = 0

    def take(self, count: int) -> Batch:
        """The next `count` examples, stacked."""
        found = [self._example(n) for n in range(self.position, self.position + count)]
        self.position += count
        return {name: np.stack([example[name] for example in found]) for name in found[0]}


def make_example_batches(
    config: ImagesConfig,
    source: ImageSource,
    selection: Selection,
    example: Callable[[Record, Sequence[Record], np.random.Generator], Example],
    identity: dict[str, Any],
) -> Batches:
    """The endless training batches of the selected shards.

    Example n of a shard is made from the shard's n-th record and from random numbers that depend on seed,
    shard and n alone: `example` is (record, all records of the shard, random numbers) -> the arrays of one
    row. Otherwise as `make_batches`.
    """

    def read(order: grain.MapDataset, records: grain.MapDataset, seed: int) -> grain.MapDataset:
        return order.random_map(lambda record, rng: example(record, records, rng), seed=seed)

    identity = {"data_set": source.full_name, **identity}
    return make_batches(config, source, selection, read, lambda made, _: Examples(made), identity)


def held_out_examples(
    example: Callable[[int], Example], available: int, batch_size: int, num_batches: int
) -> list[Batch]:
    """Batches of examples evenly spaced over 0 .. available - 1, each at most once.

    With fewer examples there are fewer batches; the last one is padded with zeros, also in `weights`.
    """
    wanted = min(batch_size * num_batches, available)
    found = [example(i * available // wanted) for i in range(wanted)]
    empty = {name: np.zeros_like(array) for name, array in found[0].items()}
    found += [empty] * (-wanted % batch_size)
    return [
        {name: np.stack([row[name] for row in found[start : start + batch_size]]) for name in empty}
        for start in range(0, len(found), batch_size)
    ]


_ASPECTS = (3 / 4, 4 / 3)  # of parts of an image, width over height
_TRIES = 10  # attempts to sample a part that fits


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
    over height from 3/4 to 4/3. If no sample fits in the image, the largest central part of such a shape.
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


WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
DIGITS = 1, 3  # minimum and maximum on a canvas


def caption_length(config: CanvasConfig) -> int:
    """L, the number of tokens of the longest caption: its bytes and eos."""
    return len(caption([3] * DIGITS[1])) + 1


def caption(labels: Sequence[int]) -> str:
    """The digits in words, from left to right: `four two seven`."""
    return " ".join(WORDS[label] for label in labels)


def make_canvas_batches(config: CanvasConfig, shape: tuple[int, int, int], selection: Selection) -> Batches:
    """The endless training batches of the selected shards.

    Each canvas holds the shard's next image, and others of the shard drawn at random. A batch has `image`
    (B, *shape) uint8, and (B, L) int32 `inputs` (begin of sequence and the caption's bytes), `targets` (the
    caption's bytes and end of sequence) and `weights` (1 where a target counts).

    Raises:
      ConfigError: the digits do not fit on the canvas.
      DataError: the data set cannot be opened, has labels other than digits, or fewer images than shards.
    """
    source = _open_digits(config, config.train_split, shape)

    def example(record: Record, others: Sequence[Record], rng: np.random.Generator) -> Example:
        return _canvas(record, others, config, shape, rng)

    identity = {"canvas": [*shape, *DIGITS]}
    return make_example_batches(config, source, selection, example, identity)


def held_out_canvases(
    config: CanvasConfig, shape: tuple[int, int, int], batch_size: int, num_batches: int
) -> list[Batch]:
    """The held-out batches, the same for every learner: canvases of images of the eval split alone.

    At most one canvas for each image of the split. Raises as `make_canvas_batches` does.
    """
    source = _open_digits(config, config.eval_split, shape)

    def example(index: int) -> Example:
        rng = np.random.default_rng([0, index])
        return _canvas(source[index], source, config, shape, rng)

    return held_out_examples(example, len(source), batch_size, num_batches)


def draw_canvas(
    digits: Sequence[np.ndarray], shape: tuple[int, int, int], rng: np.random.Generator
) -> np.ndarray:
    """A black canvas (H, W, C) uint8 with these images (h, w, C) from left to right, at random places."""
    canvas = np.zeros(shape, np.uint8)
    free = shape[1] - sum(digit.shape[1] for digit in digits)
    gaps = np.sort(rng.integers(0, free + 1, len(digits)))
    left = 0
    for digit, gap in zip(digits, gaps, strict=True):
        height, width = digit.shape[:2]
        top = rng.integers(0, shape[0] - height + 1)
        canvas[top : top + height, left + gap : left + gap + width] = digit
        left += width
    return canvas


def _canvas(
    record: Record,
    others: Sequence[Record],
    config: CanvasConfig,
    shape: tuple[int, int, int],
    rng: np.random.Generator,
) -> Example:
    count = int(rng.integers(DIGITS[0], DIGITS[1] + 1))
    shown = [record, *(others[int(i)] for i in rng.integers(0, len(others), count - 1))]
    shown = [shown[i] for i in rng.permutation(count)]
    tokens = ByteTokenizer().encode(caption([digit["label"] for digit in shown]))
    length, end = caption_length(config), len(tokens)
    inputs, targets = np.full((2, length), ByteTokenizer.pad, np.int32)
    inputs[0], inputs[1 : end + 1] = ByteTokenizer.bos, tokens
    targets[:end], targets[end] = tokens, ByteTokenizer.eos
    weights = (np.arange(length) <= end).astype(np.int32)
    image = draw_canvas([digit["image"] for digit in shown], shape, rng)
    return {"image": image, "inputs": inputs, "targets": targets, "weights": weights}


def _open_digits(config: CanvasConfig, split: str, shape: tuple[int, int, int]) -> ImageSource:
    height, width, channels = shape
    source = open_images(config, split, channels)
    if source.num_classes != len(WORDS):
        problem = f"{config.name} has {source.num_classes} classes, but captions need ten digits"
        raise DataError(f"config.data.name: {problem}")
    rows, columns = source[0]["image"].shape[:2]
    if rows > height or columns * DIGITS[1] > width:
        raise ConfigError(
            f"config.model: its canvas of {height} x {width} has no room for {DIGITS[1]} images of "
            f"{rows} x {columns}"
        )
    return source
