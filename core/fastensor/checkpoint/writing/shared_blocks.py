"""Blocks that a new file shares with earlier files of this process: what has not changed is not written again.

On XFS, btrfs and bcachefs, files may have blocks in common until one of them is written. So this module remembers where
each storage was written last. A storage is unchanged if it is the same object, the version counters of its tensors are
the same, and, because writes through ``.data`` and by other libraries do not count, the CRC32 of its bytes in memory is
the one in the old file. If the old file is still the one that was written, the new file gets the blocks that hold
nothing but such a storage. The rest is written to a file beside, and moved to its places. In doubt, a storage is
written.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch

from fastensor.backends import streams
from fastensor.backends.registry import announce
from fastensor.checkpoint.writing.outputs import Link, Replacement
from fastensor.errors import StateChangedError
from fastensor.files import posix
from fastensor.files.new_directory import names_of
from fastensor.stitch.extents import Extent
from fastensor.stitch.image import Payload
from fastensor.stitch.remainder import Remainder, remainder
from fastensor.stitch.source import Plan

if TYPE_CHECKING:
    from fastensor.checkpoint.writing.save_transaction import ShareOrLink

_LEAST_NBYTES = 256 << 10
"""Fewer bytes are written as fast as they are shared."""
_MOST_BASES = 32
"""Files that a new one shares blocks with. Each is open while blocks are shared."""
_MOST_COPIES = 4096
"""Copies of different parts of a storage that are remembered."""
_SAMPLED = 16
"""With ``"trust"``, each save compares one in so many bytes that it takes for unchanged, others each time."""
_UNCOUNTED = -1
"""In place of the version counter that an inference tensor does not have."""
_NEVER = (errno.EOPNOTSUPP, errno.ENOTTY, errno.ENOSYS)
"""Errors by which a filesystem says that its files share no blocks."""


class WrittenFile(NamedTuple):
    """A file of this process, as it was when it was written."""

    paths: tuple[str, ...]
    """Its path then, and the one that it has since its directory was published."""
    identity: tuple[int, ...]


class Copy(NamedTuple):
    """The copy of a storage, or of a part of it, in a file."""

    file: WrittenFile
    offset: int
    crc32: int
    versions: tuple[int, ...]
    """The version counters of the tensors that show the storage, when it was copied."""
    age: int
    """Number of the saves since then that have not compared its bytes."""
    is_changed: bool = False
    """True if the storage was changed without a new version. It is written until its versions are others."""


class _WrittenPart(NamedTuple):
    """A storage, or a part of it, and where it is in the new file."""

    payload: Payload
    storage: ReferenceType[torch.UntypedStorage]
    versions: tuple[int, ...]

    @property
    def copies(self) -> dict[Extent, Copy]:
        """The latest copies of the storage, by the extent of its bytes."""
        storage = self.storage()
        return {} if storage is None else _copies.setdefault(storage, {})

    @property
    def extent(self) -> Extent:
        return self.payload.before, self.payload.before + self.payload.nbytes


class _Candidate(NamedTuple):
    """What may be shared."""

    part: _WrittenPart
    copy: Copy
    base: int
    """Descriptor of the file that has the copy."""
    shared: Extent
    """The blocks of the new file that hold nothing else."""

    @property
    def number(self) -> int:
        return self.part.payload.storage

    def share(self, fd: int) -> None:
        begin, end = self.shared
        posix.share_blocks(self.base, begin - self.part.payload.offset + self.copy.offset, fd, begin, end - begin)


_copies: WeakKeyDictionary[torch.UntypedStorage, dict[Extent, Copy]] = WeakKeyDictionary()
"""The latest copies of each storage. Changes are single calls, so this needs no lock."""
_refusing: set[int] = set()
"""Devices whose filesystems have refused to share blocks."""


class SharedBlocks:
    """The blocks that one new file shares. :func:`share_blocks` makes the object, one thread at a time uses it."""

    def __init__(
        self,
        file: Replacement,
        parts: Sequence[_WrittenPart],
        count: int,
        left: Remainder | None,
        ages: dict[int, int],
    ) -> None:
        self.nbytes = 0 if left is None else left.shared_nbytes
        """Bytes that the file shares."""
        self.file = file
        """The new file; or an earlier one that takes its place, so that nothing is left to be written."""
        self._parts = parts
        self._count = count
        """How many storages the whole plan has."""
        self._left = left
        """What is left to be written, without its storages; None if that is everything."""
        self._ages = ages
        self._identity = posix.identity_of(os.fstat(file.fd))

    @contextmanager
    def writing(self) -> Iterator[Replacement]:
        """A block in which the file that it gives is to get what is left. At its end, the new file is whole.

        Raises:
            OSError: there is no space.
        """
        if self._left is None:
            yield self.file
        else:
            with closing(Replacement(self.file.path, mode=0o600)) as beside:
                yield beside
                for begin, offset, nbytes in self._left.places:
                    posix.move_bytes(beside.fd, begin, self.file.fd, offset, nbytes)
        self._identity = posix.identity_of(os.fstat(self.file.fd))

    def remember(self, checksums: Sequence[int]) -> Sequence[int]:
        """Note where the storages are. The new file has got its name.

        Args:
            checksums: the CRC32s that a backend has returned for what was left.

        Returns:
            Those of all storages of the whole plan; none if the backend has returned none.
        """
        if self._left is not None:
            checksums = self._left.all_checksums(checksums)
        if len(checksums) != self._count:
            return ()
        file = WrittenFile(names_of(self.file.path), self._identity)
        for part in self._parts:
            number, copies = part.payload.storage, part.copies
            old = copies.pop(part.extent, None)
            is_changed = old is not None and old.is_changed and old.versions == part.versions
            age = self._ages.get(number, 0)
            copies[part.extent] = Copy(file, part.payload.offset, checksums[number], part.versions, age, is_changed)
            if (count := len(copies) - _MOST_COPIES) > 0:
                for oldest in [*copies][:count]:
                    copies.pop(oldest, None)
        return checksums


def share_blocks(
    plan: Plan, new: Replacement, how: ShareOrLink, name_of: Callable[[int], str] | None = None
) -> tuple[Plan, SharedBlocks]:
    """Give a new file blocks of earlier ones, or an earlier file in its place.

    Args:
        plan: of the file. Its storages must not change until this returns.
        new: the file, which is empty.
        how: whether the file shares blocks, or may be an earlier one.
        name_of: the name of the tensor in a storage, by the storage's number in the plan, for messages; None if the
            plan has names.

    Returns:
        The plan of what is left to be written: the given one if nothing is shared.

    Raises:
        OSError: the filesystem cannot be asked.
        StateChangedError: ``how`` is ``"trust"``, and a storage has changed, but not its version counters, which torch
            has counted up before.
    """
    may_share = (
        bool(how)
        and plan.nbytes >= _LEAST_NBYTES
        and posix.may_share_blocks(new.fd)
        and os.fstat(new.fd).st_dev not in _refusing
    )
    parts = _parts_of(plan, least_nbytes=1 if how == "link" else _LEAST_NBYTES) if may_share or how == "link" else []
    with ExitStack() as opened:
        found = _candidates(parts, new.fd, opened)
        # versions of 0 say nothing: what is collected by ``.data`` has a counter of its own, which stays there
        trusted = {one.number for one in found if how == "trust" and 0 not in one.part.versions}
        compared = [one for one in found if one.number not in trusted]
        compared += _sample([one for one in found if one.number in trusted])
        try:
            changed = _changed(compared)
        except (MemoryError, torch.OutOfMemoryError):
            announce("sharing unchanged blocks", "there is no memory to compare them")
            found, changed = [], []
        for one in changed:
            if one.number in trusted:
                raise _not_to_be_trusted(one, name_of or partial(_name_in, plan))
            one.part.copies[one.part.extent] = one.copy._replace(is_changed=True)
        left_out = {one.number for one in changed}
        same = [one for one in found if one.number not in left_out]
        if how == "link" and (linked := _link(plan, same, new.path)) is not None:
            return linked
        shared = _share(same, new.fd) if may_share else []
    if not shared:
        return plan, SharedBlocks(new, parts, len(plan.storages), None, {})
    extents = sorted(one.shared for one in shared)
    rest = remainder(plan, extents, {one.number: one.copy.crc32 for one in shared})
    ages = {one.number: one.copy.age + 1 for one in shared} | {one.number: 0 for one in compared}
    return rest, SharedBlocks(new, parts, len(plan.storages), rest.released(), ages)


def _parts_of(plan: Plan, least_nbytes: int) -> list[_WrittenPart]:
    """The storages of a file that are worth sharing."""
    versions = _versions(plan)
    found = []
    for segment in plan.image.segments:
        if isinstance(segment, Payload) and segment.nbytes >= least_nbytes:
            storage = plan.storages[segment.storage]
            if not isinstance(storage, torch.UntypedStorage):
                continue
            if storage.device.type != "cpu" and not streams.are_on(storage.device):  # its bytes cannot be read
                continue
            counters = versions.get(storage, [_UNCOUNTED])
            if _UNCOUNTED not in counters:
                found.append(_WrittenPart(segment, ref(storage), tuple(counters)))
    return found


def _versions(plan: Plan) -> dict[torch.UntypedStorage, list[int]]:
    """The version counters of all tensors of an object, by the storages that they show."""
    found: dict[torch.UntypedStorage, list[int]] = {}
    for tensor in plan.tensors:
        with suppress(Exception):  # whatever a subclass raises that has no storage: the tensors in it are here, too
            counters = found.setdefault(tensor.untyped_storage(), [])
            counters.append(_UNCOUNTED)
            counters[-1] = tensor._version
    return found


def _candidates(parts: Sequence[_WrittenPart], fd: int, opened: ExitStack) -> list[_Candidate]:
    """The parts whose versions are those of a copy, in a file of the same filesystem that has not changed since."""
    block_nbytes, device = os.fstatvfs(fd).f_bsize, os.fstat(fd).st_dev
    matching: list[tuple[_WrittenPart, Copy, Extent]] = []
    nbytes: Counter[WrittenFile] = Counter()
    for part in parts:
        copy = part.copies.get(part.extent)
        if copy is None or copy.is_changed or copy.versions != part.versions or copy.file.identity[0] != device:
            continue
        payload = part.payload
        if (copy.offset - payload.offset) % block_nbytes:
            continue
        begin = -(-payload.offset // block_nbytes) * block_nbytes  # the blocks that hold nothing but the payload
        end = (payload.offset + payload.nbytes) // block_nbytes * block_nbytes
        matching.append((part, copy, (begin, max(begin, end))))
        nbytes[copy.file] += payload.nbytes
    bases = {file: _open(file, opened) for file, _ in nbytes.most_common(_MOST_BASES)}
    return [
        _Candidate(part, copy, bases[copy.file], shared)
        for part, copy, shared in matching
        if bases.get(copy.file, -1) >= 0
    ]


def _open(file: WrittenFile, opened: ExitStack) -> int:
    """A descriptor of a file that is still the one that was written; else -1."""
    for path in file.paths:
        with suppress(OSError), ExitStack() as this:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            this.callback(posix.close_read_only, fd)
            if posix.identity_of(os.fstat(fd)) == file.identity:
                opened.push(this.pop_all())
                return fd
    return -1


def _sample(candidates: Sequence[_Candidate]) -> list[_Candidate]:
    """The candidates that were not compared for the longest time, until they have 1/16 of all bytes."""
    left = sum(one.part.payload.nbytes for one in candidates) // _SAMPLED
    found: list[_Candidate] = []
    for one in sorted(candidates, key=lambda one: -one.copy.age):
        if found and left <= 0:
            break
        found.append(one)
        left -= one.part.payload.nbytes
    return found


def _changed(candidates: Sequence[_Candidate]) -> list[_Candidate]:
    """The candidates whose bytes in memory are not those of the copy."""
    if not candidates:
        return []
    from fastensor.backends.storage_crc32 import StoragePart, crc32s_of  # which few saves need

    parts = []
    for one in candidates:
        storage = one.part.storage()
        assert storage is not None, "the plan holds it"
        parts.append(StoragePart(storage, one.part.payload.before, one.part.payload.nbytes))
    crc32s = crc32s_of(parts)
    return [one for one, crc32 in zip(candidates, crc32s, strict=True) if crc32 != one.copy.crc32]


def _link(plan: Plan, same: Sequence[_Candidate], path: str) -> tuple[Plan, SharedBlocks] | None:
    """What :func:`share_blocks` returns for a link to the earlier file that has all bytes of a planned one. None if
    there is none, or the link cannot be made, which is logged.

    Args:
        plan: of the file.
        same: what has not changed since it was written.
        path: of the new file.
    """
    payloads = sum(isinstance(segment, Payload) for segment in plan.image.segments)
    are_there = [one for one in same if one.copy.offset == one.part.payload.offset and one.base == same[0].base]
    if not same or len(are_there) != payloads or not plan.checksums_first:
        return None
    base, identity = same[0].base, same[0].copy.file.identity
    left = remainder(plan, [(0, plan.nbytes)], {one.number: one.copy.crc32 for one in same})
    head = left.head(())
    try:
        if os.fstat(base).st_size != plan.nbytes or posix.read_exactly(base, 0, len(head)) != head:
            return None
        with ExitStack() as undo:
            link = Link(path, base)
            undo.callback(link.close)
            blocks = SharedBlocks(link, [one.part for one in same], len(plan.storages), left.released(), {})
            if posix.identity_of(os.fstat(base)) != identity:
                return None
            undo.pop_all()
            return left, blocks
    except OSError as error:
        announce("linking unchanged files", str(error))
        return None


def _share(candidates: Sequence[_Candidate], fd: int) -> list[_Candidate]:
    """Share blocks. Returns the candidates whose blocks the new file has now."""
    shared = []
    for one in candidates:
        if one.shared[0] == one.shared[1]:
            continue
        try:
            one.share(fd)
        except OSError as error:
            announce("sharing unchanged blocks", str(error))
            if error.errno in _NEVER:
                _refusing.add(os.fstat(fd).st_dev)
                break
        else:
            shared.append(one)
    return [one for one in shared if posix.identity_of(os.fstat(one.base)) == one.copy.file.identity]


def _name_in(plan: Plan, storage: int) -> str:
    from fastensor.checkpoint.cooperative.replicas import name_of_storage  # for an error

    return name_of_storage(plan, storage)


def _not_to_be_trusted(changed: _Candidate, name_of: Callable[[int], str]) -> StateChangedError:
    return StateChangedError(
        f"{name_of(changed.number)!r} has changed since {changed.copy.file.paths[-1]} was written, but its version "
        f"counter has not: something writes to it through .data, or without torch. Nothing was saved. Choose "
        f"share_unchanged=True, which compares all bytes, in place of 'trust'"
    )
