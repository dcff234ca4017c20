"""Calls of the user's objects: samples are read, prepared, and made into batches.

A sample is encoded when it was read and has gone through ``before_cache``. From then on it makes no difference whether
it came from the cache. Functions of the user get a copy of their own, so they may change it.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.utils.data import default_collate

from fastensor.data.coalescing import Integers
from fastensor.data.skipping import OnError, Skipped, substitute, tried, tried_together
from fastensor.errors import CorruptSampleError
from fastensor.provision import encoding
from fastensor.provision.sources import Source


@dataclass(frozen=True, slots=True)
class UserObjects:
    """The user's objects. Whatever they need has to be pickled along."""

    source: Source
    before_cache: Callable[[Any], Any] | None
    after_cache: Callable[[Any], Any] | None


class Fresh(NamedTuple):
    """A sample that was read just now."""

    value: Any
    """As the source has given it. It is not changed."""
    encoded: memoryview


Sample: TypeAlias = memoryview | Fresh | Skipped
"""An encoded sample, perhaps with its value; or why it cannot be made."""


@dataclass(frozen=True, slots=True)
class Found:
    """The samples of a task."""

    samples: list[Sample]
    """Those of the cache are views of it."""
    read: list[int]
    """Places of the samples that were read."""
    lost: list[int]
    """Places of the samples whose bytes in the cache were damaged. They were read, too."""

    def encoded(self, place: int) -> memoryview:
        """A sample that is not left out."""
        sample = self.samples[place]
        assert not isinstance(sample, Skipped)
        return sample.encoded if isinstance(sample, Fresh) else sample


def found_samples(
    positions: Integers,
    offsets: Integers,
    lengths: Integers,
    *,
    slabs: memoryview,
    read: Callable[[Integers], list[Sample]],
) -> Found:
    """Samples of the cache, and of the source those that the cache lacks, or has damaged.

    Args:
        positions: of the samples.
        offsets: of each in the cache; -1: it is not there.
        lengths: bytes of each in the cache.
        slabs: the memory of the cache.
        read: reads samples of the source, see :func:`read_samples`.
    """
    samples: list[Sample] = []
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
        for place, found in zip(missing, read(positions[missing]), strict=True):
            samples[place] = found
    return Found(samples, [place for place in missing if not isinstance(samples[place], Skipped)], lost)


def read_samples(
    contents: Callable[[], UserObjects], positions: Integers, *, seed: int, on_error: OnError = "raise"
) -> list[Sample]:
    """Samples of the source, as the cache takes them.

    Args:
        contents: gives the source, and what is done before the cache.
        positions: of the samples.
        seed: of ``before_cache``.
        on_error: what becomes of samples that cannot be read or prepared.
    """
    served = contents()
    wanted = positions.tolist()
    if on_error == "raise":
        return [*_read_together(served, wanted, seed)]
    return tried_together(
        lambda positions: _read_together(served, positions, seed),
        lambda position: _read_together(served, [position], seed)[0],
        wanted,
    )


def _read_together(contents: UserObjects, positions: Sequence[int], seed: int) -> list[memoryview | Fresh]:
    samples: list[memoryview | Fresh] = []
    encoder = encoding.Encoder()
    _seed_all(seed, *positions)  # a source may draw random numbers
    for position, value in zip(positions, contents.source.read(positions), strict=True):
        if contents.before_cache is not None:
            _seed_all(seed, position)
            value = _named(contents.before_cache, value, "before_cache, of sample", position)
        encoded: encoding.Encoded = _named(encoder.encode, value, "sample", position)
        # A value of before_cache is not kept, since that function may use its memory again. Neither are arrays of which
        # torch makes no tensors, such as those with negative strides: those that come out of the cache have none.
        is_kept = contents.before_cache is None and encoded.as_decoded
        samples.append(Fresh(value, encoded.copied()) if is_kept else encoded.copied())
    return samples


class MadeBatch(NamedTuple):
    """An encoded batch, and how many samples it lacks."""

    encoded: encoding.Encoded
    """The batch; with ``on_error="skip"`` a tuple, see :attr:`fastensor.provision.engine.Registration.on_error`."""
    skipped: int
    """Samples that were left out."""


def made_batch(
    samples: Sequence[Sample],
    positions: Integers,
    *,
    contents: Callable[[], UserObjects],
    collate_fn: Callable[[list[Any]], Any] | None,
    seed: int,
    epoch: int,
    source_seed: int,
    on_error: OnError = "raise",
) -> MadeBatch:
    """A batch of samples.

    Args:
        samples: they are not changed.
        positions: of the samples.
        contents: gives what is done with each sample, and the source, if none of the samples can be made.
        collate_fn: makes the batch; None: as a ``DataLoader`` makes it, which changes no sample.
        seed: of the loader.
        epoch: that the batch is of.
        source_seed: of ``before_cache``.
        on_error: what becomes of samples that cannot be made. Some may be left out already.
    """
    served = contents()
    untouched = served.after_cache is None and collate_fn is None

    def prepared(sample: memoryview | Fresh, position: int) -> Any:
        if isinstance(sample, Fresh):
            if untouched:
                return sample.value
            sample = sample.encoded
        value = encoding.decode(sample if untouched else np.array(sample, np.uint8).data)  # a copy is decoded
        if served.after_cache is None:
            return value
        _seed_all(seed, epoch, position)
        return _named(served.after_cache, value, "after_cache, of sample", position)

    def left_out_or_prepared(sample: Sample, position: int) -> Any:
        if isinstance(sample, Skipped):
            return sample
        return prepared(sample, position) if on_error == "raise" else tried(partial(prepared, sample), position)

    def read_and_prepared(position: int) -> Any:
        return prepared(_read_together(served, [position], source_seed)[0], position)

    wanted = positions.tolist()
    made = list(map(left_out_or_prepared, samples, wanted))
    values = [value for value in made if not isinstance(value, Skipped)]
    skipped = [value for value in made if isinstance(value, Skipped)]
    if skipped and not values:
        values.append(substitute(read_and_prepared, wanted[0], len(served.source)))
    batch = _collated(values, collate_fn, seeds=(seed, epoch, wanted[0], len(values)))
    if on_error == "raise":
        return MadeBatch(encoding.encode(batch), 0)
    whole = batch, [one.position for one in skipped], [one.reason for one in skipped]
    return MadeBatch(encoding.encode(whole), len(skipped))


def _collated(values: list[Any], collate_fn: Callable[[list[Any]], Any] | None, *, seeds: tuple[int, ...]) -> Any:
    if collate_fn is None:
        return default_collate(values)
    _seed_all(*seeds)
    return collate_fn(values)


def _is_whole(sample: memoryview) -> bool:
    try:
        encoding.check(sample)
    except CorruptSampleError:
        return False
    return True


def _named(function: Callable[[Any], Any], value: Any, what: str, position: int) -> Any:
    """Call a function of the user; an error says of what."""
    try:
        return function(value)
    except Exception as error:
        error.add_note(f"This was {what} {position}")
        raise


def _seed_all(*numbers: int) -> None:
    """Seed the generators of Python, NumPy and torch (CPU) of this process: transforms draw the same numbers for a
    sample, whichever process makes it."""
    digest = hashlib.blake2b(str(numbers).encode(), digest_size=8).digest()
    (seed,) = struct.unpack("=Q", digest)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)
