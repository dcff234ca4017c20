"""Saving to and loading from what is not a path of this machine: URLs and open files."""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import os
import pathlib
import sys
import tempfile
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import pytest
import states
import torch
from hypothesis import given
from hypothesis import strategies as st

import fastensor
from fastensor import CheckpointReadError, CheckpointWriteError, CorruptCheckpointError, UnknownFilesystemError
from fastensor.checkpoint import remote
from fastensor.checkpoint.writing import outputs, save_transaction
from fastensor.files import os_errors
from fastensor_lightning import FastensorCheckpointIO

STATE = {"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(2, dtype=torch.bfloat16), "n": {"epoch": 3}}
OF_UPLOADS = {module.__file__ for module in (contextlib, os_errors, outputs, remote, save_transaction)}
TENSORS = {"w": STATE["w"], "b": STATE["b"], "large": torch.randint(0, 255, (13 << 20,), dtype=torch.uint8)}


@pytest.fixture(params=["memory", "s3", "file"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty folder."""
    if request.param == "s3":
        yield f"{request.getfixturevalue('s3_url')}/run"
        return
    if request.param == "file":
        yield f"file://{tmp_path}"
        return
    yield "memory://run"
    fsspec.filesystem("memory").store.clear()


def names_in(folder: str) -> list[str]:
    filesystem, path = fsspec.core.url_to_fs(folder)
    return sorted(name.rpartition("/")[2] for name in filesystem.find(path))


@pytest.mark.parametrize("suffix", ["ckpt", "safetensors"])
def test_round_trips(folder: str, suffix: str) -> None:
    for name, state in (("small", {"w": STATE["w"]}), ("large", TENSORS), ("small", TENSORS)):
        url = f"{folder}/{name}.{suffix}"
        report = fastensor.save(state, url)
        assert report.durable == folder.startswith("file")
        found, loaded = fastensor.load_with_report(url)
        assert loaded.verified
        assert loaded.nbytes == report.nbytes
        states.assert_equal({key: found[key] for key in state}, state)
        states.assert_equal(fastensor.load(url, keys=["w"]), {"w": state["w"]})
    assert names_in(folder) == [f"large.{suffix}", f"small.{suffix}"]


def test_the_bytes_are_those_of_a_local_file(folder: str, tmp_path: Path) -> None:
    fastensor.save(TENSORS, tmp_path / "local.safetensors")
    fastensor.save(TENSORS, f"{folder}/remote.safetensors")
    with fsspec.open(f"{folder}/remote.safetensors", "rb") as file:
        assert file.read() == (tmp_path / "local.safetensors").read_bytes()


class Unpicklable:
    def __reduce__(self) -> Any:
        raise ValueError("not this one")


def test_a_failed_save_keeps_what_was_there(folder: str) -> None:
    url = f"{folder}/x.ckpt"
    fastensor.save(STATE, url)
    with pytest.raises(ValueError, match="not this one"):
        fastensor.save(Unpicklable(), url)
    from fastensor.backends import staging

    original = staging.HostStager.finish

    def fail_late(self: Any, window: Any) -> None:
        if window.offset:
            raise KeyboardInterrupt
        original(self, window)

    if not folder.startswith("file"):
        with mock.patch.object(staging.HostStager, "finish", fail_late), pytest.raises(KeyboardInterrupt):
            fastensor.save(TENSORS, url)
    states.assert_equal(fastensor.load(url), STATE)
    assert names_in(folder) == ["x.ckpt"]


@pytest.mark.parametrize(
    "method", ["put_object", "create_multipart_upload", "upload_part", "complete_multipart_upload"]
)
def test_an_upload_that_the_store_refuses(s3_url: str, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    import s3fs

    url = f"{s3_url}/x.safetensors"
    large = {"w": torch.zeros(60 << 20, dtype=torch.uint8)}  # more than one part
    fastensor.save({"w": torch.ones(1)}, url)
    original = s3fs.S3FileSystem.call_s3
    failed = []

    def refuse(self: Any, name: str, *arguments: Any, **options: Any) -> Any:
        if name == method:
            failed.append(name)
            raise ConnectionLost("the network is down")
        return original(self, name, *arguments, **options)

    state = {"w": torch.zeros(3)} if method == "put_object" else large
    refusing = mock.patch.object(s3fs.S3FileSystem, "call_s3", refuse)
    with refusing, pytest.raises(CheckpointWriteError, match=r"down.*kept") as caught:
        fastensor.save(state, url)
    assert failed
    assert caught.value.errno == errno.EIO
    assert fsspec.filesystem("s3").call_s3("list_multipart_uploads", Bucket="bucket").get("Uploads", []) == []
    states.assert_equal(fastensor.load(f"{url}"), {"w": torch.ones(1)})


class ConnectionLost(Exception):
    """Network libraries raise errors that are not ``OSError``s."""


def test_a_download_that_fails(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import s3fs

    url = f"{s3_url}/x.ckpt"
    fastensor.save(TENSORS, url)
    original = s3fs.S3File._fetch_range
    calls = []

    def fail(self: Any, start: int, end: int) -> bytes:
        calls.append(start)
        if len(calls) == 4:
            raise ConnectionLost("the network is down")
        data: bytes = original(self, start, end)
        return data

    monkeypatch.setattr(s3fs.S3File, "_fetch_range", fail)
    with pytest.raises(CheckpointReadError, match="ConnectionLost: the network is down"):
        fastensor.load(url)


def test_damage_in_a_bucket_is_noticed(s3_url: str) -> None:
    for suffix in ("ckpt", "safetensors"):
        url = f"{s3_url}/x.{suffix}"
        fastensor.save(TENSORS, url)
        filesystem, path = fsspec.core.url_to_fs(url)
        data = bytearray(filesystem.cat_file(path))
        data[len(data) // 2] ^= 1
        filesystem.pipe_file(path, bytes(data))
        with pytest.raises(CorruptCheckpointError, match="CRC32"):
            fastensor.load(url)
        filesystem.pipe_file(path, bytes(data[:-1000]))
        with pytest.raises(CorruptCheckpointError, match="cut off"):
            fastensor.load(url)


def test_a_file_that_is_replaced_while_it_is_opened(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastensor.checkpoint import remote

    url = f"{s3_url}/x.safetensors"
    fastensor.save(TENSORS, url)
    original = remote.RemoteFile.open_reader

    def replace_first(self: Any, *arguments: Any) -> Any:
        fastensor.save({**TENSORS, "w": torch.zeros(12)}, url)
        return original(self, *arguments)

    monkeypatch.setattr(remote.RemoteFile, "open_reader", replace_first)
    with pytest.raises(CheckpointReadError, match="replaced"):
        fastensor.load(url)


def test_a_wrapped_filesystem() -> None:
    fastensor.save(STATE, "memory://run/x.ckpt")
    states.assert_equal(fastensor.load("simplecache::memory://run/x.ckpt"), STATE)
    fsspec.filesystem("memory").store.clear()


def test_what_is_not_there(folder: str) -> None:
    with pytest.raises(FileNotFoundError):
        fastensor.load(f"{folder}/nothing.ckpt")


def test_urls_of_unknown_protocols(tmp_path: Path) -> None:
    with pytest.raises(UnknownFilesystemError, match=r"foo://x: fsspec cannot reach it.*s3fs"):
        fastensor.save(STATE, "foo://x")
    with pytest.raises(UnknownFilesystemError, match="gcsfs"):
        fastensor.load("gs://bucket/x")
    weird = tmp_path / "a::b"
    fastensor.save(STATE, weird)
    states.assert_equal(fastensor.load(weird), STATE)


@pytest.mark.parametrize("kind", [pathlib.Path, pathlib.PurePosixPath, str])
def test_every_kind_of_path(tmp_path: Path, kind: Any) -> None:
    fastensor.save(STATE, kind(tmp_path / "x y"))
    states.assert_equal(fastensor.load(kind(tmp_path / "x y")), STATE)


@pytest.mark.parametrize("wrong", [b"bytes", 3, None])
def test_what_is_no_path(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"expected a path.*found"):
        fastensor.save(STATE, wrong)
    with pytest.raises(TypeError, match=r"expected a path.*found"):
        fastensor.load(wrong)


@given(tree=states.trees(), before=st.binary(max_size=5))
def test_open_files(tree: Any, before: bytes) -> None:
    buffer = io.BytesIO(before)
    buffer.seek(0, os.SEEK_END)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = fastensor.save(tree, buffer)
        assert buffer.tell() == len(before) + report.nbytes
        buffer.seek(len(before))
        states.assert_equal(
            fastensor.load(buffer, weights_only=False),
            torch.load(io.BytesIO(buffer.getvalue()[len(before) :]), weights_only=False),
        )


def test_open_files_on_a_disk(tmp_path: Path) -> None:
    with open(tmp_path / "x", "wb") as file:
        report = fastensor.save(STATE, file)
    assert (report.durable, report.backend, report.path) == (False, "stream", str(tmp_path / "x"))
    states.assert_equal(torch.load(tmp_path / "x"), STATE)
    with open(tmp_path / "x", "rb") as file:
        found, loaded = fastensor.load_with_report(file)
        assert not file.closed
    assert loaded.backend == "numpy"
    states.assert_equal(found, STATE)
    with open(tmp_path / "y.safetensors", "wb+") as both:
        fastensor.save({"w": STATE["w"]}, both)
        both.seek(0)
        states.assert_equal(fastensor.load(both), {"w": STATE["w"]})
    with tempfile.SpooledTemporaryFile() as spooled:
        fastensor.save(STATE, spooled)  # type: ignore[arg-type]
        spooled.seek(0)
        states.assert_equal(fastensor.load(spooled), STATE)  # type: ignore[arg-type]


def test_open_files_of_the_wrong_kind(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as pipe, os.fdopen(writing, "wb"), pytest.raises(CheckpointReadError, match="seek"):
        fastensor.load(pipe)
    with open(tmp_path / "text", "w+") as text:
        with pytest.raises(CheckpointWriteError, match="mode 'wb'"):
            fastensor.save(STATE, text)  # type: ignore[arg-type]
        with pytest.raises(CheckpointReadError, match="mode 'rb'"):
            fastensor.load(text)  # type: ignore[arg-type]
    with open(tmp_path / "text", "rb") as read_only, pytest.raises(CheckpointWriteError, match="mode 'wb'"):
        fastensor.save(STATE, read_only)
    buffer = io.BytesIO()
    fastensor.save(STATE, buffer)
    with pytest.raises(CorruptCheckpointError, match=r"seek\(0\)"):
        fastensor.load(buffer)
    with pytest.raises(ValueError, match="mmap"):
        fastensor.load(io.BytesIO(buffer.getvalue()), mmap=True)


def test_an_open_file_that_fails() -> None:
    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, "no space")

    with pytest.raises(CheckpointWriteError, match=r"no space.*part of it") as caught:
        fastensor.save(STATE, Full())
    assert caught.value.errno == errno.ENOSPC


def test_a_pipe_can_be_written(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as source, os.fdopen(writing, "wb") as sink:
        fastensor.save({"w": STATE["w"]}, sink, container="safetensors")
        sink.close()
        states.assert_equal(fastensor.load(io.BytesIO(source.read())), {"w": STATE["w"]})


def test_the_plugin_with_urls(folder: str) -> None:
    plugin = FastensorCheckpointIO()
    url = f"{folder}/deep/er/x.ckpt"
    plugin.save_checkpoint(STATE, url)
    states.assert_equal(plugin.load_checkpoint(url), STATE)
    assert plugin.last_save
    assert plugin.last_save.nbytes > 0
    plugin.remove_checkpoint(url)
    plugin.remove_checkpoint(url)
    with pytest.raises(FileNotFoundError):
        plugin.load_checkpoint(url)


def test_training_into_a_bucket(s3_url: str, tmp_path: Path) -> None:
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.demos.boring_classes import BoringModel

    options: dict[str, Any] = {"logger": False, "accelerator": "cpu", "enable_progress_bar": False}
    options |= {"enable_model_summary": False, "limit_train_batches": 2, "limit_val_batches": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saving = ModelCheckpoint(dirpath=f"{s3_url}/run", save_top_k=2, monitor="step", mode="max", save_last=True)
        Trainer(plugins=[FastensorCheckpointIO()], callbacks=[saving], max_epochs=3, **options).fit(BoringModel())
        assert len(names_in(f"{s3_url}/run")) == 3
        trainer = Trainer(plugins=[FastensorCheckpointIO()], max_epochs=4, enable_checkpointing=False, **options)
        trainer.fit(BoringModel(), ckpt_path=saving.last_model_path)
    assert trainer.current_epoch == 4


def test_several_threads_read_one_file_in_memory() -> None:
    fastensor.save(TENSORS, "memory://run/x.safetensors")
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: fastensor.load("memory://run/x.safetensors"), range(8)):
            states.assert_equal({key: found[key] for key in TENSORS}, TENSORS)
    fsspec.filesystem("memory").store.clear()


AWKWARD = ["a[1].ckpt", "a*.ckpt", "a?.ckpt", "deep/[x]/y.ckpt"]


@pytest.mark.parametrize("name", AWKWARD)
def test_names_that_look_like_patterns(folder: str, name: str) -> None:
    plugin = FastensorCheckpointIO()
    others = [f"{folder}/a1.ckpt", f"{folder}/ab.ckpt", f"{folder}/deep/x/y.ckpt"]
    for url in [*others, f"{folder}/{name}"]:
        plugin.save_checkpoint(STATE, url)
    assert len(names_in(folder)) == 4
    states.assert_equal(plugin.load_checkpoint(f"{folder}/{name}"), STATE)
    plugin.remove_checkpoint(f"{folder}/{name}")
    assert names_in(folder) == ["a1.ckpt", "ab.ckpt", "y.ckpt"]
    plugin.remove_checkpoint(f"{folder}/deep")
    assert names_in(folder) == ["a1.ckpt", "ab.ckpt"]


def test_urls_that_name_no_file() -> None:
    fastensor.save(STATE, "memory://run/x/y.ckpt")
    for url in ("memory://run/x", "memory://run/x/", "memory://"):
        with pytest.raises(CheckpointWriteError, match=r"directory|names no file"):
            fastensor.save(STATE, url)
    filesystem = fsspec.filesystem("memory")
    assert filesystem.find("/") == ["/run/x/y.ckpt"]
    filesystem.store.clear()


def test_an_interrupt_while_an_upload_is_opened(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import s3fs

    fastensor.save(STATE, f"{s3_url}/x.ckpt")
    original = s3fs.S3FileSystem.open

    def interrupt(self: Any, path: str, mode: str = "rb", **options: Any) -> Any:
        original(self, path, mode, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(s3fs.S3FileSystem, "open", interrupt)
        with pytest.raises(KeyboardInterrupt):
            fastensor.save(STATE, f"{s3_url}/x.ckpt")
        gc.collect()
    states.assert_equal(fastensor.load(f"{s3_url}/x.ckpt"), STATE)


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.torture)], ids=["some lines", "every line"])
def test_an_interrupt_at_any_line_of_an_upload(s3_url: str, step: int) -> None:
    """The store has the old object or the new one, whole: it shows also what the garbage collector closes."""
    old, new = {"w": 0}, {"w": 1}
    for number in range(1, 1000, step):
        fastensor.save(old, f"{s3_url}/x.ckpt")
        left = [number]

        def trace(frame: Any, event: str, argument: Any, left: list[int] = left, number: int = number) -> Any:
            if frame.f_code.co_filename not in OF_UPLOADS:
                return None
            has_begun = left[0] < number or frame.f_code.co_filename == remote.__file__
            if event == "line" and has_begun:
                left[0] -= 1
                if not left[0]:
                    sys.settrace(None)
                    raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            fastensor.save(new, f"{s3_url}/x.ckpt")
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        gc.collect(1)
        assert fastensor.load(f"{s3_url}/x.ckpt") in (old, new)
        if left[0]:
            break
    assert number > 20
    assert fastensor.load(f"{s3_url}/x.ckpt") == new


def test_uploads_are_forgotten(s3_url: str) -> None:
    fastensor.save(STATE, f"{s3_url}/x.ckpt")
    assert not fsspec.filesystem("s3").transaction.files


def test_a_part_of_a_remote_file(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import s3fs

    state = {"bias": torch.ones(3), **{f"w{i}": torch.full((8 << 20,), i, dtype=torch.uint8) for i in range(6)}}
    fetched: list[int] = []
    original = s3fs.S3File._fetch_range

    def count(self: Any, start: int, end: int) -> bytes:
        data: bytes = original(self, start, end)
        fetched.append(len(data))
        return data

    monkeypatch.setattr(s3fs.S3File, "_fetch_range", count)
    for suffix in ("ckpt", "safetensors"):
        url = f"{s3_url}/x.{suffix}"
        fastensor.save(state, url)
        fetched.clear()
        states.assert_equal(fastensor.load(url, keys=["bias"]), {"bias": state["bias"]})
        assert sum(fetched) < 20 << 20
        fetched.clear()
        assert fastensor.verify(url).complete
        assert sum(fetched) < 70 << 20
        fetched.clear()
        fastensor.convert(url, f"{s3_url}/y.{'ckpt' if suffix == 'safetensors' else 'safetensors'}")
        assert sum(fetched) < 130 << 20


def test_handles_do_not_pile_up(s3_url: str) -> None:
    fastensor.save(TENSORS, f"{s3_url}/x.safetensors")
    with fastensor.open(f"{s3_url}/x.safetensors") as found:
        file: Any = found._file
        for _ in range(5):
            assert torch.equal(found["large"], TENSORS["large"])
        assert file._handles.qsize() == 4


def test_a_state_that_changes_between_the_two_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastensor.backends import stream

    tensor = torch.zeros(1000)
    original = stream.checksums_of

    def change(source: Any) -> Any:
        found = original(source)
        tensor.fill_(1)
        return found

    monkeypatch.setattr(stream, "checksums_of", change)
    with pytest.raises(fastensor.StateChangedError, match="changed while"):
        fastensor.save({"w": tensor}, io.BytesIO(), container="safetensors")


def test_file_objects_of_few_methods(tmp_path: Path) -> None:
    """As much as torch.save and torch.load ask for."""

    class Sink:
        def __init__(self) -> None:
            self.data = b""

        def write(self, data: Any) -> None:
            self.data += bytes(data)

    class Source:
        def __init__(self, data: bytes) -> None:
            inner = io.BytesIO(data)
            self.read, self.readline, self.seek, self.tell = inner.read, inner.readline, inner.seek, inner.tell

    sink: Any = Sink()
    fastensor.save(STATE, sink)
    source: Any = Source(sink.data)
    states.assert_equal(fastensor.load(source), STATE)
