"""Tokenizers: round trips, special ids, and model files that are not there."""

import json
import pathlib
import shutil
import sys

import numpy as np
import pytest
import sentencepiece
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from ddiloco.config import ConfigError, build
from ddiloco.data.settings import DataConfig
from ddiloco.data.tokenizers import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    make_tokenizer,
)
from tests.refusals import refusal

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


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A folder with a tokenizer.json of pairs of bytes, which cuts off and pads what it is given."""
    folder = tmp_path_factory.mktemp("huggingface")
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = level, tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<begin>", "<end>"],
        initial_alphabet=level.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 50, trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("<begin> $A", None, [("<begin>", 1)])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def published(trained, tmp_path):
    """Gives the file of a tokenizer whose settings are these; `beside`: other files by their stems."""

    def make(beside=None, **settings):
        shutil.copy(trained / "tokenizer.json", tmp_path)
        for name, content in {"tokenizer_config": settings, **(beside or {})}.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return str(tmp_path / "tokenizer.json")

    return make


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


def test_a_published_tokenizer_round_trips_any_text_whole(published):
    tokenizer = HuggingFaceTokenizer(published(eos_token="<end>"))
    for text in (TEXT, "many syncers", "naïve 学习 🙂\n\t x", ""):
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int32 and tokenizer.decode(ids) == text
        np.testing.assert_array_equal(tokenizer.encode(text.encode()), ids)
    assert 4 < len(tokenizer.encode(TEXT)) < len(TEXT)  # the file says that 4 tokens are enough
    assert tokenizer.decode(tokenizer.encode("\ud800")) == "?"
    assert tokenizer.decode([*tokenizer.encode("learners"), tokenizer.eos, 10**6, -1]) == "learners"
    assert tokenizer.vocab_size == 300


@pytest.mark.parametrize(
    ("settings", "pad", "bos", "eos"),
    [
        ({"pad_token": "<pad>", "bos_token": "<begin>", "eos_token": "<end>"}, 0, 1, 2),
        ({"bos_token": {"content": "<begin>", "lstrip": False}, "eos_token": "<end>"}, 2, 1, 2),
        ({"bos_token": "<begin>", "eos_token": "<end>", "add_bos_token": False}, 2, None, 2),
        ({"bos_token": "<end>", "eos_token": "<end>"}, 2, None, 2),
        ({}, 0, None, None),
    ],
)
def test_the_special_ids_of_a_published_tokenizer_are_those_of_its_settings(
    settings, pad, bos, eos, published
):
    tokenizer = HuggingFaceTokenizer(published(**settings))
    assert (tokenizer.pad, tokenizer.bos, tokenizer.eos) == (pad, bos, eos)


def test_fingerprints_tell_special_ids_apart(published):
    with_bos = HuggingFaceTokenizer(published(bos_token="<begin>", eos_token="<end>")).fingerprint
    without = HuggingFaceTokenizer(published(eos_token="<end>")).fingerprint
    assert with_bos != without
    assert without == HuggingFaceTokenizer(published(eos_token="<end>", pad_token="<pad>")).fingerprint


@pytest.mark.parametrize(
    ("model", "settings", "told"),
    [
        (None, "{}", "tokenizer.json: cannot be read: No such file"),
        ("{}", "{}", "is no tokenizer.json with its tokenizer_config.json: "),
        ("trained", None, "tokenizer_config.json: cannot be read: No such file"),
        ("trained", '{"eos_token": "<stop>"}', "it has no token '<stop>'"),
        ("trained", '{"eos_token": ["<end>"]}', "list indices must be"),
    ],
)
def test_a_missing_or_corrupt_published_tokenizer_is_told_in_one_line(
    model, settings, told, trained, tmp_path
):
    if model == "trained":
        shutil.copy(trained / "tokenizer.json", tmp_path)
    elif model is not None:
        (tmp_path / "tokenizer.json").write_text(model)
    if settings is not None:
        (tmp_path / "tokenizer_config.json").write_text(settings)
    data = DataConfig(tokenizer="huggingface", tokenizer_model=str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"^config\.data\.tokenizer_model: ") as error:
        make_tokenizer(data)
    assert told in str(error.value) and "\n" not in str(error.value)


DECODER = {"2": {"content": "<end>", "special": True}}


@pytest.mark.parametrize(
    ("settings", "beside", "eos"),
    [
        ({}, {"special_tokens_map": {"eos_token": "<end>"}}, 2),
        ({"eos_token": "<pad>"}, {"special_tokens_map": {"eos_token": "<end>"}}, 2),
        (
            {"eos_token": "<pad>", "added_tokens_decoder": DECODER},
            {"special_tokens_map": {"eos_token": "<end>"}},
            0,
        ),
        ({}, {"config": {"eos_token_id": 2}}, 2),
        ({}, {"config": {"eos_token_id": 0}, "generation_config": {"eos_token_id": [2, 0]}}, 2),
        ({}, {"config": {"eos_token_id": None}}, None),
        ({"eos_token": ""}, {}, None),
    ],
)
def test_the_end_is_looked_for_in_all_files_that_may_name_it(settings, beside, eos, published):
    assert HuggingFaceTokenizer(published(beside, **settings)).eos == eos


def test_files_with_a_byte_order_mark_are_read(published):
    file = pathlib.Path(published(eos_token="<end>"))
    for path in (file, file.with_name("tokenizer_config.json")):
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert HuggingFaceTokenizer(str(file)).eos == 2


def test_the_settings_file_may_be_missing_where_another_one_is_there(published):
    file = pathlib.Path(published({"special_tokens_map": {"eos_token": "<end>"}}))
    file.with_name("tokenizer_config.json").unlink()
    assert HuggingFaceTokenizer(str(file)).eos == 2


@pytest.mark.parametrize("settings", [{}, {"add_bos_token": True}])
def test_without_a_flag_the_file_itself_says_whether_a_text_begins_with_bos(settings, published):
    file = published(bos_token="<begin>", eos_token="<end>", **settings)
    plain = tokenizers.Tokenizer.from_file(file)
    plain.post_processor = tokenizers.processors.ByteLevel()
    plain.save(file)
    assert HuggingFaceTokenizer(file).bos == (1 if settings else None)


def test_tokens_that_only_the_settings_have_are_added(published):
    added = {"300": {"content": "<stop>", "special": True}}
    tokenizer = HuggingFaceTokenizer(published(eos_token="<stop>", added_tokens_decoder=added))
    assert (tokenizer.eos, tokenizer.vocab_size) == (300, 301)
    assert HuggingFaceTokenizer(published({"added_tokens": {"<stop>": 300}}, eos_token="<stop>")).eos == 300
    told = refusal(ConfigError, lambda: HuggingFaceTokenizer(published({"added_tokens": {"<stop>": 400}})))
    assert "'<stop>' gets the id 300, but must have 400" in told


@pytest.mark.parametrize(
    ("settings", "beside"),
    [
        ({"eos_token": "<end>"}, {}),
        ({"eos_token": "<pad>"}, {"special_tokens_map": {"eos_token": "<end>"}}),
        (
            {"eos_token": "<stop>", "added_tokens_decoder": {"300": {"content": "<stop>", "special": True}}},
            {},
        ),
        ({"bos_token": "<begin>", "eos_token": "<end>", "additional_special_tokens": ["<pad>"]}, {}),
    ],
)
@pytest.mark.parametrize("control_tokens", ["text", "tokens"])
def test_transformers_finds_the_same_tokens(settings, beside, control_tokens, published):
    transformers = pytest.importorskip("transformers")
    split = {"split_special_tokens": control_tokens == "text"}
    file = published(beside, tokenizer_class="PreTrainedTokenizerFast", **settings)
    theirs = transformers.AutoTokenizer.from_pretrained(pathlib.Path(file).parent, **split)
    ours = HuggingFaceTokenizer(file, control_tokens)
    text = f"{TEXT}<end>{TEXT}<stop><begin> learners<pad>"
    plain = {"truncation": False, "padding": False}
    assert ours.eos == theirs.eos_token_id
    assert ours.encode(text).tolist() == theirs(text, add_special_tokens=False, **plain).input_ids
    if theirs.bos_token is not None:
        assert [ours.bos] == theirs("", **plain).input_ids


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("by_id", [True, False])
def test_a_document_ends_itself_only_where_control_tokens_are_tokens(special, by_id, published):
    file = published(
        {"config": {"eos_token_id": 2}}, bos_token="<begin>", eos_token=None if by_id else "<end>"
    )
    entries = json.loads(pathlib.Path(file).read_text())
    entries["added_tokens"][2]["special"] = special
    pathlib.Path(file).write_text(json.dumps(entries))
    text = "one<end>two<begin>"
    ours, theirs = (HuggingFaceTokenizer(file, kind) for kind in ("text", "tokens"))
    assert not {0, 1, 2} & set(ours.encode(text)) and ours.decode(ours.encode(text)) == text
    assert [i for i in theirs.encode(text) if i < 3] == [2, 1]
    assert ours.fingerprint != theirs.fingerprint


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("control_tokens", ["text", "tokens"])
def test_what_the_vocabulary_itself_has_is_broken_up(special, control_tokens, tmp_path):
    """A model that knows whole words makes a control token of its name, whatever the token is said to be."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((char, -3.0) for char in "▁</s>ab")]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, 0))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    if special:
        tokenizer.add_special_tokens(["</s>", "<unk>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>", "unk_token": "<unk>"}')
    ours = HuggingFaceTokenizer(str(tmp_path / "tokenizer.json"), control_tokens)
    names = {i: name for name, i in tokenizer.get_vocab().items()}
    whole = ["</s>"] if control_tokens == "tokens" else ["<", "/", "s", ">"]
    found = [names[i] for i in ours.encode("a</s>b</s>").tolist()]
    assert [name for name in found if name != "▁"] == ["a", *whole, "b", *whole]
    assert ours.encode("ü").tolist()[-1:] == [0]


def test_that_the_package_tokenizers_is_missing_is_told_in_one_line(published, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"^config\.data\.tokenizer: huggingface needs .* pip install "):
        HuggingFaceTokenizer(published())


@pytest.mark.parametrize(("kind", "eos"), [("control_symbols", 2), ("user_defined_symbols", None)])
def test_no_text_ends_itself_by_a_sentencepiece_model(kind, eos, tmp_path):
    """An end that a model has for texts to name is none for documents."""
    with (tmp_path / "own.model").open("wb") as writer:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([TEXT, "< / s > < turn >"] * 50),
            model_writer=writer,
            vocab_size=60,
            hard_vocab_limit=False,
            minloglevel=2,
            **{kind: "<turn>" if eos else "<s>,</s>"},
        )
    tokenizer = SentencePieceTokenizer(str(tmp_path / "own.model"))
    ids = tokenizer.encode("learners</s>step<s><turn>").tolist()
    assert tokenizer.eos == eos and not {tokenizer.bos, tokenizer.eos} & {*ids}
    assert tokenizer.decode(ids) == "learners</s>step<s><turn>"


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


@pytest.mark.parametrize("content", [None, b"not a model"])
def test_a_missing_or_corrupt_model_file_is_told_in_one_line(content, tmp_path):
    path = tmp_path / "broken.model"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"^config\.data\.tokenizer_model: .*broken\.model") as error:
        make_tokenizer(DataConfig(tokenizer="sentencepiece", tokenizer_model=str(path)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "values",
    [
        {"tokenizer": "sentencepiece"},
        {"tokenizer": "huggingface"},
        {"tokenizer_model": "some.model"},
        {"tokenizer": "words"},
        {"control_tokens": "tokens"},
        {"control_tokens": "tokens", "tokenizer": "sentencepiece", "tokenizer_model": "some.model"},
    ],
)
def test_settings_that_do_not_fit_together_are_refused(values):
    with pytest.raises(ConfigError, match=r"config\.(tokenizer|control_tokens)"):
        build(DataConfig, values)
