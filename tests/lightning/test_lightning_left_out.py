"""``FastensorCheckpointIO(exclude=...)``: what is left out comes from the module, and nothing else is lost."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning_models import loader, make_trainer
from states import assert_equal
from torch import Tensor, nn

import fastensor
from fastensor.backends.registry import announce
from fastensor_lightning import CheckpointMonitor, FastensorCheckpointIO
from fastensor_lightning.left_out import KEY

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


class Adapted(pl.LightningModule):
    """A frozen base with a norm whose running values change, and a head that trains."""

    def __init__(self, seed: int = 0, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, width))
        self.base.requires_grad_(False)
        self.head = nn.Linear(width, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.head(self.base(batch[0])).square().mean()
        self.log("loss", loss)
        return loss

    validation_step = test_step = training_step

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.head.parameters(), lr=0.01)


FROZEN = {f"base.{layer}.{kind}" for layer in (0, 1, 2) for kind in ("weight", "bias")}


def fit(
    folder: Path, plugin: FastensorCheckpointIO | None, module: Any = None, ckpt_path: Any = None, **options: Any
) -> Any:
    callbacks = [CheckpointMonitor(), *options.pop("callbacks", [])] if plugin else options.pop("callbacks", [])
    trainer = make_trainer(pl, folder, plugin, callbacks=callbacks, **options)
    torch.manual_seed(1)
    trainer.fit(Adapted() if module is None else module, loader(), ckpt_path=ckpt_path)
    return trainer


def weights(trainer: Any) -> dict[str, Tensor]:
    return {name: one.detach().clone() for name, one in trainer.lightning_module.state_dict().items()}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("exclude", "left_out"),
    [("frozen", FROZEN), (["base.0.*", "base.2.weight"], {"base.0.weight", "base.0.bias", "base.2.weight"})],
)
def test_a_training_goes_on_bit_for_bit(tmp_path: Path, exclude: Any, left_out: set[str], asynchronous: bool) -> None:
    stock = fit(tmp_path / "stock", None, max_epochs=2)
    plugin = FastensorCheckpointIO(exclude=exclude, asynchronous=asynchronous)
    first = fit(tmp_path / "ours", plugin, max_epochs=1)
    path = first.checkpoint_callback.best_model_path
    saved = torch.load(path)
    assert saved["state_dict"].keys() == first.lightning_module.state_dict().keys() - left_out
    assert saved[KEY].keys() == left_out
    assert saved["optimizer_states"][0]["state"]
    assert saved["loops"]
    assert saved["callbacks"]
    assert fastensor.verify(path).complete
    again = fit(tmp_path / "ours", FastensorCheckpointIO(exclude=exclude), ckpt_path=path, max_epochs=2)
    plain = fit(tmp_path / "plain", FastensorCheckpointIO(), max_epochs=1)
    resumed = fit(tmp_path / "plain", FastensorCheckpointIO(), ckpt_path=plain.checkpoint_callback.best_model_path)
    assert_equal(weights(again), weights(resumed))
    assert weights(again).keys() == weights(stock).keys()
    # what a resumed run saves leaves the same out
    assert torch.load(again.checkpoint_callback.best_model_path)[KEY].keys() == left_out


def test_any_plugin_reads_it_for_every_kind_of_run(tmp_path: Path) -> None:
    first = fit(tmp_path, FastensorCheckpointIO(exclude="frozen"), max_epochs=1)
    path, expected = first.checkpoint_callback.best_model_path, weights(first)
    for run in ("validate", "test"):
        trainer = make_trainer(pl, tmp_path, FastensorCheckpointIO(), callbacks=[CheckpointMonitor()])
        module = Adapted()
        getattr(trainer, run)(module, loader(), ckpt_path=path)
        assert_equal(dict(module.state_dict()), expected)


def test_without_the_plugin(tmp_path: Path) -> None:
    first = fit(tmp_path, FastensorCheckpointIO(exclude="frozen"), max_epochs=1)
    path = first.checkpoint_callback.best_model_path
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"base\.0\.weight\""):
        Adapted.load_from_checkpoint(path)
    loaded = Adapted.load_from_checkpoint(path, strict=False)
    assert_equal(dict(loaded.state_dict()), weights(first))


def test_another_base_is_an_error_that_names_it(tmp_path: Path) -> None:
    first = fit(tmp_path, FastensorCheckpointIO(exclude="frozen"), max_epochs=1)
    path = first.checkpoint_callback.best_model_path
    with pytest.raises(
        fastensor.StateMismatchError, match=r"leaves out 'base\.0\.bias'.* another one .*\(4 of 6 differ"
    ):
        fit(tmp_path, FastensorCheckpointIO(), Adapted(seed=7), path)
    with pytest.raises(fastensor.StateMismatchError, match=r"'base\.0\.bias'"):
        fit(tmp_path, FastensorCheckpointIO(), Adapted(width=8), path)
    module = Adapted(seed=7)
    fit(tmp_path, FastensorCheckpointIO(verify=False), module, path)
    assert torch.equal(module.base[0].weight, Adapted(seed=7).base[0].weight)


@pytest.mark.parametrize("strict", [True, False])
def test_a_module_that_lacks_what_was_left_out(tmp_path: Path, strict: bool) -> None:
    first = fit(tmp_path, FastensorCheckpointIO(exclude="frozen"), max_epochs=1)
    path = first.checkpoint_callback.best_model_path
    module = Adapted()
    module.strict_loading = strict
    del module.base[2]
    trainer = make_trainer(pl, tmp_path, FastensorCheckpointIO(), callbacks=[CheckpointMonitor()])
    if strict:
        with pytest.raises(
            fastensor.StateMismatchError, match=r"'base.2.bias', which the module has to .* \(2 missing"
        ):
            trainer.validate(module, loader(), ckpt_path=path)
    else:
        trainer.validate(module, loader(), ckpt_path=path)


def test_what_is_missing_besides_is_an_error_as_ever(tmp_path: Path) -> None:
    first = fit(tmp_path, FastensorCheckpointIO(exclude="frozen"), max_epochs=1)
    saved = torch.load(first.checkpoint_callback.best_model_path)
    del saved["state_dict"]["head.bias"]
    torch.save(saved, tmp_path / "cut.ckpt")
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"head.bias\"\."):
        fit(tmp_path, FastensorCheckpointIO(), ckpt_path=tmp_path / "cut.ckpt")


def test_what_has_changed_is_saved_all_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Running values change, though the pattern excludes them: no ``__init__`` could give them again."""
    announce.cache_clear()
    with caplog.at_level(logging.WARNING, "fastensor"):
        first = fit(tmp_path, FastensorCheckpointIO(exclude=["base.*"]), max_epochs=1)
    saved = torch.load(first.checkpoint_callback.best_model_path)
    changed = {"base.1.running_mean", "base.1.running_var", "base.1.num_batches_tracked"}
    assert saved["state_dict"].keys() == changed | {"head.weight", "head.bias"}
    assert "leaving out 'base.1.num_batches_tracked' is not used: it has changed since the run began" in caplog.text
    module = Adapted()
    fit(tmp_path, FastensorCheckpointIO(), module, first.checkpoint_callback.best_model_path, max_epochs=1)
    assert_equal(dict(module.state_dict()), weights(first))


class Unfreezing(Adapted):
    """Its base trains in the first epoch, and is frozen again."""

    def on_train_epoch_start(self) -> None:
        self.base[0].requires_grad_(self.current_epoch == 0)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_what_was_trained_and_is_frozen_again_is_saved(tmp_path: Path) -> None:
    keep = ModelCheckpoint(save_top_k=-1, dirpath=tmp_path, filename="{epoch}")
    trained = fit(tmp_path, FastensorCheckpointIO(exclude="frozen"), Unfreezing(), max_epochs=2, callbacks=[keep])
    saved = torch.load(tmp_path / "epoch=1.ckpt")
    assert "base.0.weight" in saved["state_dict"]
    assert saved[KEY].keys() == FROZEN - {"base.0.weight"}  # a bias in front of a norm has no gradient
    # resumed, with the layer frozen from the start: it is not the module's own, and is saved again
    module = Adapted()
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.1)  # type: ignore[method-assign]
    again = fit(
        tmp_path / "again", FastensorCheckpointIO(exclude="frozen"), module, tmp_path / "epoch=1.ckpt", max_epochs=3
    )
    saved = torch.load(again.checkpoint_callback.best_model_path)
    assert torch.equal(saved["state_dict"]["base.0.weight"], trained.lightning_module.base[0].weight)
    assert KEY in saved


def test_a_checkpoint_that_leaves_nothing_out_is_a_base_too(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", FastensorCheckpointIO(), max_epochs=1)
    path = whole.checkpoint_callback.best_model_path
    assert KEY not in torch.load(path)
    resumed = fit(tmp_path, FastensorCheckpointIO(exclude="frozen"), ckpt_path=path, max_epochs=2)
    assert torch.load(resumed.checkpoint_callback.best_model_path)[KEY].keys() == FROZEN


def test_precision_that_converts_the_module(tmp_path: Path) -> None:
    """The base has other bits when the module is restored than when it is saved."""
    first = fit(tmp_path, FastensorCheckpointIO(exclude="frozen"), max_epochs=1, precision="bf16-true")
    path = first.checkpoint_callback.best_model_path
    assert torch.load(path)[KEY]["base.0.weight"][0] == "bfloat16"
    resumed = fit(
        tmp_path, FastensorCheckpointIO(exclude="frozen"), ckpt_path=path, max_epochs=2, precision="bf16-true"
    )
    assert torch.load(resumed.checkpoint_callback.best_model_path)[KEY].keys() == FROZEN
    for name in FROZEN:
        assert torch.equal(weights(resumed)[name], weights(first)[name])


def test_callbacks_and_weights_only_files(tmp_path: Path) -> None:
    stopping = EarlyStopping("loss", patience=7, check_on_train_epoch_end=True)
    saver = ModelCheckpoint(dirpath=tmp_path, save_weights_only=True)
    fit(tmp_path, FastensorCheckpointIO(exclude="frozen"), max_epochs=1, callbacks=[stopping, saver])
    saved = torch.load(saver.best_model_path)
    assert saved[KEY].keys() == FROZEN
    assert "optimizer_states" not in saved


def test_the_line_at_the_beginning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
        fit(tmp_path, FastensorCheckpointIO(exclude="frozen"), max_epochs=1)
    assert "checkpoints leave out 6 tensors (" in caplog.text


def test_arguments_that_mean_nothing(tmp_path: Path) -> None:
    for value, kind, said in (
        ("frozn", ValueError, r"found 'frozn'; did you mean 'frozen'\?"),
        (3, TypeError, "exclude is 'frozen' or a list of names and patterns, found 3"),
        ([], ValueError, "exclude is empty"),
    ):
        with pytest.raises(kind, match=said):
            FastensorCheckpointIO(exclude=value)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cooperative and exclude contradict"):
        FastensorCheckpointIO(exclude="frozen", cooperative=True)
    with pytest.raises(fastensor.UnknownKeyError, match=r"exclude: nothing in it is called or matches 'basis\.\*'"):
        fit(tmp_path, FastensorCheckpointIO(exclude=["basis.*"]), max_epochs=1)


def test_a_plugin_without_a_monitor_says_that_nothing_is_left_out(tmp_path: Path) -> None:
    plugin = pickle.loads(pickle.dumps(FastensorCheckpointIO(exclude="frozen")))
    assert "exclude='frozen'" in repr(plugin)
    with pytest.warns(UserWarning, match="without a CheckpointMonitor, nothing is left out of checkpoints"):
        plugin.save_checkpoint({"state_dict": {"w": torch.ones(3)}}, tmp_path / "x.ckpt")
    assert plugin.load_checkpoint(tmp_path / "x.ckpt")["state_dict"]["w"].sum() == 3


def test_strategies_whose_ranks_hold_parts_are_refused(tmp_path: Path) -> None:
    for kind in (FSDPStrategy, ModelParallelStrategy):
        monitor, trainer = CheckpointMonitor(), mock.Mock(spec=["strategy"])
        trainer.strategy = kind()
        trainer.strategy.checkpoint_io = FastensorCheckpointIO(exclude="frozen")
        trainer.callbacks = [monitor]
        with pytest.raises(TypeError, match=rf"exclude=\.\.\.\) is for one device and DDP; found {kind.__name__}"):
            monitor.setup(trainer, None, "fit")


def test_ranks_of_ddp(tmp_path: Path) -> None:
    """Rank 0 saves, and each rank gets its base from its own module."""
    options: dict[str, Any] = {"strategy": "ddp_fork", "devices": 2}
    first = fit(tmp_path, FastensorCheckpointIO(exclude="frozen"), max_epochs=1, **options)
    path = first.checkpoint_callback.best_model_path
    assert torch.load(path)[KEY].keys() == FROZEN
    again = fit(tmp_path, FastensorCheckpointIO(exclude="frozen"), ckpt_path=path, max_epochs=2, **options)
    saved = torch.load(again.checkpoint_callback.best_model_path)
    assert saved[KEY].keys() == FROZEN
    assert saved["epoch"] == 1
