"""All commands by one name: `ddiloco train --config=dense` is `python -m experiments.train` with it."""

import ast
import importlib.util
import pathlib
import pkgutil
import runpy
import sys

from ddiloco.config import REFUSED, suggestion

_NO_COMMANDS = {"__main__", "cli", "examples", "studies"}


def commands() -> dict[str, str]:
    """Each command, and what it does in a line, without importing it."""
    folder = pathlib.Path(importlib.util.find_spec("experiments").origin).parent
    names = {module.name for module in pkgutil.iter_modules([str(folder)])} - _NO_COMMANDS
    files = {name: folder / f"{name}.py" for name in sorted(names)}
    files = {name: file if file.exists() else folder / name / "__main__.py" for name, file in files.items()}
    lines = {name: ast.get_docstring(ast.parse(file.read_text())) for name, file in files.items()}
    return {name: line.partition("\n")[0].partition(":")[0].rstrip(".") for name, line in lines.items()}


def main() -> None:
    """Runs the command that comes first; lists all if there is none."""
    found = commands()
    given = next(iter(sys.argv[1:]), "--help")
    if given in found:
        sys.argv[:2] = [given]
        runpy.run_module(f"experiments.{given}", run_name="__main__", alter_sys=True)
    elif given in ("--help", "-h", "help"):
        print("\n".join(f"ddiloco {name:10}  {line}" for name, line in found.items()))
    else:
        print(f"error: {given}: no such command; {suggestion(given, found)}", file=sys.stderr)
        sys.exit(REFUSED)


if __name__ == "__main__":
    main()
