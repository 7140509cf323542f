"""Tokenizers: round trips, special ids, and model files that are not there."""

import numpy as np
import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from ddiloco.config import ConfigError, build
from ddiloco.data.settings import DataConfig
from ddiloco.data.tokenizers import ByteTokenizer, SentencePieceTokenizer, make_tokenizer

TEXT = "the learner steps on while the syncer merges fragments of many learners\n"


@pytest.fixture(scope="session")
def model_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sentencepiece")
    corpus = folder / "corpus.txt"
    corpus.write_text(TEXT * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(folder / "small"),
        vocab_size=300,
        byte_fallback=True,
        hard_vocab_limit=False,
        remove_extra_whitespaces=False,
        minloglevel=2,
        pad_id=3,
    )
    return str(folder / "small.model")


@given(st.text())
def test_bytes_round_trip_any_text(text):
    tokenizer = ByteTokenizer()
    kept = text.encode("utf-8", errors="replace").decode()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == kept
    assert ids.tolist() == list(tokenizer.encode(kept.encode()))


@given(st.lists(st.integers(0, 258)))
def test_bytes_decode_any_ids_without_an_error(ids):
    content = bytes(i for i in ids if i < 256)
    assert ByteTokenizer().decode(ids) == content.decode("utf-8", errors="replace")


def test_byte_ids_and_special_ids_fill_the_vocabulary():
    tokenizer = ByteTokenizer()
    ids = [*tokenizer.encode(bytes(range(256))), tokenizer.pad, tokenizer.bos, tokenizer.eos]
    assert sorted(ids) == list(range(tokenizer.vocab_size))


def test_sentencepiece_round_trips_text_of_and_beyond_its_corpus(model_file):
    tokenizer = SentencePieceTokenizer(model_file)
    for text in (TEXT.strip(), "many syncers", "naïve 学习"):
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int32 and ids.max() < tokenizer.vocab_size
        assert tokenizer.decode(ids) == text
        np.testing.assert_array_equal(tokenizer.encode(text.encode()), ids)
    assert len(tokenizer.encode(TEXT)) < len(TEXT)
    assert len(tokenizer.encode("")) == 0


def test_sentencepiece_special_ids_are_the_models_and_decode_to_nothing(model_file):
    tokenizer = SentencePieceTokenizer(model_file)
    assert (tokenizer.bos, tokenizer.eos, tokenizer.pad) == (1, 2, 3)
    ids = [tokenizer.bos, *tokenizer.encode("learners"), tokenizer.eos, tokenizer.pad, 10**6]
    assert tokenizer.decode(ids) == "learners"
    assert tokenizer.decode([]) == ""


def test_fingerprints_tell_models_apart(model_file, tmp_path):
    copy = tmp_path / "copy.model"
    with open(model_file, "rb") as file:
        copy.write_bytes(file.read())
    ours = SentencePieceTokenizer(model_file).fingerprint
    assert ours == SentencePieceTokenizer(str(copy)).fingerprint
    assert ours != ByteTokenizer().fingerprint


def test_the_config_chooses_the_tokenizer(model_file):
    assert isinstance(make_tokenizer(DataConfig()), ByteTokenizer)
    chosen = make_tokenizer(DataConfig(tokenizer="sentencepiece", tokenizer_model=model_file))
    assert isinstance(chosen, SentencePieceTokenizer)


@pytest.mark.parametrize("content", [None, b"", b"not a model", b"\x00" * 1000])
def test_a_missing_or_corrupt_model_file_is_told_in_one_line(content, tmp_path):
    path = tmp_path / "broken.model"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"^config\.data\.tokenizer_model: .*broken\.model") as error:
        make_tokenizer(DataConfig(tokenizer="sentencepiece", tokenizer_model=str(path)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "values", [{"tokenizer": "sentencepiece"}, {"tokenizer_model": "some.model"}, {"tokenizer": "words"}]
)
def test_settings_that_do_not_fit_together_are_refused(values):
    with pytest.raises(ConfigError, match=r"config\.tokenizer"):
        build(DataConfig, values)
