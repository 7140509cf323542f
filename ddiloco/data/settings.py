"""Settings of a run's data, and what two splits have in common by what their names say."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from typing import NamedTuple

from ddiloco.config import setting


@dataclasses.dataclass(frozen=True)
class RecordsConfig:
    """The records of a TFDS data set, and reading ahead."""

    name: str
    train_split: str = setting("train", "TFDS split to train on; slices such as train[:10%] work")
    eval_split: str = setting(
        "validation", "TFDS split that held-out batches come from", may_change="process"
    )
    data_dir: str | None = setting(
        None, "folder of prepared data sets; None: $TFDS_DATA_DIR or TFDS' default", may_change="process"
    )
    shuffle: bool = setting(True, "whether a shard's documents or images are reshuffled each epoch")
    threads: int = setting(
        0,
        "threads that prepare documents or images ahead; 0: none, each when it is needed",
        at_least=0,
        may_change="process",
    )
    prefetch: int = setting(
        0, "batches that a thread prepares ahead; 0: none, no thread", at_least=0, may_change="process"
    )

    def __post_init__(self) -> None:
        if overlap(self.train_split, self.eval_split):
            problem = f"is {self.eval_split}, but must have nothing of train_split, {self.train_split}"
            raise ValueError(f"eval_split: {problem}")

    def setting_of(self, split: str) -> str:
        """The setting that names the split."""
        return "train_split" if split == self.train_split else "eval_split"


@dataclasses.dataclass(frozen=True)
class DataConfig(RecordsConfig):
    """The text, its tokens and rows."""

    name: str = setting(
        "stdlib_text",
        "stdlib_text (built here), any TFDS data set such as c4/en, or files of one's own: /data/*.jsonl",
    )
    text_feature: str = setting("text", "feature of the data set that holds a document's text")
    # A position in text is one in a document, whatever the rows.
    sequence_length: int = setting(128, "tokens in a row, L", at_least=1, may_change="resume")
    tokenizer: str = setting(
        "byte", "how text becomes tokens", choices=("byte", "sentencepiece", "huggingface")
    )
    tokenizer_model: str | None = setting(
        None, "file of all tokenizers but byte: a SentencePiece model, or for huggingface a tokenizer.json"
    )
    # As text by default: else a document that someone else wrote could end itself, or begin a turn of a chat
    control_tokens: str = setting(
        "text",
        "what a control token's name in a document is: text, or, with huggingface alone, that token",
        choices=("text", "tokens"),
    )
    tokenized: str | None = setting(
        None,
        "folder from experiments.tokenize, where this text stands as tokens; None: tokenize what is read",
        may_change="process",
    )
    interleave: int = setting(
        128, "documents of a shard that are read side by side, row by row; 1: one after the other", at_least=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokenizer != "byte" and not self.tokenizer_model:
            raise ValueError(f"tokenizer_model: is missing, but tokenizer={self.tokenizer} needs a file")
        if self.tokenizer == "byte" and self.tokenizer_model:
            raise ValueError("tokenizer_model: is set, but bytes take none")
        if self.control_tokens == "tokens" and self.tokenizer != "huggingface":
            problem = f"is tokens, but tokenizer={self.tokenizer} makes control tokens of no text"
            raise ValueError(f"control_tokens: {problem}; it must be text")


@dataclasses.dataclass(frozen=True)
class ImagesConfig(RecordsConfig):
    """The labelled images."""

    name: str = setting(
        "digits", "TFDS data set: digits (built here) or any name with labelled images, such as cifar10"
    )
    image_feature: str = setting("image", "feature of the data set that holds the image")
    label_feature: str = setting("label", "feature that holds its class")
    eval_split: str = setting("test", "TFDS split that held-out batches come from", may_change="process")
    keep: bool = setting(
        False, "whether an image, once decoded, stays in memory; for small data sets", may_change="process"
    )


@dataclasses.dataclass(frozen=True)
class ClassificationConfig(ImagesConfig):
    """Images to classify, and how they are augmented in training."""

    crop: str = setting(
        "padded",
        "of a training image: padded (its size, within the border), resized (a random part), none",
        choices=("padded", "resized", "none"),
    )
    padding: int = setting(1, "pixels of a black border on each side, before the crop", at_least=0)
    smallest_area: float = setting(
        0.08, "smallest share of the image that a part has; of crop=resized", above=0.0, at_most=1.0
    )
    flip: bool = setting(False, "whether every other training image is mirrored left to right")
    central_share: float = setting(
        1.0, "of the shorter side that is kept where an image is made square", above=0.0, at_most=1.0
    )


@dataclasses.dataclass(frozen=True)
class CanvasConfig(ImagesConfig):
    """Canvases of several images of digits side by side, and their captions."""


_ALL = "all"  # TFDS' name of all splits together
_WHOLE = "whole"
_TERM = re.compile(r"([^\[\]]+)(?:\[(.*):(.*)\])?")
_EDGE = re.compile(r"(-?\d+)(\D*)")


class _Span(NamedTuple):
    name: str
    unit: str  # "%", "" for records, TFDS' "shard", or _WHOLE
    begin: float = 0.0
    end: float = math.inf

    def meets(self, other: _Span) -> bool:
        if self.name != other.name and _ALL not in (self.name, other.name):
            return False
        if _ALL in (self.name, other.name) or _WHOLE in (self.unit, other.unit):
            return True
        return self.unit == other.unit and self.begin < other.end and other.begin < self.end


def overlap(one: str, other: str) -> bool:
    """Whether the splits surely have records in common, such as `train[:90%]` and `train+test`.

    Spans of different units, such as percent and records, are not held against each other.
    """
    spans = [[_span(term) for term in split.split("+")] for split in (one, other)]
    return one == other or any(a.meets(b) for a, b in itertools.product(*spans) if a and b)


def _span(term: str) -> _Span | None:
    """What a term without `+` has; None: it is written in a way that is not known here."""
    found = _TERM.fullmatch(term.strip())
    if found is None:
        return None
    name, *sides = found.groups()
    if not any(sides):
        return _Span(name, _WHOLE)
    edges = [_EDGE.fullmatch(side) if side else None for side in sides]
    if any(side and not edge for side, edge in zip(sides, edges, strict=True)):
        return None
    unit = next(edge[2] for edge in edges if edge)
    begin, end = (float(edge[1]) if edge else at for edge, at in zip(edges, (0.0, math.inf), strict=True))
    if unit == "%":
        begin, end = (edge + 100 if edge < 0 else edge for edge in (begin, end))
    return None if min(begin, end) < 0 else _Span(name, unit, begin, end)
