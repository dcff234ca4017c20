"""Wrong arguments of the adapters are told when they are made, or when ``fit`` starts, not when the first file is."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning_models import fit

import fastensor
from fastensor.errors import OffloadError, UnknownBackendError
from fastensor.offload import OffloadConfig
from fastensor_accelerate import CheckpointMapping, ConfigError, FastensorConfig
from fastensor_lightning import (
    CheckpointMonitor,
    FastensorCheckpointIO,
    FastensorDataModule,
    SSDActivationOffload,
)


def flag(name: str) -> tuple[dict[str, Any], type[Exception], str]:
    return {name: "no"}, TypeError, f"{name} is True or False, found 'no'"


USES: dict[str, Callable[..., object]] = {
    "FastensorCheckpointIO": FastensorCheckpointIO,
    "SSDActivationOffload": SSDActivationOffload,
    "CheckpointMonitor": CheckpointMonitor,
    "FastensorDataModule": lambda **arguments: FastensorDataModule("x.lmdb", **arguments),
    "FastensorConfig": FastensorConfig,
}
WRONG: dict[str, list[tuple[dict[str, Any], type[Exception], str]]] = {
    "FastensorCheckpointIO": [
        ({"backend": "fast"}, UnknownBackendError, "no backend is named 'fast'; did you mean 'auto'"),
        ({"backend": 3}, TypeError, "backend is a name or a fastensor.Selector, found 3"),
        flag("durable"),
        flag("verify"),
        ({"map_location": "gpu"}, ValueError, "map_location='gpu' names no device; did you mean 'cuda'"),
        ({"asynchronous": "yes"}, TypeError, "asynchronous is a bool, or a dict with keys among"),
        ({"asynchronous": {"staging": 3}}, TypeError, "found 'staging'; did you mean 'staging_bytes'"),
        ({"asynchronous": {"staging_bytes": "lots"}}, ValueError, "staging_bytes: expected a size"),
        ({"asynchronous": {"exit_seconds": "long"}}, TypeError, "exit_seconds is a number of seconds, found 'long'"),
        ({"cooperative": {"timeout": -1}}, ValueError, "timeout is a positive number of seconds, found -1"),
        ({"cooperative": {"check_replicas": "some"}}, ValueError, "check_replicas is one of .*found 'some'"),
    ],
    "SSDActivationOffload": [
        ({"config": "/tmp"}, TypeError, r"config is an OffloadConfig, found '/tmp': OffloadConfig\(directories=\('/tm"),
        ({"directory": 3}, TypeError, "the first argument is a folder, or an OffloadConfig, found 3"),
        ({"min_byte": "1MiB"}, TypeError, r"SSDActivationOffload\(\) got an .* 'min_byte'; did you mean 'min_bytes'"),
        ({"min_bytes": "lots"}, ValueError, "min_bytes: expected a size such as 5GB or 2GiB, found 'lots'"),
        ({"codecs": ("zip",)}, ValueError, "codecs are some of"),
        (
            {"directory": "/nvme", "directories": ("/nvme",)},
            TypeError,
            r"folders are given twice: '/nvme' and directories=\('/nvme',\)",
        ),
        (
            {"directory": OffloadConfig(), "min_bytes": 3},
            TypeError,
            "an OffloadConfig has all options; found min_bytes beside it: put them into it",
        ),
        (
            {"directory": "/nvme", "config": OffloadConfig()},
            TypeError,
            "an OffloadConfig has all options; found a folder beside it",
        ),
        ({"config": {"min_bytes": 3}}, TypeError, "config is an OffloadConfig, found {'min_bytes': 3}"),
        flag("log"),
        flag("dry_run"),
    ],
    "CheckpointMonitor": [flag("progress_bar"), flag("details"), flag("log"), flag("explain")],
    "FastensorDataModule": [
        ({"batch_size": 0}, ValueError, "batch_size is at least 1, found 0"),
        ({"batch_size": "8"}, TypeError, "batch_size is a whole number, found '8'"),
        ({"num_workers": -1}, ValueError, "num_workers is at least 0, found -1"),
        ({"shuffle": "ful"}, ValueError, "shuffle is one of .*found 'ful'; did you mean 'full'"),
        ({"decode": "images"}, TypeError, "decode is a function, found 'images'"),
        flag("drop_last"),
        flag("pin_memory"),
    ],
    "FastensorConfig": [
        ({"backend": "dirct"}, ConfigError, "'dirct', which is no backend; did you mean 'direct'"),
        ({"durable": "no"}, ConfigError, "durable is bool, found 'no'"),
        ({"staging_bytes": "lots"}, ConfigError, "staging_bytes: expected a size such as 5GB or 2GiB, found 'lots'"),
        ({"offload_min_bytes": "lots"}, ConfigError, "offload_min_bytes: expected a size"),
    ],
}


def cases() -> list[Any]:
    return [
        pytest.param(name, *row, id=f"{name}: {next(iter(row[0]))}={next(iter(row[0].values()))!r:.20}")
        for name, rows in WRONG.items()
        for row in rows
    ]


@pytest.mark.parametrize(("name", "arguments", "error", "message"), cases())
def test_wrong_arguments(name: str, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        USES[name](**arguments)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"durable": "no"}, TypeError, "durable is True or False, found 'no'"),
        ({"asynchronous": "no"}, TypeError, "asynchronous is True or False, found 'no'"),
        ({"backend": "fast"}, UnknownBackendError, "no backend is named 'fast'"),
    ],
)
def test_options_of_one_save(tmp_path: Path, options: Any, error: type[Exception], message: str) -> None:
    plugin = FastensorCheckpointIO()
    with pytest.raises(error, match=message):
        plugin.save_checkpoint({"a": 1}, tmp_path / "new" / "x", storage_options=options)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("folder", ["/nosuch", "/etc/hostname", "/proc"])
def test_folders_are_tried_when_fit_starts(tmp_path: Path, folder: str) -> None:
    callback = SSDActivationOffload(OffloadConfig(directories=(folder,)))
    with pytest.raises(OffloadError, match=f"no file for activations can be made in {folder}.*another folder"):
        fit(pl, tmp_path, callbacks=[callback], max_steps=1)


def test_sizes_may_be_texts(tmp_path: Path) -> None:
    plugin = FastensorCheckpointIO(asynchronous={"staging_bytes": "64MiB", "max_bytes_per_second": "1GB"})
    assert plugin._writer is not None
    assert plugin._writer._settings.staging_bytes == 64 << 20
    config = FastensorConfig(staging_bytes="64MiB", offload_min_bytes="1MiB", offload_schedule="2GiB")  # type: ignore[arg-type]
    assert config.staging_bytes == 64 << 20
    assert config.offload_config().min_bytes == 1 << 20
    assert config.offload_config().schedule == 2 << 30
    assert FastensorConfig.from_mapping({"max_bytes_per_second": "1GB"}).max_bytes_per_second == 1e9
    fastensor.save({"w": torch.ones(1)}, tmp_path / "x.safetensors")
    with CheckpointMapping(tmp_path / "x.safetensors", read_ahead_bytes="1MiB") as weights:
        assert weights["w"].tolist() == [1]
    with pytest.raises(ValueError, match="read_ahead_bytes: expected a size"):
        CheckpointMapping(tmp_path / "x.safetensors", read_ahead_bytes="lots")
    with pytest.raises(TypeError, match="verify is True or False"):
        CheckpointMapping(tmp_path / "x.safetensors", verify="no")  # type: ignore[arg-type]


def test_checkpoints_in_memory_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    folder = Path("/dev/shm")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        pytest.skip("this machine has no folder in memory")
    path = folder / f"fastensor-{os.getpid()}.ckpt"
    plugin = FastensorCheckpointIO()
    try:
        plugin.save_checkpoint({"a": 1}, path)
        plugin.save_checkpoint({"a": 1}, path)
    finally:
        path.unlink(missing_ok=True)
    assert plugin.last_save is not None
    assert not plugin.last_save.durable
    (said,) = [one for one in caplog.messages if "in memory" in one]
    assert "do not survive a power failure" in said


@pytest.mark.parametrize("as_list", [True, False])
def test_the_plugin_among_the_callbacks(as_list: bool) -> None:
    plugin: Any = FastensorCheckpointIO()
    with pytest.raises(TypeError, match=r"is a plugin: pass plugins=\[FastensorCheckpointIO\(...\)\], not callbacks$"):
        pl.Trainer(callbacks=[plugin] if as_list else plugin, logger=False)
    assert pickle.loads(pickle.dumps(plugin)).durable
    assert not hasattr(copy.copy(plugin), "no_such_attribute")


def test_the_plugin_among_the_callbacks_of_fabric() -> None:
    fabric = Fabric(callbacks=[FastensorCheckpointIO()], accelerator="cpu")
    with pytest.raises(TypeError, match="is a plugin"):
        fabric.call("on_train_epoch_end")
