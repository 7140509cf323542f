"""Text and images for training: TFDS sources, tokenizers, and Grain pipelines whose state resumes exactly.

What needs Grain or TFDS is imported on first use, so that settings can be read without either.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ddiloco.data.errors import DataError
from ddiloco.data.settings import DataConfig
from ddiloco.data.sources import open_images, open_text
from ddiloco.data.tokenizers import ByteTokenizer, SentencePieceTokenizer, Tokenizer, make_tokenizer

if TYPE_CHECKING:
    from ddiloco.data.pipeline import Batches, held_out_batches, make_batches

__all__ = [
    "Batches",
    "ByteTokenizer",
    "DataConfig",
    "DataError",
    "SentencePieceTokenizer",
    "Tokenizer",
    "held_out_batches",
    "make_batches",
    "make_tokenizer",
    "open_images",
    "open_text",
]

_FROM_PIPELINE = frozenset({"Batches", "held_out_batches", "make_batches"})


def __getattr__(name: str) -> Any:
    if name in _FROM_PIPELINE:
        return getattr(importlib.import_module("ddiloco.data.pipeline"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
