"""Plants every mistake, or those whose names hold a word, and prints which tests found it.

    python -m tests.mutation [WORD...]

Each is planted in a copy of the repository, whose tests run until one fails. Exit code 1 if one survived,
or if the text that it changes is no longer there.
"""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

from tests.mutation import outer, protocol, remote
from tests.mutation.mutant import Mutant

MUTANTS = (*protocol.MUTANTS, *outer.MUTANTS, *remote.MUTANTS)
ROOT = pathlib.Path(__file__).parents[2]
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "build", "runs", "__pycache__", ".hypothesis", ".*_cache")
LIMIT = 900  # seconds for the tests of one mutant; what makes them hang is found by that


def place(mutant: Mutant, texts: Mapping[pathlib.Path, str]) -> pathlib.Path:
    """The one file, of these with their texts, that holds the mutant's.

    Raises:
      LookupError: there is none, or the text stands there more than once.
    """
    found = [path for path, text in texts.items() for _ in range(text.count(mutant.old))]
    if len(found) != 1:
        raise LookupError(f"the text of {mutant.name!r} stands in the package {len(found)} times, not once")
    return found[0]


def package(root: pathlib.Path) -> dict[pathlib.Path, str]:
    """The files of the package with their texts."""
    return {path: path.read_text() for path in (root / "ddiloco").rglob("*.py")}


def listing(root: pathlib.Path) -> list[str]:
    """All files and folders of tests, as seen from the root."""
    return sorted(str(path.relative_to(root)) for path in (root / "tests").rglob("*"))


def named_tests(mutant: Mutant, every: Sequence[str]) -> list[str]:
    """The files and folders of tests that the mutant names, as far as they are there."""
    named = [[path for path in every if f"/{path}".endswith(f"/{end}")] for end in mutant.tests]
    return [path for paths in named for path in paths]


def finder(mutant: Mutant, root: pathlib.Path) -> str | None:
    """Runs the tests on the package with the mistake in it; the test that found it, or None.

    `root` is a copy of the repository, which is put right again.
    """
    texts = package(root)
    path = place(mutant, texts)
    sound = texts[path]
    path.write_text(sound.replace(mutant.old, mutant.new))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            [*command, *named_tests(mutant, listing(root))],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
    except subprocess.TimeoutExpired:
        return f"no end within {LIMIT} s"
    finally:
        path.write_text(sound)
    if done.returncode == 0:
        return None
    told = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return told.group(1).removeprefix("tests/") if told else f"exit code {done.returncode}"


def main(words: list[str]) -> int:
    """Prints a table in Markdown; the exit code."""
    chosen = [m for m in MUTANTS if not words or any(word in m.name for word in words)]
    survived = 0
    print("| mistake | found by |\n|---|---|", flush=True)
    with tempfile.TemporaryDirectory(prefix="ddiloco-mutants-") as folder:
        root = pathlib.Path(folder) / "repository"
        shutil.copytree(ROOT, root, ignore=LEFT_OUT)
        (root / "build").symlink_to(ROOT / "build")  # compiled programs are found by what they compute
        for mutant in chosen:
            try:
                found = finder(mutant, root)
                told = f"`{found}`" if found else "**nothing**"
            except LookupError as error:
                found, told = None, f"**{error}**"
            survived += found is None
            print(f"| {mutant.name} | {told} |", flush=True)
    print(f"\n{len(chosen) - survived} of {len(chosen)} found")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
