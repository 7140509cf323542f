"""Canvases: what stands on them is what the caption says, of images of the right split alone."""

import numpy as np
import pytest

from ddiloco.config import ConfigError
from ddiloco.data.batches import Selection
from ddiloco.data.images import (
    caption,
    caption_length,
    draw_canvas,
    held_out_canvases,
    make_canvas_batches,
)
from ddiloco.data.settings import CanvasConfig, ImagesConfig
from ddiloco.data.sources import open_images
from ddiloco.data.tokenizers import ByteTokenizer

SHAPE = (12, 32, 1)


@pytest.fixture
def config(data_dir):
    return CanvasConfig(data_dir=data_dir)


def batches(config, shards=(0,), batch_size=8, seed=3, shape=SHAPE):
    return make_canvas_batches(config, shape, Selection(shards, 4, batch_size, seed))


def captions(batch):
    """The captions that the targets hold."""
    return [
        ByteTokenizer().decode(np.where(counts, row, ByteTokenizer.pad))
        for row, counts in zip(batch["targets"], batch["weights"], strict=True)
    ]


def images_of(data_dir, split):
    source = open_images(ImagesConfig(data_dir=data_dir), split, 1)
    return [(record["image"][..., 0], record["label"]) for record in source]


def found_on(canvas, images):
    """Labels of the images that stand on the canvas, by brute force, from left to right."""
    windows = np.lib.stride_tricks.sliding_window_view(canvas[..., 0], (8, 8))
    found = []
    for image, label in images:
        for top, left in np.argwhere((windows == image).all(axis=(2, 3))):
            found.append((int(left), int(top), label))
    return [label for _, _, label in sorted(found)]


def test_a_batch_keeps_the_contract(config):
    batch = next(batches(config))
    length = caption_length(config)
    assert length == len("three seven eight") + 1
    assert (batch["image"].shape, batch["image"].dtype) == ((8, *SHAPE), np.uint8)
    for name in ("inputs", "targets", "weights"):
        assert (batch[name].shape, batch[name].dtype) == ((8, length), np.int32)
    assert (batch["inputs"][:, 0] == ByteTokenizer.bos).all()
    for row in range(8):
        end = batch["weights"][row].sum()
        np.testing.assert_array_equal(batch["inputs"][row, 1:end], batch["targets"][row, : end - 1])
        assert batch["targets"][row, end - 1] == ByteTokenizer.eos
        assert (batch["weights"][row] == (np.arange(length) < end)).all()


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_caption_says_what_stands_on_the_canvas_and_it_is_of_the_split(config, data_dir, split):
    shard = slice(1, None, 4) if split == "train" else slice(None)
    images = images_of(data_dir, split)[shard]
    batch = (
        next(batches(config, shards=(1,))) if split == "train" else held_out_canvases(config, SHAPE, 8, 1)[0]
    )
    for canvas, told in zip(batch["image"], captions(batch), strict=True):
        assert caption(found_on(canvas, images)) == told


def test_digits_lie_side_by_side_inside_the_canvas():
    rng = np.random.default_rng(0)
    for _ in range(200):
        digits = [np.full((8, 8, 1), value, np.uint8) for value in (50, 100, 150)]
        canvas = draw_canvas(digits, (9, 25, 1), rng)[..., 0]
        lefts = [np.flatnonzero((canvas == value).any(axis=0))[0] for value in (50, 100, 150)]
        assert [np.count_nonzero(canvas == value) for value in (50, 100, 150)] == [64] * 3
        assert lefts == sorted(lefts)


def test_what_does_not_fit_is_told_in_one_line(config):
    with pytest.raises(
        ConfigError, match=r"config.model: its canvas of 12 x 20 has no room for 3 images of 8 x 8"
    ):
        batches(config, shape=(12, 20, 1))
