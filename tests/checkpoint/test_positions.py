"""Where ``load`` and ``save`` take and leave the position of an open file: as ``torch.load`` and ``torch.save`` do."""

from __future__ import annotations

import errno
import gzip
import io
import pickle
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest
import states
import torch

import fastensor
from fastensor.errors import (
    CheckpointReadError,
    CorruptCheckpointError,
    EmptyCheckpointError,
    FastensorError,
    NotACheckpointError,
)

RECORDS: tuple[Any, ...] = (
    {"step": 0, "w": torch.arange(5.0), "none": torch.empty(0), "b": torch.ones(3, dtype=torch.int16)},
    {"step": 1, "large": torch.arange(70_000)},
    "no tensor",
)
LEGACY: dict[str, Any] = {"_use_new_zipfile_serialization": False}
Kind = Callable[[bytes], Any]


class OnlyRead:
    """A file with nothing but what ``torch.load`` asks for."""

    def __init__(self, data: bytes) -> None:
        file = io.BytesIO(data)
        self.read, self.readline, self.seek, self.tell = file.read, file.readline, file.seek, file.tell


@pytest.fixture
def kinds(tmp_path: Path) -> Iterator[dict[str, Kind]]:
    path = tmp_path / "open"
    with ExitStack() as stack:

        def written(file: Any, data: bytes) -> Any:
            stack.callback(file.close)
            file.write(data)
            file.seek(0)
            return file

        def on_disk(data: bytes, **options: Any) -> Any:
            path.write_bytes(data)
            return stack.enter_context(open(path, "rb", **options))

        def member(data: bytes) -> Any:
            with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr("inner", data)
            return stack.enter_context(stack.enter_context(zipfile.ZipFile(path)).open("inner"))

        def remote(data: bytes) -> Any:
            fsspec.filesystem("memory").pipe_file("/positions", data)
            return stack.enter_context(fsspec.open("memory://positions", "rb"))

        def local_by_fsspec(data: bytes) -> Any:
            path.write_bytes(data)
            return stack.enter_context(fsspec.open(f"file://{path}", "rb"))

        yield {
            "BytesIO": io.BytesIO,
            "only read": OnlyRead,
            "buffered": on_disk,
            "unbuffered": lambda data: on_disk(data, buffering=0),
            "read and written": lambda data: written(open(path, "w+b"), data),  # noqa: SIM115  # the stack closes it
            "TemporaryFile": lambda data: written(tempfile.TemporaryFile(), data),  # noqa: SIM115  # as above
            "NamedTemporaryFile": lambda data: written(tempfile.NamedTemporaryFile(), data),  # noqa: SIM115
            "spooled": lambda data: written(tempfile.SpooledTemporaryFile(), data),  # noqa: SIM115
            "gzip": lambda data: gzip.GzipFile(fileobj=io.BytesIO(gzip.compress(data, 1))),
            "zip member": member,
            "fsspec in memory": remote,
            "fsspec on disk": local_by_fsspec,
        }


KINDS = (
    "BytesIO", "only read", "buffered", "unbuffered", "read and written", "TemporaryFile", "NamedTemporaryFile",
    "spooled", "gzip", "zip member", "fsspec in memory", "fsspec on disk",
)  # fmt: skip
FORMATS = {"zip": {}, "legacy": LEGACY}


def saved(record: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(record, file, **options)
    return file.getvalue()


def stream(**options: Any) -> bytes:
    """Several records in one file."""
    return b"".join(saved(record, **options) for record in RECORDS)


def read_all(load: Callable[..., Any], file: Any, **options: Any) -> tuple[list[Any], list[int]]:
    found, positions = [], []
    for _ in RECORDS:
        found.append(load(file, **options))
        positions.append(file.tell())
    with pytest.raises(EOFError):
        load(file, **options)
    return found, [*positions, file.tell()]


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::fastensor.UnverifiedCheckpointWarning")
def test_files_of_before_1_6_one_after_another(kinds: dict[str, Kind], kind: str, weights_only: bool) -> None:
    data = stream(**LEGACY)
    expected, stops = read_all(torch.load, kinds[kind](data), weights_only=weights_only)
    found, positions = read_all(fastensor.load, kinds[kind](data), weights_only=weights_only)
    states.assert_equal(found, expected)
    assert positions == stops == [sum(len(saved(one, **LEGACY)) for one in RECORDS[: n + 1]) for n in (0, 1, 2, 2)]


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_an_archive_behind_other_data(kinds: dict[str, Kind], kind: str, weights_only: bool) -> None:
    for record in RECORDS:
        stops = []
        for load in (torch.load, fastensor.load):
            file = kinds[kind](b"head" + saved(record))
            file.seek(4)
            states.assert_equal(load(file, weights_only=weights_only), record)
            stops.append(file.tell())
        assert stops[1] == stops[0], record


@pytest.mark.parametrize("record", ["version", "byteorder", "data.pkl", ".data/serialization_id", "data/0"])
@pytest.mark.parametrize("verify", [True, False])
def test_no_loop_meets_a_damaged_file_twice(tmp_path: Path, record: str, verify: bool) -> None:
    fastensor.save(RECORDS[0], tmp_path / "x.ckpt")
    data = bytearray((tmp_path / "x.ckpt").read_bytes())
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        name = next(name for name in archive.namelist() if name.endswith(f"/{record}"))
        content = archive.read(name)
    data[data.index(content, data.index(name.encode()))] ^= 0x40
    file = io.BytesIO(bytes(data))
    if verify:
        with pytest.raises(CorruptCheckpointError, match=f"{record}'"):
            fastensor.load(file)
    else:
        with suppress(FastensorError):
            fastensor.load(file, verify=False)
    assert file.tell() > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("of", FORMATS)
@pytest.mark.filterwarnings("ignore::fastensor.UnverifiedCheckpointWarning")
def test_a_file_from_its_start(kinds: dict[str, Kind], kind: str, of: str) -> None:
    stops = []
    for load in (torch.load, fastensor.load):
        file = kinds[kind](saved(RECORDS[0], **FORMATS[of]))
        states.assert_equal(load(file), RECORDS[0])
        stops.append(file.tell())
    assert stops[1] == stops[0]


class Custom:
    pass


def cut(nbytes: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:nbytes]


DAMAGED: dict[str, tuple[Any, dict[str, Any], Callable[[bytes], bytes]]] = {
    "a class that is refused": ([torch.ones(2), Custom()], {}, bytes),
    "a class that is refused, before 1.6": ([torch.ones(2), Custom()], LEGACY, bytes),
    "cut in the directory": (RECORDS[0], {}, cut(-30)),
    "cut in a large archive": (RECORDS[1], {}, cut(-5000)),
    "cut in the first header": (RECORDS[0], {}, cut(20)),
    "cut in the magic number": (RECORDS[0], LEGACY, cut(9)),
    "cut in the pickle": (RECORDS[0], LEGACY, cut(120)),
    "cut in a tensor": (RECORDS[1], LEGACY, cut(-100)),
    "nothing": (None, {}, lambda data: b""),
}


@pytest.mark.parametrize("kind", ["BytesIO", "buffered", "unbuffered", "only read"])
@pytest.mark.parametrize("what", DAMAGED)
def test_failures(kinds: dict[str, Kind], kind: str, what: str) -> None:
    record, options, damage = DAMAGED[what]
    stops = []
    for load, kept in ((torch.load, Exception), (fastensor.load, FastensorError)):
        for head in (b"", b"head"):
            file = kinds[kind](head + damage(saved(record, **options)))
            file.seek(len(head))
            with pytest.raises(kept):
                load(file)
            stops.append(file.tell())
    assert stops[2:] == stops[:2]


@pytest.mark.parametrize("kind", ["BytesIO", "buffered"])
@pytest.mark.parametrize(
    ("data", "expected", "words"),
    [
        (b"PK\3", CorruptCheckpointError, "but no zip archive"),
        (pickle.dumps({"a": 1}) + b"more", NotACheckpointError, "a pickle that torch.save did not write"),
        (b"nothing of torch's", NotACheckpointError, "a text that begins with .nothing"),
    ],
)
def test_no_loop_meets_what_is_no_checkpoint_again(
    kinds: dict[str, Kind], kind: str, data: bytes, expected: type[FastensorError], words: str
) -> None:
    """Nothing of it is unpickled to find out where torch would stop."""
    file = kinds[kind](data)
    with pytest.raises(expected, match=words):
        fastensor.load(file)
    with pytest.raises(EmptyCheckpointError):
        fastensor.load(file)


class Breaking(io.BytesIO):
    """A file that fails from some call on."""

    def __init__(self, data: bytes, calls: int) -> None:
        super().__init__(data)
        self.left = calls

    def _call(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.EIO, "the cable was pulled")

    def seek(self, offset: int, whence: int = 0) -> int:
        self._call()
        return super().seek(offset, whence)

    def readinto(self, buffer: Any) -> int:
        self._call()
        return super().readinto(buffer)

    def read(self, size: int | None = -1) -> bytes:
        self._call()
        return super().read(size)


@pytest.mark.parametrize("of", FORMATS)
@pytest.mark.filterwarnings("ignore::fastensor.UnverifiedCheckpointWarning")
def test_a_file_that_fails_at_any_call(of: str) -> None:
    record = {str(number): torch.arange(20_000) for number in range(8)}  # each is read by itself
    data = saved(record, **FORMATS[of])
    file = Breaking(data, 10_000)
    fastensor.load(file)
    needed = 10_000 - file.left
    assert needed > 20
    for calls in range(needed):
        with pytest.raises(CheckpointReadError) as caught:
            fastensor.load(Breaking(data, calls))
        assert caught.value.errno == errno.EIO
    states.assert_equal(fastensor.load(Breaking(data, needed)), record)


def test_the_end_of_a_stream_is_both_errors() -> None:
    with pytest.raises(EOFError, match="nothing stands behind the file's position") as caught:
        fastensor.load(io.BytesIO())
    assert isinstance(caught.value, CorruptCheckpointError)
    assert isinstance(caught.value, EmptyCheckpointError)


def test_an_empty_file_is_both_errors(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    for load in (torch.load, fastensor.load):
        with pytest.raises(EOFError):
            load(tmp_path / "x")


def test_a_place_that_torch_refuses_leaves_the_position_as_torch() -> None:
    data = saved([torch.ones(3), torch.ones(2)], **LEGACY)
    stops = []
    for load in (torch.load, fastensor.load):
        file = io.BytesIO(data)
        with pytest.raises(RuntimeError, match="nowhere"):
            load(file, {"cpu": "nowhere"})
        stops.append(file.tell())
    assert stops[0] == stops[1]


@pytest.mark.filterwarnings("ignore::fastensor.UnverifiedCheckpointWarning")
def test_a_file_that_reads_no_lines() -> None:
    """``torch.load`` needs ``readline``, and only for files of before 1.6."""
    file: Any = OnlyRead(stream(**LEGACY))
    del file.readline
    found, positions = read_all(fastensor.load, file)
    expected, stops = read_all(torch.load, io.BytesIO(stream(**LEGACY)))
    states.assert_equal(found, expected)
    assert positions == stops


@pytest.mark.parametrize("missing", ["seek", "tell"])
def test_a_file_without_a_position_is_refused(missing: str) -> None:
    file: Any = OnlyRead(saved(RECORDS[0]))
    delattr(file, missing)
    with pytest.raises(CheckpointReadError, match="that can seek"):
        fastensor.load(file)


def test_pickles_between(tmp_path: Path) -> None:
    with open(tmp_path / "x", "w+b") as file:
        pickle.dump(41, file)
        torch.save(torch.ones(2), file, **LEGACY)
        pickle.dump(42, file)
        file.seek(0)
        with pytest.warns(fastensor.UnverifiedCheckpointWarning):
            assert (pickle.load(file), fastensor.load(file).tolist(), pickle.load(file)) == (41, [1, 1], 42)


@pytest.mark.parametrize("kind", ["BytesIO", "buffered"])
def test_what_is_only_looked_at_stays_where_it_is(kinds: dict[str, Kind], kind: str) -> None:
    for head in (b"", b"head"):
        file = kinds[kind](head + saved(RECORDS[0]))
        file.seek(len(head))
        fastensor.verify(file)
        fastensor.inspect(file)
        with fastensor.open(file) as lazily:
            assert torch.equal(lazily["w"], RECORDS[0]["w"])
        states.assert_equal(fastensor.load(file), RECORDS[0])


@pytest.mark.parametrize("kind", ["BytesIO", "buffered"])
def test_safetensors_are_read_to_the_end(kinds: dict[str, Kind], kind: str) -> None:
    data = io.BytesIO()
    fastensor.save({"w": torch.ones(3)}, data, container="safetensors")
    file = kinds[kind](data.getvalue())
    assert fastensor.load(file)["w"].tolist() == [1, 1, 1]
    with pytest.raises(EOFError):
        fastensor.load(file)


def test_a_part_of_a_file_moves_the_position_too() -> None:
    """With ``keys`` torch's reader stops behind what was chosen; with ``into`` it has no part in the load."""
    data = saved(RECORDS[0])
    values = RECORDS[0]["w"].numpy().tobytes()
    stops = []
    for options in ({"keys": ["w"]}, {"into": {"w": torch.empty(5)}}):
        file = io.BytesIO(data)
        fastensor.load(file, **options)  # type: ignore[arg-type]  # mypy mixes the values of both
        stops.append(file.tell())
    assert stops == [data.index(values) + len(values), len(data)]


def test_a_file_that_is_closed_meanwhile_stays_closed() -> None:
    file = io.BytesIO(saved(RECORDS[0]))
    lazily = fastensor.open(file)
    file.close()
    lazily.close()


def test_two_archives_in_one_file_are_told(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(saved(RECORDS[0]) + saved(RECORDS[1]))
    for load in (fastensor.load, fastensor.verify, fastensor.open):
        with pytest.raises(CorruptCheckpointError, match="another archive stands in front"):
            load(path)


@pytest.mark.parametrize("mode", ["", "w+b", "a+b"])
def test_saves_one_after_another(tmp_path: Path, mode: str) -> None:
    """Archives are found from where they begin, as those of ``torch.save``; what stands in front stays."""
    for number, save in enumerate((torch.save, fastensor.save)):
        with ExitStack() as stack:
            file: Any = stack.enter_context(open(tmp_path / str(number), mode)) if mode else io.BytesIO()
            file.write(b"head")
            begins = [file.tell()]
            for record in RECORDS:
                save(record, file)
                begins.append(file.tell())
            assert file.seek(0, io.SEEK_END) == begins[-1]
            for load in (torch.load, fastensor.load):
                file.seek(begins[-2])
                assert load(file) == RECORDS[-1]
            for begin, end, record in zip(begins, begins[1:], RECORDS, strict=False):
                file.seek(begin)
                states.assert_equal(torch.load(io.BytesIO(file.read(end - begin))), record)
