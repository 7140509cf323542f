"""Pages of the site that no file of docs/ holds, and the links to them; a hook of mkdocs.

They are the root's pages, all settings and metrics, the reference, and the sources that pages link to.
"""

import pathlib
import posixpath
import re

import griffe
from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).parent.parent
OF_ROOT = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
SCRIPTS = {"mermaid.min.js", "iframe_worker.js"}  # that scripts/docs.sh fetches
STYLE = ".md-typeset table code { white-space: nowrap; } .md-grid { max-width: 72rem; }"
LINK = re.compile(r"(\]\()(?!https?:|#)([^)#\s]+)")
EXAMPLE = re.compile(r"^( *)>>> .*(?:\n\1\S.*)*", re.M)


class Examples(griffe.Extension):
    """Shows the examples of docstrings as code."""

    def on_instance(self, *, obj, **_):
        if obj.docstring:
            code = EXAMPLE.sub(r"\1```pycon\n\g<0>\n\1```", obj.docstring.value)
            obj.docstring.value = code


def on_config(config):
    """Fills the part of the navigation for the reference."""
    for section in config.nav:
        for name, pages in section.items():
            if pages == "reference/*":
                section[name] = sorted(reference())
    return config


def on_files(files, config):
    """Adds the generated pages."""
    pages = {target: (ROOT / source).read_text() for source, target in OF_ROOT.items()}
    pages |= {"settings.md": settings(), "metrics.md": metrics(), **reference(), **sources()}
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    files.append(File.generated(config, "assets/site.css", content=STYLE))
    for name in SCRIPTS:
        files.append(
            File.generated(config, f"assets/{name}", abs_src_path=str(ROOT / "build" / "docs" / name))
        )
    return files


def on_page_markdown(markdown, page, config, files):
    """Turns links between files of the repository into links between pages of the site."""
    here = page.file.src_uri
    file = {target: source for source, target in OF_ROOT.items()}.get(here, f"docs/{here}")

    def to_page(match):
        path = posixpath.normpath(posixpath.join(posixpath.dirname(file), match[2]))
        return match[1] + posixpath.relpath(page_of(path), posixpath.dirname(here) or ".")

    return LINK.sub(to_page, markdown) if here not in OF_CODE else markdown


def page_of(path):
    """The site's page for a file of the repository."""
    if path in OF_ROOT:
        return OF_ROOT[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}.md"


def sources():
    """Files of code that pages link to, as pages."""
    found = {}
    for file in [*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in OF_ROOT)]:
        for _, target in LINK.findall(file.read_text()):
            path = (file.parent / target).resolve()
            name = path.relative_to(ROOT).as_posix()
            if path.is_file() and page_of(name).startswith("source/"):
                found[page_of(name)] = f"# {name}\n\n````{path.suffix[1:]}\n{path.read_text()}\n````\n"
    return found


def reference():
    """A page for each package and module of ddiloco."""
    package = ROOT / "ddiloco"
    names = [p.parent.name for p in package.glob("*/__init__.py")]
    names += [p.stem for p in package.glob("*.py") if p.stem != "__init__"]
    pages = {f"reference/{name}.md": f"# ddiloco.{name}\n\n::: ddiloco.{name}\n" for name in names}
    only = "    options:\n      show_submodules: false\n"
    return {"reference/ddiloco.md": f"# ddiloco\n\n::: ddiloco\n{only}", **pages}


def settings():
    """Every setting of the models' presets."""
    from ddiloco.config import allowed
    from ddiloco.settings.experiment import all_settings, parse
    from experiments.cli.program import load_config

    rows = {}
    for family in ("dense", "moe", "vit", "multimodal"):
        for leaf in all_settings(parse(load_config(f"configs/{family}.py"))):
            stays = "no" if leaf.metadata["may_change"] == "never" else ""
            cells = leaf.metadata["meaning"], allowed(leaf.metadata) or "", stays
            rows.setdefault(
                leaf.path, f"| `{leaf.path}` | `{leaf.value}` | {' | '.join(map(escaped, cells))} |"
            )
    head = "| setting | tiny preset | meaning | bounds | may change on a restart |\n|---|---|---|---|---|\n"
    how = "`--config.NAME=VALUE` sets one; `experiments.train --settings` lists those of a config."
    groups: dict[str, list[str]] = {}
    for path, row in rows.items():
        groups.setdefault(path.rpartition(".")[0] or "general", []).append(row)
    tables = (f"## {group}\n\n{head}" + "\n".join(found) for group, found in groups.items())
    return "\n\n".join([f"# Settings\n\n{how}", *tables]) + "\n"


def metrics():
    """What `/metrics` of a run's page has, and the rules of its advice."""
    from ddiloco.dashboard.advice import RULES
    from ddiloco.dashboard.exposition import LABELLED, METRICS, OF_FRAGMENT, OF_LEARNER

    labels = dict.fromkeys(OF_LEARNER, "learner") | dict.fromkeys(OF_FRAGMENT, "fragment")
    labels |= {metric: ", ".join(names) for names, metric in LABELLED.items()}
    rows = [f"| `{one.name}` | {labels.get(one, '')} | {escaped(one.meaning)} |" for one in METRICS]
    head = "| metric | labels beside `run` | meaning |\n|---|---|---|\n"
    where = "[Seeing a run](dashboard.md#prometheus-and-grafana) says where they are."
    rules = [f"| `{rule.__name__}` | {escaped(rule.__doc__.splitlines()[0])} |" for rule in RULES]
    advice = "## Advice\n\n| rule | when |\n|---|---|\n" + "\n".join(rules)
    return f"# Metrics and advice\n\n{where}\n\n{head}" + "\n".join(rows) + f"\n\n{advice}\n"


def escaped(text):
    """Text for a cell of a table."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


OF_CODE = {*reference(), "settings.md", "metrics.md"}
