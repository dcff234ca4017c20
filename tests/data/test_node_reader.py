"""A node reader brings the same values as reading does, and nobody hangs or leaves anything behind, whoever is
killed."""

from __future__ import annotations

import gc
import hashlib
import os
import pickle
import re
import resource
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data.databases import make, some_records
from programs import Program

from fastensor.data import LmdbDataset, LmdbLoader, Merging, decoders, processes
from fastensor.data.coalescing import Extents
from fastensor.data.connection import Connection, ConnectionLost
from fastensor.data.engines.choice import Strategy
from fastensor.data.node import engine as node_engine
from fastensor.data.node import lease
from fastensor.data.node.lease import NodeReader, name_of_job
from fastensor.data.node.protocol import Needs, Opening, Request, sent_error, spans_of
from fastensor.data.node.server import in_turns
from fastensor.errors import BackendUnavailableError, CorruptDatasetError, NodeReaderError
from fastensor.files.posix import EndOfFile

RECORDS = some_records(300)
VALUES = [RECORDS[key] for key in sorted(RECORDS)]
SECONDS = 20


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("node") / "db", RECORDS.items())


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeReader]:
    """One reader for the tests that do not kill it: each costs an import of torch."""
    reader = NodeReader("fastensor-tests-" + tmp_path_factory.mktemp("name").as_posix().replace("/", "-"))
    yield reader
    reader.close()
    gc.collect()  # datasets of the tests are clients, too
    assert ended(reader.pid)


@pytest.fixture
def shared(node: NodeReader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Datasets join that reader."""
    monkeypatch.setattr(lease, "name_of_job", lambda: node.name)


def ended(pid: int) -> bool:
    """Wait until a process has ended."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], SECONDS)[0])
    finally:
        os.close(fd)


def rings_of(pid: int) -> int:
    """How many rings a process has mapped."""
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:fastensor-ring")


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("engine", ["auto", "mapped", "pread", "willneed", "direct"])
def test_values_are_those_of_the_file(path: Path, engine: Any) -> None:
    dataset = LmdbDataset(path, engine=engine, reader="node")
    chance = np.random.default_rng(0)
    order = chance.permutation(len(dataset))
    batches = np.array_split(order, 10)
    dataset.read_ahead(batches)
    for number, batch in enumerate(batches):
        assert dataset.__getitems__(batch) == [VALUES[position] for position in batch]
        if number % 3 == 0:  # nobody has announced these
            assert dataset[number] == VALUES[number]
            assert dataset.__getitems__([5, 5, 7]) == [VALUES[5], VALUES[5], VALUES[7]]
    assert dataset.reading_by.startswith("node/")


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_read_by_the_reader(path: Path, context: str) -> None:
    dataset = LmdbDataset(path, reader="node")
    loader = LmdbLoader(dataset, 16, num_workers=2, collate_fn=list, multiprocessing_context=context)
    assert sorted(value for batch in loader for value in batch) == sorted(VALUES)


@pytest.mark.usefixtures("shared")
def test_a_client_that_keeps_all_values_gets_the_others_too(path: Path) -> None:
    """The values are larger than its ring. Those for which the ring has no room come by themselves."""
    views = LmdbDataset(path, reader="node", decode=decoders.Array("u1", (-1,)), read_ahead_nbytes=1 << 20)
    batches = np.array_split(np.arange(len(views)), 20)
    views.read_ahead(batches)
    kept = [view for batch in batches for view in views.__getitems__(batch)]
    assert sum(view.nbytes for view in kept) > 2 << 20
    assert [view.tobytes() for view in kept] == VALUES
    assert not any(view.flags.writeable for view in kept)


@pytest.mark.usefixtures("shared")
def test_views_are_aligned(path: Path) -> None:
    views = LmdbDataset(path, reader="node", decode=decoders.Array("u1", (-1,)))
    assert {view.ctypes.data % 64 for view in views.__getitems__(range(50)) if view.size} == {0}


@pytest.mark.usefixtures("shared")
def test_a_value_that_is_larger_than_the_ring(tmp_path: Path) -> None:
    value = os.urandom(3 << 20)
    dataset = LmdbDataset(make(tmp_path / "db", [(b"a", value), (b"b", b"small")]), reader="node", read_ahead_nbytes=1)
    assert dataset.__getitems__([0, 1, 0]) == [value, b"small", value]


@pytest.mark.usefixtures("shared")
def test_a_full_ring_waits_for_its_client_alone(path: Path) -> None:
    """One client announces everything and takes nothing; the other one gets on."""
    idle, busy = (LmdbDataset(path, reader="node", read_ahead_nbytes=1 << 20) for _ in range(2))
    batches = np.array_split(np.arange(len(idle)), 20)
    idle.read_ahead(batches)
    taken = idle.__getitems__(batches[0])
    assert busy.__getitems__(range(len(busy))) == VALUES
    for batch in batches[1:]:
        taken += idle.__getitems__(batch)
    assert taken == VALUES


@pytest.mark.usefixtures("shared")
def test_announced_batches_may_be_left_out(path: Path) -> None:
    dataset = LmdbDataset(path, reader="node")
    dataset.read_ahead([[]])
    assert dataset[9] == VALUES[9]
    dataset.read_ahead([[0, 1], [2, 3], [], [4, 5], [6]])
    assert dataset.__getitems__([0, 1]) == VALUES[:2]
    assert dataset.__getitems__([4, 5]) == VALUES[4:6]
    assert dataset.__getitems__([2, 3]) == VALUES[2:4]
    assert dataset.__getitems__([6]) == VALUES[6:7]


@pytest.mark.usefixtures("shared")
def test_a_reader_that_hangs_is_an_error(path: Path, node: NodeReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_engine, "_SILENT_SECONDS", 0.2)
    dataset = LmdbDataset(path, reader="node")
    assert dataset[0] == VALUES[0]
    os.kill(node.pid, signal.SIGSTOP)
    try:
        with pytest.raises(NodeReaderError, match=r"it has sent nothing for 0.2 s.*Make the dataset anew"):
            dataset[1]
    finally:
        os.kill(node.pid, signal.SIGCONT)


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("read", [lambda dataset: dataset[1], lambda dataset: dataset.__getitems__([1, 2])])
def test_reading_goes_on_after_an_interrupt(path: Path, node: NodeReader, read: Callable[[Any], object]) -> None:
    """Ctrl-C comes while the dataset waits for the reader."""
    dataset = LmdbDataset(path, reader="node")
    assert dataset[0] == VALUES[0]

    def interrupted() -> None:
        threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGINT]).start()
        read(dataset)

    os.kill(node.pid, signal.SIGSTOP)
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted()
    finally:
        os.kill(node.pid, signal.SIGCONT)
    assert dataset[1] == VALUES[1]
    assert dataset.__getitems__(range(len(dataset))) == VALUES


def open_nothing(connection: Connection) -> None:
    connection.send(Opening(Strategy("pread"), 1.0, 1 << 20))


def say_what_is_no_message(connection: Connection) -> None:
    connection.send({})


def request_without_a_file(connection: Connection) -> None:
    connection.send(Request(1, Extents(np.zeros(1, np.int64), np.zeros(1, np.int64))))


def release_what_is_free(connection: Connection) -> None:
    open_a_file(connection)
    connection.send(Needs(-1, -1, [], [0]))


def open_a_file(connection: Connection) -> None:
    with open("/proc/self/exe") as file:
        connection.send(Opening(Strategy("pread"), 1.0, 1 << 20), fd=file.fileno())


def open_two_files(connection: Connection) -> None:
    open_a_file(connection)
    open_a_file(connection)


def request(number: Any, extents: Any) -> Callable[[Connection], None]:
    def talk(connection: Connection) -> None:
        open_a_file(connection)
        connection.send(Request(number, extents))

    return talk


def numbers(*found: float) -> Any:
    return np.array(found, np.int64 if all(isinstance(one, int) for one in found) else np.float64)


def send_no_memory(connection: Connection) -> None:
    os.write(connection.fileno(), b"\0")


def send_no_pickle(connection: Connection) -> None:
    os.write(connection.fileno(), b"____")


NONSENSE = [
    open_nothing, say_what_is_no_message, request_without_a_file, release_what_is_free, send_no_memory,
    send_no_pickle, open_two_files, request(1, "no extents"), request([], Extents(numbers(0), numbers(3))),
    request(1, Extents(numbers(0, 5), numbers(3, 3, 3))), request(1, Extents(numbers(0), numbers(-1))),
    request(1, Extents(numbers(-1), numbers(1))), request(1, Extents(numbers(0), numbers(1 << 62))),
    request(1, Extents(numbers(0), numbers(0.5))),
]  # fmt: skip


def test_programs_that_a_service_starts_get_no_socket_of_it(node: NodeReader) -> None:
    process = Path(f"/proc/{node.pid}")
    infos = [
        (process / "fdinfo" / fd.name).read_text()
        for fd in (process / "fd").iterdir()
        if os.readlink(fd).startswith("socket:")
    ]
    flags = [int(re.findall(r"flags:\s*(\d+)", info)[0], 8) for info in infos]
    assert flags
    assert all(flag & os.O_CLOEXEC for flag in flags)


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("talk", NONSENSE)
def test_a_client_that_talks_nonsense_is_dropped_alone(
    path: Path, node: NodeReader, talk: Callable[[Connection], None]
) -> None:
    dataset = LmdbDataset(path, reader="node")
    assert dataset[0] == VALUES[0]
    connection = node.connect()
    talk(connection)

    def listen() -> None:
        while connection.wait(SECONDS):
            message = connection.receive()
            if message is not None and message.fd is not None:
                os.close(message.fd)

    with pytest.raises(ConnectionLost):
        listen()
    connection.close()
    assert dataset[1] == VALUES[1]


SERVER = """
import os, resource, socket, sys
from fastensor.data.node.server import NodeServer
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(chr(0) + sys.argv[1])
listener.listen()
server = NodeServer(listener)
lowest = os.dup(0)
os.close(lowest)
resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
print("listens", flush=True)
server.run()
"""


def test_a_reader_without_descriptors_lets_further_clients_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"fastensor-tests-full-{os.getpid()}"
    with Program("-c", SERVER, name) as program:
        assert program.stdout.readline() == "listens\n"
        first = NodeReader(name)
        assert first.pid == program.pid
        with monkeypatch.context() as impatient:
            impatient.setattr(processes, "ANSWER_SECONDS", 0.1)
            with pytest.raises(NodeReaderError, match=r"does not run: it has sent nothing for 0\.1 s"):
                first.connect()
        most = resource.prlimit(program.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(program.pid, resource.RLIMIT_NOFILE, (most[1], most[1]))
        first.connect().close()
        first.close()
        assert program.wait() == 0


@pytest.mark.parametrize(
    "error",
    [
        ValueError("found 7"), MemoryError("too much"), OSError(5, "broken"), PermissionError(13, "no"),
        BackendUnavailableError("no disk"), EndOfFile("too short"),
    ],
)  # fmt: skip
def test_errors_come_to_other_processes_as_they_are(error: Exception) -> None:
    found = pickle.loads(pickle.dumps(sent_error(error)))
    assert (type(found), str(found)) == (type(error), str(error))


def test_an_error_of_any_type_comes_to_other_processes() -> None:
    class OwnError(Exception):
        pass

    found = pickle.loads(pickle.dumps(sent_error(OwnError("why"))))
    assert (type(found), str(found)) == (NodeReaderError, "the node reader has failed: OwnError: why")


@pytest.mark.usefixtures("shared")
def test_a_file_that_was_cut_off(tmp_path: Path, node: NodeReader) -> None:
    dataset = LmdbDataset(make(tmp_path / "db", RECORDS.items()), engine="pread", reader="node", merging=Merging(0, 1))
    assert dataset[0] == VALUES[0]
    os.truncate(tmp_path / "db/data.mdb", 100_000)
    with pytest.raises(CorruptDatasetError, match="cut off"):
        dataset.__getitems__(range(len(dataset)))
    assert LmdbDataset(make(tmp_path / "other", RECORDS.items()), reader="node")[3] == VALUES[3]
    assert os.path.exists(f"/proc/{node.pid}")


@pytest.mark.usefixtures("shared")
def test_without_memory_for_a_ring_there_is_an_error(path: Path, node: NodeReader) -> None:
    before = resource.prlimit(node.pid, resource.RLIMIT_AS)
    resource.prlimit(node.pid, resource.RLIMIT_AS, (1 << 20, before[1]))
    try:
        with pytest.raises(OSError, match="memory"):
            LmdbDataset(path, reader="node", read_ahead_nbytes=64 << 20)[0]
    finally:
        resource.prlimit(node.pid, resource.RLIMIT_AS, before)
    assert LmdbDataset(path, reader="node")[0] == VALUES[0]


RANK = """
import sys
from hashlib import md5
from fastensor.data import LmdbDataset, LmdbLoader
dataset = LmdbDataset(sys.argv[1], reader="node", engine="pread")
loader = LmdbLoader(dataset, 7, ranks=(int(sys.argv[2]), 3), num_workers=1, collate_fn=list)
print(dataset._node.pid, *(md5(value).hexdigest() for _ in range(2) for batch in loader for value in batch))
"""


def test_ranks_share_a_reader_which_ends_with_the_last(path: Path) -> None:
    """Each reads its share of two epochs, with a worker."""
    name = f"ranks-{os.getpid()}"
    ranks = [Program("-c", RANK, path, rank, FASTENSOR_NODE_READER=name) for rank in range(3)]
    found = [rank.communicate() for rank in ranks]
    assert [error for _, error in found] == ["", "", ""]
    (pid,) = {out.split()[0] for out, _ in found}
    read = sorted(digest for out, _ in found for digest in out.split()[1:])
    assert read == sorted(2 * [hashlib.md5(value).hexdigest() for value in VALUES])
    assert ended(int(pid))


CLIENT = """
import sys, time
from fastensor.data import LmdbDataset
dataset = LmdbDataset(sys.argv[1], reader="node", read_ahead_nbytes=1 << 20)
dataset.read_ahead([range(10)] * 100)
dataset.__getitems__(range(10))
print(dataset._node.pid, flush=True)
sys.stdin.read()
"""


def test_a_killed_client_frees_its_ring(path: Path) -> None:
    """Its ring is full, and requests are left."""
    with Program("-c", CLIENT, path, FASTENSOR_NODE_READER=f"killed-client-{os.getpid()}") as first:
        pid = int(first.stdout.readline())
        with Program("-c", CLIENT, path, FASTENSOR_NODE_READER=f"killed-client-{os.getpid()}") as second:
            assert int(second.stdout.readline()) == pid
            assert rings_of(pid) == 2
            second.kill()
            second.wait()
            deadline = time.monotonic() + SECONDS
            while rings_of(pid) == 2:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert rings_of(pid) == 1
        first.kill()
        first.wait()
    assert ended(pid)


def test_a_killed_reader_is_an_error_and_a_new_dataset_starts_another(path: Path) -> None:
    dataset = LmdbDataset(path, reader="node")
    assert dataset[1] == VALUES[1]
    assert dataset._node is not None
    os.kill(dataset._node.pid, signal.SIGKILL)
    assert ended(dataset._node.pid)
    with pytest.raises(NodeReaderError, match=r"cannot be reached any more .* Make the dataset anew"):
        dataset[1]
    with pytest.raises(NodeReaderError, match="does not run"):
        pickle.loads(pickle.dumps(dataset))[1]  # as a worker that is spawned does
    again = LmdbDataset(path, reader="node")
    assert again[1] == VALUES[1]
    assert again._node is not None
    pid = again._node.pid
    del again
    gc.collect()
    assert ended(pid)


TRAINING = """
import sys
from fastensor.data import LmdbDataset, LmdbLoader
dataset = LmdbDataset(sys.argv[1], reader="node", decode=len)
loader = LmdbLoader(dataset, 4, num_workers=2, collate_fn=list, persistent_workers=True)
for epoch in range(1 << 30):
    for number, batch in enumerate(loader):
        if (epoch, number) == (0, 1):
            print(dataset._node.pid, dataset._node.name, flush=True)
"""


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.torture), signal.SIGKILL])
def test_nothing_is_left_behind(path: Path, number: signal.Signals) -> None:
    """Neither the reader nor workers, which keep it running.

    Workers of torch whose parent is killed end within 5 s, but for two cases, whatever dataset they read: a worker
    whose batches fill the pipe to the parent (64 KiB) waits for ever for its thread that writes to the pipe, whose read
    end it has open itself (``Queue._finalize_join``); and a worker that is being started takes the process that has
    adopted it for its parent (``ManagerWatchdog``). So batches are small here, and both workers have given one out.
    """
    before = set(os.listdir("/dev/shm"))
    with Program("-c", TRAINING, path) as program:
        pid, name = program.stdout.readline().split()
        assert name in Path("/proc/net/unix").read_text()
        program.send_signal(number)
        program.wait()
    assert ended(int(pid))
    assert name not in Path("/proc/net/unix").read_text()
    assert not {entry for entry in set(os.listdir("/dev/shm")) - before if "fastensor" in entry}


def test_arguments_that_make_no_sense(path: Path) -> None:
    with pytest.raises(ValueError, match="found 'rack'"):
        LmdbDataset(path, reader="rack")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not to a GPU"):
        LmdbDataset(path, reader="node", engine="kvikio")


@pytest.mark.usefixtures("shared")
def test_an_unknown_engine_is_refused_by_the_reader(path: Path) -> None:
    with pytest.raises(ValueError, match="found 'wish'"):
        LmdbDataset(path, reader="node", engine="wish")[0]  # type: ignore[arg-type]


def test_ranks_of_a_job_have_one_name_and_other_jobs_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (lease.NAME_VARIABLE, "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert name_of_job() != name_of_job()
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    first = name_of_job()
    assert first == name_of_job()
    assert re.fullmatch(r"fastensor-data-\d+-[0-9a-f]{24}", first)
    monkeypatch.setenv("MASTER_PORT", "29501")
    assert name_of_job() != first


def test_requests_of_several_clients_are_merged_in_the_order_of_need() -> None:
    first = spans_of(np.full(5, 60), 128)
    second = spans_of(np.full(3, 60), 128)
    assert first == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert in_turns([first, second]) == [first[0], second[0], first[1], second[1], first[2]]
