"""Pages that lead somewhere: every link and every file that a page names is there."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = [ROOT, ROOT / "ddiloco", ROOT / "tests"]  # that paths in pages begin from


def test_links_lead_to_files():
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in PAGES
        for target in re.findall(r"\]\((?!https?:)([^)#\s]+)[^)]*\)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert not broken, "\n".join(broken)


def test_named_files_exist():
    named = re.compile(r"`((?:[a-z_]+/)+[a-z_]+\.(?:py|sh|proto|md))`")
    made = {"models/toy.py", "configs/toy.py", "ddiloco/models/toy.py"}  # docs/adding_a_model.md
    missing = [
        f"{page.relative_to(ROOT)}: {path}"
        for page in PAGES
        for path in named.findall(page.read_text())
        if path not in made
        and not path.startswith("runs/")
        and not any((folder / path).exists() for folder in FOLDERS)
    ]
    assert not missing, "\n".join(missing)
