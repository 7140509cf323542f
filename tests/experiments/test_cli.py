"""What the command line makes of a config file and of its settings."""

import shutil
import subprocess
import sys

import pytest

from experiments.cli import program
from tests.integration.programs import ROOT

FILE = """
from __future__ import annotations

import dataclasses

from configs import dense


@dataclasses.dataclass
class Point:
    rate: float
    rows: int


def get_config():
    point = Point(0.25, 3)
    config = dense.get_config()
    config.inner.learning_rate, config.train.batch_size = point.rate, point.rows
    return config
"""


def test_none_is_a_word_where_a_setting_is_one():
    given = {"model.remat": "none", "sync.quorum": "none", "init_from": "None"}
    config = program.resolve("configs/dense.py", [*given.items()])
    assert (config.model.remat, config.sync.quorum, config.init_from) == ("none", None, None)


def test_a_config_file_may_define_dataclasses(tmp_path):
    (tmp_path / "own.py").write_text(FILE)
    config = program.load_config(f"{tmp_path}/own.py")
    assert (config.inner.learning_rate, config.train.batch_size) == (0.25, 3)


@pytest.mark.parametrize("argument", ["", ":small"])
def test_a_mistake_in_a_config_file_is_not_told_as_one_of_the_command(argument, tmp_path):
    (tmp_path / "own.py").write_text("def get_config(preset='large'):\n    return int(preset)\n")
    with pytest.raises(ValueError, match="invalid literal") as raised:
        program.load_config(f"{tmp_path}/own.py{argument}")
    assert raised.traceback[-1].path == tmp_path / "own.py"


def test_what_several_files_are_refused_for_is_told(tmp_path):
    with pytest.raises(program.UsageError, match="No space left"), program.os_errors_as_usage("to", tmp_path):
        raise shutil.Error([("a", "b", "[Errno 28] No space left on device")])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("decoupled:3,decoupled:8", ("decoupled:3", "decoupled:8")),
        ("('decoupled:3', 'decoupled:8')", ("decoupled:3", "decoupled:8")),
        ("data_parallel", ("data_parallel",)),
        ("'a,b'", ("a,b",)),
        ("()", ()),
    ],
)
def test_a_tuple_of_words_needs_no_quotes(text, value):
    assert program.resolve("configs/goodput.py", [("systems", text)]).systems == value


def test_a_tuple_of_numbers_is_one_of_numbers():
    given = {"num_chips": "600000,900000", "failures.mtbi_years": "2"}
    config = program.resolve("configs/goodput.py", [*given.items()])
    assert (config.num_chips, config.failures.mtbi_years) == ((600_000, 900_000), 2.0)


def test_a_loop_is_given_any_setting_and_others_none():
    given = {"model.settings.width": "64", "model.settings.kind": "sine", "model.settings.deep": "true"}
    config = program.resolve("configs/loop.py", [*given.items()])
    assert config.model.settings.to_dict() == {"width": 64, "kind": "sine", "deep": True}
    with pytest.raises(program.UsageError, match=r"config\.model\.setting: no such setting"):
        program.resolve("configs/loop.py", [("model.setting.width", "64")])
    with pytest.raises(program.UsageError, match=r"config\.model\.settings: no such setting"):
        program.resolve("configs/dense.py", [("model.settings.width", "64")])


HANGS = """
import concurrent.futures, threading
from experiments.cli import program

program.LAST_SECONDS = 0.1

def main(_):
    concurrent.futures.ThreadPoolExecutor(1).submit(threading.Event().wait)
    print("saved")
    return 3

program.run(main)
"""


def test_a_disk_that_hangs_does_not_keep_a_program_that_is_done():
    done = subprocess.run([sys.executable, "-c", HANGS], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (3, "saved\n")
