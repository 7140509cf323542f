"""Text that was tokenized before trains like text that is tokenized meanwhile; so does text read ahead."""

import dataclasses
import json
import threading

import numpy as np
import pytest

from ddiloco.data import tokenized
from ddiloco.data.batches import Selection
from ddiloco.data.errors import DataError
from ddiloco.data.text import held_out_text, make_text_batches
from ddiloco.data.tokenized import open_tokens, write
from ddiloco.data.tokenizers import ByteTokenizer
from tests.small_disks import small_disk
from tests.workbench import assert_equal

TOKENIZER = ByteTokenizer()


@pytest.fixture(scope="module")
def folder(data_dir, tmp_path_factory):
    from ddiloco.data.settings import DataConfig

    made = tmp_path_factory.mktemp("tokens") / "bytes"
    lines = []
    write(few_of(DataConfig(data_dir=data_dir)), TOKENIZER, made, 3, lines.append)
    assert [line.split(" documents")[0] for line in lines] == ["train[:20]: 20", "validation[:5]: 5"]
    return made


def few_of(config):
    return dataclasses.replace(
        config, train_split="train[:20]", eval_split="validation[:5]", sequence_length=512, interleave=4
    )


@pytest.fixture
def few(config):
    return few_of(config)


def batches(config):
    return make_text_batches(config, TOKENIZER, Selection((1,), 2, 4, 7))


def test_batches_and_their_positions_are_those_of_the_text(few, folder):
    text, tokens = batches(few), batches(dataclasses.replace(few, tokenized=str(folder)))
    for _ in range(40):  # beyond an epoch
        assert_equal(next(tokens), next(text))
    state = json.loads(json.dumps(text.get_state()))
    assert tokens.get_state() == state
    text.set_state(state)  # and a run goes over from one to the other
    tokens.set_state(state)
    assert_equal(next(tokens), next(text))


def test_held_out_batches_are_those_of_the_text(few, folder):
    tokenized = dataclasses.replace(few, tokenized=str(folder))
    for ours, theirs in zip(
        held_out_text(tokenized, TOKENIZER, 4, 2), held_out_text(few, TOKENIZER, 4, 2), strict=True
    ):
        assert_equal(ours, theirs)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_threads_that_read_ahead_change_no_batch_also_after_it_was_set_back(few, prefetch):
    plain, ahead = batches(few), batches(dataclasses.replace(few, threads=2, prefetch=prefetch))
    states = []
    for _ in range(30):
        states.append(plain.get_state())
        assert ahead.get_state() == states[-1]
        assert_equal(next(ahead), next(plain))
    for state in (states[7], states[22], states[0]):
        plain.set_state(state)
        ahead.set_state(state)
        for _ in range(3):
            assert_equal(next(ahead), next(plain))
    ahead.close()


class Bare(ByteTokenizer):
    """Bytes without special ids: an empty document has no token; and so many ids that they need 4 bytes."""

    vocab_size = 70_000
    bos = eos = None
    fingerprint = "bare"

    def encode(self, text):
        return super().encode(text)[200:] + 69_000


def test_documents_without_a_token_and_large_ids_are_kept(few, tmp_path):
    write(few, Bare(), tmp_path / "made", 1, lambda line: None)
    text = open_tokens(few, Bare(), few.train_split)
    tokens = open_tokens(dataclasses.replace(few, tokenized=str(tmp_path / "made")), Bare(), few.train_split)
    assert len(tokens) == len(text) == 20 and tokens.full_name == text.full_name
    for index in range(20):
        np.testing.assert_array_equal(tokens[index], text[index])
    assert min(map(len, tokens)) == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tokenized": "nowhere"}, "nowhere: has no tokens that experiments.tokenize has written"),
        ({"train_split": "train"}, r": has no tokens of split 'train'; its splits: train\[:20\], validation"),
        ({"name": "other"}, "holds tokens of name stdlib_text, but wanted is other"),
    ],
)
def test_other_tokens_than_those_wanted_are_refused(few, folder, change, says):
    with pytest.raises(DataError, match=rf"^config\.data\.tokenized: .*{says}"):
        batches(dataclasses.replace(few, **{"tokenized": str(folder), **change}))


def test_tokens_of_another_tokenizer_are_refused(few, folder):
    with pytest.raises(DataError, match="tokens of tokenizer byte, but wanted is bare"):
        open_tokens(dataclasses.replace(few, tokenized=str(folder)), Bare(), few.train_split)


def test_damaged_files_are_refused_and_a_folder_is_never_overwritten(few, folder, tmp_path):
    write(few, TOKENIZER, tmp_path / "made", 1, lambda line: None)
    with pytest.raises(FileExistsError):
        write(few, TOKENIZER, tmp_path / "made", 1, lambda line: None)
    (tmp_path / "made/0-00000.array_record").write_bytes(b"\0" * 100)
    with pytest.raises(DataError, match="cannot be read"):
        batches(dataclasses.replace(few, tokenized=str(tmp_path / "made")))
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_a_full_disk_is_an_error_of_the_disk_and_leaves_nothing_behind(few, tmp_path):
    with small_disk(tmp_path / "disk", "64k") as disk:
        with pytest.raises(OSError, match="made"):
            write(few, TOKENIZER, disk / "made", 1, lambda line: None)
        assert not list(disk.iterdir())


def test_a_ctrl_c_waits_for_no_thread_and_leaves_nothing_behind(few, tmp_path, monkeypatch):
    sound, written, both = tokenized._write_file, [], threading.Barrier(2)

    def write_file(path, documents, *same):
        both.wait(60)
        if not documents.start:
            raise KeyboardInterrupt
        assert same[-1].wait(60)
        written.append(sound(path, documents, *same))

    monkeypatch.setattr(tokenized, "_write_file", write_file)
    with pytest.raises(KeyboardInterrupt):
        write(few, TOKENIZER, tmp_path / "made", 2, print)
    assert written == [0] and not list(tmp_path.iterdir())


def test_a_split_that_there_is_not_leaves_nothing_behind(few, tmp_path):
    with pytest.raises(DataError):
        write(dataclasses.replace(few, eval_split="nothing"), TOKENIZER, tmp_path / "made", 1, print)
    assert not list(tmp_path.iterdir())
