"""Trainers whose data is in LMDB: each sample of an epoch trains the model once, wherever the training is resumed."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from data.databases import make
from lightning_models import act_as_rank, make_trainer
from programs import free_port, run_ranks

from fastensor.data import LmdbDataset, decoders
from fastensor_lightning import FastensorDataModule

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*unclosed.*:ResourceWarning"),
]

BRANDS = ["lightning.pytorch", "pytorch_lightning"]
COUNT = 103
DECODE = decoders.Chain((decoders.Array("<i8", (-1,)), decoders.tensor))


@pytest.fixture(params=BRANDS)
def pl(request: pytest.FixtureRequest) -> Any:
    return pytest.importorskip(request.param)


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """The sample at each position is that number."""
    return make(tmp_path / "db", [(b"%06d" % number, number.to_bytes(8, "little")) for number in range(COUNT)])


def model_of(pl: Any) -> Any:
    class Model(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.seen: list[int] = []
            self.validated: list[int] = []

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            self.seen += batch.ravel().tolist()
            loss: torch.Tensor = self.layer(batch.float()).mean() * 1e-6
            return loss

        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.validated += batch.ravel().tolist()

        test_step = validation_step

        def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return batch.ravel()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["seen"] = list(self.seen)

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.seen = list(checkpoint["seen"])

    return Model()


def trained(
    pl: Any, folder: Path, data: FastensorDataModule, ckpt_path: str | Path | None = None, **options: Any
) -> Any:
    """The model, which says what it was trained with, before the checkpoint and since."""
    model = model_of(pl)
    trainer = make_trainer(pl, folder, **{"enable_checkpointing": False, **options})
    trainer.fit(model, datamodule=data, ckpt_path=ckpt_path, weights_only=False)
    return model


@pytest.mark.parametrize("validates", [False, True])
def test_every_checkpoint_leads_to_the_same_training(pl: Any, tmp_path: Path, database: Path, validates: bool) -> None:
    """In epochs, at their ends, and after validation; by other numbers of workers."""

    def data(workers: int) -> FastensorDataModule:
        val = database if validates else None
        return FastensorDataModule(database, val=val, batch_size=20, decode=DECODE, seed=3, num_workers=workers)

    model_checkpoint = import_module(f"{pl.__name__}.callbacks").ModelCheckpoint
    savers = [
        model_checkpoint(tmp_path / "steps", filename="{step}", every_n_train_steps=1, save_top_k=-1),
        model_checkpoint(tmp_path / "epochs", filename="{step}", save_on_train_epoch_end=True, save_top_k=-1),
        model_checkpoint(
            tmp_path / "vals", mode="max", filename="{step}", save_on_train_epoch_end=False, save_top_k=-1
        ),
    ]
    whole = trained(pl, tmp_path, data(0), callbacks=savers, enable_checkpointing=True).seen
    assert [sorted(whole[begin : begin + COUNT]) for begin in (0, COUNT)] == [list(range(COUNT))] * 2
    assert whole[:COUNT] != whole[COUNT:]
    checkpoints = sorted(tmp_path.glob("*/step=*.ckpt"))
    assert len(checkpoints) == (16 if validates else 14)
    for number, checkpoint in enumerate(checkpoints):
        resumed = trained(pl, tmp_path, data(2 * (number == 3)), checkpoint)
        assert resumed.seen == whole, checkpoint


def test_a_batch_size_finder_sets_the_size_of_batches(pl: Any, tmp_path: Path, database: Path) -> None:
    """As that of any data module which has one. Every sample trains the model once all the same."""
    data = FastensorDataModule(database, val=database, batch_size=20, decode=DECODE)
    finder = import_module(f"{pl.__name__}.callbacks").BatchSizeFinder(max_trials=2, steps_per_trial=1, init_val=2)
    model = trained(pl, tmp_path, data, callbacks=[finder], max_epochs=1, limit_val_batches=2)
    assert finder.optimal_batch_size == data.batch_size > 2
    assert sorted(model.seen[-COUNT:]) == list(range(COUNT))
    assert sum(1 for _ in data.train_dataloader()) == -(-COUNT // data.batch_size)
    with pytest.raises(ValueError, match="batch_size"):
        data.batch_size = 0


def test_an_epoch_is_resumed_twice(pl: Any, tmp_path: Path, database: Path) -> None:
    """And then the next one."""
    steps, checkpoint = 0, None
    for more in (2, 3, 4, 3):
        steps += more
        saver = import_module(f"{pl.__name__}.callbacks").ModelCheckpoint(tmp_path / str(steps), every_n_train_steps=1)
        options = {"callbacks": [saver], "enable_checkpointing": True, "max_steps": steps}
        model = trained(
            pl, tmp_path, FastensorDataModule(database, batch_size=20, decode=DECODE), checkpoint, **options
        )
        checkpoint = saver.best_model_path
    assert model.seen == trained(pl, tmp_path, FastensorDataModule(database, batch_size=20, decode=DECODE)).seen


def test_epochs_that_end_early(pl: Any, tmp_path: Path, database: Path) -> None:
    """``limit_train_batches`` has each epoch take another part of the data, resumed or not."""
    options = {"limit_train_batches": 4, "max_epochs": 3}
    saver = import_module(f"{pl.__name__}.callbacks").ModelCheckpoint(tmp_path, "{step}", save_top_k=-1)
    whole = trained(
        pl,
        tmp_path,
        FastensorDataModule(database, batch_size=20, decode=DECODE),
        **options,
        callbacks=[saver],
        enable_checkpointing=True,
    )
    for step in (4, 8):
        data = FastensorDataModule(database, batch_size=20, decode=DECODE)
        assert trained(pl, tmp_path, data, tmp_path / f"step={step}.ckpt", **options).seen == whole.seen


def test_other_data_after_an_epoch(tmp_path: Path, database: Path) -> None:
    """A checkpoint of an epoch's end does not tie the order of the next one; one from within does."""
    import lightning.pytorch as pl

    steps, epochs = (
        pl.callbacks.ModelCheckpoint(tmp_path, f"{name}-{{step}}", save_top_k=-1, **{name: 1})
        for name in ("every_n_train_steps", "every_n_epochs")
    )
    trained(
        pl,
        tmp_path,
        FastensorDataModule(database, batch_size=20, decode=DECODE),
        callbacks=[steps, epochs],
        enable_checkpointing=True,
        max_epochs=1,
    )
    other = FastensorDataModule(database, batch_size=20, decode=DECODE, seed=1)
    model = trained(pl, tmp_path, other, tmp_path / "every_n_epochs-step=6.ckpt")
    assert sorted(model.seen) == sorted(2 * [*range(COUNT)])
    with pytest.raises(ValueError, match="taken with seed 0, not 1"):
        trained(pl, tmp_path, other, tmp_path / "every_n_train_steps-step=3.ckpt")


def train_a_part(rank: int, world: int, port: int, folder: Path, resumed: str | None, steps: int, saved: str) -> None:
    """As one rank. Three epochs at most."""
    import lightning.pytorch as pl

    act_as_rank(rank, port, world)
    model = model_of(pl)
    saver = pl.callbacks.ModelCheckpoint(
        folder / saved, filename="last", every_n_train_steps=1, enable_version_counter=False
    )
    trainer = make_trainer(pl, folder, devices=world, strategy="ddp", max_epochs=3, max_steps=steps, callbacks=[saver])
    checkpoint = None if resumed is None else folder / resumed / "last.ckpt"
    data = FastensorDataModule(folder / "db", batch_size=10, decode=DECODE, shuffle="block")
    trainer.fit(model, datamodule=data, ckpt_path=checkpoint, weights_only=False)
    before = len(torch.load(checkpoint)["seen"]) if checkpoint is not None else 0
    (folder / f"{saved}.{rank}.json").write_text(json.dumps(model.seen[before:]))
    torch.distributed.destroy_process_group()  # gloo aborts now and then if it is left to the end of the process


@pytest.mark.parametrize("worlds", [(2, 1), (1, 2)])
def test_other_numbers_of_ranks_resume_an_epoch(tmp_path: Path, database: Path, worlds: tuple[int, int]) -> None:
    pytest.importorskip("lightning")
    taken = []
    for world, resumed, steps, saved in ((worlds[0], None, 3, "a"), (worlds[1], "a", -1, "b")):
        run_ranks(train_a_part, world, world, free_port(), tmp_path, resumed, steps, saved)
        taken += [json.loads((tmp_path / f"{saved}.{rank}.json").read_text()) for rank in range(world)]
    numbers = sorted(number for part in taken for number in part)
    assert numbers == sorted(3 * [*range(COUNT)])


def test_stages_have_their_data(pl: Any, tmp_path: Path, database: Path) -> None:
    some = LmdbDataset(database, decode=DECODE).select(range(30))
    data = FastensorDataModule(val=some, test=database, predict=some.select([4, 2]), batch_size=7, decode=DECODE)
    trainer = make_trainer(pl, tmp_path, enable_checkpointing=False)
    model = model_of(pl)
    trainer.validate(model, datamodule=data, verbose=False)
    assert model.validated == list(range(30))
    trainer.test(model, datamodule=data, verbose=False)
    assert model.validated[30:] == list(range(COUNT))
    assert [batch.tolist() for batch in trainer.predict(model, datamodule=data)] == [[4, 2]]
    with pytest.raises(ValueError, match="no data for this stage: give FastensorDataModule train="):
        trainer.fit(model, datamodule=data)


def test_the_machine_indexes_once(pl: Any, tmp_path: Path, database: Path) -> None:
    data = FastensorDataModule(database, decode=DECODE)
    data.prepare_data()
    assert [path.name for path in database.glob("*-index")] == ["data.mdb.fastensor-index"]
    with pytest.raises(FileNotFoundError, match=r"nowhere\.lmdb"):
        FastensorDataModule("nowhere.lmdb").prepare_data()


def test_without_a_trainer(database: Path) -> None:
    loader = FastensorDataModule(database, batch_size=50, decode=DECODE).train_dataloader()
    assert [len(batch) for batch in loader] == [50, 50, 3]


def test_a_decoder_that_nothing_would_use(database: Path) -> None:
    with pytest.raises(ValueError, match="no path is given: give it to the LmdbDataset"):
        FastensorDataModule(LmdbDataset(database), decode=DECODE)
