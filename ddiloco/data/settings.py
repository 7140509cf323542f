"""What a run may set about its data."""

from __future__ import annotations

import dataclasses

from ddiloco.config import setting


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Which text is read, how it becomes tokens, and how rows are drawn from it."""

    name: str = setting("stdlib_text", "TFDS data set: stdlib_text (built here) or any name such as c4/en")
    text_feature: str = setting("text", "feature of the data set that holds a document's text")
    train_split: str = setting("train", "TFDS split to train on; slices such as train[:10%] work")
    eval_split: str = setting("validation", "TFDS split that held-out batches come from")
    data_dir: str | None = setting(
        None, "folder of prepared data sets; None: $TFDS_DATA_DIR or TFDS' default"
    )
    sequence_length: int = setting(128, "tokens in a row, L", at_least=1)
    tokenizer: str = setting("byte", "how text becomes tokens", choices=("byte", "sentencepiece"))
    tokenizer_model: str | None = setting(None, "SentencePiece model file; for tokenizer=sentencepiece only")
    shuffle: bool = setting(True, "whether a shard's documents are reshuffled each epoch")
    interleave: int = setting(
        8, "documents of a shard that are read side by side, row by row; 1: one after the other", at_least=1
    )
    prefetch: int = setting(0, "batches that a thread prepares ahead; 0: none, no thread", at_least=0)
    held_out_pool: int = setting(
        4_194_304, "tokens of the eval split that held-out rows are picked from, evenly spaced", at_least=1
    )

    def __post_init__(self) -> None:
        if self.tokenizer == "sentencepiece" and not self.tokenizer_model:
            raise ValueError("tokenizer_model: is missing, but tokenizer=sentencepiece needs a model file")
        if self.tokenizer != "sentencepiece" and self.tokenizer_model:
            raise ValueError("tokenizer_model: is set, but only tokenizer=sentencepiece takes one")
