"""The special tokens of a tokenizer.json, from the files beside it in which transformers 5 looks for them."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

SETTINGS_FILE = "tokenizer_config.json"
_SPECIAL_TOKENS, _ADDED_TOKENS = "special_tokens_map.json", "added_tokens.json"
# Of the model: transformers takes the end of a text from the first that names one
_MODEL_FILES = ("generation_config.json", "config.json")
OF_TOKENIZER = (SETTINGS_FILE, _SPECIAL_TOKENS, _ADDED_TOKENS)
_LISTS = ("additional_special_tokens", "extra_special_tokens")


@dataclasses.dataclass(frozen=True)
class SpecialTokens:
    """The content of the files."""

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
      OSError: none is there, or one cannot be read.
      ValueError, TypeError, LookupError, AttributeError: one holds something else.
    """
    if not any((folder / name).exists() for name in (*OF_TOKENIZER, *_MODEL_FILES)):
        (folder / SETTINGS_FILE).read_bytes()  # raises that there is none
    settings, special, ids = (_read(folder / name) for name in OF_TOKENIZER)
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


def _read(path: pathlib.Path) -> dict[str, Any]:
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
        value = _read(folder / name).get("eos_token_id")
        if value not in (None, []):
            found = value[0] if isinstance(value, list) else value
            if not isinstance(found, int):
                raise TypeError(f"{name}: eos_token_id is {found!r}, but must be a number")
            return found
    return None
