"""What `pip install ddiloco` gives: all that the commands need, from any folder, without the repository."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile

import pytest

from tests.integration.programs import LIMIT, ROOT, SMALLEST

PACKAGES = ("ddiloco", "experiments", "configs")
EXTRAS = (
    "test",
    "receipts",
    "privacy",
    "gpu",
    "tpu",
    "wandb",
    "mlflow",
    "ray",
    "huggingface",
    "tpu_compiler",
)
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def run(*command, cwd, limit=LIMIT, **environment):
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=limit)
    assert done.returncode == 0, (command, done.stdout[-2000:], done.stderr[-2000:])
    return done.stdout


def built(kind, source, folder):
    """The package of the kind made of a source tree, which is written to."""
    name = run(sys.executable, "-c", BUILD, f"build_{kind}", str(folder), cwd=source, **os.environ)
    return folder / name.splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Made from the source distribution, which is made from a copy of the tree."""
    folder = tmp_path_factory.mktemp("package")
    for package in PACKAGES:
        hidden = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, folder / "tree" / package, ignore=hidden)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "tree" / name)
    with tarfile.open(built("sdist", folder / "tree", folder)) as archive:
        # Of Python's first 3.11 there is no filter.
        safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(folder / "unpacked", **safe)
    [source] = (folder / "unpacked").iterdir()
    return built("wheel", source, folder)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("extras", [*EXTRAS, ",".join(EXTRAS)])
def test_extras_resolve_alone_and_together(extras, wheel, tmp_path):
    """Asks the index, and installs nothing."""
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed")
    run(*pip, f"ddiloco[{extras}] @ {wheel.as_uri()}", cwd=tmp_path, limit=1500.0, **os.environ)


def test_the_wheel_has_every_file_of_the_packages_and_needs_no_tensorflow(wheel):
    files = {p.relative_to(ROOT) for one in PACKAGES for p in (ROOT / one).rglob("*") if p.is_file()}
    with zipfile.ZipFile(wheel) as archive:
        packed = {pathlib.Path(name) for name in archive.namelist() if ".dist-info/" not in name}
        [metadata] = [archive.read(n).decode() for n in archive.namelist() if n.endswith("/METADATA")]
    assert packed == {file for file in files if "__pycache__" not in file.parts}
    needed = [line.split()[1] for line in metadata.splitlines() if line.startswith("Requires-Dist")]
    assert len(needed) > 20 and not any(name.startswith(("tensorflow>", "tensorflow;")) for name in needed)


@pytest.mark.slow
def test_processes_train_with_the_installed_package_from_an_empty_folder(wheel, data_dir, tmp_path):
    place, here = tmp_path / "environment", tmp_path / "empty"
    here.mkdir()
    (here / "configs").mkdir()  # of the user's own, which hides nothing
    venv.create(place, with_pip=False)
    python = place / "bin" / "python"
    pip = (
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
    )
    run(*pip, str(wheel), cwd=here, **os.environ)
    [packages] = (place / "lib").glob("python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"
    where = "import ddiloco, configs.dense as c; print(ddiloco.__file__, c.__file__)"
    assert run(str(python), "-c", where, cwd=here, **environment).count(str(place)) == 2
    command = (
        str(place / "bin" / "ddiloco"),
        "train",
        "--config=dense:tiny",
        "--config.driver=remote",
        *SMALLEST,
    )
    run(*command, f"--config.data.data_dir={data_dir}", "--workdir=run", cwd=here, **environment)
    summary = json.loads((here / "run" / "summary.json").read_text())
    assert (summary["finished"], summary["inner_steps"]) == (True, {"0": 12, "1": 12})
