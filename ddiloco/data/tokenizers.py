"""Tokenizers: bytes, a SentencePiece model, or the tokenizer.json of published weights."""

from __future__ import annotations

import codecs
import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, Protocol

import numpy as np

from ddiloco.config import ConfigError
from ddiloco.data.settings import DataConfig

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
    """A tokenizer.json; the files beside it name its special tokens (`read_special_tokens`).

    A document ends with eos. It begins with bos if `add_bos_token` is true or, without that setting, if
    tokenizer.json adds it; never if bos is eos.

    Raises:
      ConfigError: a file is missing or invalid, or the package tokenizers is not installed.
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
        """The id of text that the vocabulary cannot express, if there is one."""
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
    """The tokenizer that `config` names; raises ConfigError if its file is missing or invalid."""
    file = config.tokenizer_model or ""
    if config.tokenizer == "huggingface":
        return HuggingFaceTokenizer(file, config.control_tokens)
    return SentencePieceTokenizer(file) if config.tokenizer == "sentencepiece" else ByteTokenizer()


def without_end(config: DataConfig, tokenizer: Tokenizer) -> list[str]:
    """A warning if the tokenizer has no eos, so that documents have no end."""
    if tokenizer.eos is not None:
        return []
    return [f"data.tokenizer_model: {config.tokenizer_model} has no eos token: no document has an end"]


def check_bytes(vocab_size: int) -> None:
    """Raises ValueError if a vocabulary is too small for byte tokens; the message names the field."""
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


SETTINGS_FILE = "tokenizer_config.json"
_SPECIAL_TOKENS, _ADDED_TOKENS = "special_tokens_map.json", "added_tokens.json"
# The model's: transformers takes eos_token_id from the first of them that has one
_MODEL_FILES = ("generation_config.json", "config.json")
OF_TOKENIZER = (SETTINGS_FILE, _SPECIAL_TOKENS, _ADDED_TOKENS)
_LISTS = ("additional_special_tokens", "extra_special_tokens")


@dataclasses.dataclass(frozen=True)
class SpecialTokens:
    """The special tokens that the files beside a tokenizer.json define."""

    named: Mapping[str, Mapping[str, Any]]  # by role, such as eos_token: content and flags of the token
    others: Sequence[Mapping[str, Any]]  # special tokens without a role
    added: Mapping[int, Mapping[str, Any]]  # by id, tokens that tokenizer.json may lack
    eos_id: int | None  # the model's, where no token has the role
    add_bos: bool | None  # whether a text begins with bos; None: by tokenizer.json


def read_special_tokens(folder: pathlib.Path) -> SpecialTokens:
    """Reads the files in a folder, of which any may be missing, but not all.

    As in transformers, special_tokens_map.json goes before tokenizer_config.json where that has no
    `added_tokens_decoder`. Where it has one, the map is read for roles that it does not name.

    Raises:
      OSError: all are missing, or one cannot be read.
      ValueError, TypeError, LookupError, AttributeError: the content of one is invalid.
    """
    if not any((folder / name).exists() for name in (*OF_TOKENIZER, *_MODEL_FILES)):
        (folder / SETTINGS_FILE).read_bytes()  # raises that there is none
    settings, special, ids = (_read_entries(folder / name) for name in OF_TOKENIZER)
    decoder = settings.get("added_tokens_decoder")
    first, second = (special, settings) if decoder is None else (settings, special)
    entries = {**second, **{name: value for name, value in first.items() if value is not None}}
    named = {
        name: _token(value) for name, value in entries.items() if name.endswith("_token") and _is_token(value)
    }
    added = decoder or {number: text for text, number in ids.items()}
    added = {int(number): _token(value) for number, value in added.items()}
    others = [_token(value) for name in _LISTS for value in _values(entries.get(name))]
    others += [token for token in added.values() if token.get("special")]
    eos_id = None if "eos_token" in named else _eos_id(folder)
    return SpecialTokens(named, others, added, eos_id, settings.get("add_bos_token"))


def _read_entries(path: pathlib.Path) -> dict[str, Any]:
    """The entries of a file, or none if it is missing."""
    try:
        content = json.loads(path.read_bytes())  # bytes: also with a byte order mark
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from None
    if not isinstance(content, dict):
        raise TypeError(f"{path.name} is no JSON object")
    return content


def _is_token(value: Any) -> bool:
    """Whether an entry names a token; `add_bos_token` is a flag, and an empty name none."""
    return value is not None and value != "" and not isinstance(value, bool)


def _token(value: Any) -> dict[str, Any]:
    """Content and flags of a token that a file names."""
    if isinstance(value, str):
        return {"content": value}
    flags = ("lstrip", "rstrip", "single_word", "normalized", "special")
    return {"content": value["content"], **{name: value[name] for name in flags if name in value}}


def _values(tokens: Any) -> Sequence[Any]:
    """The tokens of a list, or those of an object by other names."""
    return list(tokens.values()) if isinstance(tokens, dict) else tokens or []


def _eos_id(folder: pathlib.Path) -> int | None:
    """The id with which the model ends a text; of several the first."""
    for name in _MODEL_FILES:
        value = _read_entries(folder / name).get("eos_token_id")
        if value not in (None, []):
            found = value[0] if isinstance(value, list) else value
            if not isinstance(found, int):
                raise TypeError(f"{name}: eos_token_id is {found!r}, but must be a number")
            return found
    return None
