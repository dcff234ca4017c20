"""Filesystems in files, which are mounted for the length of a block.

This needs root, loop devices, and the programs that ``tests/filesystems/install.sh`` installs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fastensor.checkpoint.writing.freeing import wait_for_space


class CannotMountError(Exception):
    """A filesystem cannot be made or mounted here; the message says why."""


@contextmanager
def mounted(
    kind: str, image: Path, nbytes: int, *, make: Sequence[str] = (), options: Sequence[str] = ()
) -> Iterator[Path]:
    """A new filesystem in a file, which is sparse, and removed at the end.

    Args:
        kind: ``xfs`` or ``btrfs``.
        image: the path of the file.
        nbytes: the size of the filesystem: 300 MiB at least.
        make: options of the program that makes it.
        options: options of the mount.

    Yields:
        Where the filesystem is mounted.

    Raises:
        CannotMountError: a program is missing, or refuses.
    """
    if os.geteuid() != 0:
        raise CannotMountError("only root can mount a filesystem")
    folder = image.with_name(f"{image.name}.mounted")
    try:
        with image.open("xb") as file:
            file.truncate(nbytes)
        _run(f"mkfs.{kind}", "-q", *make, str(image))
        folder.mkdir()
        _run("mount", "-o", ",".join(("loop", *options)), str(image), str(folder))
        try:
            yield folder
        finally:
            wait_for_space()
            _run("umount", "--lazy", str(folder))  # a descriptor of a failed test may be open
    finally:
        image.unlink(missing_ok=True)
        if folder.is_dir():
            folder.rmdir()


def find_program(name: str) -> str:
    """The path of a program, which may be one for root.

    Raises:
        CannotMountError: it is not installed.
    """
    found = shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
    if found is None:
        raise CannotMountError(f"{name} is not installed: tests/filesystems/install.sh installs it on Debian")
    return found


def _run(program: str, *arguments: str) -> None:
    done = subprocess.run([find_program(program), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise CannotMountError(f"{program} {' '.join(arguments)} has failed: {done.stderr.strip()}")
