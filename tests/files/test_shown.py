"""How what users hold shows itself: ``repr`` is short and exact, ``str`` of reports is for people."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest
import torch
from public import GIVEN, public_names

import fastensor
from fastensor.backends.registry import Fallback
from fastensor.checkpoint.dcp import FastensorStorageReader, FastensorStorageWriter
from fastensor.checkpoint.report import LoadReport
from fastensor.checkpoint.writing.report import SaveReport
from fastensor.data import LmdbDataset, LmdbLoader, ReadAheadSampler
from fastensor.files.shown import record_repr, shown
from fastensor.offload import ActivationOffload, EncodedBytes, OffloadConfig
from fastensor.offload.statistics import PlannedTensor
from fastensor.provision import DataService, FileSource, LoaderStatistics, ProvisionedLoader
from fastensor.stitch.damage import Damage
from fastensor_accelerate import (
    ActivationOffloadHook,
    CheckpointMapping,
    FastensorAccelerator,
    FastensorConfig,
    PreparedLoader,
)
from fastensor_lightning import (
    CheckpointMonitor,
    DataWaitMonitor,
    FastensorCheckpointIO,
    FastensorDataModule,
    SSDActivationOffload,
)

CLASSES = {
    path: value
    for path, value in public_names()
    if inspect.isclass(value)
    and not issubclass(value, Exception)
    and not typing.is_typeddict(value)
    and not getattr(value, "_is_protocol", False)
    and not value.__name__.endswith("Tests")
}
"""Those whose objects users hold."""
FLAT = {"fastensor.backends.Extent", "fastensor.backends.Window", "fastensor.testing.Fault"}
"""For authors of backends: a few numbers each, which nobody prints."""
SEEN: list[str] | None = None
"""What the interpreter has done that reaches out of it, while this is a list."""


def note(event: str, arguments: tuple[Any, ...]) -> None:
    if SEEN is not None and event.startswith(("open", "os.", "socket.", "subprocess.", "mmap.", "ctypes.dlopen")):
        SEEN.append(event)


sys.addaudithook(note)


@pytest.mark.parametrize("path", CLASSES)
def test_every_class_has_a_repr_of_its_own(path: str) -> None:
    assert CLASSES[path].__repr__ is not object.__repr__


@pytest.mark.parametrize("path", [path for path, kind in CLASSES.items() if not dataclasses.is_dataclass(kind)])
def test_an_object_that_is_not_made_yet_shows_that(path: str) -> None:
    """Debuggers and tracebacks show objects whose constructors have failed."""
    kind = CLASSES[path]
    if issubclass(kind, tuple):
        return  # is made at once
    assert repr(kind.__new__(kind)) == f"<{kind.__name__}, not made yet>"


@pytest.mark.parametrize("path", sorted(GIVEN))
def test_every_report_is_shown_to_people_in_words(path: str) -> None:
    kind = dict(public_names())[path]
    if dataclasses.is_dataclass(kind) and path not in FLAT:
        assert "__str__" in vars(kind)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    fastensor.save({"weight": torch.ones(3), "step": 3}, "a.ckpt")
    fastensor.save({"weight": torch.ones(3)}, "a.safetensors")
    with lmdb.open("x.lmdb", map_size=1 << 20) as env, env.begin(write=True) as writing:
        for number in range(10):
            writing.put(b"%d" % number, b"value")
    return tmp_path


def objects(folder: Path) -> Iterator[tuple[Any, str]]:
    """Objects of every class that is no record, and how they show themselves."""
    writer = fastensor.AsyncWriter(staging_bytes="64MiB")
    handle = writer.save({"weight": torch.ones(3)}, "b.ckpt")
    handle.result()
    yield handle, "<SaveHandle of 'b.ckpt': durable>"
    writer.wait()
    yield writer, "<AsyncWriter(staging_bytes=67108864): 0 saves pending, 1 ended>"
    writer.close()
    yield writer, "<AsyncWriter(staging_bytes=67108864): 0 saves pending, 1 ended, closed>"
    checkpoint = fastensor.open("a.ckpt")
    yield checkpoint, "<LazyCheckpoint 'a.ckpt': 1 tensor>"
    checkpoint.close()
    yield checkpoint, "<LazyCheckpoint 'a.ckpt': 1 tensor, closed>"
    store = fastensor.TensorStore("store", backend="numpy")
    yield store, f"<TensorStore '{folder}/store': backend 'numpy', mode 'write', not durable>"
    store.close()
    yield store, f"<TensorStore '{folder}/store': backend 'numpy', mode 'write', not durable, closed>"
    selector = fastensor.Selector()
    selector.record("1MiB", fastensor.Context("write"), "numpy", 1.0)
    yield selector, "<Selector: explores, mode 'write', 1 size known, 1 transfer>"
    yield selector.dictionary, "<Dictionary: 1 size known in 1 context>"
    yield FastensorStorageReader("dcp"), f"<FastensorStorageReader of '{folder}/dcp': verify True, backend 'auto'>"
    yield FastensorStorageWriter("dcp"), f"<FastensorStorageWriter of '{folder}/dcp': backend 'auto'>"
    dataset = LmdbDataset("x.lmdb")
    loader = LmdbLoader(dataset, 4)
    data = f"{folder}/x.lmdb/data.mdb"
    yield dataset, f"<LmdbDataset of 10 samples in '{data}': engine 'auto'>"
    yield loader, "<LmdbLoader of 10 samples, 4 a batch, shuffle 'full': epoch 0, 0 samples given out>"
    assert len(list(loader)) == 3
    yield loader, "<LmdbLoader of 10 samples, 4 a batch, shuffle 'full': epoch 0, 10 samples given out>"
    yield PreparedLoader(loader, "cpu"), f"<PreparedLoader of {loader!r}, to cpu>"
    yield ReadAheadSampler([[1]] * 10**6), "<ReadAheadSampler of a list: 16 batches ahead for 1 worker>"
    yield dataset.index, f"<LmdbIndex of 10 records in {data}>"
    dataset.index.close()
    yield dataset.index, f"<LmdbIndex of 10 records in {data}, closed>"
    yield dataset, f"<LmdbDataset of 10 samples in '{data}': engine 'auto'>"
    offload = ActivationOffload(OffloadConfig(directories=(str(folder),), schedule="all"))
    shown = f"ActivationOffload(directories=('{folder}',), schedule='all')"
    yield offload, f"<{shown}>"
    yield ActivationOffloadHook(offload), f"<ActivationOffloadHook of <{shown}>>"
    offload.attach(torch.nn.Linear(1, 1))
    yield offload, f"<{shown}, attached to a model>"
    offload.close()
    yield offload, f"<{shown}, closed>"
    yield SSDActivationOffload(min_bytes="1MiB"), "<SSDActivationOffload(min_bytes=1048576)>"
    yield CheckpointMonitor(), "<CheckpointMonitor(progress_bar=True, details=False, log=True, explain=False)>"
    yield DataWaitMonitor(), "<DataWaitMonitor(progress_bar=True, table=True)>"
    plugin = "backend='auto', durable=True, map_location='cpu', verify=True, asynchronous=False, cooperative=False"
    yield FastensorCheckpointIO(), f"<FastensorCheckpointIO({plugin}, share_unchanged=True)>"
    yield (
        FastensorDataModule("x.lmdb", val="y.lmdb"),
        "<FastensorDataModule(train='x.lmdb', val='y.lmdb', batch_size=1)>",
    )
    yield FastensorAccelerator(cpu=True), "<FastensorAccelerator on cpu, process 0 of 1>"
    mapping = CheckpointMapping("a.safetensors")
    yield mapping, "<CheckpointMapping 'a.safetensors': 1 weight>"
    mapping.close()
    yield mapping, "<CheckpointMapping 'a.safetensors': 1 weight, closed>"


def test_a_repr_is_short_and_exact_and_reaches_for_nothing(folder: Path) -> None:
    global SEEN
    kinds = set()
    for one, expected in objects(folder):
        SEEN = []
        try:
            shown, _, done = repr(one), str(one), SEEN
        finally:
            SEEN = None
        assert (shown, done) == (expected, [])
        kinds.add(type(one))
    records = {kind for kind in CLASSES.values() if dataclasses.is_dataclass(kind) or issubclass(kind, tuple)}
    assert kinds == {*CLASSES.values()} - records - {
        DataService,
        ProvisionedLoader,
    }  # provision/test_service.py has those


def test_reports_of_saves_and_loads(folder: Path) -> None:
    saved = SaveReport(
        "a.ckpt", 3 << 20, "direct", "large", True, True, 0.001, 1.0, 0.25, 0.002, 1.5, 0.125,
        (Fallback("gds", "there is no GPU"),),
    )  # fmt: skip
    assert str(saved).splitlines() == [
        "a.ckpt: 3 MiB saved in 1.5 s (2 MiB/s) by direct: large; durable, atomic; the program waited 125 ms",
        "planned 1 ms, written 1 s, synced 250 ms, published 2 ms",
        "gds is not used: there is no GPU",
    ]
    assert repr(saved).endswith("stall_seconds=0.125, fallbacks=(Fallback(backend='gds', reason='there is no GPU'),))")
    loaded = LoadReport("https://me:pass@host/a.ckpt?signature=5", 0, "numpy", "small", False, 0.5, 0.0)
    assert str(loaded) == (
        "https://***@host/a.ckpt?***: 0 B loaded in 0 s by numpy: small; not verified; 50 % were in the page cache"
    )
    assert "pass" not in repr(loaded)
    assert "signature" not in repr(loaded)


@pytest.mark.usefixtures("folder")
def test_reports_of_tools() -> None:
    report = dataclasses.replace(fastensor.verify("a.safetensors"), seconds=0.5)
    assert str(report) == f"a.safetensors: intact; 2 parts of {report.compared_bytes} B compared in 500 ms (312 B/s)"
    damage = Damage("tensor 'weight'", 100, 12, 1, 2)
    damaged = dataclasses.replace(
        report, damage=(damage,) * 7, uncompared=1, code=("os.system",), not_compared=("config.json",)
    )
    assert str(damaged).splitlines()[0].startswith("a.safetensors: damaged; ")
    assert str(damaged).splitlines()[1:] == [
        "1 part without checksum",
        *[str(damage)] * 5,
        "and 2 more",
        "not compared, or not wholly: config.json",
        "names code that weights_only=True refuses: os.system",
    ]
    found = fastensor.inspect("a.ckpt")
    assert str(found).splitlines() == [
        f"a.ckpt: torch, {found.nbytes / 1024:.2f} KiB, with checksums",
        "1 tensor of 12 B, 12 B in memory; 1 other value",
    ]
    assert str(found.tensors[0]) == "weight: float32 (3,), 12 B"
    many = dataclasses.replace(found, tensors=found.tensors * 1000)
    assert "tensors=<1000 of them>" in repr(many)
    assert len(repr(many)) < 250
    difference = fastensor.diff("a.ckpt", "a.safetensors")
    assert str(difference) == "a.ckpt and a.safetensors: 1 difference, 1 the same\nstep: only in the first"
    fastensor.save({"weight": torch.tensor([1.0, 1.0, 3.5])}, "b.ckpt")
    difference = fastensor.diff("a.safetensors", "b.ckpt")
    assert str(difference.tensors[0]) == "weight: 1 elements of float32 3 differ, by 2.5 at most"
    larger = dataclasses.replace(difference, only_first=("x",) * 20, not_compared=("y",))
    assert str(larger).splitlines()[-2:] == ["and 11 more", "not compared: y"]
    folder = dataclasses.replace(found, files={"a.ckpt": found, "b.ckpt": found})
    assert "2 files: a.ckpt, b.ckpt" in str(folder).splitlines()


def test_statistics_in_words() -> None:
    writer = fastensor.WriterStatistics(0, 1, 1, 12, 1, 0, 0, 0, 3 << 30, 0.5, 1 << 30, 1 << 20)
    assert str(writer).splitlines() == [
        "12 saves finished (3 GiB), 1 waiting, 1 being written, 1 failed",
        "the program waited 500 ms in all; 1 MiB of 1 GiB staging memory were in use at most",
    ]
    selector = fastensor.SelectorStatistics(1, 20, 0, 2.0, 0.125)
    store = fastensor.StoreStatistics(1, 2, 0, 1024, 2048, {"numpy": 1}, {"numpy": 2}, {"gds": "no GPU"}, selector)
    assert str(store).splitlines() == [
        "1 tensor put (1 KiB, 1 by numpy)",
        "2 tensors got (2 KiB, 2 by numpy), 0 deleted",
        "gds is not used: no GPU",
        "20 transfers by the backend that is believed to be the fastest, 1 try, 0 failed; exploring has cost 125 ms "
        "of 2 s in all transfers",
    ]
    context = fastensor.Context("write")
    assert str(fastensor.Change(context, 1 << 20, "numpy", 0.5)) == "numpy, write cpu durable, 1 MiB: 500 ms"
    assert str(fastensor.Change(context, 1 << 20, "numpy")) == "numpy, write cpu durable, 1 MiB: timings removed"
    assert str(fastensor.Choice("numpy", "small")) == "numpy: small"
    assert str(EncodedBytes(1 << 20, 1 << 19)) == "1 MiB, 2.00 to 1"
    planned = PlannedTensor(3, 4096, torch.float32, (32, 32), torch.device("cpu"), "AddBackward0", 0.1, 0.2, True)
    assert str(planned) == "3: float32 (32, 32) of AddBackward0, 4 KiB, leaves"
    assert repr(LoaderStatistics()) == "LoaderStatistics()"


def test_one_thing_is_told_in_the_singular(folder: Path) -> None:
    selector = fastensor.SelectorStatistics(2, 1, 0, 2.0, 0.125)
    assert str(selector).startswith("1 transfer by the backend that is believed to be the fastest, 2 tries, 0 failed;")
    for repeated, batches in (1, "1 batch"), (2, "2 batches"):
        loader = LoaderStatistics(repeated=repeated, recoveries=1)
        assert str(loader).splitlines()[-1] == f"The service was lost 1 time. {batches} came again."
    with ActivationOffload(OffloadConfig(directories=(str(folder),))) as offload:
        assert str(dataclasses.replace(offload.statistics(), steps=1)).startswith("1 step: ")
    dataset = LmdbDataset("x.lmdb").select([3])
    assert repr(dataset).startswith("<LmdbDataset of 1 sample in ")
    loaded = LmdbLoader(dataset, 4)
    assert len(list(loaded)) == 1
    assert repr(loaded) == "<LmdbLoader of 1 sample, 4 a batch, shuffle 'full': epoch 0, 1 sample given out>"
    dataset.index.close()


def test_configurations_show_what_is_not_by_default() -> None:
    assert repr(OffloadConfig(min_bytes="1MiB", verify=False)) == "OffloadConfig(min_bytes=1048576, verify=False)"
    assert repr(FastensorConfig(backend="numpy")) == "FastensorConfig(backend='numpy')"


def test_no_secrets_are_shown(folder: Path) -> None:
    fastensor.save({}, "memory://me:pass@x/a.ckpt")
    reader = FastensorStorageReader("memory://x/dcp", storage_options={"token": "pass"})
    source = FileSource.matching("memory://me:pass@x/*.ckpt", storage_options={})
    checkpoint = fastensor.open("memory://me:pass@x/a.ckpt")
    module = FastensorDataModule(service="local:name", batch_size=2)
    plugin = FastensorCheckpointIO()
    plugin.save_checkpoint({}, "memory://me:pass@x/a.ckpt")
    for one in (reader, source, checkpoint, module, plugin, plugin.last_save):
        assert "pass" not in repr(one) + str(one)
    checkpoint.close()


def test_a_record_shows_values_that_equal_a_default_of_another_type() -> None:
    @dataclasses.dataclass
    class Record:
        flag: bool | int = False
        names: list[str] = dataclasses.field(default_factory=list)
        hidden: int = dataclasses.field(default=0, repr=False)
        __repr__ = record_repr

    assert repr(Record(0, ["x"], 3)) == "Record(flag=0, names=['x'])"


def test_a_half_built_object_with_slots_shows_itself() -> None:
    class Slotted:
        __slots__ = ("path",)

        @shown
        def __repr__(self) -> str:
            return f" of {self.path!r}"

    assert repr(Slotted()) == "<Slotted, not made yet>"
