"""Text and image data sets as random-access sources, any TFDS name through one path."""

from __future__ import annotations

import difflib
import importlib
import io
import os
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ddiloco.data.errors import DataError
from ddiloco.data.settings import ImagesConfig
from ddiloco.data.source_files import is_path

EMBEDDED = {"stdlib_text": "StdlibText", "digits": "Digits"}  # built here: module and class of the builder

KEPT_BYTES = 1 << 28  # of decoded images, which then stay in memory
_EMBEDDED_WAIT_SECONDS = 300.0
_DOWNLOAD_WAIT_SECONDS = 24 * 3600.0
_NETWORK_SECONDS = 3.0
_NETWORK_PROBE = "https://storage.googleapis.com"

# Parts of TFDS that register their builders only when they are imported.
_GROUPS = (
    "text",
    "question_answering",
    "summarization",
    "text_simplification",
    "translate",
    "image_classification",
)

# TFDS keeps registries and a progress-bar switch for the whole process: one thread at a time.
_opening = threading.Lock()


class Split(NamedTuple):
    """A prepared split."""

    records: Any
    """A random-access sequence of dicts."""
    features: Any
    """TFDS' description of the features, by name."""
    of_kind: Mapping[str, str]
    """The names of the features that are read, by kind: text, or image and label."""
    full_name: str
    """TFDS' own: data set, config and version."""
    name: str
    """TFDS' name of the split."""


class Source(Sequence[dict[str, Any]]):
    """The records of one split. Picklable. `full_name` is TFDS' own: data set, config and version."""

    def __init__(self, split: Split) -> None:
        self._records = split.records
        self._split = split.name
        self.full_name = split.full_name

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: Any) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(f"record {index} of {len(self)} in {self}")
        try:
            return self._record(self._records[index % len(self)])
        except (RuntimeError, OSError) as error:  # of ArrayRecord or Pillow, for missing and damaged files
            raise DataError(f"record {index} of {self} cannot be read: {_one_line(error)}") from None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.full_name}, {self._split})"

    def _record(self, record: dict[str, Any]) -> dict[str, Any]:
        return record


class TextSource(Source):
    """The documents of one split: `source[i]` is `{"text": UTF-8 bytes}`."""

    def __init__(self, split: Split) -> None:
        super().__init__(split)
        self._feature = split.of_kind["text"]

    def _record(self, record: dict[str, Any]) -> dict[str, Any]:
        text = record[self._feature]
        return {"text": text if isinstance(text, bytes) else str(text).encode()}


class ImageSource(Source):
    """The images of one split: `source[i]` is `{"image": (H, W, C) uint8, "label": int}`.

    `num_classes` is the number of labels. Images are decoded by Pillow, the same on every machine.
    """

    def __init__(self, split: Split, channels: int) -> None:
        super().__init__(split)
        self._image, self._label = split.of_kind["image"], split.of_kind["label"]
        self._mode = {1: "L", 3: "RGB"}[channels]
        self._kept: dict[int, dict[str, Any]] | None = None
        self.num_classes: int = split.features[self._label].num_classes

    def __getitem__(self, index: Any) -> Any:
        if self._kept is None:
            return super().__getitem__(index)
        if index not in self._kept:
            self._kept[index] = super().__getitem__(index)
        return self._kept[index]

    def keep_if_few(self) -> None:
        """Keeps decoded images in memory if all together have KEPT_BYTES at most, judged by the first."""
        if len(self) * self[0]["image"].nbytes <= KEPT_BYTES:
            self._kept = {}

    def _record(self, record: dict[str, Any]) -> dict[str, Any]:
        from PIL import Image

        with Image.open(io.BytesIO(record[self._image])) as image:
            pixels = np.asarray(image.convert(self._mode))
        return {"image": pixels.reshape(*pixels.shape[:2], -1), "label": int(record[self._label])}


def data_root(data_dir: str | os.PathLike[str] | None) -> str:
    """The folder of prepared data sets: `data_dir`, else $TFDS_DATA_DIR, else ~/tensorflow_datasets.

    Raises:
      DataError: it is a bucket, of which records are not read.
    """
    chosen = data_dir or os.environ.get("TFDS_DATA_DIR") or os.path.join("~", "tensorflow_datasets")
    if "://" in os.fspath(chosen):
        raise DataError(
            f"config.data.data_dir: {chosen}: must be a folder; mount the bucket, or copy the data set"
        )
    return os.path.expanduser(os.fspath(chosen))


def open_text(
    name: str,
    split: str,
    data_dir: str | os.PathLike[str] | None = None,
    *,
    feature: str = "text",
    setting: str = "train_split",
) -> TextSource:
    """Opens a split of a TFDS text data set, and prepares it on first use.

    Args:
      name: `stdlib_text` (built here, without a network), any TFDS name such as `c4/en` or `lm1b:1.1.0`, or
        files of one's own: a path that begins with /, . or ~, as `TextFiles` has it.
      split: a TFDS split such as `train` or `train[:10%]`.
      data_dir: the folder of prepared data sets; None as in `data_root`.
      feature: the feature that holds the text.
      setting: the name of the setting that has the split, for error messages.

    Raises:
      DataError: no such data set, split or text feature; or it is not prepared and cannot be downloaded.
    """
    source = TextSource(_open(name, split, data_dir, {"text": feature}, setting))
    _ = source[0]  # files are opened on the first read; a missing one is reported now
    return source


def open_images(config: ImagesConfig, split: str, channels: int) -> ImageSource:
    """Opens a split of a TFDS data set of labelled images, and prepares it on first use.

    Image and label are the features that TFDS calls supervised, or the only ones of their kind.

    `channels`: 1 for grey or 3 for red, green and blue, whatever the data set has.

    Raises:
      DataError: no such data set, split or features; or it is not prepared and cannot be downloaded.
    """
    features = {"image": None, "label": None}
    found = _open(config.name, split, config.data_dir, features, config.setting_of(split))
    source = ImageSource(found, channels)
    source.keep_if_few()  # reads one, as for text
    return source


_IS_KIND: dict[str, Callable[[Any], bool]] = {
    "text": lambda spec: getattr(spec, "shape", None) == () and spec.np_dtype in (str, np.str_, np.object_),
    "image": lambda spec: hasattr(spec, "encoding_format"),
    "label": lambda spec: hasattr(spec, "num_classes"),
}


def _open(
    name: str,
    split: str,
    data_dir: str | os.PathLike[str] | None,
    features: Mapping[str, str | None],
    setting: str,
) -> Split:
    """Opens a split; `features` has the wanted feature of each kind, which is checked before any download."""
    root = data_root(data_dir)
    with _opening:
        builder = _find_builder(name, root, features)
        found = {kind: _feature(builder, name, kind, wanted) for kind, wanted in features.items()}
        _ensure_prepared(builder, name, root)
        records = _records(builder.data_dir, name, split, found.get("image"), setting)
        return Split(records, builder.info.features, found, builder.info.full_name, split)


def _feature(builder: Any, name: str, kind: str, wanted: str | None) -> str:
    """The feature of this kind; with None wanted the one that TFDS calls supervised, or the only one."""
    having = sorted(key for key, spec in builder.info.features.items() if _IS_KIND[kind](spec))
    if wanted is None:
        chosen = [key for key in having if key in (builder.info.supervised_keys or ())] or having
        if len(chosen) != 1:
            known = ", ".join(having) or "none"
            raise DataError(f"config.data.name: {name} must have one {kind} feature; it has {known}")
        return chosen[0]
    if wanted not in having:
        others = ", ".join(having) or "none"
        problem = f"{name} has no {kind} feature {wanted!r}; its {kind} features: {others}"
        raise DataError(f"config.data.{kind}_feature: {problem}")
    return wanted


def _records(folder: str, name: str, split: str, image_feature: str | None, setting: str) -> Any:
    import tensorflow_datasets as tfds

    try:  # from the files: the builder may have been made before another process made these
        builder = tfds.builder_from_directory(folder)
    except Exception as error:  # missing or damaged descriptions
        raise DataError(_unreadable(name, folder, error)) from None
    try:
        count = builder.info.splits[split].num_examples
    except Exception as error:  # TFDS raises ValueError, KeyError and errors of its own for a bad split
        splits = ", ".join(sorted(builder.info.splits))
        why = _one_line(error)
        problem = f"{name} has no split {split!r} ({why}); its splits: {splits}"
        raise DataError(f"config.data.{setting}: {problem}") from None
    if not count:
        raise DataError(f"config.data.{setting}: {name} has no record in split {split!r}")
    try:
        decoders = {image_feature: tfds.decode.SkipDecoding()} if image_feature else None
        return builder.as_data_source(split, decoders=decoders)
    except NotImplementedError:
        raise DataError(
            f"config.data.data_dir: {name} is prepared at {folder} as {builder.info.file_format.value}, "
            "which has no random access; prepare it as array_record under another data_dir"
        ) from None
    except Exception as error:  # missing or damaged record files
        raise DataError(_unreadable(name, folder, error)) from None


def _unreadable(name: str, folder: str, error: Exception) -> str:
    return f"{name} at {folder} cannot be read ({_one_line(error)}); remove that folder to prepare it again"


def _find_builder(name: str, root: str, features: Mapping[str, str | None]) -> Any:
    import tensorflow_datasets as tfds

    if is_path(name):
        from ddiloco.data.text_files import TextFiles

        if (feature := features.get("text")) is None:
            raise DataError(f"config.data.name: is {name}, but files are read for text alone")
        return TextFiles(name, feature, data_dir=root, file_format="array_record")
    if name in EMBEDDED:
        builder = getattr(importlib.import_module(f"ddiloco.data.{name}"), EMBEDDED[name])
        try:
            return builder(data_dir=root, file_format="array_record")
        except Exception as error:  # its own files are damaged, and TFDS reads them in its constructor
            raise DataError(
                f"{name} under {root} is damaged ({_one_line(error)}); remove {root}/{name} to prepare it "
                "again"
            ) from None
    try:
        return tfds.core.read_only_builder.builder_from_files(name, data_dir=root)
    except Exception as error:  # no files, or damaged ones: the builder's code may know the name
        return _builder_from_code(name, root, error)


def _builder_from_code(name: str, root: str, from_files: Exception) -> Any:
    import tensorflow_datasets as tfds

    for group in _GROUPS:
        try:
            importlib.import_module(f"tensorflow_datasets.{group}")
        except ImportError:
            continue
    of_files = f"; did you mean ./{name}?" if os.path.exists(name) else ""
    try:
        return tfds.builder(name, data_dir=root, file_format="array_record")
    except tfds.core.DatasetNotFoundError:
        known = [*tfds.list_builders(with_community_datasets=False), *EMBEDDED]
        close = difflib.get_close_matches(name.split("/")[0].split(":")[0], known, n=1)
        hint = of_files or (f"; did you mean {close[0]}?" if close else "")
        raise DataError(
            f"config.data.name: TFDS knows no data set {name!r} and none is prepared under {root}{hint}"
        ) from from_files
    except Exception as error:  # unknown configs and versions raise ValueError, AssertionError and others
        problem = f"TFDS cannot open {name!r}: {_one_line(error)}{of_files}"
        raise DataError(f"config.data.name: {problem}") from None


def _ensure_prepared(builder: Any, name: str, root: str) -> None:
    from ddiloco.data import preparation

    if preparation.is_prepared(builder.data_dir):
        return
    embedded = name in EMBEDDED
    if not embedded and not is_path(name) and not _network_answers():
        images = any(map(_IS_KIND["image"], builder.info.features.values()))
        call = f"open_text('{name}', 'train', '{root}')"
        if images:
            call = f"open_images(ImagesConfig('{name}', data_dir='{root}'), 'train', 3)"
        raise DataError(
            f"config.data.name: {name} is not prepared under {root} and no network answers; where there is "
            f'one run `python -c "from ddiloco.data.sources import *; {call}"` '
            f"and copy {builder.data_dir} to the same place here"
        )
    wait = _EMBEDDED_WAIT_SECONDS if embedded else _DOWNLOAD_WAIT_SECONDS
    try:
        preparation.prepare(builder, wait_seconds=wait, progress=not embedded)
    except DataError:
        raise
    except Exception as error:  # whatever a builder's code, its parsers and its servers may raise
        raise DataError(f"config.data: preparing {name} under {root} failed: {_one_line(error)}") from error


def _network_answers() -> bool:
    """Whether the network answers within a few seconds; a name lookup alone may hang far longer."""
    answered = threading.Event()

    def ask() -> None:
        try:
            urllib.request.urlopen(_NETWORK_PROBE, timeout=_NETWORK_SECONDS).close()
        except urllib.error.HTTPError:
            pass  # a refusal is an answer
        except OSError:
            return
        answered.set()

    probe = threading.Thread(target=ask, name="network-probe", daemon=True)
    probe.start()
    probe.join(_NETWORK_SECONDS)
    return answered.is_set()


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r'^Failed to construct dataset .*?}": ', "", lines[0].strip())[:200]
