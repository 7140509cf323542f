"""Canvases of handwritten digits side by side, and what stands there in words: images to caption."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grain
import numpy as np

from ddiloco.config import ConfigError
from ddiloco.data.errors import DataError
from ddiloco.data.examples import Example, Randomly, make_example_batches, spaced_batches
from ddiloco.data.images import open_split_of
from ddiloco.data.packing import Batch
from ddiloco.data.pipeline import Batches
from ddiloco.data.settings import CanvasConfig
from ddiloco.data.sources import ImageSource
from ddiloco.data.tokenizers import ByteTokenizer

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

_HELD_OUT_SEED = 0


def caption_length(config: CanvasConfig) -> int:
    """The tokens, L, of the longest caption: its bytes and one that ends it."""
    return len(caption([3] * config.most_digits)) + 1


def caption(labels: Sequence[int]) -> str:
    """The digits in words, from left to right: `four two seven`."""
    return " ".join(WORDS[label] for label in labels)


def make_canvas_batches(
    config: CanvasConfig,
    shape: tuple[int, int, int],
    *,
    shards: Sequence[int],
    num_shards: int,
    batch_size: int,
    seed: int,
) -> Batches:
    """The endless training batches of some shards, with `shards` and the rest as in `make_batches`.

    Each canvas holds the shard's next image, and others of the shard by chance. A batch is `image` (B, H, W,
    C) uint8 of `shape`, and `inputs`, `targets`, `weights` (B, L) int32: the caption's bytes after the mark
    of a beginning, the same up to the mark of an end, and 1 where they are.

    Raises:
      ConfigError: shards or batch_size do not fit, or the digits do not fit on the canvas.
      DataError: the data set cannot be opened, has labels other than digits, or fewer images than shards.
    """
    source = _digits(config, config.train_split, shape)

    def made_of(records: grain.MapDataset) -> Randomly:
        def example(record: dict[str, Any], rng: np.random.Generator) -> Example:
            return _example(record, records, config, shape, rng)

        return example

    identity = {
        "data_set": source.full_name,
        "canvas": [*shape, config.fewest_digits, config.most_digits],
    }
    return make_example_batches(
        config,
        source,
        made_of,
        identity,
        shards=shards,
        num_shards=num_shards,
        batch_size=batch_size,
        seed=seed,
    )


def held_out_canvases(
    config: CanvasConfig, shape: tuple[int, int, int], batch_size: int, num_batches: int
) -> list[Batch]:
    """The same held-out batches for everybody: canvases of images of the eval split alone.

    At most one canvas for each image of the split, on which it is. Raises as `make_canvas_batches` does.
    """
    source = _digits(config, config.eval_split, shape)

    def example(index: int) -> Example:
        rng = np.random.default_rng([_HELD_OUT_SEED, index])
        return _example(source[index], source, config, shape, rng)

    return spaced_batches(example, len(source), batch_size, num_batches)


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
    record: dict[str, Any],
    others: Sequence[dict[str, Any]],
    config: CanvasConfig,
    shape: tuple[int, int, int],
    rng: np.random.Generator,
) -> Example:
    count = int(rng.integers(config.fewest_digits, config.most_digits + 1))
    shown = [record, *(others[int(i)] for i in rng.integers(0, len(others), count - 1))]
    shown = [shown[i] for i in rng.permutation(count)]
    tokens = ByteTokenizer().encode(caption([digit["label"] for digit in shown]))
    rows = {
        name: np.full(caption_length(config), ByteTokenizer.pad, np.int32) for name in ("inputs", "targets")
    }
    end = len(tokens)
    rows["inputs"][0], rows["inputs"][1 : end + 1] = ByteTokenizer.bos, tokens
    rows["targets"][:end], rows["targets"][end] = tokens, ByteTokenizer.eos
    weights = (np.arange(caption_length(config)) <= end).astype(np.int32)
    image = drawn([digit["image"] for digit in shown], shape, rng)
    return {"image": image, **rows, "weights": weights}


def _digits(config: CanvasConfig, split: str, shape: tuple[int, int, int]) -> ImageSource:
    height, width, channels = shape
    source = open_split_of(config, split, channels)
    if source.num_classes != len(WORDS):
        raise DataError(f"{config.name} has {source.num_classes} classes, but captions need ten digits")
    rows, columns = source[0]["image"].shape[:2]
    if rows > height or columns * config.most_digits > width:
        raise ConfigError(
            f"config.data.most_digits: {config.most_digits} images of {rows} x {columns} do not fit on a "
            f"canvas of {height} x {width}, which config.model sets"
        )
    return source
