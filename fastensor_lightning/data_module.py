"""A data module that trains from LMDB databases, or a data service, and resumes within an epoch."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from fastensor.data import LmdbDataset, LmdbIndex, LmdbLoader
from fastensor.data.epochs import EpochLoader
from fastensor.data.plan import Shuffle
from fastensor.data.skipping import OnError
from fastensor.files.arguments import check_flags, check_function, check_whole, check_word, checks_keywords
from fastensor.files.shown import shown
from fastensor.provision import DataService, ProvisionedLoader
from fastensor_lightning.frameworks import load_classes

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule
else:
    LightningDataModule = type(
        "LightningDataModule", load_classes("LightningDataModule", "lightning.pytorch", "pytorch_lightning"), {}
    )

Source: TypeAlias = str | os.PathLike[str] | LmdbDataset[Any] | DataService
"""The path of an LMDB environment or of its data file; a dataset; or a service that has one."""
_Split: TypeAlias = Literal["train", "val", "test", "predict"]


@checks_keywords
class FastensorDataModule(LightningDataModule):
    """Gives a Trainer the batches of LMDB databases: one for training, others for validation, tests and prediction.

    Ranks divide the samples, as the strategy says: ranks that hold parts of one model get the same ones. Checkpoints
    have the state of the training data. A Trainer that resumes from one, with the same number of ranks or another,
    gives out each remaining sample of the epoch once, then goes on with the next epoch.

    If the number of ranks or the batch size is not what the checkpoint was saved with, the epochs after the resumed one
    have another number of batches. So that Lightning counts them anew, the module then sets
    ``trainer.reload_dataloaders_every_n_epochs`` to 1.

    Paths are opened by each process when it needs them, and indexed by one process of each machine. A dataset that you
    have made is used as it is. A :class:`~fastensor.provision.DataService` reads and prepares samples in its own
    processes, for all ranks of a machine.

    Args:
        train, val, test, predict: the data of each stage. A database has to be there for the stages that are run.
        service: the data of training, in place of ``train``: a service that this rank has started or joined; or the
            address of one, to which each rank connects when it trains.
        batch_size: samples of a batch of one rank. The attribute of that name can be set: it is that of loaders that
            are made from then on, so that Lightning's ``BatchSizeFinder`` works.
        decode: makes samples of values, see :class:`fastensor.data.LmdbDataset`. For paths only.
        shuffle: how training samples are shuffled, see :class:`fastensor.data.EpochPlan`. Others are not shuffled.
        seed: of the shuffling, the same on all ranks.
        drop_last: leave out training samples at the end of an epoch that are too few for a whole step of all ranks.
        num_workers: processes that read and decode, for each loader of a database.
        on_error: ``"raise"`` or ``"skip"``: what becomes of samples that cannot be read or decoded, see
            :class:`~fastensor.data.LmdbLoader`.
        collate_fn: as for a ``DataLoader``.
        pin_memory, persistent_workers: as for a ``DataLoader``, for loaders of a database.

    Raises:
        ValueError: ``decode`` is given, and no path is; or ``train`` and ``service`` are.
        ProvisionError: raised when training begins: there is no service at the address.

    >>> module = FastensorDataModule("train.lmdb", val="val.lmdb", batch_size=64, num_workers=4)
    """

    def __init__(
        self,
        train: Source | None = None,
        *,
        val: Source | None = None,
        test: Source | None = None,
        predict: Source | None = None,
        service: DataService | str | None = None,
        batch_size: int = 1,
        decode: Callable[[Any], Any] | None = None,
        shuffle: Shuffle = "full",
        seed: int = 0,
        drop_last: bool = False,
        num_workers: int = 0,
        on_error: OnError = "raise",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        persistent_workers: bool = False,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        check_whole(num_workers, "num_workers", at_least=0)
        check_whole(seed, "seed", at_least=0)
        check_word(shuffle, "shuffle", get_args(Shuffle))
        check_word(on_error, "on_error", get_args(OnError))
        check_function(decode, "decode")
        check_function(collate_fn, "collate_fn")
        check_flags(drop_last=drop_last, pin_memory=pin_memory, persistent_workers=persistent_workers)
        if train is not None and service is not None:
            raise ValueError("train= and service= are both data for training: give one of them")
        training = service if isinstance(service, DataService) else train
        self._sources: dict[_Split, Source | None] = {"train": training, "val": val, "test": test, "predict": predict}
        self._address = service if isinstance(service, str) else None
        """Address of the service that has the training data, until this process has connected to it."""
        if decode is not None and not self._paths():
            raise ValueError("decode= is for paths, and no path is given: give it to the LmdbDataset")
        self._decode = decode
        self._shuffle: Shuffle = shuffle
        self._drop_last = drop_last
        self._options: dict[str, Any] = {"seed": seed, "collate_fn": collate_fn, "on_error": on_error}
        """Arguments of the loaders of all stages."""
        self._worker_options: dict[str, Any] = {
            "num_workers": num_workers,
            "pin_memory": pin_memory,
            "persistent_workers": persistent_workers,
        }
        """Arguments of those that have workers of their own."""
        self._training: EpochLoader | None = None
        """The loader that the Trainer was given last for training."""
        self._resumed: dict[str, Any] | None = None
        """A state that no loader has been given yet."""

    @shown
    def __repr__(self) -> str:
        given = [f"{stage}={source!r}, " for stage, source in self._sources.items() if source is not None]
        if self._address is not None:
            given.insert(0, f"service={self._address!r}, ")
        return f"({''.join(given)}batch_size={self._batch_size})"

    __str__ = __repr__  # that of Lightning makes loaders to say their sizes, and so connects to services

    @property
    def batch_size(self) -> int:
        """Samples of a batch of one rank, in loaders that are made from now on."""
        return self._batch_size

    @batch_size.setter
    def batch_size(self, samples: int) -> None:
        check_whole(samples, "batch_size", at_least=1)
        self._batch_size = samples

    def prepare_data(self) -> None:
        """Index the databases of paths, in one process of each machine, so that others find the sidecars."""
        for path in self._paths():
            LmdbIndex.open(path).close()

    def train_dataloader(self) -> EpochLoader:
        """A shuffled loader, which goes on with the epoch of the checkpoint that the Trainer resumes from."""
        if self._address is not None:
            self._sources["train"], self._address = DataService.connect(self._address), None
        if isinstance(self._training, ProvisionedLoader):
            self._training.close()  # the service would go on to make batches for it
        self._training = loader = self._loader("train", shuffle=self._shuffle, drop_last=self._drop_last)
        state, self._resumed = self._resumed, None
        # Lightning loads the state itself, but only after it has asked how long the epoch is.
        if state and self.trainer is not None and self.trainer.fit_loop.restarting:
            loader.load_state_dict(state)
            if len(loader) != loader.plan.steps():
                self.trainer.reload_dataloaders_every_n_epochs = 1  # type: ignore[attr-defined]  # set by a connector
        return loader

    def val_dataloader(self) -> EpochLoader | list[Any]:
        """A loader in the order of the database; no loader without such data, and then there is no validation."""
        return [] if self._sources["val"] is None else self._loader("val")

    def test_dataloader(self) -> EpochLoader:
        """A loader in the order of the database."""
        return self._loader("test")

    def predict_dataloader(self) -> EpochLoader:
        """A loader in the order of the database."""
        return self._loader("predict")

    def state_dict(self) -> dict[str, Any]:
        """The state of the training data; the same on all ranks."""
        return {} if self._training is None else self._training.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state of the training data for the loader that the Trainer asks for next."""
        self._resumed = state_dict

    def _paths(self) -> list[str | os.PathLike[str]]:
        given = (source for source in self._sources.values() if source is not None)
        return [source for source in given if not isinstance(source, LmdbDataset | DataService)]

    def _loader(self, split: _Split, *, shuffle: Shuffle = "none", drop_last: bool = False) -> EpochLoader:
        source = self._sources[split]
        if source is None:
            raise ValueError(f"there is no data for this stage: give FastensorDataModule {split}=, a path or a dataset")
        options: dict[str, Any] = {"batch_size": self.batch_size, "ranks": self._ranks(), **self._options}
        options |= {"shuffle": shuffle, "drop_last": drop_last}
        if isinstance(source, DataService):
            return source.loader(**options)
        dataset = source if isinstance(source, LmdbDataset) else LmdbDataset(source, decode=self._decode)
        return LmdbLoader(dataset, **options, **self._worker_options)

    def _ranks(self) -> tuple[int, int] | None:
        """This rank, and the number of ranks, among those that divide the samples; None without a Trainer."""
        if self.trainer is None:
            return None
        divided = self.trainer.distributed_sampler_kwargs
        return (0, 1) if divided is None else (divided["rank"], divided["num_replicas"])
