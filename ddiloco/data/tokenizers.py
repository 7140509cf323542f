"""Tokenizers: bytes, or a SentencePiece model."""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from ddiloco.config import ConfigError
from ddiloco.data.settings import DataConfig


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

        path, field = pathlib.Path(model_file).expanduser(), f"config.data.tokenizer_model: {model_file}"
        try:
            model = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{field}: cannot be read: {error.strerror}") from None
        try:
            if not model:
                raise RuntimeError("empty file")
            self._processor: Any = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError:
            raise ConfigError(f"{field} is not a SentencePiece model") from None
        self.fingerprint = f"sentencepiece:{hashlib.blake2b(model, digest_size=8).hexdigest()}"
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


def make_tokenizer(config: DataConfig) -> Tokenizer:
    """The tokenizer that `config` names; raises ConfigError if its file is none."""
    if config.tokenizer == "byte":
        return ByteTokenizer()
    return SentencePieceTokenizer(config.tokenizer_model or "")


def check_bytes(vocab_size: int) -> None:
    """Raises ValueError if a model with so many ids has too few for bytes; the message names its field."""
    if vocab_size < ByteTokenizer.vocab_size:
        raise ValueError(
            f"model.vocab_size: is {vocab_size}, but bytes need at least {ByteTokenizer.vocab_size}"
        )


def _id_or_none(token: int) -> int | None:
    return token if token >= 0 else None
