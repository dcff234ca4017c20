"""Messages of ranks that save or load a file together, through the store of ``torch.distributed``.

Rank 0 leads. Others send it values, and it replies to each of them. The store is that of the default process group. So
it does not matter by which backend the group communicates, no other group has to be made, and a rank that does not come
leaves no group behind that nobody can use any more.

How the work ends is one value of the store: the first rank that fails says so there, or rank 0 that it publishes the
file. Whoever waits looks at it.

A rank may be cut off from the store. Each call of it ends within the timeout of the conversation, which has a
connection of its own. If one was left without an answer, the conversation fails at once.
"""

from __future__ import annotations

import itertools
import pickle
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from fastensor.checkpoint.cooperative.options import check_timeout
from fastensor.errors import CheckpointWriteError, FastensorError, ReplicaMismatchError
from fastensor.files.job_store import JobStore, connect_to_job, wait_until

_CHUNK_NBYTES = 4 << 20
"""``TCPStore`` takes values of up to 8 MiB."""
_OUTCOME = "outcome"
_PUBLISH, _FAILED, _DIFFERENT = "publish", "failed: ", "different replicas: "
"""Outcomes, of which the latter two begin a text."""


_groups: WeakKeyDictionary[dist.ProcessGroup, tuple[str, Iterator[int]]] = WeakKeyDictionary()
"""Record of each group: a random name by which this process claims its place in the store, and finds it again when it
connects anew; and the numbers of its conversations, alike on all ranks."""


class Ranks:
    """One conversation of the ranks of a group. All ranks make it, and use it in one thread each.

    Args:
        group: the process group; None for that of all ranks.
        what: what they do, for messages, such as ``saving x.ckpt``.
        timeout: for how many seconds rank 0 waits for others. Others wait for rank 0 twice as long, because it may be
            waiting. Each rank waits so long for an answer of the store.
        error: what is raised if a rank fails, does not come, or cannot be reached.
        name: by which the ranks find each other; None for the next number.

    Raises:
        ValueError: the timeout is not a positive number, or this rank is not in the group.
        FastensorError: the store cannot be reached.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        what: str,
        timeout: float,
        error: type[FastensorError] = CheckpointWriteError,
        name: str | None = None,
    ) -> None:
        check_timeout(timeout)
        if dist.get_rank(group) < 0:
            raise ValueError(f"{what} failed: this rank is not in the group; only ranks of the group take part")
        group = group or dist.group.WORLD
        assert group is not None
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.names = dist.get_process_group_ranks(group)
        """By the number of a rank in the group, its number in the job, by which messages name it."""
        self._what = what
        self._timeout = timeout
        self._error = error
        self._gathered = itertools.count()
        self._replies = itertools.count()
        self._doubt = ""
        """Words that messages add when rank 0 may publish the file without this rank."""
        own, numbers = _groups.setdefault(group, (uuid4().hex, itertools.count()))
        name = name or str(next(numbers))  # also if the store cannot be reached: others count on
        self._store = JobStore(partial(_connect, group, own, self.rank, name), timeout, self._unreachable)

    # --- on all ranks

    def exchange(self, value: str) -> list[str]:
        """The values of all ranks, in their order. The values stay: only the first exchange of a name waits."""
        keys = [f"of-{rank}" for rank in range(self.size)]
        self._store.ask("set", keys[self.rank], value)
        self._wait_for_all(dict(enumerate(keys)))
        return [found.decode() for found in self._store.ask("multi_get", keys)]

    def fail(self, error: BaseException) -> None:
        """Have all other ranks raise what this rank has failed with, unless they know of a failure."""
        is_ours = isinstance(error, FastensorError)
        is_mismatch = isinstance(error, ReplicaMismatchError)
        text = str(error) if is_ours else f"{type(error).__name__}: {error}".rstrip(": ")
        if not (is_mismatch or text.startswith(self._what)):  # else it names the rank
            text = f"{self._what} failed: rank {self.names[self.rank]}: {text}"
        outcome = f"{_DIFFERENT if is_mismatch else _FAILED}{text}"
        try:
            decided = self._store.decide(_OUTCOME, outcome)
            if decided == _PUBLISH and self.rank == 0:
                known = outcome if is_ours else f"{outcome}; perhaps the new file is in place"
                self._store.ask("set", _OUTCOME, known)
            elif decided not in (outcome, _PUBLISH):
                error.add_note(f"before that: {decided}")
        except self._error as silence:
            error.add_note(f"other ranks could not be told: {silence}")

    # --- on all ranks but rank 0

    def send(self, value: Any) -> None:
        """Send a value to rank 0, which has to call :meth:`gather`."""
        self._doubt = "; perhaps the file is in place, perhaps not"
        self._put(f"from-{self.rank}-{next(self._gathered)}", value)

    def receive(self) -> Any:
        """Wait for the next reply of rank 0.

        Raises:
            ReplicaMismatchError: this is how rank 0 has failed.
            FastensorError: another rank has failed, or rank 0 does not answer.
        """
        key = f"to-{self.rank}-{next(self._replies)}"
        if not self._wait([key], 2 * self._timeout):
            silent = f"rank {self.names[0]} has not answered rank {self.names[self.rank]} for {2 * self._timeout:g} s"
            # keeps rank 0 from publishing, unless it has begun to
            if self._store.decide(_OUTCOME, f"{_FAILED}{self._what} failed: {silent}") == _PUBLISH and not self._wait(
                [key], 2 * self._timeout
            ):
                raise self._error(f"{self._what}: {silent}, after all ranks have written their parts{self._doubt}")
            self._check_outcome()
        return self._take(key)

    # --- on rank 0

    def gather(self) -> list[Any]:
        """Wait until all others have sent a value. Returns the values in the order of the ranks, without rank 0's own.

        Raises:
            FastensorError: others have failed, or do not come; the message names them.
        """
        number = next(self._gathered)
        keys = {rank: f"from-{rank}-{number}" for rank in range(1, self.size)}
        self._wait_for_all(keys)
        return [self._take(key) for key in keys.values()]

    def reply(self, values: Sequence[Any]) -> None:
        """Reply to each of the others, in the order of the ranks."""
        number = next(self._replies)
        for rank, value in enumerate(values, 1):
            self._put(f"to-{rank}-{number}", value)

    def decide_to_publish(self) -> None:
        """Return if no other rank has failed or given up waiting. From now on, the failure of another rank changes
        nothing.

        Raises:
            FastensorError: one has, and takes the file for not saved.
        """
        self._store.decide(_OUTCOME, _PUBLISH)
        self._check_outcome()

    # --- inside

    def _check_outcome(self) -> None:
        """
        Raises:
            FastensorError: a rank has failed.
        """
        outcome = self._store.ask("get", _OUTCOME).decode() if self._store.ask("check", [_OUTCOME]) else ""
        if outcome.startswith(_DIFFERENT):
            raise ReplicaMismatchError(outcome.removeprefix(_DIFFERENT))
        if outcome.startswith(_FAILED):
            raise self._error(outcome.removeprefix(_FAILED))

    def _wait_for_all(self, keys: dict[int, str]) -> None:
        """Wait until the store has the key of each of these ranks.

        Raises:
            FastensorError: it does not get them in time; or a rank has failed.
        """
        if self._wait(list(keys.values()), self._timeout):
            return
        silent = [self.names[rank] for rank, key in keys.items() if not self._store.ask("check", [key])]
        if silent:
            raise self._error(
                f"{self._what} failed: rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))} did not come within "
                f"{self._timeout:g} s: dead, stopped, slow, or doing something else"
            )

    def _wait(self, keys: list[str], seconds: float) -> bool:
        """Wait until the store has all keys; False if that takes longer.

        Raises:
            FastensorError: a rank has failed.
        """

        def is_there() -> bool:
            found: bool = self._store.ask("check", keys)
            if not found:
                self._check_outcome()
            return found

        return wait_until(is_there, seconds)

    def _put(self, key: str, value: Any) -> None:
        data = zlib.compress(pickle.dumps(value), 1)  # headers are padded with one and the same byte
        chunks = [data[at : at + _CHUNK_NBYTES] for at in range(0, len(data), _CHUNK_NBYTES)]
        for number, chunk in enumerate(chunks):
            self._store.ask("set", f"{key}-{number}", chunk)
        self._store.ask("set", key, str(len(chunks)))

    def _take(self, key: str) -> Any:
        names = [f"{key}-{number}" for number in range(int(self._store.ask("get", key)))]
        data = b"".join([self._store.ask("get", name) for name in names])
        for name in (key, *names):
            self._store.ask("delete_key", name)
        return pickle.loads(zlib.decompress(data))

    def _unreachable(self, error: Exception) -> FastensorError:
        return self._error(
            f"{self._what} failed: rank {self.names[self.rank]} cannot reach the store of torch.distributed, which "
            f"is in the process of rank 0 or of the launcher: {error}{self._doubt}"
        )


def _connect(group: dist.ProcessGroup, own: str, rank: int, conversation: str) -> Any:
    """The store, with a place for a conversation of a group: the same on all ranks, and again for the name ``own``."""
    store = connect_to_job(f"fastensor/{group.group_name}/")
    # A store may outlive its group, as torchrun's does, and then holds what was left of groups of the same name. Who
    # connects again, and perhaps has not got the answer before, finds its own name.
    lives = itertools.count(1)
    life = next(life for life in lives if store.compare_set(f"life-{life}-of-{rank}", "", own) == own.encode())
    return PrefixStore(f"{life}/{conversation}/", store)
