"""Tokenizers: bytes, a SentencePiece model, or the tokenizer.json of published weights."""

from __future__ import annotations

import codecs
import hashlib
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, Protocol

import numpy as np

from ddiloco.config import ConfigError
from ddiloco.data.settings import DataConfig
from ddiloco.data.special_tokens import SETTINGS_FILE, SpecialTokens, read_special_tokens

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
        """The id before each document; None: none."""

    @property
    def eos(self) -> int | None:
        """The id after each document; None: none."""

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
    """A SentencePiece model from a file; raises ConfigError if that is missing or invalid.

    Its bos, eos and pad are control symbols, which no text is encoded to.
    """

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
    """A tokenizer.json; the files beside it name its special tokens (`ddiloco.data.special_tokens`).

    A document ends with eos. It begins with bos if `add_bos_token` is true or, without that setting, if
    tokenizer.json adds it; never if bos is eos.

    Raises:
      ConfigError: a file is missing or something else, or the package tokenizers is.
    """

    def __init__(self, model_file: str, control_tokens: str = "text") -> None:
        """`control_tokens`: as in DataConfig."""
        model = _read(model_file).removeprefix(codecs.BOM_UTF8)
        try:
            import tokenizers

            self._tokenizer = tokenizers.Tokenizer.from_buffer(model)
            special = read_special_tokens(pathlib.Path(model_file).expanduser().parent)
            changed = self._add(special)
            ids = {name: self._id(special.named.get(f"{name}_token")) for name in ("pad", "bos", "eos")}
            ids["eos"] = special.eos_id if ids["eos"] is None else ids["eos"]
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            with_bos = ids["bos"] != ids["eos"] and self._begins_with(ids["bos"], special.add_bos)
            unknown = self._unknown(special.named.get("unk_token"))
            control = {i for i in ids.values() if i is not None} - {unknown}
            self._spelled = self._as_text(control, unknown) if control_tokens == "text" else {}
        except ImportError:
            raise ConfigError(
                "config.data.tokenizer: huggingface needs the package tokenizers: pip install tokenizers"
            ) from None
        except OSError as error:
            raise ConfigError(f"{_FIELD}: {error.filename}: cannot be read: {error.strerror}") from None
        except Exception as error:  # tokenizers raises nothing more special
            problem = f"is no tokenizer.json with its {SETTINGS_FILE}: {error}".splitlines()[0]
            raise ConfigError(f"{_FIELD}: {model_file} {problem}") from None
        self.vocab_size: int = max(self._tokenizer.get_vocab().values()) + 1
        self.bos, self.eos = ids["bos"] if with_bos else None, ids["eos"]
        self.pad = next((i for i in (ids["pad"], self.eos) if i is not None), 0)
        parts = ["huggingface", _digest(model), f"{self.bos}", f"{self.eos}"]
        parts += [_digest(json.dumps(changed).encode())] if changed else []
        self.fingerprint = ":".join([*parts, *(["text"] if control_tokens == "text" else [])])

    def encode(self, text: str | bytes) -> np.ndarray:
        content = text if isinstance(text, bytes) else text.encode("utf-8", errors="replace")
        encoded = self._tokenizer.encode(content.decode("utf-8", errors="replace"), add_special_tokens=False)
        return _replaced(np.asarray(encoded.ids, np.int32), self._spelled)

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids if 0 <= int(i) < self.vocab_size])

    def _add(self, special: SpecialTokens) -> list[Any]:
        """Adds tokens missing in the file, and marks special ones as such; returns the changes."""
        from tokenizers import AddedToken

        changed: list[Any] = []
        for number, token in sorted(special.added.items()):
            if self._tokenizer.token_to_id(token["content"]) is not None:
                continue
            self._tokenizer.add_tokens([AddedToken(**token)])
            if (found := self._tokenizer.token_to_id(token["content"])) != number:
                raise ValueError(f"{token['content']!r} gets the id {found}, but must have {number}")
            changed.append(token)
        named = [*special.named.values(), *special.others]
        if special.eos_id is not None:
            named.append({"content": self._of_model(special.eos_id)})
        known = {token.content: token for token in self._tokenizer.get_added_tokens_decoder().values()}
        for token in named:
            content = token["content"]
            if self._tokenizer.token_to_id(content) is None or getattr(known.get(content), "special", False):
                continue
            flags = {"normalized": False, **token, "special": True}
            self._tokenizer.add_special_tokens([AddedToken(**flags)])
            changed.append(content)
        return changed

    def _id(self, token: Mapping[str, Any] | None) -> int | None:
        if token is None:
            return None
        found: int | None = self._tokenizer.token_to_id(token["content"])
        if found is None:
            raise ValueError(f"it has no token {token['content']!r}")
        return found

    def _of_model(self, eos: int) -> str:
        content: str | None = self._tokenizer.id_to_token(eos)
        if content is None:
            raise ValueError(f"it has no token of the model's eos_token_id, {eos}")
        return content

    def _begins_with(self, bos: int | None, wanted: bool | None) -> bool:
        return bos in self._tokenizer.encode("").ids if wanted is None else wanted

    def _unknown(self, named: Mapping[str, Any] | None) -> int | None:
        """The id for text that has no tokens."""
        token = getattr(self._tokenizer.model, "unk_token", None) or (named or {}).get("content")
        return None if token is None else self._tokenizer.token_to_id(token)

    def _as_text(self, control: Set[int], unknown: int | None) -> dict[int, list[int]]:
        """Encodes names of control tokens as text; by id, the pieces for those in the model's vocabulary."""
        self._tokenizer.encode_special_tokens = True
        added = self._tokenizer.get_added_tokens_decoder().items()
        control = control | {i for i, token in added if token.special and i != unknown}
        names = {i: self._tokenizer.id_to_token(i) or "" for i in sorted(control)}
        known = self._tokenizer.model.token_to_id
        return {i: self._pieces(name, control) for i, name in names.items() if known(name) is not None}

    def _pieces(self, content: str, control: Set[int]) -> list[int]:
        """The ids of a text in the form of the model's vocabulary, with longer control tokens split."""
        found: list[int] = []
        for half in (content[:1], content[1:]):
            for token in self._tokenizer.model.tokenize(half) if half else ():
                whole = token.id in control and len(token.value) > 1
                found += self._pieces(token.value, control) if whole else [token.id]
        return found


def make_tokenizer(config: DataConfig) -> Tokenizer:
    """The tokenizer that `config` names; raises ConfigError if its file is none."""
    file = config.tokenizer_model or ""
    if config.tokenizer == "huggingface":
        return HuggingFaceTokenizer(file, config.control_tokens)
    return SentencePieceTokenizer(file) if config.tokenizer == "sentencepiece" else ByteTokenizer()


def without_end(config: DataConfig, tokenizer: Tokenizer) -> list[str]:
    """A warning if documents get no end."""
    if tokenizer.eos is not None:
        return []
    return [f"data.tokenizer_model: {config.tokenizer_model} has no eos token: no document has an end"]


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


def _replaced(ids: np.ndarray, by: Mapping[int, Sequence[int]]) -> np.ndarray:
    """The ids, with some replaced by several each."""
    at = np.flatnonzero(np.isin(ids, list(by)))
    if not at.size:
        return ids
    kept = np.split(ids, np.stack([at, at + 1], axis=1).reshape(-1))
    kept[1::2] = [np.asarray(by[int(ids[i])], np.int32) for i in at]
    return np.concatenate(kept)
