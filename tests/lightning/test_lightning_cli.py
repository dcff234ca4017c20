"""Programs of ``LightningCLI``: the plugin and the callbacks in YAML, and on the command line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

import fastensor
from fastensor_lightning import CheckpointMonitor, FastensorCheckpointIO, OffloadConfig, SSDActivationOffload

GUIDE = Path(__file__).parents[2] / "docs" / "yaml.md"
LONG_NAMES, SHORT_NAMES = re.findall(r"^```yaml\n(trainer:.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)

pytest.importorskip("jsonargparse", reason="LightningCLI needs jsonargparse[signatures]")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


def run(folder: Path, yaml: str, *arguments: str) -> Any:
    """The Trainer after ``fit``."""
    (folder / "given.yaml").write_text(yaml)
    quiet = ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
    root = f"--trainer.default_root_dir={folder}"
    command = ["fit", "--config", str(folder / "given.yaml"), root, *quiet, *arguments]
    return LightningCLI(BoringModel, args=command).trainer


def only(trainer: Any, kind: type) -> Any:
    (found,) = (one for one in trainer.callbacks if type(one) is kind)
    return found


def test_names_in_the_package(tmp_path: Path) -> None:
    trainer = run(tmp_path, LONG_NAMES)
    plugin = trainer.strategy.checkpoint_io
    assert type(plugin) is FastensorCheckpointIO
    assert plugin.asynchronous
    assert plugin._options == {"staging_bytes": "512MiB"}
    config = OffloadConfig(directories=("/var/tmp",), min_bytes=1 << 20, schedule="all")
    assert only(trainer, SSDActivationOffload).config == config
    assert only(trainer, CheckpointMonitor)._details
    assert plugin.last_save is not None
    kept = (tmp_path / "config.yaml").read_text()  # by Lightning, to repeat the run
    again = tmp_path / "again"
    again.mkdir()
    config = only(run(again, kept), SSDActivationOffload).config
    assert (config.min_bytes, config.schedule) == (1 << 20, "all")


def test_short_names_of_imported_classes(tmp_path: Path) -> None:
    trainer = run(tmp_path, SHORT_NAMES)
    assert type(trainer.strategy.checkpoint_io) is FastensorCheckpointIO
    assert only(trainer, SSDActivationOffload).config == OffloadConfig(directories=("/var/tmp",), min_bytes=1 << 20)


def test_names_on_the_command_line(tmp_path: Path) -> None:
    chosen = ("--trainer.plugins", "fastensor_lightning.FastensorCheckpointIO", "--trainer.plugins.durable", "false")
    added = ("--trainer.callbacks+=fastensor_lightning.CheckpointMonitor",)
    trainer = run(tmp_path, "trainer: {max_steps: 1, accelerator: cpu, logger: false}", *chosen, *added)
    assert not trainer.strategy.checkpoint_io.durable
    assert not only(trainer, CheckpointMonitor)._details


@pytest.mark.parametrize("exclude", ["frozen", ["base.*", "*.mean"]])
def test_what_is_left_out(tmp_path: Path, exclude: str | list[str]) -> None:
    fastensor.save({"weight": torch.ones(2)}, tmp_path / "base.ckpt")
    options = f"{{exclude: {exclude}, base: {tmp_path / 'base.ckpt'}}}"
    plugin = f"{{class_path: fastensor_lightning.FastensorCheckpointIO, init_args: {options}}}"
    yaml = f"trainer: {{max_steps: 1, accelerator: cpu, logger: false, plugins: [{plugin}]}}"
    if exclude == "frozen":
        assert f"exclude={exclude!r}, base=" in repr(run(tmp_path, yaml).strategy.checkpoint_io)
    else:
        with pytest.raises(fastensor.UnknownKeyError, match=r"exclude: nothing in it .* 'base\.\*', '\*\.mean'"):
            run(tmp_path, yaml)


@pytest.mark.parametrize("wrong", ["min_byte: 1MiB", "log: sometimes"])
def test_mistakes_are_told_before_the_training(tmp_path: Path, wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    yaml = LONG_NAMES.replace("min_bytes: 1MiB", wrong)
    with pytest.raises(SystemExit):
        run(tmp_path, yaml)
    assert wrong.partition(":")[0] in capsys.readouterr().err
