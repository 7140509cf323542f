"""A real file system that is soon full, for what must stand one."""

import contextlib
import errno
import shutil
import subprocess

import pytest


@contextlib.contextmanager
def small_disk(folder, size):
    """A new folder on a file system of `size`, as mount takes it; skips the test if there can be none."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounts are not permitted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def fill(path, leave=0):
    """A file that leaves so many bytes of its file system."""
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            assert error.errno == errno.ENOSPC
        file.truncate(file.tell() - leave)
