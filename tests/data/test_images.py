"""Batches of images: shards, epochs, augmentation by chance that repeats, exact resumption."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddiloco.config import ConfigError
from ddiloco.data.batches import Selection
from ddiloco.data.images import (
    augmented,
    held_out_images,
    make_image_batches,
    part_of,
    resized,
    squared,
)
from ddiloco.data.settings import ClassificationConfig, ImagesConfig
from ddiloco.data.sources import open_images


@pytest.fixture
def config(data_dir):
    return ClassificationConfig(data_dir=data_dir, train_split="train[:40]")


def batches(config, shards=(0,), num_shards=4, batch_size=4, seed=7, size=8, channels=1, num_classes=10):
    selection = Selection(shards, num_shards, batch_size, seed)
    return make_image_batches(config, size, channels, num_classes, selection)


def drawn(config, count, **options):
    """The first `count` images as bytes."""
    rows = itertools.chain.from_iterable(batch["image"] for batch in batches(config, **options))
    return [row.tobytes() for row in itertools.islice(rows, count)]


def stored(data_dir, split="train[:40]"):
    source = open_images(ImagesConfig(data_dir=data_dir), split, 1)
    return [source[i]["image"].tobytes() for i in range(len(source))]


def test_an_epoch_of_a_shard_is_its_images_and_each_epoch_has_an_order_of_its_own(config, data_dir):
    plain = dataclasses.replace(config, crop="none")
    found = drawn(plain, 30, shards=(1,))
    epochs = [found[:10], found[10:20], found[20:]]
    assert all(sorted(epoch) == sorted(stored(data_dir)[1::4]) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_images_keep_their_labels(config, data_dir):
    source = open_images(ImagesConfig(data_dir=data_dir), "train[:40]", 1)
    label = {record["image"].tobytes(): record["label"] for record in source}
    for batch in itertools.islice(batches(dataclasses.replace(config, crop="none")), 6):
        assert [label[row.tobytes()] for row in batch["image"]] == batch["label"].tolist()


def test_a_seed_repeats_the_augmentation_and_another_changes_it(config):
    assert drawn(config, 30) == drawn(config, 30) != drawn(config, 30, seed=8)


def test_the_same_image_is_augmented_anew_in_each_epoch(config):
    assert len(set(drawn(config, 20, shards=(2,), num_shards=40))) > 3


def test_more_classes_than_the_model_has_are_refused(config):
    with pytest.raises(ConfigError, match=r"config\.model\.num_classes: is 9, but digits/1\.0\.0 has 10"):
        batches(config, num_classes=9)


def test_held_out_images_are_spread_evenly_and_never_augmented(config, data_dir):
    known = stored(data_dir, "test")
    found = [row.tobytes() for batch in held_out_images(config, 8, 1, 10, 4, 5) for row in batch["image"]]
    assert found == [known[i * len(known) // 20] for i in range(20)]


def test_a_small_held_out_split_is_scored_once_and_the_rest_is_padding(config):
    small = dataclasses.replace(config, eval_split="test[:10]")
    found = held_out_images(small, 8, 1, 10, 4, 100)
    assert [batch["weights"].tolist() for batch in found] == [[1] * 4, [1] * 4, [1, 1, 0, 0]]
    assert not found[-1]["image"][2:].any()


def test_a_padded_crop_is_every_crop_of_the_padded_image_in_turn(config):
    image = np.random.default_rng(0).integers(0, 256, (8, 8, 1), np.uint8)
    padded, rng = np.pad(image, ((2, 2), (2, 2), (0, 0))), np.random.default_rng(1)
    crops = {padded[top : top + 8, left : left + 8].tobytes() for top in range(5) for left in range(5)}
    moved = dataclasses.replace(config, crop="padded", padding=2, flip=False)
    assert {augmented(image, 8, moved, rng).tobytes() for _ in range(400)} == crops


@given(st.integers(1, 40), st.integers(1, 40), st.floats(0.05, 1.0), st.integers(0, 10_000))
def test_a_random_part_lies_in_the_image(height, width, smallest, seed):
    top, left, rows, columns = part_of((height, width), smallest, np.random.default_rng(seed))
    assert 0 <= top <= top + rows <= height and 0 <= left <= left + columns <= width
    assert rows and columns


def test_random_parts_have_the_areas_and_shapes_asked_for():
    rng = np.random.default_rng(0)
    parts = np.array([part_of((300, 300), 0.25, rng) for _ in range(2000)])
    areas, aspects = parts[:, 2] * parts[:, 3] / 300**2, parts[:, 3] / parts[:, 2]
    assert 0.24 < areas.min() < 0.27 and areas.max() > 0.9
    assert 0.74 < aspects.min() < 0.78 and 1.28 < aspects.max() < 1.35


def test_half_of_the_images_are_mirrored_where_flips_are_allowed(config):
    image = np.arange(64, dtype=np.uint8).reshape(8, 8, 1)
    allowed = dataclasses.replace(config, crop="none", flip=True)
    rng = np.random.default_rng(1)
    found = [augmented(image, 8, allowed, rng) for _ in range(400)]
    mirrored = sum(np.array_equal(row, image[:, ::-1]) for row in found)
    assert 160 < mirrored < 240
    assert mirrored + sum(np.array_equal(row, image) for row in found) == 400


def test_a_rectangle_becomes_the_central_square_at_the_size_asked_for():
    image = np.zeros((40, 20, 3), np.uint8)
    image[10:30] = 200
    np.testing.assert_array_equal(squared(image, 10, 1.0), np.full((10, 10, 3), 200))
    np.testing.assert_array_equal(squared(image, 20, 1.0), image[10:30])
    assert squared(image[..., :1], 6, 0.5).shape == (6, 6, 1)


def test_scaling_down_by_two_of_a_smooth_image_is_the_mean_of_neighbours():
    ramp = np.repeat(np.arange(0, 240, 2, dtype=np.uint8)[None, :, None], 120, axis=0)
    halved = resized(ramp, (0, 0, 120, 120), 60)
    expected = ramp.reshape(60, 2, 60, 2).mean(axis=(1, 3))
    np.testing.assert_allclose(halved[5:-5, 5:-5, 0], expected[5:-5, 5:-5], atol=1)
