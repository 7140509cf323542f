"""Writes a model as a folder that transformers reads: weights, settings and tokenizer."""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ddiloco.config import ConfigError
from ddiloco.data.settings import DataConfig
from ddiloco.data.tokenizers import OF_TOKENIZER, SETTINGS_FILE, ByteTokenizer, make_tokenizer
from ddiloco.settings.experiment import Experiment
from ddiloco.storage import array_file
from ddiloco.weights.architectures import counterpart_of
from ddiloco.weights.counterpart import CONFIG, Theirs
from ddiloco.weights.files import SHARD_BYTES, Tensor, write

_SPECIAL = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}


def export(
    experiment: Experiment,
    params: Mapping[str, np.ndarray],
    folder: pathlib.Path,
    shard_bytes: int = SHARD_BYTES,
) -> list[str]:
    """Writes the parameters, by layer, into the folder, new or empty; `config.json` is written last.

    It needs memory for the tensors of one file beside the parameters.

    Returns:
      A line for each part that has no counterpart in transformers; logits are equal all the same.

    Raises:
      ConfigError: transformers has no architecture that computes the same; the message is one line.
      OSError: the disk refuses.
    """
    found = counterpart_of(experiment.model)
    if found.differences:
        raise ConfigError(f"config.{'; '.join(found.differences)}")
    folder.mkdir(parents=True, exist_ok=True)
    tensors = [
        Tensor(name, theirs.shape, functools.partial(_made, params, theirs))
        for name, theirs in found.table.theirs.items()
    ]
    write(folder, tensors, shard_bytes)
    more: dict[str, Any] = {}
    lines: list[str] = []
    if isinstance(experiment.data, DataConfig):
        files, more, lines = tokenizer_files(experiment.data)
        for name, content in files.items():
            array_file.replace(folder / name, [content])
    more |= {"architectures": [found.architecture], "dtype": "float32", "torch_dtype": "float32"}
    for name in reversed(found.files):
        entries = {**found.entries(name), **(more if name == CONFIG else {})}
        array_file.replace(folder / name, [json.dumps(entries, indent=2).encode() + b"\n"])
    return lines


def _made(params: Mapping[str, np.ndarray], theirs: Theirs) -> np.ndarray:
    if theirs.ours is None:
        return np.zeros(theirs.shape, np.float32)
    return theirs.make(np.asarray(params[theirs.ours], np.float32))


class TokenizerFiles(NamedTuple):
    """Files by name, entries of config.json, and lines about what has no counterpart."""

    files: dict[str, bytes]
    entries: dict[str, Any]
    lines: list[str]


def tokenizer_files(data: DataConfig) -> TokenizerFiles:
    """The tokenizer of this text, as transformers reads it: bytes as a byte-level BPE without merges."""
    tokenizer = make_tokenizer(data)
    ids = {"pad_token_id": tokenizer.pad, "bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eos}
    entries = {"max_position_embeddings": data.sequence_length, **ids}
    if data.tokenizer == "byte":
        plain = {"clean_up_tokenization_spaces": False, "model_max_length": data.sequence_length}
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **_SPECIAL, **plain}
        contents = {"tokenizer.json": _byte_level(), SETTINGS_FILE: config}
        files = {name: json.dumps(content).encode() for name, content in contents.items()}
        return TokenizerFiles(files, entries, [])
    file = pathlib.Path(data.tokenizer_model or "").expanduser()
    model = file.read_bytes()
    if data.tokenizer == "huggingface":
        beside = [path for name in OF_TOKENIZER if (path := file.with_name(name)).exists()]
        files = {"tokenizer.json": model, **{path.name: path.read_bytes() for path in beside}}
        return TokenizerFiles(files, entries, [])
    line = "tokenizer: tokenizer.model is for the package sentencepiece; transformers has none quite like it"
    return TokenizerFiles({"tokenizer.model": model}, entries, [line])


def _byte_level() -> dict[str, Any]:
    """tokenizer.json: a document begins with bos, as in training, and each byte has its value as id."""
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    ids = {name: getattr(ByteTokenizer, name.removesuffix("_token")) for name in _SPECIAL}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    bos = _SPECIAL["bos_token"]
    vocabulary = {char: byte for byte, char in enumerate(_characters())}
    return {
        "version": "1.0",
        "added_tokens": [{"id": ids[name], "content": _SPECIAL[name], **special} for name in _SPECIAL],
        "pre_tokenizer": level,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {bos: {"id": bos, "ids": [ids["bos_token"]], "tokens": [bos]}},
        },
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }


def _characters() -> list[str]:
    """What stands for each byte in byte-level vocabularies.

    Itself in Latin-1, or where that is no visible character the next one from 256 on.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]
