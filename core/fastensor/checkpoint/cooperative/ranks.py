"""How ranks talk while they save or load a file together: through the store of ``torch.distributed``.

Rank 0 leads. Others send it values, and it replies to each of them. The store is that of the default process group. So
it does not matter by which backend the group communicates, no other group has to be made, and a rank that does not come
leaves no group behind that nobody can use any more.
"""

from __future__ import annotations

import itertools
import pickle
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from fastensor.errors import CheckpointWriteError, FastensorError, ReplicaMismatchError

_SHORTEST_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.0005, 0.05
_CHUNK_NBYTES = 4 << 20
"""``TCPStore`` takes values of up to 8 MiB."""
_PUBLISH = "publish"
_conversations: WeakKeyDictionary[dist.ProcessGroup, itertools.count[int]] = WeakKeyDictionary()
"""By group, the numbers of its conversations, alike on all ranks."""


@dataclass(frozen=True, slots=True)
class _Failure:
    text: str
    replicas_differ: bool = False


class Ranks:
    """One conversation of the ranks of a group. All ranks make it, and use it in one thread each.

    Args:
        group: the process group; None for that of all ranks.
        what: what they do, for messages, such as ``saving x.ckpt``.
        timeout: for how many seconds rank 0 waits for others. Others wait for rank 0 twice as long, because it may be
            waiting.
        error: what is raised if a rank fails, does not come, or cannot be reached.

    Raises:
        FastensorError: the store cannot be reached.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        what: str,
        timeout: float,
        error: type[FastensorError] = CheckpointWriteError,
    ) -> None:
        group = group or dist.group.WORLD
        assert group is not None
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.names = dist.get_process_group_ranks(group)
        """By the number of a rank in the group, its number in the job, by which messages name it."""
        self._what = what
        self._timeout = timeout
        self._error = error
        number = next(_conversations.setdefault(group, itertools.count()))
        self._gathered = itertools.count()
        self._replies = itertools.count()
        with self._reaching():
            store: Any = _get_default_store()
            # a connection of its own, where torch can make one: calls of one connection wait for each other
            own = store.clone() if hasattr(store, "clone") else store
            self._store: Any = PrefixStore(f"fastensor/{group.group_name}/{number}/", own)

    # --- on all ranks but rank 0

    def send(self, value: Any) -> None:
        """Send a value to rank 0, which has to call :meth:`gather`."""
        self._put(f"from-{self.rank}-{next(self._gathered)}", value)

    def send_failure(self, error: BaseException) -> None:
        """Have :meth:`gather` raise on rank 0."""
        self.send(_Failure(_in_words(error)))

    def receive(self) -> Any:
        """Wait for the next reply of rank 0.

        Raises:
            ReplicaMismatchError: this is how rank 0 has failed.
            FastensorError: rank 0 has failed in another way, or does not answer.
        """
        key = f"to-{self.rank}-{next(self._replies)}"
        if not self._wait([key], 2 * self._timeout):
            self._give_up(key)
        value = self._take(key)
        if isinstance(value, _Failure):
            raise (ReplicaMismatchError if value.replicas_differ else self._error)(value.text)
        return value

    def _give_up(self, key: str) -> None:
        """Keep rank 0 from publishing. If it has begun to, wait for its reply once more.

        Raises:
            FastensorError: unless there is a reply now.
        """
        silent = f"rank {self.names[0]} has not answered rank {self.names[self.rank]} for {2 * self._timeout:g} s"
        with self._reaching():
            decided = self._store.compare_set("decision", "", silent)
        if decided != _PUBLISH.encode():
            raise self._error(f"{self._what} failed: {silent}")
        if not self._wait([key], 2 * self._timeout):
            raise self._error(
                f"{self._what}: {silent}, after all ranks have written their parts: perhaps the file is in place, "
                f"perhaps what was there before is kept"
            )

    # --- on rank 0

    def gather(self) -> list[Any]:
        """Wait until all others have sent a value. Returns the values in the order of the ranks, without rank 0's own.

        Raises:
            FastensorError: others have failed, or do not come; the message names them.
        """
        number = next(self._gathered)
        keys = [f"from-{rank}-{number}" for rank in range(1, self.size)]
        if not self._wait(keys, self._timeout):
            with self._reaching():
                silent = [rank for rank, key in enumerate(keys, 1) if not self._store.check([key])]
                given_up = self._store.get("decision").decode() if self._store.check(["decision"]) else ""
            if silent:
                reason = given_up or (
                    f"{self._named(silent)} did not come within {self._timeout:g} s: dead, stopped, slow, or doing "
                    f"something else"
                )
                raise self._error(f"{self._what} failed: {reason}")
        values = [self._take(key) for key in keys]
        failed = {rank: value for rank, value in enumerate(values, 1) if isinstance(value, _Failure)}
        if failed:
            texts = [f"{self._named([rank])}: {failure.text}" for rank, failure in failed.items()]
            raise self._error(f"{self._what} failed: {'; '.join(texts)}")
        return values

    def reply(self, values: Sequence[Any]) -> None:
        """Reply to each of the others, in the order of the ranks."""
        number = next(self._replies)
        for rank, value in enumerate(values, 1):
            self._put(f"to-{rank}-{number}", value)

    def reply_failure(self, error: BaseException) -> None:
        """Have :meth:`receive` raise on all others."""
        text = _in_words(error)
        if not (text.startswith(self._what) or isinstance(error, ReplicaMismatchError)):  # else it names the rank
            text = f"{self._what} failed: rank {self.names[0]}: {text}"
        self.reply([_Failure(text, isinstance(error, ReplicaMismatchError))] * (self.size - 1))

    def decide_to_publish(self) -> None:
        """Return if no other rank has given up waiting. From now on, none does before it has asked what was decided.

        Raises:
            FastensorError: one has given up, and takes the file for not saved.
        """
        with self._reaching():
            decided = self._store.compare_set("decision", "", _PUBLISH)
        if decided != _PUBLISH.encode():
            raise self._error(f"{self._what} failed: {decided.decode()}")

    # --- inside

    def _named(self, ranks: Sequence[int]) -> str:
        names = ", ".join(str(self.names[rank]) for rank in ranks)
        return f"rank{'s' * (len(ranks) > 1)} {names}"

    def _wait(self, keys: Sequence[str], seconds: float) -> bool:
        """Wait until the store has all keys; False if that takes longer.

        The store's own ``wait`` cannot be interrupted, and logs every timeout.
        """
        started = time.monotonic()
        with self._reaching():
            while not self._store.check(list(keys)):
                waited = time.monotonic() - started
                if waited > seconds:
                    return False
                time.sleep(min(max(waited / 50, _SHORTEST_POLL_SECONDS), _LONGEST_POLL_SECONDS))
        return True

    def _put(self, key: str, value: Any) -> None:
        data = zlib.compress(pickle.dumps(value), 1)  # headers are padded with one and the same byte
        chunks = [data[at : at + _CHUNK_NBYTES] for at in range(0, len(data), _CHUNK_NBYTES)]
        with self._reaching():
            for number, chunk in enumerate(chunks):
                self._store.set(f"{key}-{number}", chunk)
            self._store.set(key, str(len(chunks)))

    def _take(self, key: str) -> Any:
        with self._reaching():
            count = int(self._store.get(key))
            names = [f"{key}-{number}" for number in range(count)]
            data = b"".join(self._store.get(name) for name in names)
            for name in (key, *names):
                self._store.delete_key(name)
        return pickle.loads(zlib.decompress(data))

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """Errors of the store in the block are raised as errors of the conversation."""
        try:
            yield
        except (RuntimeError, ValueError) as error:  # ValueError if the process group was destroyed
            raise self._error(
                f"{self._what} failed: the store of torch.distributed, which is in the process of rank 0 or of the "
                f"launcher, cannot be reached: {error}"
            ) from error


def _in_words(error: BaseException) -> str:
    return str(error) if isinstance(error, FastensorError) else f"{type(error).__name__}: {error}"
