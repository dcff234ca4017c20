"""Where torch raises, ours raises an exception that handlers of torch's type catch: each row is tried with both."""

from __future__ import annotations

import bz2
import copy
import gzip
import io
import lzma
import os
import pickle
import random
import re
import struct
import tarfile
import threading
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

import fastensor
from fastensor import CorruptCheckpointError, FastensorError, NotACheckpointError, UnsafeCheckpointError
from fastensor.checkpoint.dcp import FastensorStorageReader, FastensorStorageWriter
from fastensor.errors import CheckpointReadError, UnsupportedContentError, caught_as
from fastensor.files.os_errors import read_error, write_error

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]
STATE = {"w": torch.arange(100.0)}


def in_memory(write: Callable[[Any], object]) -> bytes:
    file = io.BytesIO()
    write(file)
    return file.getvalue()


def of_torch(obj: object = STATE, **options: Any) -> bytes:
    return in_memory(lambda file: torch.save(obj, file, **options))


def legacy(obj: object = STATE) -> bytes:
    return of_torch(obj, _use_new_zipfile_serialization=False)


def zipped(*names: str) -> bytes:
    def write(file: Any) -> None:
        with zipfile.ZipFile(file, "w") as archive:
            for name in names:
                archive.writestr(name, b"hello")

    return in_memory(write)


def tarred(*names: str) -> bytes:
    def write(file: Any) -> None:
        with tarfile.open(fileobj=file, mode="w") as archive:
            for name in names:
                member = tarfile.TarInfo(name)
                member.size = 1
                archive.addfile(member, io.BytesIO(b"."))

    return in_memory(write)


def scripted() -> bytes:
    return in_memory(lambda file: torch.jit.save(torch.jit.script(nn.Linear(2, 2)), file))  # type: ignore[no-untyped-call]


def exported() -> bytes:
    return in_memory(lambda file: torch.export.save(torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),)), file))


def invalid_sparse() -> torch.Tensor:
    return torch.sparse_coo_tensor([[0, 3]], [1.0, 2.0], (3,), check_invariants=False)


class Unknown:
    """A class that is not allow-listed."""


FOREIGN: dict[str, tuple[Callable[[], bytes], str]] = {
    "git lfs": (
        lambda: b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 12345\n",
        "git lfs pull",
    ),
    "html": (lambda: b"\n<!DOCTYPE html><html><title>Index of /models</title></html>", "an HTML page"),
    "xml": (lambda: b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "an XML document"),
    "json": (lambda: b'{"error": "Entry not found"}', "JSON that begins with"),
    "text": (lambda: "Zugriff verweigert: bitte anmelden \u00fc".encode(), "a text that begins with 'Zugriff"),
    "listing": (lambda: b"total 12\ndrwxr-xr-x 2 root root 4096 model\n", "a text that begins with 'total 12"),
    "gguf": (lambda: b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + bytes(100), "a GGUF file"),
    "npy": (lambda: in_memory(lambda file: np.save(file, np.ones(3))), "numpy.load"),
    "npz": (lambda: in_memory(lambda file: np.savez(file, a=np.ones(3))), "numpy.load"),
    "hdf5": (lambda: b"\x89HDF\r\n\x1a\n" + bytes(100), "an HDF5 file"),
    "gzip": (lambda: gzip.compress(of_torch()), "gzip; decompress"),
    "bzip2": (lambda: bz2.compress(of_torch()), "bzip2; decompress"),
    "xz": (lambda: lzma.compress(of_torch()), "xz; decompress"),
    "zstd": (lambda: b"\x28\xb5\x2f\xfd" + bytes(50), "zstd; decompress"),
    "tar": (lambda: tarred("model/config.json", "model/weights"), "a tar archive; unpack it first"),
    "old tar": (lambda: tarred("sys_info", "pickle", "storages", "tensors"), "before 0.1.11, load it by torch.load"),
    "zip": (lambda: zipped("a/model.pt", "a/config.json"), "a zip archive of 'a/model.pt', 'a/config.json'"),
    "empty zip": (lambda: zipped(), "a zip archive with nothing in it"),
    "exported": (exported, "torch.export.load"),
    "pickle": (lambda: pickle.dumps({"a": 1}), "pickle.load"),
    "pickle of numpy": (lambda: pickle.dumps(np.ones(3)), "pickle.load"),
    "parquet": (lambda: b"PAR1" + bytes(100), "Parquet"),
    "png": (lambda: b"\x89PNG\r\n\x1a\n" + bytes(100), "a PNG image"),
}
DAMAGED: dict[str, Callable[[], bytes]] = {
    "cut in its header": lambda: of_torch()[:10],
    "cut in the middle": lambda: of_torch()[: len(of_torch()) // 2],
    "cut at the end": lambda: of_torch()[:-1],
    "another first byte": lambda: b"X" + of_torch()[1:],
    "zeros": lambda: bytes(1000),
    "random": lambda: random.Random(1).randbytes(1000),
    "one byte": lambda: b"\x80",
    "legacy, cut in its number": lambda: legacy()[:5],
    "legacy, cut behind it": lambda: legacy()[:20],
    "legacy, cut in its pickle": lambda: legacy()[:100],
    "legacy, cut at a mark": lambda: legacy()[:300],
    "legacy, cut in a storage": lambda: legacy()[:-10],
}
SOUND: dict[str, Callable[[], bytes]] = {
    "zip": of_torch,
    "legacy": legacy,
    "legacy as text": lambda: of_torch(_use_new_zipfile_serialization=False, pickle_protocol=0),
    "scripted": scripted,
    "a class": lambda: of_torch({"x": Unknown()}),
    "a class, legacy": lambda: legacy({"x": Unknown()}),
    "invalid sparse": lambda: of_torch({"x": invalid_sparse()}),
    "invalid sparse, legacy": lambda: legacy({"x": invalid_sparse()}),
}
CONTENTS: dict[str, Callable[[], bytes]] = {
    **{name: write for name, (write, _) in FOREIGN.items()},
    **DAMAGED,
    **SOUND,
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"weights_only": False},
    {"mmap": True},
    {"mmap": True, "weights_only": False},
    {"map_location": "cuda:77"},
    {"map_location": {"cpu": "cuda:77"}},
]


def outcome(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except Exception as error:  # noqa: BLE001  # what is raised is compared
        return error
    return None


def tried(call: Callable[[Any], object], place: Any) -> Exception | None:
    """What a call raises for a path or a file, which is closed."""
    try:
        return outcome(lambda: call(place))
    finally:
        if isinstance(place, io.IOBase):
            place.close()


def check_alike(theirs: Exception | None, ours: Exception | None) -> None:
    """Ours is of torch's type, or both succeed. Its message names no file by what is only ours."""
    assert theirs is None or isinstance(ours, type(theirs)), f"torch: {theirs!r}, ours: {ours!r}"
    assert theirs is not None or ours is None, f"torch: no error, ours: {ours!r}"
    one: BaseException | None = ours
    while one is not None:
        assert "/proc/self/fd" not in f"{one} {getattr(one, '__notes__', '')}"
        one = one.__cause__


def loads(path: Any, **options: Any) -> tuple[Exception | None, Exception | None]:
    """What torch and ours raise."""
    theirs = outcome(lambda: torch.load(path, **options))
    return theirs, outcome(lambda: fastensor.load(path, verify=False, **options))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", CONTENTS)
def test_load(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    if torch.cuda.is_available() and "map_location" in options:
        pytest.skip("this machine has CUDA, so cuda:77 is another mistake")
    path = tmp_path / "x.pt"
    path.write_bytes(CONTENTS[name]())
    with torch.sparse.check_sparse_tensor_invariants():
        check_alike(*loads(path, **options))


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_called_so(tmp_path: Path, name: str) -> None:
    (tmp_path / "x.pt").write_bytes(DAMAGED[name]())
    with pytest.raises(CorruptCheckpointError, match=rf"^{re.escape(str(tmp_path / 'x.pt'))}: "):
        fastensor.load(tmp_path / "x.pt")


def python2(text: bytes) -> bytes:
    """A file of before torch 1.6 in which Python 2 has pickled a text."""
    return legacy({"x": "TEXT"}).replace(b"X\4\0\0\0TEXT", text)


NOT_DAMAGED: dict[str, tuple[Callable[[], bytes], dict[str, Any], type[Exception], str]] = {
    "mapped": (legacy, {"mmap": True}, UnsupportedContentError, "mmap=True maps zip archives.*without mmap"),
    "as text": (SOUND["legacy as text"], {}, UnsafeCheckpointError, "Unsupported operand"),
    "protocol 4": (
        lambda: of_torch(_use_new_zipfile_serialization=False, pickle_protocol=4),
        {},
        UnsafeCheckpointError,
        "Unsupported operand 149",
    ),
    "scripted": (scripted, {}, UnsafeCheckpointError, "TorchScript"),
    "sparse": (SOUND["invalid sparse"], {}, UnsupportedContentError, "found index 3"),
    "sparse, legacy": (SOUND["invalid sparse, legacy"], {}, UnsupportedContentError, "check sparse tensors"),
    "Latin-1 of Python 2": (lambda: python2(b"U\4\xe9t\xe9s"), {}, UnsupportedContentError, "encoding='latin1'"),
    "bytes of Python 2": (lambda: python2(b"T\4\0\0\0\xe9t\xe9s"), {}, UnsafeCheckpointError, "Unsupported operand 84"),
}


@pytest.mark.parametrize("name", NOT_DAMAGED)
def test_what_torch_refuses_is_not_called_damaged(tmp_path: Path, name: str) -> None:
    write, options, kind, words = NOT_DAMAGED[name]
    (tmp_path / "x.pt").write_bytes(write())
    with torch.sparse.check_sparse_tensor_invariants():
        theirs, ours = loads(tmp_path / "x.pt", **options)
    assert theirs is not None
    check_alike(theirs, ours)
    assert isinstance(ours, kind)
    assert not isinstance(ours, CorruptCheckpointError)
    assert re.search(words, str(ours))


ENTRIES: dict[str, Callable[[Path, Path], object]] = {
    "load": lambda path, _: fastensor.load(path),
    "load of a file": lambda path, _: fastensor.load(io.BytesIO(path.read_bytes())),
    "load into": lambda path, _: fastensor.load(path, into={"w": torch.ones(3)}),
    "load_sharded": lambda path, _: fastensor.load_sharded(path),
    "load_model": lambda path, _: fastensor.load_model(nn.Linear(1, 1), path),
    "open": lambda path, _: fastensor.open(path).close(),
    "verify": lambda path, _: fastensor.verify(path),
    "inspect": lambda path, _: fastensor.inspect(path),
    "diff": lambda path, _: fastensor.diff(path, path),
    "convert": lambda path, target: fastensor.convert(path, target),
}


@pytest.mark.parametrize("suffix", [".pt", ".safetensors", ".bin", ".ckpt"])
@pytest.mark.parametrize("name", FOREIGN)
def test_other_formats_are_named(tmp_path: Path, name: str, suffix: str) -> None:
    write, words = FOREIGN[name]
    path = tmp_path / f"model{suffix}"
    path.write_bytes(write())
    for entry, call in ENTRIES.items():
        with pytest.raises(NotACheckpointError) as caught:
            call(path, tmp_path / "target.safetensors")
        assert not isinstance(caught.value, CorruptCheckpointError), entry
        assert words in str(caught.value), entry
        assert "/proc/self/fd" not in str(caught.value), entry
        assert entry == "load of a file" or str(caught.value).startswith(f"{path}: "), entry


POINTER = FOREIGN["git lfs"][0]()


def test_pointers_in_place_of_the_files_of_a_model(tmp_path: Path) -> None:
    fastensor.save_sharded({"a": torch.ones(3), "b": torch.ones(3)}, tmp_path, shard_nbytes="12B")
    shard = next(tmp_path.glob("*-00002-of-00002.safetensors"))
    shard.write_bytes(POINTER)
    for call in (fastensor.load_sharded, fastensor.verify, fastensor.inspect):
        with pytest.raises(NotACheckpointError, match=rf"^{re.escape(str(shard))}.*git lfs pull"):
            call(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_bytes(POINTER)
    for call in (fastensor.load_sharded, fastensor.verify, fastensor.inspect):
        with pytest.raises(NotACheckpointError, match=r"expected the index of a model.*git lfs pull"):
            call(tmp_path)
    fastensor.save_sharded({"a": torch.ones(3), "b": torch.ones(3)}, tmp_path, shard_nbytes="12B")
    assert fastensor.load_sharded(tmp_path)["b"].tolist() == [1, 1, 1]


def test_pointers_in_place_of_a_distributed_checkpoint(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(300)}, storage_writer=FastensorStorageWriter(tmp_path), no_dist=True)
    found = {"a": torch.zeros(300)}
    data = next(tmp_path.glob("*.distcp"))
    data.write_bytes(POINTER)
    with pytest.raises(NotACheckpointError, match="git lfs pull"):
        fastensor.verify(tmp_path)
    with pytest.raises(CheckpointException, match="git lfs pull"):
        dcp.load(found, storage_reader=FastensorStorageReader(tmp_path), no_dist=True)
    (tmp_path / ".metadata").write_bytes(POINTER)
    with pytest.raises(NotACheckpointError, match=r"expected the metadata.*git lfs pull"):
        fastensor.verify(tmp_path)


class MakesArchives(DefaultSavePlanner):
    """Saves objects as it likes: as text, and as a zip archive of its own."""

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.type != WriteItemType.BYTE_IO:
            return super().resolve_data(write_item)
        return io.BytesIO(zipped("a", "b") if write_item.index.fqn == "zip" else b"plain text")


def test_what_a_planner_has_made_is_not_judged(tmp_path: Path) -> None:
    state = {"a": torch.ones(3), "zip": object, "text": object}
    dcp.save(state, storage_writer=FastensorStorageWriter(tmp_path), planner=MakesArchives(), no_dist=True)
    assert fastensor.verify(tmp_path).damage == ()
    assert fastensor.inspect(tmp_path).tensors[0].name == "a"
    assert fastensor.diff(tmp_path, tmp_path).is_empty


def directory(path: Path) -> Path:
    path.mkdir()
    return path


def linked(path: Path) -> Path:
    path.symlink_to(path)
    return path


def closed() -> Any:
    file = io.BytesIO()
    file.close()
    return file


def pipe() -> Any:
    return os.fdopen(os.pipe()[0], "rb")


SOURCES: dict[str, Callable[[Path], Any]] = {
    "nothing": lambda path: path,
    "a directory": directory,
    "a path below a file": lambda path: written(path) / "x",
    "a link to itself": linked,
    "a long name": lambda path: path / ("x" * 300),
    "a zero in the name": lambda path: f"{path}\0",
    "a number": lambda path: 5,
    "None": lambda path: None,
    "a path of bytes": lambda path: os.fsencode(written(path)),
    "bytes": lambda path: of_torch(),
    "a file for writing": lambda path: open(path, "wb"),  # noqa: SIM115  # the test closes it
    "a closed file": lambda path: closed(),
    "a pipe": lambda path: pipe(),
}


def written(path: Path) -> Path:
    path.write_bytes(of_torch())
    return path


@pytest.mark.parametrize("name", SOURCES)
def test_what_cannot_be_opened(tmp_path: Path, name: str) -> None:
    theirs = tried(torch.load, SOURCES[name](tmp_path / "one"))
    assert theirs is not None
    check_alike(theirs, tried(fastensor.load, SOURCES[name](tmp_path / "two")))


def test_a_file_of_text(tmp_path: Path) -> None:
    """torch fails at its first byte that is no text, by ``UnicodeDecodeError``, which is a ``ValueError``. No exception
    can be that and an ``OSError``: the one row that does not hold."""
    with open(written(tmp_path / "x")) as file, pytest.raises(CheckpointReadError, match="mode 'rb'") as caught:
        fastensor.load(file)  # type: ignore[arg-type]
    assert isinstance(caught.value, ValueError)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    written(tmp_path / "x").chmod(0)
    check_alike(*loads(tmp_path / "x"))


def test_types_of_errors_of_the_operating_system() -> None:
    for error in (PermissionError(13, "denied"), ConnectionResetError(104, "reset"), TimeoutError(110, "late")):
        for ours in (read_error(error, "x"), write_error(error, "x", "the save failed")):
            assert isinstance(ours, type(error))
            assert (ours.errno, ours.filename) == (error.errno, "x")


PLACES: list[Any] = [
    "gpu",
    "",
    5,
    ["cpu"],
    b"cpu",
    torch.float32,
    {"cpu": "gpu"},
    {"cpu": 5},
    lambda s, _: 5,
    lambda: 0,
]


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("place", PLACES, ids=lambda place: "callable" if callable(place) else repr(place))
def test_wrong_places(tmp_path: Path, place: Any, weights_only: bool) -> None:
    theirs, ours = loads(written(tmp_path / "x"), map_location=place, weights_only=weights_only)
    assert theirs is not None
    check_alike(theirs, ours)
    assert not isinstance(ours, CorruptCheckpointError | UnsupportedContentError)


def loads_of_safetensors(path: Path) -> tuple[Exception | None, Exception | None]:
    """What ``torch.load`` and ours raise. It has safetensors load files of that name, where it knows them: before torch
    2.13 it may not, and users call safetensors."""
    if torch.__version__ >= "2.13":
        return loads(path)
    return outcome(lambda: safetensors.torch.load_file(path)), loads(path)[1]


def test_files_of_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file(STATE, path)
    sound = path.read_bytes()
    for data in (sound[:-1], sound[:5], sound[:20], b"\xff" * 9 + sound, POINTER, bytes(100)):
        path.write_bytes(data)
        theirs, ours = loads_of_safetensors(path)
        assert isinstance(theirs, safetensors.SafetensorError)
        check_alike(theirs, ours)


@pytest.mark.parametrize("last", [b"}", b"x"])
def test_a_header_of_safetensors_that_no_reader_takes(tmp_path: Path, last: bytes) -> None:
    """A file of 1,290,000 tensors had one. If no header is as long as is claimed, the length is damaged."""
    with open(tmp_path / "x.safetensors", "wb") as file:
        file.write(struct.pack("<Q", 132_095_296) + b"{")
        file.seek(8 + 132_095_296 - 1)
        file.write(last + bytes(10))
    theirs, ours = loads_of_safetensors(tmp_path / "x.safetensors")
    check_alike(theirs, ours)
    assert isinstance(ours, UnsupportedContentError if last == b"}" else CorruptCheckpointError)
    assert "132095296 bytes" in str(ours)


class WithoutState(pickle.Pickler):
    def persistent_id(self, value: object) -> str | None:
        return "7" if value is STATE else None


def test_variables_that_contradict_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"):
        monkeypatch.setenv(name, "1")
    check_alike(*loads(written(tmp_path / "x")))


@pytest.mark.parametrize("options", [{}, {"weights_only": False}, {"mmap": True}], ids=str)
@pytest.mark.parametrize("write", [of_torch, legacy])
def test_files_that_were_cut_off_anywhere(tmp_path: Path, write: Callable[..., bytes], options: dict[str, Any]) -> None:
    """torch raises ``OSError`` for most archives of more than a page."""
    data = write(OrderedDict(w=torch.arange(1500.0), s="text"))
    assert len(data) > 6000
    for nbytes in [*range(1, 600, 13), *range(600, len(data), 397), len(data) - 1]:
        (tmp_path / "x.pt").write_bytes(data[:nbytes])
        theirs, ours = loads(tmp_path / "x.pt", **options)
        assert theirs is not None
        check_alike(theirs, ours)
        assert isinstance(ours, CorruptCheckpointError) or options
        if "mmap" not in options:
            theirs = outcome(lambda: torch.load(io.BytesIO(data[:nbytes]), **options))  # noqa: B023
            check_alike(theirs, outcome(lambda: fastensor.load(io.BytesIO(data[:nbytes]), **options)))  # noqa: B023


class Refuses:
    """Cannot be pickled."""

    def __reduce__(self) -> Any:
        raise LookupError("mine")


def deep() -> Any:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    return nested


def under_two_dtypes() -> Any:
    tensor = torch.zeros(4)
    return [tensor, tensor.view(torch.int32)]


UNSAVABLE: dict[str, Callable[[], Any]] = {
    "a lambda": lambda: lambda: 0,
    "a generator": lambda: (number for number in ()),
    "a lock": threading.Lock,
    "a module": lambda: os,
    "a memoryview": lambda: memoryview(b"x"),
    "what refuses": Refuses,
    "lists in lists": deep,
    "one storage under two dtypes": under_two_dtypes,
    "a scripted module": lambda: torch.jit.script(nn.Linear(1, 1)),  # type: ignore[no-untyped-call]
    "a future": torch.futures.Future,
    "a graph": lambda: (torch.ones(1, requires_grad=True) * 2).grad_fn,
}


@pytest.mark.parametrize("name", UNSAVABLE)
def test_what_cannot_be_saved(tmp_path: Path, name: str) -> None:
    obj = UNSAVABLE[name]()
    theirs = outcome(lambda: torch.save(obj, tmp_path / "one"))
    assert theirs is not None
    check_alike(theirs, outcome(lambda: fastensor.save(obj, tmp_path / "two")))


class Full:
    """A file on a full disk."""

    def write(self, data: Any) -> int:
        raise OSError(28, "No space left on device")


TARGETS: dict[str, Callable[[Path], Any]] = {
    "a missing directory": lambda path: path / "x",
    "a directory": directory,
    "a path below a file": lambda path: written(path) / "x",
    "no name": lambda path: "",
    "a slash": lambda path: f"{directory(path)}/",
    "a long name": lambda path: path.parent / ("x" * 300),
    "where no file can be": lambda path: "/proc/x",
    "a full device": lambda path: "/dev/full",
    "a full disk": lambda path: Full(),
    "a link to itself": linked,
    "a number": lambda path: 5,
    "None": lambda path: None,
    "a path of bytes": lambda path: os.fsencode(path),
    "a file for reading": lambda path: open(written(path), "rb"),  # noqa: SIM115  # the test closes it
    "a file of text": lambda path: open(path, "w"),  # noqa: SIM115  # the test closes it
    "a text in memory": lambda path: io.StringIO(),
    "a closed file": lambda path: closed(),
}


@pytest.mark.parametrize("name", TARGETS)
def test_where_nothing_can_be_saved(tmp_path: Path, name: str) -> None:
    theirs = tried(partial(torch.save, STATE), TARGETS[name](tmp_path / "one"))
    assert theirs is not None
    check_alike(theirs, tried(partial(fastensor.save, STATE), TARGETS[name](tmp_path / "two")))


@pytest.mark.parametrize("kind", [KeyError, UnicodeDecodeError, io.UnsupportedOperation, PermissionError, ImportError])
def test_errors_of_two_types_are_as_the_first(kind: type[Exception]) -> None:
    plain = CorruptCheckpointError("x.pt: cut off")
    plain.overwritten = ("a",)
    plain.add_note("and more")
    error = caught_as(plain, kind)
    for one in (error, pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert isinstance(one, CorruptCheckpointError)
        assert isinstance(one, kind)
        assert (str(one), repr(one), one.args) == (str(plain), repr(plain), plain.args)
        assert (one.overwritten, one.__notes__) == (("a",), ["and more"])
    assert caught_as(error, kind) is error
    assert caught_as(plain, RuntimeError) is plain


def test_an_error_keeps_its_place_and_number() -> None:
    error = caught_as(CheckpointReadError(13, "denied", "x.pt"), PermissionError)
    for one in (error, pickle.loads(pickle.dumps(error))):
        assert isinstance(one, PermissionError)
        assert isinstance(one, FastensorError)
        assert (one.errno, one.strerror, one.filename) == (13, "denied", "x.pt")


@pytest.mark.parametrize("weights_only", [True, False])
def test_the_error_is_of_the_file_that_is_loaded(tmp_path: Path, weights_only: bool) -> None:
    """Not that of the file for which it takes the place, whose error is being handled."""
    for name in ("first", "second"):
        fastensor.save({"a": torch.ones(1000)}, tmp_path / name)
        data = bytearray((tmp_path / name).read_bytes())
        data[data.index(b"PK\x01\x02") // 2] ^= 1
        (tmp_path / name).write_bytes(data)
    try:
        fastensor.load(tmp_path / "first", weights_only=weights_only)
    except CorruptCheckpointError:
        with pytest.raises(CorruptCheckpointError, match="second"):
            fastensor.load(tmp_path / "second", weights_only=weights_only)
    else:
        raise AssertionError("the first file is damaged")
