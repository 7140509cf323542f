"""Problems that must be seen but may not end a run: each is shown once and kept for the summary."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterable, Iterator

from ddiloco.telemetry.terminal import printable

MAX_ALARMS = 200
MAX_OF_A_KIND = 25  # that begin with the same two words, so that one liar's do not hide all others
NO_MORE = "there are more alarms than are kept and shown"


class Alarms:
    """Problems so far, in order; one entry for each key however often it happens, bounded in number."""

    def __init__(self, show: Callable[[str], None]) -> None:
        """`show` is called with each new alarm's sentence."""
        self._show = show
        self._by_key: dict[str, str] = {}
        self._kinds: collections.Counter[str] = collections.Counter()

    @property
    def sentences(self) -> list[str]:
        """The alarms in the order in which they were first raised."""
        return list(dict.fromkeys(self._by_key.values()))

    def recall(self, sentences: Iterable[str]) -> None:
        """Loads the alarms of earlier processes; a repeated one is shown again."""
        for sentence in sentences:
            self._by_key[sentence] = sentence
            self._kinds[_kind(sentence)] += 1

    def raise_once(self, key: str, sentence: str) -> None:
        """Keeps and shows the sentence unless the key has been raised before."""
        if key in self._by_key or len(self._by_key) > MAX_ALARMS:
            return
        kind = _kind(sentence)
        self._kinds[kind] += 1
        if self._kinds[kind] > MAX_OF_A_KIND:
            key, sentence = kind, f"{kind} ...: there are more alarms that begin so than are kept"
            if key in self._by_key:
                return
        sentence = printable(sentence) if len(self._by_key) < MAX_ALARMS else NO_MORE
        self._by_key[key] = sentence
        self._show(sentence)

    @contextlib.contextmanager
    def guard(self, what: str, *caught: type[Exception]) -> Iterator[None]:
        """Turns the exceptions `caught` (OSError when none is given) into an alarm about `what`."""
        errors = caught or (OSError,)
        try:
            yield
        except errors as error:
            self.raise_once(what, f"{what}: {type(error).__name__}: {error}")


def _kind(sentence: str) -> str:
    return " ".join(sentence.split()[:2])
