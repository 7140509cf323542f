"""Batches of images with captions: handwritten digits side by side on a canvas, and their names in words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ddiloco.config import ConfigError
from ddiloco.data.batches import Batch, Batches, Selection
from ddiloco.data.errors import DataError
from ddiloco.data.examples import (
    Example,
    Record,
    held_out_examples,
    make_example_batches,
)
from ddiloco.data.settings import CanvasConfig
from ddiloco.data.sources import ImageSource, open_images
from ddiloco.data.tokenizers import ByteTokenizer

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

_HELD_OUT_SEED = 0


def caption_length(config: CanvasConfig) -> int:
    """The tokens, L, of the longest caption: its bytes and one that ends it."""
    return len(caption([3] * config.most_digits)) + 1


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
    source = _open(config, config.train_split, shape)

    def example(record: Record, others: Sequence[Record], rng: np.random.Generator) -> Example:
        return _example(record, others, config, shape, rng)

    identity = {"canvas": [*shape, config.fewest_digits, config.most_digits]}
    return make_example_batches(config, source, selection, example, identity)


def held_out_canvases(
    config: CanvasConfig, shape: tuple[int, int, int], batch_size: int, num_batches: int
) -> list[Batch]:
    """The held-out batches, the same for every learner: canvases of images of the eval split alone.

    At most one canvas for each image of the split. Raises as `make_canvas_batches` does.
    """
    source = _open(config, config.eval_split, shape)

    def example(index: int) -> Example:
        rng = np.random.default_rng([_HELD_OUT_SEED, index])
        return _example(source[index], source, config, shape, rng)

    return held_out_examples(example, len(source), batch_size, num_batches)


def drawn(digits: Sequence[np.ndarray], shape: tuple[int, int, int], rng: np.random.Generator) -> np.ndarray:
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


def _example(
    record: Record,
    others: Sequence[Record],
    config: CanvasConfig,
    shape: tuple[int, int, int],
    rng: np.random.Generator,
) -> Example:
    count = int(rng.integers(config.fewest_digits, config.most_digits + 1))
    shown = [record, *(others[int(i)] for i in rng.integers(0, len(others), count - 1))]
    shown = [shown[i] for i in rng.permutation(count)]
    tokens = ByteTokenizer().encode(caption([digit["label"] for digit in shown]))
    length, end = caption_length(config), len(tokens)
    inputs, targets = np.full((2, length), ByteTokenizer.pad, np.int32)
    inputs[0], inputs[1 : end + 1] = ByteTokenizer.bos, tokens
    targets[:end], targets[end] = tokens, ByteTokenizer.eos
    weights = (np.arange(length) <= end).astype(np.int32)
    image = drawn([digit["image"] for digit in shown], shape, rng)
    return {"image": image, "inputs": inputs, "targets": targets, "weights": weights}


def _open(config: CanvasConfig, split: str, shape: tuple[int, int, int]) -> ImageSource:
    height, width, channels = shape
    source = open_images(config, split, channels)
    if source.num_classes != len(WORDS):
        told = f"{config.name} has {source.num_classes} classes, but captions need ten digits"
        raise DataError(f"config.data.name: {told}")
    rows, columns = source[0]["image"].shape[:2]
    if rows > height or columns * config.most_digits > width:
        raise ConfigError(
            f"config.data.most_digits: {config.most_digits} images of {rows} x {columns} do not fit on a "
            f"canvas of {height} x {width}, which config.model sets"
        )
    return source
