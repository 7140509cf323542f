"""Batches of the real data set: shards, epochs, exact resumption, and the same rows data-parallel."""

import collections
import dataclasses
import itertools

import numpy as np
import pytest

from ddiloco.config import ConfigError, build
from ddiloco.data.batches import Selection, shard_seed
from ddiloco.data.errors import DataError
from ddiloco.data.settings import DataConfig
from ddiloco.data.text import held_out_text, make_text_batches
from ddiloco.data.tokenizers import ByteTokenizer
from tests.data.positions import assert_goes_on
from tests.workbench import assert_equal

TOKENIZER = ByteTokenizer()


def batches(config, shards=(0,), num_shards=4, batch_size=4, seed=7):
    return make_text_batches(config, TOKENIZER, Selection(shards, num_shards, batch_size, seed))


def documents_of(config, count, **options):
    """The first `count` whole documents that the rows hold, put together again from the inputs alone."""
    found, part = [], []
    for batch in batches(config, **options):
        for token in batch["inputs"].reshape(-1).tolist():
            if token == TOKENIZER.bos:
                part = []
            elif token == TOKENIZER.eos:
                found.append(bytes(part))
                if len(found) == count:
                    return found
            else:
                part.append(token)


@pytest.fixture
def few(config):
    """The first 40 documents, in rows long enough to pass through several epochs quickly."""
    return dataclasses.replace(config, train_split="train[:40]", sequence_length=2048, interleave=1)


def test_rows_in_stored_order_reconstruct_the_documents_in_order(few, train_texts):
    unshuffled = dataclasses.replace(few, shuffle=False)
    assert documents_of(unshuffled, 20, shards=(0,)) == train_texts[:40][0::4] * 2


def test_a_tokenizer_without_special_ids_gives_the_bare_bytes(few, train_texts):
    class Bare(ByteTokenizer):
        bos = eos = None

    stored_order = dataclasses.replace(few, shuffle=False)
    iterator = make_text_batches(stored_order, Bare(), Selection((0,), 1, 8, seed=0))
    stored = b"".join(train_texts[:40])
    drawn = b"".join(row for _ in range(10) for row in pieces(next(iterator)))
    assert drawn == (stored * 2)[: len(drawn)]


def test_shards_share_no_document_and_together_hold_all(few, train_texts):
    drawn = [documents_of(few, 8, shards=(shard,), num_shards=5) for shard in range(5)]
    counts = collections.Counter(itertools.chain.from_iterable(drawn))
    assert counts == collections.Counter(train_texts[:40])


def test_each_epoch_has_its_own_order_of_the_same_documents(few):
    drawn = documents_of(few, 30)
    epochs = [drawn[:10], drawn[10:20], drawn[20:]]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_interleaved_rows_read_every_document_once_an_epoch_and_in_one_piece(few, train_texts):
    lanes = 3
    config = dataclasses.replace(few, sequence_length=256, interleave=lanes)
    begun, ended, reading = [], 0, {}
    iterator = batches(config, batch_size=1)
    for row in itertools.count():
        for token in next(iterator)["inputs"][0].tolist():
            if token == TOKENIZER.bos:
                reading[row % lanes] = bytearray()
                begun.append(reading[row % lanes])
            elif token == TOKENIZER.eos:
                ended += any(reading[row % lanes] is document for document in begun[:10])
            else:
                reading[row % lanes].append(token)
        if ended == 10:
            break
    assert sorted(map(bytes, begun[:10])) == sorted(train_texts[:40][::4])


def test_a_seed_gives_one_order_and_another_seed_another(few):
    first = documents_of(few, 10, seed=1)
    assert documents_of(few, 10, seed=1) == first
    assert documents_of(few, 10, seed=2) != first
    # Grain seeds epoch e with seed + e, so neighbours must not become neighbours.
    assert documents_of(few, 20, seed=1)[10:] != documents_of(few, 10, seed=2)


def test_shard_seeds_fit_grain_and_differ():
    seeds = {shard_seed(seed, shard) for seed in range(20) for shard in range(20)}
    assert len(seeds) == 400
    assert all(0 <= seed < 2**32 for seed in seeds)


def test_data_parallel_draws_the_very_rows_of_the_learners(config):
    learners = [batches(config, shards=(shard,), batch_size=3) for shard in range(4)]
    together = batches(config, shards=(0, 1, 2, 3), batch_size=12)
    for _ in range(20):
        parts = [next(learner) for learner in learners]
        assert_equal(next(together), {name: np.concatenate([p[name] for p in parts]) for name in parts[0]})


@pytest.mark.parametrize(
    ("prefetch", "steps", "interleave", "shards"),
    [(3, 1, 1, (3, 0)), (0, 17, 4, (3, 0)), (3, 60, 4, (2,))],
)
def test_a_restored_iterator_continues_exactly(few, prefetch, steps, shards, interleave):
    # 60 steps: beyond an epoch
    config = dataclasses.replace(few, sequence_length=1024, prefetch=prefetch, interleave=interleave)
    original = batches(config, shards=shards)
    for _ in range(steps):
        next(original)
    assert_goes_on(original, batches(config, shards=shards), steps)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seed": 8}, "seed was 7, is 8"),
        ({"num_shards": 5}, "num_shards was 4, is 5"),
        ({"shards": (1,)}, r"shards were \[0\], are \[1\]"),
    ],
)
def test_a_state_of_another_stream_is_refused_with_the_difference(config, change, says):
    state = batches(config).get_state()
    with pytest.raises(DataError, match=says):
        batches(config, **change).set_state(state)


def test_a_state_fits_another_batch_size(config):
    small, large = batches(config, batch_size=2), batches(config, batch_size=6)
    next(small)
    large.set_state(small.get_state())
    rows = [next(small) for _ in range(3)]
    assert_equal(next(large), {name: np.concatenate([row[name] for row in rows]) for name in rows[0]})


def test_more_shards_than_documents_are_refused(few):
    with pytest.raises(
        DataError, match=r"^config.data.train_split: .* has 40 records in split .*, too few for 41 shards"
    ) as error:
        batches(few, num_shards=41)
    assert "\n" not in str(error.value)


def test_a_shard_of_one_document_repeats_it(few, train_texts):
    assert documents_of(few, 2, shards=(3,), num_shards=40) == [train_texts[3]] * 2


@pytest.mark.parametrize(
    "options",
    [{"shards": ()}, {"shards": (8,)}, {"shards": (1, 1)}, {"shards": (0, 1, 2)}, {"batch_size": 0}],
)
def test_shards_and_batch_sizes_that_do_not_fit_are_refused(config, options):
    with pytest.raises(ConfigError, match=r"^(shards|batch_size): "):
        batches(config, **options)


def test_held_out_batches_are_the_same_for_everybody_and_from_other_files(config, train_texts):
    longer = dataclasses.replace(config, sequence_length=256)
    first = held_out_text(longer, TOKENIZER, 4, 3)
    assert len(first) == 3
    for ours, theirs in zip(first, held_out_text(longer, TOKENIZER, 4, 3), strict=True):
        assert ours["inputs"].shape == (4, 256)
        assert_equal(ours, theirs)
    trained_on = b"\0".join(train_texts)
    assert sum(row in trained_on for batch in first for row in pieces(batch)) <= 2


def pieces(batch):
    """The bytes of each row, without special ids."""
    return [bytes(i for i in row if i < 256) for row in batch["inputs"].tolist()]


def test_held_out_rows_are_spread_over_the_whole_split(config):
    few_rows = np.concatenate([b["inputs"] for b in held_out_text(config, TOKENIZER, 8, 4)])
    every = np.concatenate([b["inputs"] for b in held_out_text(config, TOKENIZER, 256, 10_000)])
    place = [int(np.flatnonzero((every == row).all(axis=1))[0]) for row in few_rows]
    gaps = np.diff(place)
    assert gaps.min() >= 0.5 * len(every) / 32
    assert gaps.max() <= 2 * len(every) / 32


def test_a_small_held_out_split_gives_what_it_has_once_and_then_padding(config, train_texts):
    few = {"train_split": "train[2:]", "eval_split": "train[:2]"}
    small = dataclasses.replace(config, **few, sequence_length=512)
    got = held_out_text(small, TOKENIZER, 8, 1000)
    tokens = sum(len(text) + 2 for text in train_texts[:2])
    assert len(got) == -(-tokens // (8 * 512))
    assert {batch["inputs"].shape for batch in got} == {(8, 512)}
    assert sum(int(batch["weights"].sum()) for batch in got) == tokens - 2
    last = got[-1]
    padding = last["segments"] == 0
    assert padding.any() and not last["weights"][padding].any()
    assert (last["inputs"][padding] == TOKENIZER.pad).all()


def test_a_large_held_out_split_is_read_only_up_to_the_pool(config, monkeypatch):
    monkeypatch.setattr("ddiloco.data.text.HELD_OUT_POOL", 1)
    one_document = held_out_text(config, TOKENIZER, 64, 10_000)
    assert sum((batch["inputs"] == TOKENIZER.bos).sum() for batch in one_document) == 1


def test_an_empty_held_out_split_is_an_error(config):
    with pytest.raises(DataError, match=r"^config.data.eval_split: .* no record in split"):
        held_out_text(dataclasses.replace(config, eval_split="validation[:0]"), TOKENIZER, 4, 1)


@pytest.mark.parametrize(
    ("train", "held_out", "apart"),
    [
        ("train", "validation", True),
        ("train[:90%]", "train[90%:]", True),
        ("train", "train", False),
        ("train[:90%]", "train", False),
        ("train[:90%]", "train[-20%:]", False),
        ("train[:90%]", "train[-10%:]", True),
        ("train[10%:20%]+train[80%:]", "train[20%:80%]", True),
        ("train[10%:20%]+train[80%:]", "train[15%:80%]", False),
        ("train[:100]", "train[99:200]", False),
        ("train[:100]", "train[100:]", True),
        ("train+validation", "validation[:5%]", False),
        ("all", "validation", False),
        ("train[:4shard]", "train[4shard:]", True),
        ("train[:4shard]", "train[2shard:3shard]", False),
    ],
)
def test_what_is_trained_on_is_not_held_out(train, held_out, apart):
    splits = {"train_split": train, "eval_split": held_out}
    if apart:
        assert build(DataConfig, splits, "data").eval_split == held_out
    else:
        with pytest.raises(ConfigError, match=r"^data\.eval_split: is .*, but must have nothing of train_"):
            build(DataConfig, splits, "data")
