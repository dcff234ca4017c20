"""``fastensor dictionary``: what was learned, shown and moved."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import programs
import pytest
from programs import command_line

from fastensor.cli import main
from fastensor.cli.plot import lines
from fastensor.select.context import Context
from fastensor.select.dictionary import Change, Dictionary, replacing
from fastensor.select.files import DictionaryFile, file_for, read
from fastensor.testing.calls import Call, intercepted

MIB = 1 << 20
WRITE, READ = Context("write"), Context("read", warm=True)
CHANGES = [
    *[Change(WRITE, MIB, "numpy", 0.0021)] * 3,
    Change(WRITE, MIB, "direct", 0.0042),
    Change(WRITE, 512 * MIB, "numpy", 1.5),
    Change(WRITE, 512 * MIB, "direct", 0.5),
    Change(WRITE, 512 * MIB, "mine", 0.75),
    Change(READ, MIB, "numpy", 0.00003),
    Change(Context("write", "cuda"), MIB, "gds", 0.001),
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the dictionaries. The current folder is another one."""
    monkeypatch.setenv("FASTENSOR_DICTIONARIES", str(tmp_path / "dictionaries"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "dictionaries"


@pytest.fixture
def file() -> DictionaryFile:
    """What is known for files here."""
    found = file_for(".")
    found.update(CHANGES)
    return found


@pytest.fixture
def other(folder: Path) -> DictionaryFile:
    """The dictionary of another machine."""
    found = DictionaryFile(folder / f"{7:016x}.json", {"cpu": "96 × Other", "disk": "NVMe"})
    found.update(CHANGES[:1])
    return found


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    return command_line(capsys, "dictionary", *arguments)


def learned(changes: list[Change]) -> Dictionary:
    dictionary = Dictionary()
    for change in changes:
        dictionary.apply(change)
    return dictionary


def test_single_tensors_have_a_dictionary_of_their_own(capsys: Any, file: DictionaryFile) -> None:
    assert "write cpu" in run(capsys, "show")[1]
    assert "of: single tensors\n\nNothing is known yet." in run(capsys, "show", "--tensors")[1]
    file_for(".", of="tensors").update(CHANGES[:1])
    assert len(json.loads(run(capsys, "show", "--tensors", "--json")[1])["entries"]) == 1
    assert run(capsys, "clear", "--tensors")[0] == 0
    assert file.path.exists()


def test_nothing_is_known_at_first(capsys: Any, folder: Path) -> None:
    status, out, _ = run(capsys, "show")
    assert status == 0
    assert out.startswith(f"Dictionary for files at .: {file_for('.').path}\ncpu: ")
    assert out.endswith("\n\nNothing is known yet.\n")
    assert run(capsys, "show", "--all") == (0, f"There are no dictionaries in {folder}\n", "")
    assert json.loads(run(capsys, "show", "--all", "--json")[1]) == []
    assert json.loads(run(capsys, "show", "--json")[1])["entries"] == {}
    assert run(capsys, "clear") == run(capsys, "clear", "--all") == (0, "There was nothing to remove.\n", "")
    assert not folder.exists()


def test_the_table(capsys: Any, file: DictionaryFile) -> None:
    status, out, _ = run(capsys, "show", "not/there/yet")
    assert status == 0
    assert out.splitlines()[3:] == [
        "context               up to        gds        numpy       direct        mine",
        "read cpu resident     1 MiB          –   *30 µs (1)            –           –",
        "write cpu durable     1 MiB          –  *2.1 ms (3)   4.2 ms (1)           –",
        "write cpu durable   512 MiB          –    1.5 s (1)  *500 ms (1)  750 ms (1)",
        "write cuda durable    1 MiB  *1 ms (1)            –            –           –",
        "",
        "* the fastest; in brackets, how often it was measured",
    ]


def test_the_table_for_programs(capsys: Any, file: DictionaryFile) -> None:
    found = json.loads(run(capsys, "show", "--json")[1])
    assert (found["path"], found["machine"]) == (str(file.path), file.machine)
    assert found["entries"]["write cpu durable"]["536870912"]["best"] == "direct"


def test_names_in_a_file_move_no_cursor(capsys: Any, file: DictionaryFile) -> None:
    file.update([Change(WRITE, MIB, "mi\x1b[2Jne", 1.0)])
    _, out, _ = run(capsys, "show")
    assert r"mi\x1b[2Jne" in out
    assert "\x1b" not in out


def test_all_of_them(capsys: Any, file: DictionaryFile, other: DictionaryFile, folder: Path) -> None:
    (folder / "notes.txt").write_text("no dictionary")
    (folder / f"{8:016x}.json.lock").touch()
    status, out, _ = run(capsys, "show", "--all")
    assert status == 0
    title, _, *rows = out.splitlines()
    assert title == f"Dictionaries in {folder}:"
    assert [row.split()[:3] for row in rows] == [[other.path.name, "1", "1"], [file.path.name, "4", "9"]]
    assert rows[0].endswith("  cpu: 96 × Other, disk: NVMe")
    assert [one["machine"] for one in json.loads(run(capsys, "show", "--all", "--json")[1])] == [
        other.machine,
        file.machine,
    ]


def test_a_damaged_one(capsys: Any, file: DictionaryFile, other: DictionaryFile) -> None:
    file.path.write_text("{}")
    for arguments in (["show"], ["export"], ["plot", "-o", "x.png"]):
        assert run(capsys, *arguments) == (1, "", f"fastensor: {file.path}: not a dictionary of Fastensor's\n")
    status, out, _ = run(capsys, "show", "--all")
    assert status == 1
    assert out.splitlines()[-1].endswith(f"{file.path}: not a dictionary of Fastensor's")
    status, out, _ = run(capsys, "show", "--all", "--json")
    assert status == 1
    assert [one.get("error") for one in json.loads(out)] == [None, f"{file.path}: not a dictionary of Fastensor's"]


def test_export_and_import(capsys: Any, file: DictionaryFile, tmp_path: Path) -> None:
    assert run(capsys, "export", "-o", "x.json") == (0, "", "")
    assert Path("x.json").read_text() == file.path.read_text() == run(capsys, "export", "--json")[1]
    file.update([Change(WRITE, MIB, "numpy", 9.0), Change(WRITE, 2 * MIB, "numpy", 3.0)])
    status, out, _ = run(capsys, "import", "x.json")
    assert (status, out) == (0, f"{file.path}: 4 sizes and contexts were taken over from x.json\n")
    dictionary = read(file.path).dictionary
    assert dictionary.of(WRITE, MIB).timings["numpy"].samples == (0.0021, 0.0021, 0.0021)
    assert dictionary.of(WRITE, 2 * MIB).timings["numpy"].seconds == 3.0
    assert dictionary.of(Context("write", "cuda"), MIB).best == "gds"


def test_an_export_takes_the_place_of_a_file_at_once(capsys: Any, file: DictionaryFile) -> None:
    file.update([Change(WRITE, MIB, "müde", 1.0)])
    Path("x.csv").write_text("what was there before")
    Path("x.csv").chmod(0o600)

    def full(call: Call) -> Any:
        if call.name == "pwrite":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return call.perform()

    export = ("export", "--csv", "WDic", "-o", "x.csv", "--force")
    status, _, err = run(capsys, *export[:-1])
    assert (status, err) == (1, "fastensor: x.csv: it is there already; --force replaces it, or choose another file\n")
    with intercepted(full):
        status, _, err = run(capsys, *export)
    assert status == 1
    assert os.strerror(errno.ENOSPC) in err
    assert Path("x.csv").read_text() == "what was there before"
    assert run(capsys, *export) == (0, "", "")
    assert "müde" in Path("x.csv").read_bytes().decode("utf-8")
    assert Path("x.csv").stat().st_mode & 0o777 == 0o600
    assert os.listdir() == ["x.csv"]


def test_text_is_utf_8_whatever_the_locale_says(file: DictionaryFile) -> None:
    file.update([Change(WRITE, MIB, "müde", 1.0)])
    locale = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    program = ("-m", "fastensor", "dictionary", "export", "--csv", "WDic", "-o", "x.csv")
    programs.run(*program, cold=True, **locale)
    assert "müde" in Path("x.csv").read_bytes().decode("utf-8")


def test_import_from_another_machine(capsys: Any, other: DictionaryFile) -> None:
    status, out, _ = run(capsys, "import", other.path, "some/path")
    assert status == 0
    here = file_for(".")
    assert read(here.path).dictionary.of(WRITE, MIB).best == "numpy"
    assert f"measured with another cpu: 96 × Other, here {here.machine['cpu']}\n" in out
    assert f"measured with another torch: None, here {here.machine['torch']}\n" in out


def test_the_papers_csv(capsys: Any, file: DictionaryFile) -> None:
    assert run(capsys, "export", "--csv", "WDic")[1].splitlines() == [
        "1.0,\"[[0.0021, 'npy'], [0.0042, 'direct'], 'npy']\"",
        "512.0,\"[[1.5, 'npy'], [0.5, 'direct'], [0.75, 'mine'], 'direct']\"",
    ]
    assert run(capsys, "export", "--csv", "RDic", "--resident")[1] == "1.0,\"[[3e-05, 'npy'], 'npy']\"\n"
    assert run(capsys, "export", "--csv", "WRDic", "--resident")[1] == "1.0,\"[[0.00213, 'npy'], 'npy']\"\n"
    status, out, err = run(capsys, "export", "--csv", "RDic")
    assert (status, out) == (1, "")
    assert err.startswith("fastensor: nothing is known that could be exported")
    assert run(capsys, "export", ".", "--csv", "WDic", "--output", "x.csv")[0] == 0
    status, out, _ = run(capsys, "import", "x.csv", "--context", "write cuda unsynced")
    assert (status, out) == (0, f"{file.path}: 2 sizes and contexts were taken over from x.csv\n")
    assert read(file.path).dictionary.of(Context("write", "cuda", warm=True), 512 * MIB).best == "direct"


@pytest.mark.parametrize(
    ("content", "context", "message"),
    [
        (b"1.0,[[1, 'npy']]", None, "if it is CSV, --context has to say"),
        (b"{}", None, "x: not a dictionary of Fastensor's"),
        (b"1.0,2,3", "read cpu cold", "x: line 1: expected 2 columns, found 3"),
        (b"\xff", "read cpu cold", "x: 'utf-8' codec"),
        (b" " * (MIB + 1), "read cpu cold", "x: 1048577 bytes, expected at most 1048576"),
        (None, None, "No such file or directory: 'x'"),
        (None, "read cpu cold", "No such file or directory: 'x'"),
    ],
)
def test_what_cannot_be_imported(
    capsys: Any, folder: Path, content: bytes | None, context: str | None, message: str
) -> None:
    if content is not None:
        Path("x").write_bytes(content)
    status, out, err = run(capsys, "import", "x", *(["--context", context] if context else []))
    assert (status, out) == (1, "")
    assert err.startswith("fastensor: ")
    assert message in err
    assert not folder.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["clear", "x", "--all"],
        ["show", "x", "--all"],
        ["export", "--csv", "Dic"],
        ["export", "--csv", "WDic", "--json"],
        ["import"],
        ["import", "x", "--context", "write"],
        ["import", "x", "--context", "read cpu durable"],
        ["plot"],
    ],
)
def test_wrong_arguments(capsys: Any, arguments: list[str]) -> None:
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert "Traceback" not in err
    assert "--context" not in arguments or "expected write DEVICE durable|unsynced or read DEVICE" in err


def test_nothing_can_be_written(capsys: Any, folder: Path, other: DictionaryFile) -> None:
    Path("x.json").write_text(other.path.read_text())
    other.remove()
    folder.rmdir()
    folder.write_text("in the way")
    status, _, err = run(capsys, "import", "x.json")
    assert status == 1
    assert str(folder) in err


def test_clearing(capsys: Any, file: DictionaryFile, other: DictionaryFile, folder: Path) -> None:
    status, out, _ = run(capsys, "clear")
    assert (status, out) == (0, f"removed {file.path}\nremoved {file.path}.lock\n")
    assert [path.name for path in sorted(folder.iterdir())] == [other.path.name, f"{other.path.name}.lock"]
    (folder / "notes.txt").touch()
    Path(f"{file.path}.damaged").touch()
    status, out, _ = run(capsys, "clear", "--all")
    assert status == 0
    assert out.splitlines() == [
        f"removed {other.path}",
        f"removed {other.path}.lock",
        f"removed {file.path}.damaged",
    ]
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_the_picture(capsys: Any, file: DictionaryFile) -> None:
    pytest.importorskip("matplotlib")
    assert run(capsys, "plot", "-o", "x.png") == (0, f"x.png: drawn from {file.path}\n", "")
    assert Path("x.png").read_bytes().startswith(b"\x89PNG")
    status, _, err = run(capsys, "plot", "-o", "x.strange")
    assert status == 2
    assert "strange" in err
    found = lines(read(file.path).dictionary)
    assert list(found) == [READ, WRITE, Context("write", "cuda")]
    assert [(point.nbytes, point.best) for point in found[WRITE]["direct"]] == [(MIB, False), (512 * MIB, True)]
    assert found[WRITE]["direct"][1].bytes_per_second == 1024 * MIB


def test_nothing_to_draw(capsys: Any) -> None:
    pytest.importorskip("matplotlib")
    status, out, err = run(capsys, "plot", "-o", "x.png")
    assert (status, out) == (1, "")
    assert "nothing was measured yet" in err
    assert not Path("x.png").exists()


@pytest.fixture
def no_matplotlib(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        patch.setitem(sys.modules, "matplotlib.figure", None)
        yield


def test_a_picture_without_matplotlib(capsys: Any, file: DictionaryFile, no_matplotlib: None) -> None:
    status, out, err = run(capsys, "plot", "-o", "x.png")
    assert (status, out, err) == (1, "", "fastensor: drawing needs matplotlib: pip install matplotlib\n")


def test_matplotlib_is_not_imported_before(file: DictionaryFile) -> None:
    code = (
        "import sys; from fastensor.cli import main; main(['dictionary', 'show']); print('matplotlib' in sys.modules)"
    )
    assert programs.run("-c", code).stdout.splitlines()[-1] == "False"


def test_what_replaces_is_what_there_was() -> None:
    dictionary = learned(CHANGES)
    again = learned(list(replacing(dictionary)))
    assert [(key, entry.timings.keys()) for key, entry in again] == [
        (key, entry.timings.keys()) for key, entry in dictionary
    ]
    assert all(
        again.at(key).timings[name].samples == one.samples
        for key, entry in dictionary
        for name, one in entry.timings.items()
    )
    many = learned([Change(WRITE, MIB, "numpy", float(number)) for number in range(13)])
    copy = learned([*CHANGES, *replacing(many)])
    assert copy.of(WRITE, MIB).timings["numpy"].samples == tuple(map(float, range(4, 13)))
    assert copy.of(WRITE, MIB).timings["direct"].seconds == 0.0042


def test_what_is_not_there_is_not_cleared(
    file: DictionaryFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A path that was mistyped; where nothing can be lost, one that is not there yet may be meant."""
    before = file.path.read_bytes()
    assert main(["dictionary", "clear", str(tmp_path / "chekpoints")]) == 1
    assert re.search("no such file or folder.*chekpoints", capsys.readouterr().err)
    assert file.path.read_bytes() == before
