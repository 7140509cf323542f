"""Executes a notebook without Jupyter: python -m tests.examples.notebook FILE writes its outputs."""

import ast
import contextlib
import io
import json
import pathlib
import sys


def execute(notebook):
    """Gives each code cell its outputs, in the working folder; an exception ends it."""
    names = {"__name__": "__notebook__"}
    cells = (cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    for count, cell in enumerate(cells, start=1):
        cell["execution_count"], cell["outputs"] = count, []
        printed, value = _run("".join(cell["source"]), names)
        if printed:
            cell["outputs"].append({"output_type": "stream", "name": "stdout", "text": _lines(printed)})
        if value is not None:
            shown = hasattr(value, "_repr_html_")
            data = {"text/plain": _lines(type(value).__name__ if shown else repr(value))}
            if shown:
                data["text/html"] = _lines(value._repr_html_())
            result = {"output_type": "execute_result", "execution_count": count, "metadata": {}, "data": data}
            cell["outputs"].append(result)


def _run(source, names):
    """What a cell prints, and the value of its last line."""
    magic, _, rest = source.partition("\n")
    if magic.startswith("%%writefile "):
        pathlib.Path(magic.split()[1]).write_text(rest)
        return f"Writing {magic.split()[1]}\n", None
    body = ast.parse(source).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(ast.Module(body, []), "<cell>", "exec"), names)
        value = None if last is None else eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
    return printed.getvalue(), value


def _lines(text):
    return text.splitlines(keepends=True)


if __name__ == "__main__":
    path = pathlib.Path(sys.argv[1])
    read = json.loads(path.read_text())
    execute(read)
    path.write_text(json.dumps(read, indent=1, ensure_ascii=False) + "\n")
