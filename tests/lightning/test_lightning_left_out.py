"""``FastensorCheckpointIO(exclude=..., base=...)``: what the base has is left out, and nothing is lost."""

from __future__ import annotations

import importlib
import logging
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sharded_trainers
import torch
from lightning_models import act_as_rank, make_trainer, without_entry_points
from programs import free_port, run_ranks
from states import assert_equal
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fastensor
from fastensor.backends.registry import announce
from fastensor_lightning import CheckpointMonitor, FastensorCheckpointIO, add_left_out, left_out
from fastensor_lightning.left_out import KEY, _record

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*unclosed.*:ResourceWarning"),
]
WIDTH = 64
BASE_NBYTES = 4 * WIDTH * WIDTH
FROZEN = {"base.weight", "base.bias", "tied.weight", "tied.bias"}


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def pl(request: pytest.FixtureRequest) -> Any:
    return pytest.importorskip(request.param)


@pytest.fixture(autouse=True)
def _announcements() -> None:
    announce.cache_clear()


def make_module(pl: Any, base: nn.Module | None = None, seed: int = 5) -> Any:
    """A frozen base, an adapter that trains, and running values."""

    class Adapted(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                self.base = base or nn.Linear(WIDTH, WIDTH)
                self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
            self.base.requires_grad_(False)
            self.tied = self.base
            self.norm = nn.BatchNorm1d(WIDTH, affine=False)

        def forward(self, inputs: Tensor) -> Tensor:
            inputs = inputs.to(self.base.weight.dtype)
            adapted: Tensor = self.norm(self.base(inputs) + self.up(self.down(inputs)))
            return adapted

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss: Tensor = (self(batch[0]) - 1).square().mean()
            return loss

        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.log("score", self(batch[0]).abs().max())

        test_step = validation_step

        def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return self(batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    return Adapted()


def make_loader() -> DataLoader[Any]:
    data = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(data), batch_size=4)


def state_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: one.detach().clone() for name, one in module.state_dict().items()}


def make_base(pl: Any, folder: Path) -> Path:
    path = folder / "base.ckpt"
    fastensor.save(make_module(pl).state_dict(), path)
    return path


def fit(
    pl: Any, folder: Path, plugin: Any, epochs: int = 1, module: Any = None, ckpt_path: Any = None, **options: Any
) -> tuple[Any, str]:
    """A run up to that many epochs. Returns the module and the path of the last checkpoint."""
    module = make_module(pl) if module is None else module
    trainer = make_trainer(pl, folder, plugin, max_epochs=epochs, **options)
    trainer.fit(module, make_loader(), ckpt_path=ckpt_path)
    return module, trainer.checkpoint_callback.best_model_path


def validate(pl: Any, folder: Path, plugin: Any, path: Any, run: str = "validate", module: Any = None) -> Any:
    """The module after a run that has loaded a checkpoint."""
    module = make_module(pl, seed=9) if module is None else module
    getattr(make_trainer(pl, folder, plugin), run)(module, make_loader(), ckpt_path=path)
    return module


def left_out_of(path: Any) -> set[str]:
    """By plain ``torch.load``. What is left out is not in the file, and all else is."""
    found = torch.load(path)
    names = set(found.get(KEY, {"tensors": ()})["tensors"])
    assert not names & found["state_dict"].keys()
    return names


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("exclude", ["frozen", ["base.*", "tied.weight", "tied.bi[a]s"]], ids=["frozen", "patterns"])
def test_a_training_goes_on_bit_for_bit(pl: Any, tmp_path: Path, exclude: Any, asynchronous: bool) -> None:
    plugin = FastensorCheckpointIO(exclude=exclude, base=make_base(pl, tmp_path), asynchronous=asynchronous)
    _, whole = fit(pl, tmp_path / "whole", None, 2)
    trained, path = fit(pl, tmp_path / "small", plugin, 2)
    expected, _ = fit(pl, tmp_path / "whole", None, 4, ckpt_path=whole)
    resumed, again = fit(pl, tmp_path / "small", plugin, 4, make_module(pl, seed=9), path)
    assert os.path.getsize(path) < os.path.getsize(whole) - BASE_NBYTES
    assert left_out_of(path) == left_out_of(again) == FROZEN
    assert torch.load(path)["optimizer_states"][0]["state"]
    assert fastensor.verify(path).complete
    assert_equal(state_of(resumed), state_of(expected))
    assert trained.state_dict().keys() == resumed.state_dict().keys()


@pytest.mark.parametrize("run", ["validate", "test", "predict"])
def test_every_kind_of_run_has_what_was_saved(pl: Any, tmp_path: Path, run: str) -> None:
    """Whatever base the module has itself. The second load is as the first."""
    base = make_base(pl, tmp_path)
    trained, path = fit(pl, tmp_path, FastensorCheckpointIO(exclude="frozen", base=base))
    plugin = FastensorCheckpointIO(base=base)
    module = validate(pl, tmp_path, plugin, path, run)
    assert_equal(state_of(module), state_of(trained))
    module.base.requires_grad_(True)
    with torch.no_grad():
        module.base.weight.add_(1)
    assert_equal(state_of(validate(pl, tmp_path, plugin, path, run, module)), state_of(trained))


def test_without_the_plugin(pl: Any, tmp_path: Path) -> None:
    """Lightning's own loading is strict. ``add_left_out`` makes the checkpoint whole before."""
    base = make_base(pl, tmp_path)
    trained, path = fit(pl, tmp_path, FastensorCheckpointIO(exclude="frozen", base=base))
    kind = type(make_module(pl))
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "base.weight", "base.bias"'):
        kind.load_from_checkpoint(path)

    class Adding(kind):  # type: ignore[misc, valid-type]
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            add_left_out(checkpoint, base)

    assert_equal(state_of(Adding.load_from_checkpoint(path)), state_of(trained))
    found = torch.load(path)
    add_left_out(found, base)
    add_left_out(found, base)  # nothing is left out any more
    assert KEY not in found
    assert_equal(dict(sorted(found["state_dict"].items())), dict(sorted(state_of(trained).items())))
    tied = found["state_dict"]["tied.weight"]
    assert tied.data_ptr() != found["state_dict"]["base.weight"].data_ptr(), "each name has memory of its own"
    whole = tmp_path / "whole.ckpt"
    fastensor.save(found, whole)
    del found["state_dict"]["base.weight"]
    fastensor.save(found, tmp_path / "cut.ckpt")
    assert_equal(state_of(kind.load_from_checkpoint(whole)), state_of(trained))
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "base.weight"\.'):
        Adding.load_from_checkpoint(tmp_path / "cut.ckpt")


@pytest.mark.parametrize("missing", ["down.weight", "norm.running_mean"])
def test_what_is_missing_besides_is_an_error_as_ever(pl: Any, tmp_path: Path, missing: str) -> None:
    plugin = FastensorCheckpointIO(exclude="frozen", base=make_base(pl, tmp_path))
    _, path = fit(pl, tmp_path, plugin)
    checkpoint = torch.load(path)
    del checkpoint["state_dict"][missing]
    torch.save(checkpoint, path)
    with pytest.raises(RuntimeError, match=rf'Missing key\(s\) in state_dict: "{missing}"\.'):
        fit(pl, tmp_path, plugin, 2, ckpt_path=path)


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
def test_another_base_is_an_error_that_names_the_tensor(pl: Any, tmp_path: Path, strict: bool) -> None:
    base, other = make_base(pl, tmp_path), tmp_path / "other.ckpt"
    _, path = fit(pl, tmp_path, FastensorCheckpointIO(exclude="frozen", base=base))
    state = torch.load(base)
    state["base.bias"] += 1
    torch.save(state, other)
    module = make_module(pl, seed=9)
    module.strict_loading = strict
    before = state_of(module)
    for plugin, error, message in (
        (FastensorCheckpointIO(), fastensor.StateMismatchError, r"leaves out 'base\.weight' and 3 more: pass Fast"),
        (
            FastensorCheckpointIO(base=other),
            fastensor.StateMismatchError,
            r"other\.ckpt has no tensor with the values of 'base\.bias' .float32 .64.., .*; 1 of 2 .* '.*base\.ckpt'",
        ),
        (FastensorCheckpointIO(base=tmp_path / "gone.ckpt"), FileNotFoundError, "gone.ckpt"),
    ):
        with pytest.raises(error, match=message):
            validate(pl, tmp_path, plugin, path, module=module)
    assert_equal(state_of(module), before)


def test_a_damaged_base_is_an_error(pl: Any, tmp_path: Path) -> None:
    base = make_base(pl, tmp_path)
    plugin = FastensorCheckpointIO(exclude="frozen", base=base)
    _, path = fit(pl, tmp_path, plugin)
    content = bytearray(base.read_bytes())
    at = content.index(make_module(pl).base.weight.numpy().tobytes())
    content[at + BASE_NBYTES // 2] ^= 1
    base.write_bytes(content)
    with pytest.raises(fastensor.StateMismatchError, match=r"has no tensor with the values of 'base\.weight'"):
        validate(pl, tmp_path, plugin, path)
    assert left_out_of(fit(pl, tmp_path, plugin)[1]) == {"base.bias", "tied.bias"}, "the status of the base has changed"


def train_by_trainer(pl: Any, folder: Path, module: Any) -> None:
    fit(pl, folder, None, 2, module)


def train_by_hand(pl: Any, folder: Path, module: Any) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module.training_step(next(iter(make_loader())), 0).backward()
    optimizer.step()
    module.zero_grad()


def train_with_the_plugin(pl: Any, folder: Path, module: Any) -> None:
    fit(pl, folder, FastensorCheckpointIO(exclude="frozen", base=folder / "base.ckpt"), 2, module)


@pytest.mark.parametrize("first", [train_by_trainer, train_by_hand, train_with_the_plugin])
@pytest.mark.parametrize("copied", [False, True], ids=["the same tensors", "copies"])
def test_what_was_trained_in_an_earlier_stage_is_saved(
    pl: Any, tmp_path: Path, first: Callable[..., None], copied: bool
) -> None:
    base = make_base(pl, tmp_path)
    earlier = make_module(pl)
    earlier.base.requires_grad_(True)
    first(pl, tmp_path, earlier)
    module = make_module(pl, None if copied else earlier.base, seed=5)
    if copied:
        module.base.load_state_dict(earlier.base.state_dict())
    trained, path = fit(pl, tmp_path / "second", FastensorCheckpointIO(exclude="frozen", base=base), module=module)
    assert not torch.equal(trained.base.weight, make_module(pl).base.weight)
    assert torch.equal(torch.load(path)["state_dict"]["base.weight"], trained.base.weight)
    assert_equal(state_of(validate(pl, tmp_path, FastensorCheckpointIO(base=base), path)), state_of(trained))


def test_the_checkpoint_of_an_earlier_stage_is_a_base(pl: Any, tmp_path: Path) -> None:
    """Its names may be others, and its optimizer has tensors of the same shapes."""
    earlier = make_module(pl)
    earlier.base.requires_grad_(True)
    _, first = fit(pl, tmp_path / "first", FastensorCheckpointIO(), module=earlier)

    class Second(type(earlier)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.encoder = earlier.base.requires_grad_(False)
            del self.base, self.tied

        def forward(self, inputs: Tensor) -> Tensor:
            adapted: Tensor = self.norm(self.encoder(inputs) + self.up(self.down(inputs)))
            return adapted

    plugin = FastensorCheckpointIO(exclude="frozen", base=first)
    trained, path = fit(pl, tmp_path / "second", plugin, module=Second())
    assert left_out_of(path) == {"encoder.weight", "encoder.bias"}
    module = Second()
    module.encoder = nn.Linear(WIDTH, WIDTH)
    assert_equal(state_of(validate(pl, tmp_path, plugin, path, module=module)), state_of(trained))


def freezing(pl: Any, epoch: int, name: str, frozen: bool) -> Any:
    class Freezing(pl.Callback):  # type: ignore[misc]
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            if epoch == 0:
                pl_module.get_submodule(name).requires_grad_(not frozen)

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == epoch:
                pl_module.get_submodule(name).requires_grad_(not frozen)

    return Freezing()


def checkpoints(pl: Any, folder: Path) -> Any:
    kind = importlib.import_module(f"{pl.__name__}.callbacks").ModelCheckpoint
    return kind(save_top_k=-1, dirpath=folder, filename="{epoch}")


def test_what_trained_for_some_steps_and_was_frozen_is_saved(pl: Any, tmp_path: Path) -> None:
    plugin = FastensorCheckpointIO(exclude="frozen", base=make_base(pl, tmp_path))
    callbacks = [freezing(pl, 1, "down", frozen=True), checkpoints(pl, tmp_path)]
    module, _ = fit(pl, tmp_path, plugin, 2, callbacks=callbacks)
    assert not module.down.weight.requires_grad
    assert torch.equal(torch.load(tmp_path / "epoch=1.ckpt")["state_dict"]["down.weight"], module.down.weight)
    assert left_out_of(tmp_path / "epoch=1.ckpt") == FROZEN


def test_what_is_frozen_by_a_callback_and_trains_later(pl: Any, tmp_path: Path) -> None:
    """Checkpoints of the time when it was frozen can still be loaded into the module that has trained it."""
    plugin = FastensorCheckpointIO(exclude="frozen", base=make_base(pl, tmp_path))
    module = make_module(pl)
    module.base.requires_grad_(True)
    trainer = make_trainer(
        pl, tmp_path, plugin, max_epochs=2,
        callbacks=[freezing(pl, 0, "base", True), freezing(pl, 1, "base", False), checkpoints(pl, tmp_path)],
    )  # fmt: skip
    trainer.fit(module, make_loader())
    assert left_out_of(tmp_path / "epoch=0.ckpt") == FROZEN
    assert left_out_of(tmp_path / "epoch=1.ckpt") == set()
    assert not torch.equal(module.base.weight, make_module(pl).base.weight)
    for run in ("validate", "test", "predict"):
        getattr(trainer, run)(module, make_loader(), ckpt_path=tmp_path / "epoch=0.ckpt")
        assert torch.equal(module.base.weight, make_module(pl).base.weight)
        getattr(trainer, run)(module, make_loader(), ckpt_path=tmp_path / "epoch=1.ckpt")
        assert torch.equal(module.base.weight, torch.load(tmp_path / "epoch=1.ckpt")["state_dict"]["base.weight"])


def test_lightnings_own_callback_that_freezes(pl: Any, tmp_path: Path) -> None:
    finetuning = importlib.import_module(f"{pl.__name__}.callbacks").BackboneFinetuning
    base = make_base(pl, tmp_path)
    module = make_module(pl)
    del module.tied
    module.backbone = module.base.requires_grad_(True)
    module.configure_optimizers = lambda: torch.optim.SGD(
        [one for one in module.parameters() if one.requires_grad], lr=0.1
    )
    plugin = FastensorCheckpointIO(exclude="frozen", base=base)
    callbacks = [finetuning(unfreeze_backbone_at_epoch=2), checkpoints(pl, tmp_path)]
    fit(pl, tmp_path, plugin, 3, module, callbacks=callbacks)
    assert left_out_of(tmp_path / "epoch=1.ckpt") >= {"backbone.weight", "backbone.bias"}
    assert left_out_of(tmp_path / "epoch=2.ckpt") == set()
    resumed = make_module(pl, seed=9)
    del resumed.tied
    resumed.backbone = resumed.base
    resumed = validate(pl, tmp_path, plugin, tmp_path / "epoch=1.ckpt", module=resumed)
    assert torch.equal(resumed.backbone.weight, make_module(pl).base.weight)


def test_a_module_that_renames_what_it_loads(pl: Any, tmp_path: Path) -> None:
    base = make_base(pl, tmp_path)
    trained, path = fit(pl, tmp_path, FastensorCheckpointIO(exclude="frozen", base=base))

    class Renamed(type(make_module(pl))):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net, self.norm2 = self.base, self.norm
            del self.tied, self.base, self.norm

        def forward(self, inputs: Tensor) -> Tensor:
            adapted: Tensor = self.norm2(self.net(inputs) + self.up(self.down(inputs)))
            return adapted

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            state = checkpoint["state_dict"]
            for name in [name for name in state if name.startswith("tied")]:
                del state[name]
            for name in [name for name in state if name.startswith(("base", "norm"))]:
                state[name.replace("base", "net").replace("norm", "norm2")] = state.pop(name)

    module = Renamed()
    with torch.no_grad():
        module.net.weight.add_(1)  # another base than was saved
    plugin = FastensorCheckpointIO(exclude="frozen", base=base)
    resumed, again = fit(pl, tmp_path / "renamed", plugin, 2, module, path)
    assert torch.equal(resumed.net.weight, trained.base.weight)
    assert left_out_of(again) == {"net.weight", "net.bias"}
    other = torch.load(path)["state_dict"]["down.weight"]
    assert not torch.equal(resumed.down.weight, other), "it has trained on"


def test_what_exists_nowhere_else_is_saved(pl: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A frozen base of other random numbers than those in the file, and running values, which patterns exclude."""
    plugin = FastensorCheckpointIO(exclude=["*"], base=make_base(pl, tmp_path))
    with caplog.at_level(logging.WARNING, "fastensor"):
        trained, path = fit(pl, tmp_path, plugin, module=make_module(pl, seed=6))
    assert left_out_of(path) == set()
    assert KEY not in torch.load(path)
    assert "leaving out 'base.weight' is not used:" in caplog.text
    assert "base.ckpt has no tensor with these values, so it is saved" in caplog.text
    trained, path = fit(pl, tmp_path, plugin)
    assert left_out_of(path) == FROZEN
    assert_equal(state_of(validate(pl, tmp_path, plugin, path)), state_of(trained))


def test_dtypes(pl: Any, tmp_path: Path) -> None:
    """A base of 32 bits does not have what was rounded to 16, and a base of 16 bits gives back 16."""
    base = make_base(pl, tmp_path)
    wide = FastensorCheckpointIO(exclude="frozen", base=base)
    trained, path = fit(pl, tmp_path / "wide", wide, precision="bf16-true")
    assert left_out_of(path) == set()
    half = tmp_path / "half.ckpt"
    fastensor.save({name: one.to(torch.bfloat16) for name, one in torch.load(base).items()}, half)
    narrow = FastensorCheckpointIO(exclude="frozen", base=half)
    trained, path = fit(pl, tmp_path / "narrow", narrow, precision="bf16-true")
    assert left_out_of(path) == FROZEN
    assert narrow.load_checkpoint(path)["state_dict"]["base.weight"].dtype == torch.bfloat16
    resumed, again = fit(pl, tmp_path / "narrow", narrow, 2, make_module(pl, seed=9), path, precision="bf16-true")
    assert torch.equal(resumed.base.weight, trained.base.weight)
    assert left_out_of(again) == FROZEN
    with pytest.raises(fastensor.StateMismatchError, match=r"values of 'base\.weight' \(bfloat16 \[64, 64\]\)"):
        validate(pl, tmp_path, wide, path)
    # exact in both: the values of 16 bits, in 32
    rounded = make_module(pl)
    with torch.no_grad():
        rounded.base.weight.copy_(rounded.base.weight.bfloat16())
    assert left_out_of(fit(pl, tmp_path / "rounded", narrow, module=rounded)[1]) == set()


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "several files"])
def test_the_folder_of_a_model_is_a_base(pl: Any, tmp_path: Path, sharded: bool) -> None:
    """As ``save_pretrained`` has made it: names of its own, and no checksums."""
    module, folder = make_module(pl), tmp_path / "model"
    fastensor.save_sharded(
        {f"transformer.{name}": one for name, one in module.base.state_dict().items()},
        folder, checksums=False, shard_nbytes=1000 if sharded else "5GB",
    )  # fmt: skip
    assert len(list(folder.glob("*.safetensors"))) == 1 + sharded
    plugin = FastensorCheckpointIO(exclude="frozen", base=folder)
    trained, path = fit(pl, tmp_path, plugin, module=module)
    assert left_out_of(path) == FROZEN
    assert_equal(state_of(validate(pl, tmp_path, plugin, path)), state_of(trained))


class Replacing:
    """What happens to the base in the middle of a run."""

    @staticmethod
    def removed(base: Path) -> None:
        base.unlink()

    @staticmethod
    def replaced(base: Path) -> None:
        fastensor.save({"other": torch.ones(WIDTH, WIDTH)}, base)

    @staticmethod
    def cut(base: Path) -> None:
        base.write_bytes(base.read_bytes()[:100])


@pytest.mark.parametrize("happens", [Replacing.removed, Replacing.replaced, Replacing.cut])
def test_without_its_base_a_checkpoint_is_whole(pl: Any, tmp_path: Path, happens: Callable[[Path], None]) -> None:
    base = make_base(pl, tmp_path)

    class Losing(pl.Callback):  # type: ignore[misc]
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                happens(base)

    plugin = FastensorCheckpointIO(exclude="frozen", base=base)
    trained, _ = fit(pl, tmp_path, plugin, 2, callbacks=[Losing(), checkpoints(pl, tmp_path)])
    assert left_out_of(tmp_path / "epoch=0.ckpt") == FROZEN
    assert left_out_of(tmp_path / "epoch=1.ckpt") == set()
    assert_equal(state_of(validate(pl, tmp_path, None, tmp_path / "epoch=1.ckpt")), state_of(trained))


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_the_plugin_does_not_lose_its_base(
    pl: Any, tmp_path: Path, asynchronous: bool, caplog: pytest.LogCaptureFixture
) -> None:
    link, base = tmp_path / "last.ckpt", make_base(pl, tmp_path)
    link.symlink_to(base)
    content = base.read_bytes()
    plugin = FastensorCheckpointIO(exclude="frozen", base=link, asynchronous=asynchronous)
    trainer = make_trainer(pl, tmp_path, plugin, max_epochs=1)
    trainer.fit(make_module(pl), make_loader())
    for path in (base, os.path.relpath(base)):
        with pytest.raises(ValueError, match=r"was not saved: it is the base of other checkpoints"):
            trainer.save_checkpoint(path)
        plugin.remove_checkpoint(path)
        assert "is not removed, because it is the base of other checkpoints" in caplog.text
    plugin.teardown()
    assert (link.readlink(), base.read_bytes()) == (base, content)
    other = tmp_path / "other.ckpt"
    other.symlink_to(base)  # it is replaced, not what it leads to
    trainer.save_checkpoint(other)
    assert not other.is_symlink()
    assert base.read_bytes() == content


def test_a_base_that_was_given_by_a_link_is_kept_when_the_link_leads_elsewhere(pl: Any, tmp_path: Path) -> None:
    """As with ``ModelCheckpoint(save_last="link")``, which then removes the file that the link has led to."""
    link, base = tmp_path / "last.ckpt", make_base(pl, tmp_path)
    link.symlink_to(base)
    plugin = FastensorCheckpointIO(exclude="frozen", base=link)
    trainer = make_trainer(pl, tmp_path, plugin, max_epochs=1)
    trainer.fit(make_module(pl), make_loader())
    trainer.save_checkpoint(tmp_path / "new.ckpt")
    link.unlink()
    link.symlink_to(tmp_path / "new.ckpt")
    plugin.remove_checkpoint(base)
    trainer.save_checkpoint(tmp_path / "newer.ckpt")
    for name in ("new.ckpt", "newer.ckpt"):
        assert left_out_of(tmp_path / name)
        checkpoint = torch.load(tmp_path / name)
        add_left_out(checkpoint, base)
        assert checkpoint["state_dict"].keys() == trainer.lightning_module.state_dict().keys()


def test_a_link_does_not_take_the_place_of_the_base(pl: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    base = make_base(pl, tmp_path)
    plugin = FastensorCheckpointIO(exclude="frozen", base=base, asynchronous=True)
    plugin._link(str(tmp_path / "x.ckpt"), str(base))
    plugin.teardown()
    assert "because it is the base of other checkpoints" in caplog.text
    assert not base.is_symlink()


def test_a_folder_that_has_the_base_is_not_removed(pl: Any, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    base = make_base(pl, tmp_path / "run")
    plugin = FastensorCheckpointIO(exclude="frozen", base=base)
    plugin.remove_checkpoint(tmp_path / "run")
    assert base.exists()
    FastensorCheckpointIO(base=base.parent).remove_checkpoint(tmp_path / "run")
    assert base.exists()


def test_without_memory_to_compare_a_checkpoint_is_whole(
    pl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("the device is full")

    plugin = FastensorCheckpointIO(exclude="frozen", base=make_base(pl, tmp_path))
    trainer = make_trainer(pl, tmp_path, plugin, max_epochs=1)
    trainer.fit(make_module(pl), make_loader())
    monkeypatch.setattr(left_out, "crc32s_of", full)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    assert not left_out_of(tmp_path / "x.ckpt")


def test_who_excludes_nothing_is_told(pl: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plugin = FastensorCheckpointIO(exclude="frozen", base=make_base(pl, tmp_path))
    trainer = make_trainer(pl, tmp_path, plugin, max_epochs=1)
    trainer.fit(make_module(pl).requires_grad_(True), make_loader())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    assert "no tensor of the checkpoint is excluded" in caplog.text


def test_a_base_at_a_url_is_refused() -> None:
    with pytest.raises(ValueError, match="copy it to a local folder"):
        FastensorCheckpointIO(exclude="frozen", base="memory://base.ckpt")


def test_weights_only_and_after_the_run(pl: Any, tmp_path: Path) -> None:
    plugin = FastensorCheckpointIO(exclude=["base.*"], base=make_base(pl, tmp_path))
    trainer = make_trainer(pl, tmp_path, plugin, max_epochs=1)
    trainer.fit(make_module(pl), make_loader())
    trainer.save_checkpoint(tmp_path / "x.ckpt", weights_only=True)
    assert left_out_of(tmp_path / "x.ckpt") == {"base.weight", "base.bias"}
    assert "optimizer_states" not in torch.load(tmp_path / "x.ckpt")
    assert trainer.lightning_module.state_dict().keys() >= {"base.weight"}


def test_inside_of_lightnings_own_asynchronous_plugin(pl: Any, tmp_path: Path) -> None:
    wrapper = importlib.import_module(f"{pl.__name__}.plugins").AsyncCheckpointIO
    base = make_base(pl, tmp_path)
    trained, path = fit(pl, tmp_path, wrapper(FastensorCheckpointIO(exclude="frozen", base=base)))
    assert left_out_of(path) == FROZEN
    module = validate(pl, tmp_path, wrapper(FastensorCheckpointIO(base=base)), path)
    assert_equal(state_of(module), state_of(trained))


def test_mistakes_are_told_before_training(pl: Any, tmp_path: Path) -> None:
    base = make_base(pl, tmp_path)
    (tmp_path / "text").write_text("no checkpoint")
    for exclude, path, error, message in (
        (["base.*", "bass.*"], base, fastensor.UnknownKeyError, r"exclude: nothing in it is called or matches 'bass"),
        ("frozen", tmp_path / "gone.ckpt", FileNotFoundError, "gone.ckpt"),
        ("frozen", tmp_path / "text", fastensor.NotACheckpointError, "text"),
    ):
        for callbacks in ([CheckpointMonitor()], None):
            with pytest.raises(error, match=message):
                fit(pl, tmp_path, FastensorCheckpointIO(exclude=exclude, base=path), callbacks=callbacks)
    assert list(tmp_path.rglob("*.ckpt")) == [base]


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"exclude": "frozn"}, ValueError, r"found 'frozn'; did you mean 'frozen'\?"),
        ({"exclude": 3}, TypeError, "exclude is 'frozen' or a list of names and patterns, found 3"),
        ({"exclude": [3]}, TypeError, r"exclude is 'frozen' or a list of names and patterns, found \[3\]"),
        ({"exclude": []}, ValueError, "exclude is empty"),
        ({"exclude": "frozen", "base": None}, ValueError, r"exclude='frozen' needs base, a file that has"),
        ({"exclude": "frozen", "cooperative": True}, ValueError, "cooperative and exclude contradict"),
        ({"base": 3}, TypeError, "int"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        FastensorCheckpointIO(**{"base": "x.ckpt", **options})


def test_without_a_monitor_checkpoints_are_whole(pl: Any, tmp_path: Path) -> None:
    plugin = FastensorCheckpointIO(exclude="frozen", base=make_base(pl, tmp_path))
    with without_entry_points(), pytest.warns(UserWarning, match="nothing is left out of checkpoints"):
        _, path = fit(pl, tmp_path, plugin)
    assert left_out_of(path) == set()
    with pytest.warns(UserWarning, match="nothing is left out of checkpoints"):  # Fabric's
        FastensorCheckpointIO(exclude="frozen", base="base.ckpt").save_checkpoint({"state_dict": {}}, tmp_path / "x")


def test_a_copy_of_the_plugin_knows_no_run(pl: Any, tmp_path: Path) -> None:
    plugin = FastensorCheckpointIO(exclude=["base.*"], base=make_base(pl, tmp_path))
    fit(pl, tmp_path, plugin)
    copy = pickle.loads(pickle.dumps(plugin))
    assert copy._left_out._module is None
    assert f"exclude=['base.*'], base='{tmp_path / 'base.ckpt'}'" in repr(copy)


def test_checkpoints_without_the_option_cost_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a whole checkpoint nor a plugin without a base compares anything."""
    pl = pytest.importorskip("lightning.pytorch")
    base = make_base(pl, tmp_path)
    monkeypatch.setattr("fastensor_lightning.left_out._record", None)
    _, path = fit(pl, tmp_path, FastensorCheckpointIO())
    validate(pl, tmp_path, FastensorCheckpointIO(exclude="frozen", base=base), path)


class Subclass(Tensor):
    pass


def test_what_can_be_compared() -> None:
    ones = torch.ones(3, 4)
    assert _record(ones) == _record(ones.t().contiguous().t()) == _record(torch.ones(1).expand(3, 4))
    others = [ones.t(), ones.half(), ones.int(), ones[0], ones + torch.eye(3, 4), ones.flatten()]
    assert len({_record(one) for one in [ones, *others]}) == len(others) + 1
    number = torch.tensor([1 + 2j])
    assert _record(number.conj()) == _record(number.conj().resolve_conj()) != _record(number)
    assert None is not _record(torch.tensor(True)) != _record(torch.tensor(False))
    for odd in (torch.zeros(0), ones.to_sparse(), ones.to("meta"), ones.as_subclass(Subclass), 3, "x"):
        assert _record(odd) is None
    swapped = torch.arange(4.0)
    assert _record(swapped) != _record(swapped.flip(0))


def start(rank: int, program: Callable[[Any, int, Path], None], brand: str, port: int, folder: Path) -> None:
    act_as_rank(rank, port)
    torch.set_num_threads(1)
    program(importlib.import_module(brand), rank, folder)
    torch.distributed.destroy_process_group()


def fit_and_resume(pl: Any, rank: int, folder: Path) -> None:
    plugin = FastensorCheckpointIO(exclude="frozen", base=folder / "base.ckpt")
    ddp: dict[str, Any] = {"devices": 2, "strategy": "ddp"}
    trained, _ = fit(pl, folder / "saved", plugin, 2, callbacks=[CheckpointMonitor()], **ddp)
    (path,) = (folder / "saved").rglob("*.ckpt")
    assert left_out_of(path) == FROZEN
    for options in ({}, {"cooperative": {"timeout": 30.0}}):
        module = make_module(pl, seed=9)
        loading = FastensorCheckpointIO(base=folder / "base.ckpt", **options)  # type: ignore[arg-type]
        trainer = make_trainer(pl, folder, loading, callbacks=[CheckpointMonitor()], **ddp)
        trainer.validate(module, make_loader(), ckpt_path=path)
        assert torch.equal(module.up.weight, trained.up.weight)
        assert torch.equal(module.base.weight, trained.base.weight)


def refuse(pl: Any, rank: int, folder: Path) -> None:
    plugin = FastensorCheckpointIO(exclude="frozen", base=folder / "base.ckpt")
    for full in (False, True):
        with pytest.raises(TypeError, match=r"is for one device and for DDP.* found ModelParallelStrategy"):
            sharded_trainers.fit(pl, folder, plugin, full=full, callbacks=[CheckpointMonitor()])


@pytest.mark.parametrize("program", [fit_and_resume, refuse])
@pytest.mark.parametrize("brand", ["lightning.pytorch", "pytorch_lightning"])
def test_two_ranks(brand: str, tmp_path: Path, program: Callable[[Any, int, Path], None]) -> None:
    make_base(pytest.importorskip(brand), tmp_path)
    run_ranks(start, 2, program, brand, free_port(), tmp_path)


def test_a_strategy_that_is_not_known_is_refused() -> None:
    plugin = FastensorCheckpointIO(exclude="frozen", base="base.ckpt")
    strategy = SimpleNamespace(checkpoint_io=plugin)
    with pytest.raises(TypeError, match=r"is for one device and for DDP, .* found SimpleNamespace: leave both out"):
        CheckpointMonitor().setup(SimpleNamespace(strategy=strategy), None, "fit")  # type: ignore[arg-type]
