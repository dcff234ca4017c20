"""Entry points are found wherever ``importlib.metadata`` finds them."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, entry_points
from pathlib import Path

import pytest

from fastensor.files.importing import entry_points_of

GROUP = "fastensor.tests"
METADATA = "Metadata-Version: 2.1\nName: brought\nVersion: 1.0\n"
POINTS = f"[{GROUP}]\nmine = brought:Mine\n"


@pytest.mark.parametrize(
    ("folder", "file"),
    [("brought-1.0.dist-info", "METADATA"), ("brought-1.0.egg-info", "PKG-INFO"), ("EGG-INFO", "PKG-INFO")],
)
def test_in_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, file: str) -> None:
    path = tmp_path / "brought.egg"
    (path / folder).mkdir(parents=True)
    (path / folder / file).write_text(METADATA)
    (path / folder / "entry_points.txt").write_text(POINTS)
    monkeypatch.syspath_prepend(path)
    assert [point.value for point in entry_points_of(GROUP)] == ["brought:Mine"]


def test_in_an_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "brought.zip", "w") as archive:
        archive.writestr("brought-1.0.dist-info/METADATA", METADATA)
        archive.writestr("brought-1.0.dist-info/entry_points.txt", POINTS)
    monkeypatch.syspath_prepend(tmp_path / "brought.zip")
    assert [point.value for point in entry_points_of(GROUP)] == ["brought:Mine"]


class Brought(Distribution):
    """A package that is in no folder."""

    def read_text(self, filename: str) -> str | None:
        return {"METADATA": METADATA, "entry_points.txt": POINTS}.get(filename)

    def locate_file(self, path: object) -> Path:  # type: ignore[override]
        return Path(str(path))


class Finder:
    def find_spec(self, *_: object) -> None:
        return None

    def find_distributions(self, _: object = None) -> Iterator[Distribution]:
        yield Brought()


def test_of_another_finder(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not entry_points_of(GROUP)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder()])
    assert [point.value for point in entry_points_of(GROUP)] == ["brought:Mine"]


def test_of_pytest() -> None:
    assert entry_points_of("pytest11") == tuple(entry_points(group="pytest11")) != ()
