"""The common part of this package's TFDS builders: they download nothing, and split by a hash."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, ClassVar

import tensorflow_datasets as tfds


class LocalBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
    """A builder whose data are on this machine already."""

    VERSION = tfds.core.Version("1.0.0")
    SPLITS: ClassVar[tuple[str, ...]]
    # TFDS derives from the code's place where checksums of downloads are kept; nothing is downloaded here.
    code_path = None

    def _log_download_bytes(self) -> None:
        """Silent: TFDS would announce a download on standard output."""

    def _log_download_done(self) -> None:
        """Silent, as above."""

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Iterator[Any]]:
        del dl_manager
        return {split: self._generate_examples(split) for split in self.SPLITS}


def one_in(count: int, key: str) -> bool:
    """Whether the hash of this key makes it one of about 1 in `count`."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % count == 0
