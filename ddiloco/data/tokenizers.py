"""Tokenizers: bytes, a SentencePiece model, or a tokenizer.json as published weights come with."""

from __future__ import annotations

import hashlib
import json
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import numpy as np

from ddiloco.config import ConfigError
from ddiloco.data.settings import DataConfig

SETTINGS_FILE = "tokenizer_config.json"
_FIELD = "config.data.tokenizer_model"


class Tokenizer(Protocol):
    """Converts text to token ids in [0, vocab_size), and back."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, special ones included."""

    @property
    def pad(self) -> int:
        """The id of padding, which never counts."""

    @property
    def bos(self) -> int | None:
        """Put before each document; None if there is no such id."""

    @property
    def eos(self) -> int | None:
        """Put after each document; None if there is no such id."""

    @property
    def fingerprint(self) -> str:
        """Equal only for tokenizers that give the same ids."""

    def encode(self, text: str | bytes) -> np.ndarray:
        """The ids of `text` (bytes are UTF-8), (n,) int32, without bos and eos."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, without special ids; invalid UTF-8 becomes replacement characters."""


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of UTF-8; then come pad, bos and eos: 259 in all."""

    vocab_size = 259
    pad = 256
    bos = 257
    eos = 258
    fingerprint = "byte"

    def encode(self, text: str | bytes) -> np.ndarray:
        """As in `Tokenizer`; lone surrogates, which have no bytes, become question marks."""
        content = text.encode("utf-8", errors="replace") if isinstance(text, str) else text
        return np.frombuffer(content, np.uint8).astype(np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        ids = np.asarray(list(ids) if not isinstance(ids, np.ndarray) else ids, np.int64).reshape(-1)
        return ids[(ids >= 0) & (ids < 256)].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class SentencePieceTokenizer:
    """A SentencePiece model from a file; raises ConfigError if that is missing or something else."""

    def __init__(self, model_file: str) -> None:
        import sentencepiece

        model = _read(model_file)
        try:
            if not model:
                raise RuntimeError("empty file")
            self._processor: Any = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError:
            raise ConfigError(f"{_FIELD}: {model_file} is not a SentencePiece model") from None
        self.fingerprint = f"sentencepiece:{_digest(model)}"
        self.vocab_size: int = self._processor.vocab_size()
        self.bos = _id_or_none(self._processor.bos_id())
        self.eos = _id_or_none(self._processor.eos_id())
        pad = _id_or_none(self._processor.pad_id())
        self.pad = self._processor.unk_id() if pad is None else pad

    def encode(self, text: str | bytes) -> np.ndarray:
        content = text.decode("utf-8", errors="replace") if isinstance(text, bytes) else text
        return np.asarray(self._processor.encode(content, out_type=int), np.int32).reshape(-1)

    def decode(self, ids: Iterable[int]) -> str:
        skipped = {self.pad, self.bos, self.eos}
        kept = [int(i) for i in ids if int(i) not in skipped and 0 <= int(i) < self.vocab_size]
        return self._processor.decode(kept) if kept else ""


class HuggingFaceTokenizer:
    """A tokenizer.json; `tokenizer_config.json` beside it names its special tokens.

    A document ends with eos, and begins with bos unless that is the same token or `add_bos_token` is false.

    Raises:
      ConfigError: a file is missing or something else, or the package tokenizers is.
    """

    def __init__(self, model_file: str) -> None:
        model, settings = _read(model_file), _read(str(pathlib.Path(model_file).with_name(SETTINGS_FILE)))
        try:
            import tokenizers

            self._tokenizer = tokenizers.Tokenizer.from_buffer(model)
            named = json.loads(settings)
            special = {name: self._special(named.get(f"{name}_token")) for name in ("pad", "bos", "eos")}
            with_bos = named.get("add_bos_token", True) and special["bos"] != special["eos"]
        except ImportError:
            raise ConfigError(
                "config.data.tokenizer: huggingface needs the package tokenizers: pip install tokenizers"
            ) from None
        except Exception as error:  # tokenizers raises nothing more special
            told = f"is no tokenizer.json with its {SETTINGS_FILE}: {error}".splitlines()[0]
            raise ConfigError(f"{_FIELD}: {model_file} {told}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size: int = max(self._tokenizer.get_vocab().values()) + 1
        self.bos, self.eos = special["bos"] if with_bos else None, special["eos"]
        self.pad = next((i for i in (special["pad"], self.eos) if i is not None), 0)
        self.fingerprint = f"huggingface:{_digest(model)}:{self.bos}:{self.eos}"

    def encode(self, text: str | bytes) -> np.ndarray:
        content = text if isinstance(text, bytes) else text.encode("utf-8", errors="replace")
        encoded = self._tokenizer.encode(content.decode("utf-8", errors="replace"), add_special_tokens=False)
        return np.asarray(encoded.ids, np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids if 0 <= int(i) < self.vocab_size])

    def _special(self, token: str | Mapping[str, Any] | None) -> int | None:
        if token is None:
            return None
        content = token if isinstance(token, str) else token["content"]
        found: int | None = self._tokenizer.token_to_id(content)
        if found is None:
            raise ValueError(f"it has no token {content!r}")
        return found


def make_tokenizer(config: DataConfig) -> Tokenizer:
    """The tokenizer that `config` names; raises ConfigError if its file is none."""
    kind = _OF_FILES.get(config.tokenizer)
    return ByteTokenizer() if kind is None else kind(config.tokenizer_model or "")


def check_bytes(vocab_size: int) -> None:
    """Raises ValueError if a model with so many ids has too few for bytes; the message names its field."""
    if vocab_size < ByteTokenizer.vocab_size:
        raise ValueError(
            f"model.vocab_size: is {vocab_size}, but bytes need at least {ByteTokenizer.vocab_size}"
        )


def _read(file: str) -> bytes:
    try:
        return pathlib.Path(file).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"{_FIELD}: {file}: cannot be read: {error.strerror}") from None


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def _id_or_none(token: int) -> int | None:
    return token if token >= 0 else None


_OF_FILES: dict[str, Callable[[str], Tokenizer]] = {
    "sentencepiece": SentencePieceTokenizer,
    "huggingface": HuggingFaceTokenizer,
}
