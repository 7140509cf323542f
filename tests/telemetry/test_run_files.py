"""Files that grow are read on, whole lines and frames only."""

import json
import math

import pytest

from ddiloco.telemetry import run_files
from ddiloco.telemetry.run_files import LineTail, Replaced


def taken(lines):
    found = []
    lines.look()
    while lines.time < math.inf:
        found.append(lines.take()["time"])
    return found


def write(path, *times, mode="a"):
    with path.open(mode) as file:
        file.writelines(json.dumps({"time": time}) + "\n" for time in times)


def test_lines_are_read_once_and_half_a_line_when_it_is_whole(tmp_path):
    path = tmp_path / "steps.jsonl"
    lines = LineTail(path)
    assert taken(lines) == []
    write(path, 1, 2)
    with path.open("a") as file:
        file.write('{"time": ')
    assert taken(lines) == [1, 2]
    with path.open("a") as file:
        file.write("3}\n")
    assert taken(lines) == [3] and taken(lines) == []


def test_a_line_that_cannot_be_read_is_skipped(tmp_path):
    path = tmp_path / "steps.jsonl"
    path.write_text('{"time": 1}\n{"ti\n[]\n{"time": "soon"}\n{"time": NaN}\n{"time": 1e999}\n{"time": 2}\n')
    assert taken(LineTail(path)) == [1, 2]


def test_a_long_file_is_read_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(run_files, "CHUNK", 64)
    path = tmp_path / "steps.jsonl"
    write(path, *range(100))
    assert taken(LineTail(path)) == list(range(100))


def test_another_file_in_its_place_is_noticed(tmp_path):
    path = tmp_path / "steps.jsonl"
    lines = LineTail(path)
    write(path, 1, 2)
    taken(lines)
    write(path, 3, mode="w")
    with pytest.raises(Replaced):
        lines.look()
    path.unlink()
    with pytest.raises(Replaced):
        lines.look()
