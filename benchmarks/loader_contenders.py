"""What is compared: tools that load files of safetensors or checkpoints of torch, and save them, with their settings.

Fastensor has one setting, its default. The others are tried with what their documents, or their code, offer for a local
disk: threads, requests in flight, sizes of blocks, O_DIRECT or not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from contenders import CONTENDERS, MAPPED, OURS, OURS_SAFETENSORS, REFERENCE, SAFETENSORS, State, sync

UNCHECKED = "fastensor, no checksums"
RUNAI = "run:ai model streamer"
FASTSAFETENSORS = "fastsafetensors"
INSTANTTENSOR = "InstantTensor"
TORCH_CHECKPOINTING = "torch_checkpointing"


@dataclass(frozen=True, slots=True)
class Setting:
    """How a tool is told to work."""

    name: str = "default"
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables, which are set before the tool is imported."""
    options: dict[str, Any] = field(default_factory=dict)
    """More arguments of the function."""


@dataclass(frozen=True, slots=True)
class Use:
    """A function that loads or saves, and its settings, the default first."""

    call: Callable[..., Any]
    """Loads to a device what is at a path, and returns it. Or saves a state to a path at which there is nothing; when
    it returns, that is durable."""
    settings: tuple[Setting, ...] = (Setting(),)


@dataclass(frozen=True, slots=True)
class Tool:
    """Who loads, saves, or does both."""

    name: str
    suffix: str
    """How the name of the file ends that the tool loads or saves; empty for a folder."""
    checks: str
    """What a load compares."""
    memory: str
    """What tensors that it has loaded to memory lie in."""
    load: Use
    save: Use | None = None
    distribution: str = ""
    """What has to be installed, if this benchmark does not need it anyway; imported before a time is taken."""
    loads: str = ""
    """The name of the tool that has saved what this one loads, if that is another one."""
    needs_gpu: bool = False

    @property
    def version(self) -> str | None:
        try:
            return version(self.distribution) if self.distribution else ""
        except PackageNotFoundError:
            return None


def _load(contender: str) -> Use:
    return Use(next(one for one in CONTENDERS if one.name == contender).load)


def _save(contender: str) -> Use:
    return Use(next(one for one in CONTENDERS if one.name == contender).save)


def _load_torch(path: Path, device: str, *, mmap: bool = False) -> State:
    state: State = _load(MAPPED if mmap else REFERENCE).call(path, device)
    return state


def _load_runai(path: Path, device: str) -> State:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_file(str(path), device=device)
        return dict(streamer.get_tensors())


def _runai(strategy: str, in_flight: int, block_mib: int) -> Setting:
    """``sync_buffered`` has a thread for each read in flight."""
    block = "CHUNK_BYTESIZE" if strategy == "sync_buffered" else "FS_CHUNK_BYTESIZE"
    variables = {"FS_STRATEGY": strategy, "FS_QUEUE_DEPTH": str(in_flight), block: str(block_mib << 20)}
    variables = {f"RUNAI_STREAMER_{key}": text for key, text in variables.items()}
    return Setting(f"{strategy}, {in_flight} × {block_mib} MiB", variables)


def _load_fastsafetensors(path: Path, device: str, **options: Any) -> State:
    from fastsafetensors import SafeTensorsFileLoader

    loader = SafeTensorsFileLoader(None, device, nogds=device == "cpu", **options)
    loader.add_filenames({0: [str(path)]})
    buffers = loader.copy_files_to_device()
    state = {name: buffers.get_tensor(name) for name in loader.get_keys()}
    buffers.close()  # which leaves their memory to the tensors
    loader.close()
    return state


def _fastsafetensors(threads: int, block_kib: int, *, direct: bool) -> Setting:
    """A thread reads blocks of half its share of the bounce buffers."""
    return Setting(
        f"{'O_DIRECT' if direct else 'buffered'}, {threads} × {block_kib} KiB",
        {"FASTSAFETENSORS_ODIRECT": str(int(direct))},
        {"max_threads": threads, "bbuf_size_kb": 2 * threads * block_kib},
    )


def _save_fastsafetensors(state: State, path: Path, **options: Any) -> None:
    from fastsafetensors import ParallelSaver

    ParallelSaver(fsync=True, **options).save(state, str(path / "model"))
    sync(path.parent)


def _load_instanttensor(path: Path, device: str) -> State:
    from instanttensor import safe_open

    with safe_open(str(path), framework="pt", device=device) as file:
        return dict(file.tensors())


def _checkpoint_manager(*, use_direct_io: bool = True, use_mmap: bool = True) -> Any:
    """A manager whose saves are synchronous. Its default, saving in another process, needs CUDA."""
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.config import CheckpointLoaderConfig, SyncCheckpointSaverConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    return CheckpointManager(
        CheckpointManager.Config(
            save=SyncCheckpointSaverConfig(),
            load=CheckpointLoaderConfig(use_mmap=use_mmap),
            storage_config=LocalFileSystemStorageConfig(use_direct_io=use_direct_io),
        )
    )


def _load_torch_checkpointing(path: Path, device: str, **options: Any) -> State:
    manager = _checkpoint_manager(**options)
    state: State = manager.load(str(path), {"model": None}, map_location=device)["model"]
    manager.close()
    return state


def _save_torch_checkpointing(state: State, path: Path, **options: Any) -> None:
    """Save durably: torch_checkpointing renames its folder when that is complete, and syncs nothing."""
    manager = _checkpoint_manager(**options)
    manager.save(str(path), {"model": state})
    manager.close()
    for written in (*path.iterdir(), path, path.parent):
        sync(written)


def _torch_checkpointing(threads: int, block_mib: int) -> Setting:
    prefix = "TORCH_CKPT_PARALLEL_FILL"
    variables = {f"{prefix}_WORKERS": str(threads), f"{prefix}_CHUNK_MB": str(block_mib)}
    return Setting(f"{threads} × {block_mib} MiB", variables)


_CRC32S = "CRC32s of the header and of each tensor"
_SIZES = "header, offsets, size of the file"
_OWN = "each has its own"
TOOLS = (
    Tool(OURS_SAFETENSORS, ".safetensors", _CRC32S, _OWN, _load(OURS_SAFETENSORS), _save(OURS_SAFETENSORS)),
    Tool(UNCHECKED, ".safetensors", _SIZES, _OWN, _load(OURS_SAFETENSORS), loads=SAFETENSORS),
    Tool(SAFETENSORS, ".safetensors", _SIZES, f"{_OWN}, being cloned", _load(SAFETENSORS), _save(SAFETENSORS)),
    Tool(
        RUNAI, ".safetensors", _SIZES, "blocks, of an 18th of the file each", loads=SAFETENSORS,
        distribution="runai_model_streamer",
        load=Use(_load_runai, (
            Setting(),
            _runai("io_uring_direct", 8, 8),
            _runai("io_uring_direct", 32, 2),
            _runai("io_uring_buffered", 32, 2),
            _runai("sync_buffered", 2, 2),
            _runai("sync_buffered", 4, 8),
            _runai("sync_buffered", 16, 2),
        )),
    ),
    Tool(
        FASTSAFETENSORS, "", _SIZES, "one block", distribution="fastsafetensors", loads=SAFETENSORS,
        load=Use(_load_fastsafetensors, (
            Setting(),  # O_DIRECT, 16 × 512 KiB
            _fastsafetensors(2, 2048, direct=True),
            _fastsafetensors(4, 8192, direct=True),
            _fastsafetensors(2, 512, direct=False),
            _fastsafetensors(4, 2048, direct=False),
            _fastsafetensors(16, 512, direct=False),
        )),
        save=Use(_save_fastsafetensors, (
            Setting(),  # 16 files, 8 threads
            Setting("1 file", options={"num_shards": 1}),
            Setting("2 files, 2 threads", options={"num_shards": 2, "num_threads": 2}),
            Setting("4 files, 4 threads", options={"num_shards": 4, "num_threads": 4}),
        )),
    ),
    Tool(
        INSTANTTENSOR, ".safetensors", _SIZES, "–", distribution="instanttensor", loads=SAFETENSORS, needs_gpu=True,
        load=Use(_load_instanttensor, (
            Setting(),
            Setting("buffered", {"INSTANTTENSOR_BACKEND": "BUFFERED"}),
            Setting("8 in flight", {"INSTANTTENSOR_IO_DEPTH": "8"}),
            Setting("32 in flight", {"INSTANTTENSOR_IO_DEPTH": "32"}),
        )),
    ),
    Tool(OURS, ".ckpt", "CRC32 of each record", _OWN, _load(OURS), _save(OURS)),
    Tool(
        REFERENCE, ".ckpt", "the directory of the archive", _OWN, save=_save(REFERENCE),
        load=Use(_load_torch, (Setting(), Setting("mmap=True, cloned", options={"mmap": True}))),
    ),
    Tool(
        TORCH_CHECKPOINTING, "", "the size of the file", "one block, of shared memory",
        distribution="torch_checkpointing",
        load=Use(_load_torch_checkpointing, (
            Setting(),  # 8 × 64 MiB
            _torch_checkpointing(2, 64),
            _torch_checkpointing(4, 16),
            Setting("use_mmap=False", options={"use_mmap": False}),
        )),
        # With O_DIRECT, its default, what it writes is not aligned, which ext4 refuses.
        save=Use(_save_torch_checkpointing, (Setting("use_direct_io=False", options={"use_direct_io": False}),)),
    ),
)  # fmt: skip


def tool_named(name: str) -> Tool:
    return next(tool for tool in TOOLS if tool.name == name)
