"""Text that strangers made, streams that nobody reads, and counts that do not grow without end."""

import io
import os
import threading

from ddiloco.telemetry.alarms import MAX_ALARMS, MAX_OF_A_KIND, NO_MORE, Alarms
from ddiloco.telemetry.progress import Progress
from ddiloco.telemetry.records import LearnerDied, Noted, RunInfo, reason
from ddiloco.telemetry.state import MAX_FAILURES, MAX_REASONS, OTHERS, RunState
from ddiloco.telemetry.terminal import print_line, printable

EVIL = "\x1b[2J\x1b]0;owned\x07\r\nan alarm \u202e\x9b31m"


def state():
    return RunState(RunInfo("decoupled", 2, 1, 1, 10, 0, {0: 1, 1: 1}), 0.0)


def test_control_characters_are_shown_and_not_obeyed():
    shown = printable(EVIL)
    assert shown.isprintable() and "\\x1b[2J" in shown and "an alarm " in shown
    assert printable("naïve – 你好") == "naïve – 你好"
    assert len(printable("x" * 10**6)) == 1000


def test_what_went_wrong_is_one_short_line_whatever_a_library_says_of_a_file():
    said = reason(ValueError(f"\x1b[2J{'x' * 1000}\nand more"))
    assert said.isprintable() and len(said) <= 310
    assert reason(OSError(28, "No space left on device", "/a/file")) == "No space left on device"
    assert reason(MemoryError()) == "MemoryError"


def test_alarms_and_lines_hold_no_control_characters():
    out, err, shown = io.StringIO(), io.StringIO(), []
    alarms = Alarms(shown.append)
    alarms.raise_once(EVIL, EVIL)
    progress = Progress(out, err)
    progress.print_line(EVIL)
    progress.warn(EVIL)
    for text in (*shown, *alarms.sentences, out.getvalue()[:-1], err.getvalue()[:-1]):
        assert text and text.isprintable()


def test_however_many_different_alarms_and_reasons_there_are_few_are_kept():
    shown, counted = [], state()
    alarms = Alarms(shown.append)
    for n in range(6001):
        alarms.raise_once(f"key {n}", f"{n} is a sentence")
        counted.apply(Noted("drop", {"reason": f"reason {n}"}, 1.0))
        counted.apply(Noted("recovered", {"inner_state": f"source {n}\x1b"}, 1.0))
        counted.apply(LearnerDied(0, 1.0, f"traceback {n}"))
    assert len(alarms.sentences) == len(shown) == MAX_ALARMS + 1
    assert alarms.sentences[-1] == NO_MORE
    assert (len(counted.drops), counted.drops.total()) == (MAX_REASONS + 1, 6001)
    assert counted.drops[OTHERS] == 6001 - MAX_REASONS
    assert len(counted.inner_states) == MAX_REASONS + 1
    assert len(counted.failures) == MAX_FAILURES and counted.failures[-1].traceback == "traceback 6000"


def test_alarms_of_one_kind_do_not_hide_those_of_others():
    alarms = Alarms(lambda sentence: None)
    for n in range(1000):
        alarms.raise_once(f"key {n}", f"learner 3: whatever {n}")
    alarms.raise_once("another", "learner 4 is in quarantine")
    assert len(alarms.sentences) == MAX_OF_A_KIND + 2
    *first, more, another = alarms.sentences
    assert first == [f"learner 3: whatever {n}" for n in range(MAX_OF_A_KIND)]
    assert more == "learner 3: ...: there are more alarms that begin so than are kept"
    assert another == "learner 4 is in quarantine"


def test_a_pipe_that_nobody_reads_holds_nobody_up():
    reading, writing = os.pipe()
    with open(reading, "rb") as reader, open(writing, "w") as pipe:
        progress = Progress(pipe, pipe)

        def write():
            for n in range(5000):
                progress.print_line(f"line {n} {'x' * 100}")
                progress.warn(f"line {n}")
                print_line(f"line {n}", pipe)
            progress.end()

        thread = threading.Thread(target=write, daemon=True)
        thread.start()
        thread.join(30.0)
        assert not thread.is_alive()
        assert reader.read1(20).startswith(b"line 0 xxx")
