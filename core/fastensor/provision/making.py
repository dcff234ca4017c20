"""What is done with the user's objects: samples are read, prepared, and made into batches.

A sample is encoded when it was read and has gone through ``before_cache``. From then on it makes no difference whether
it came from the cache. Functions of the user get a copy of their own, so they may change it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import default_collate

from fastensor.data.coalescing import Integers
from fastensor.errors import CorruptSampleError
from fastensor.provision import encoding
from fastensor.provision.seeding import seed_all
from fastensor.provision.sources import Source


@dataclass(frozen=True, slots=True)
class Contents:
    """The user's objects. Whatever they need has to be pickled along."""

    source: Source
    before_cache: Callable[[Any], Any] | None
    after_cache: Callable[[Any], Any] | None


@dataclass(frozen=True, slots=True)
class Found:
    """The samples of a task."""

    samples: list[memoryview]
    """Encoded. Those of the cache are views of it."""
    read: list[int]
    """Places of the samples that were read."""
    lost: list[int]
    """Places of the samples whose bytes in the cache were damaged. They were read, too."""


def found_samples(
    positions: Integers,
    offsets: Integers,
    lengths: Integers,
    *,
    slabs: memoryview,
    read: Callable[[Integers], list[memoryview]],
) -> Found:
    """Samples of the cache, and of the source those that the cache lacks, or has damaged.

    Args:
        positions: of the samples.
        offsets: of each in the cache; -1: it is not there.
        lengths: bytes of each in the cache.
        slabs: the memory of the cache.
        read: reads samples of the source, see :func:`read_samples`.
    """
    samples: list[memoryview] = []
    missing: list[int] = []
    lost: list[int] = []
    for place, (offset, nbytes) in enumerate(zip(offsets.tolist(), lengths.tolist(), strict=True)):
        sample = slabs[offset : offset + nbytes] if offset >= 0 else memoryview(b"")
        samples.append(sample)
        if offset < 0:
            missing.append(place)
        elif not _is_whole(sample):
            missing.append(place)
            lost.append(place)
    if missing:
        for place, sample in zip(missing, read(positions[missing]), strict=True):
            samples[place] = sample
    return Found(samples, missing, lost)


def read_samples(contents: Contents, positions: Integers, *, seed: int) -> list[memoryview]:
    """Samples of the source, as the cache takes them.

    Args:
        contents: the source, and what is done before the cache.
        positions: of the samples.
        seed: of ``before_cache``.
    """
    samples = []
    wanted = positions.tolist()
    seed_all(seed, *wanted)  # a source may draw random numbers
    for position, value in zip(wanted, contents.source.read(wanted), strict=True):
        seed_all(seed, position)
        if contents.before_cache is not None:
            value = _named(contents.before_cache, value, f"before_cache, of sample {position}")
        samples.append(_written(_named(encoding.encode, value, f"sample {position}")))
    return samples


def made_batch(
    samples: Sequence[memoryview],
    positions: Integers,
    *,
    after_cache: Callable[[Any], Any] | None,
    collate_fn: Callable[[list[Any]], Any] | None,
    seed: int,
    epoch: int,
) -> encoding.Encoded:
    """A batch of samples.

    Args:
        samples: encoded. They are not changed.
        positions: of the samples.
        after_cache: what is done with each sample.
        collate_fn: makes the batch; None: as a ``DataLoader`` makes it, which changes no sample.
        seed: of the loader.
        epoch: that the batch is of.
    """
    untouched = after_cache is None and collate_fn is None
    values = [encoding.decode(sample if untouched else _copy(sample)) for sample in samples]
    if after_cache is not None:
        for place, position in enumerate(positions.tolist()):
            seed_all(seed, epoch, position)
            values[place] = _named(after_cache, values[place], f"after_cache, of sample {position}")
    if collate_fn is None:
        return encoding.encode(default_collate(values))
    seed_all(seed, epoch, int(positions[0]), len(values))
    return encoding.encode(collate_fn(values))


def _is_whole(sample: memoryview) -> bool:
    try:
        encoding.check(sample)
    except CorruptSampleError:
        return False
    return True


def _written(encoded: encoding.Encoded) -> memoryview:
    memory = memoryview(bytearray(encoded.nbytes))
    encoded.write_into(memory)
    return memory


def _copy(sample: memoryview) -> memoryview:
    return memoryview(bytearray(sample))


def _named(function: Callable[[Any], Any], value: Any, what: str) -> Any:
    """Call a function of the user; an error says of what."""
    try:
        return function(value)
    except Exception as error:
        error.add_note(f"This was {what}")
        raise
