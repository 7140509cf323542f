"""Documents as tokens: tokenized as they are read, or read from files of tokens.

Both give the same tokens in the same order, so that a run may change from one to the other.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import errno
import itertools
import json
import pathlib
import secrets
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ddiloco.config import build
from ddiloco.data.errors import DataError
from ddiloco.data.settings import DataConfig
from ddiloco.data.source_files import file_digests, is_path, text_files
from ddiloco.data.sources import data_root, open_text
from ddiloco.data.tokenizers import Tokenizer

_INDEX = "tokens.json"
_DTYPES = ("<u2", "<u4")


@dataclasses.dataclass(frozen=True)
class _Split:
    """The files of one split, and how many documents and tokens are in them."""

    files: tuple[str, ...]
    documents: int
    tokens: int


@dataclasses.dataclass(frozen=True)
class _Index:
    """The index file: the text, and the tokenizer of its tokens."""

    name: str
    text_feature: str
    tokenizer: str
    full_name: str
    dtype: str
    splits: Mapping[str, _Split]


class TokenizingSource(Sequence[np.ndarray]):
    """The documents of one split, each tokenized when it is read: ids with bos and eos, (n,) int32."""

    def __init__(self, config: DataConfig, tokenizer: Tokenizer, split: str) -> None:
        feature, setting = config.text_feature, config.setting_of(split)
        self._text = open_text(config.name, split, config.data_dir, feature=feature, setting=setting)
        self._tokenizer = tokenizer
        self._before = [] if tokenizer.bos is None else [tokenizer.bos]
        self._after = [] if tokenizer.eos is None else [tokenizer.eos]
        self.full_name = self._text.full_name

    def __len__(self) -> int:
        return len(self._text)

    def __getitem__(self, index: Any) -> Any:
        ids = self._tokenizer.encode(self._text[index]["text"])
        return np.concatenate([self._before, ids, self._after], dtype=np.int32, casting="unsafe")


class TokenizedSource(Sequence[np.ndarray]):
    """The documents of one split as `write` has tokenized them."""

    def __init__(self, config: DataConfig, tokenizer: Tokenizer, split: str) -> None:
        """Raises DataError if the files are of another text or tokenizer, or cannot be read."""
        import grain

        folder = pathlib.Path(config.tokenized or "")
        index = _index(folder)
        wanted = _identity(config, tokenizer)
        for what, value in wanted.items():
            if (found := getattr(index, what)) != value:
                raise DataError(
                    f"config.data.tokenized: {folder}: holds tokens of {what} {found}, but wanted is {value}"
                )
        _check_files(config, folder, index.full_name)
        if split not in index.splits:
            having = ", ".join(sorted(index.splits))
            raise DataError(
                f"config.data.tokenized: {folder}: has no tokens of split {split!r}; its splits: {having}"
            )
        self._name, self._dtype = f"config.data.tokenized: {folder}, split {split}", np.dtype(index.dtype)
        self.full_name = index.full_name
        self._count = index.splits[split].documents
        try:
            files = [folder / name for name in index.splits[split].files]
            self._records = grain.sources.ArrayRecordDataSource(files)
            _ = self[0]
        except (RuntimeError, OSError, ValueError, IndexError) as error:
            raise DataError(f"{self._name}: cannot be read: {error}".splitlines()[0]) from None
        if len(self._records) != self._count:
            raise DataError(f"{self._name}: has {len(self._records)} documents instead of {self._count}")

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self._count:
            raise IndexError(f"document {index} of {self._count} in {self._name}")
        try:
            return np.frombuffer(self._records[index], self._dtype).astype(np.int32)
        except (RuntimeError, OSError) as error:  # of ArrayRecord, for missing and damaged files
            raise DataError(f"{self._name}: document {index} cannot be read: {error}") from None


def open_tokens(config: DataConfig, tokenizer: Tokenizer, split: str) -> TokenizingSource | TokenizedSource:
    """The documents of a split as tokens, from `config.tokenized` if that is set; may raise DataError."""
    kind = TokenizingSource if config.tokenized is None else TokenizedSource
    return kind(config, tokenizer, split)


def write(
    config: DataConfig,
    tokenizer: Tokenizer,
    folder: pathlib.Path,
    threads: int,
    print_line: Callable[[str], None],
) -> None:
    """Tokenizes the training and held-out splits of `config` into ArrayRecord files, one for each thread.

    The folder appears once all is written. `print_line` is called with a line for each split.

    Raises:
      DataError: the text cannot be opened.
      OSError: writing fails, or the folder exists already.
    """
    if folder.exists():
        raise FileExistsError(errno.EEXIST, "is there already", str(folder))
    wanted = dict.fromkeys((config.train_split, config.eval_split))
    sources = {split: TokenizingSource(config, tokenizer, split) for split in wanted}
    partial = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    partial.mkdir(parents=True)
    try:
        _write(config, tokenizer, sources, partial, threads, print_line)
        partial.rename(folder)
    except RuntimeError as error:  # ArrayRecord's, with the disk's error
        raise OSError(errno.EIO, str(error).splitlines()[0], str(partial)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(
    config: DataConfig,
    tokenizer: Tokenizer,
    sources: Mapping[str, TokenizingSource],
    folder: pathlib.Path,
    threads: int,
    print_line: Callable[[str], None],
) -> None:
    dtype = np.dtype(_DTYPES[0] if tokenizer.vocab_size <= 1 << 16 else _DTYPES[1])
    splits: dict[str, Any] = {}
    full_name = ""
    for number, (split, source) in enumerate(sources.items()):
        full_name = source.full_name
        names = [f"{number}-{part:05d}.array_record" for part in range(min(threads, len(source)))]
        bounds = np.linspace(0, len(source), len(names) + 1).astype(int).tolist()
        parts = [range(first, stop) for first, stop in itertools.pairwise(bounds)]
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            paths, given_up = [str(folder / name) for name in names], threading.Event()
            same = (itertools.repeat(one) for one in (source, dtype, given_up))
            try:
                tokens = sum(pool.map(_write_file, paths, parts, *same))
            except BaseException:  # also Ctrl-C; leaving the pool waits for its threads
                given_up.set()
                raise
        splits[split] = {"files": names, "documents": len(source), "tokens": tokens}
        print_line(f"{split}: {len(source):,} documents, {tokens:,} tokens")
    index = {**_identity(config, tokenizer), "full_name": full_name, "dtype": dtype.str, "splits": splits}
    (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _write_file(
    path: str, documents: range, source: Sequence[np.ndarray], dtype: np.dtype, given_up: threading.Event
) -> int:
    """Writes these documents to one file, until `given_up` is set; returns the number of their tokens."""
    from array_record.python.array_record_module import ArrayRecordWriter

    writer, tokens = ArrayRecordWriter(path, "group_size:1"), 0
    for index in documents:
        if given_up.is_set():
            break
        ids = source[index]
        tokens += len(ids)
        writer.write(ids.astype(dtype).tobytes())
    writer.close()
    return tokens


def _identity(config: DataConfig, tokenizer: Tokenizer) -> dict[str, str]:
    """What must be equal for files of tokens to be used."""
    return {
        "name": config.name,
        "text_feature": config.text_feature,
        "tokenizer": tokenizer.fingerprint,
    }


def _check_files(config: DataConfig, folder: pathlib.Path, full_name: str) -> None:
    """Raises DataError if the files of text are on this machine, and have changed since."""
    if not is_path(config.name):
        return
    try:
        files, root = text_files(config.name), data_root(config.data_dir)
    except DataError:  # only their tokens are here
        return
    now = file_digests(config.name, config.text_feature, root, files).digest
    if now not in full_name.split("/"):
        problem = (
            f"holds tokens of {config.name} as it was: its files have changed since; tokenize them again"
        )
        raise DataError(f"config.data.tokenized: {folder}: {problem}")


def _index(folder: pathlib.Path) -> _Index:
    try:
        index = build(_Index, json.loads((folder / _INDEX).read_text()), "index")
        if index.dtype not in _DTYPES:
            raise ValueError(index.dtype)
        return index
    except (OSError, ValueError, RecursionError):
        raise DataError(
            f"config.data.tokenized: {folder}: has no tokens that experiments.tokenize has written"
        ) from None
