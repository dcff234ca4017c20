"""``verify``, ``inspect`` and ``convert``, in Python and on the command line."""

from __future__ import annotations

import io
import json
import os
import pickle
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import programs
import pytest
import safetensors.torch
import states
import torch
from hypothesis import given
from hypothesis import strategies as st
from programs import command_line, run

import fastensor
from fastensor import CorruptCheckpointError, DamagedCheckpointError, UnsupportedContentError
from fastensor.backends.registry import available_names
from fastensor.cli import main

WEIGHTS = {"w": torch.arange(600.0).reshape(20, 30), "b": torch.ones(7, dtype=torch.bfloat16), "s": torch.tensor(3)}
CHECKPOINT = {"state_dict": WEIGHTS, "epoch": 3, "lists": [torch.ones(2), "text"]}


class Hyper:
    """A class that weights_only=True refuses."""


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    fastensor.save(CHECKPOINT, tmp_path / "x.ckpt")
    return tmp_path / "x.ckpt"


@pytest.fixture
def tensors(tmp_path: Path) -> Path:
    fastensor.save(WEIGHTS, tmp_path / "x.safetensors", metadata={"made": "here"})
    return tmp_path / "x.safetensors"


def damage(path: Path, *tensors: torch.Tensor) -> None:
    data = bytearray(path.read_bytes())
    for tensor in tensors:
        data[data.index(tensor.view(-1).view(torch.uint8).numpy().tobytes()) + 3] ^= 1
    path.write_bytes(data)


# verify


@pytest.mark.parametrize("backend", available_names())
def test_sound_files(ckpt: Path, tensors: Path, backend: str) -> None:
    for path, parts in ((ckpt, 10), (tensors, 4)):
        done: list[tuple[int, int]] = []
        report = fastensor.verify(path, backend=backend, progress=lambda *now: done.append(now))  # noqa: B023
        assert report.complete
        assert (report.compared, report.uncompared, report.damage) == (parts, 0, ())
        assert report.nbytes == path.stat().st_size
        assert done[-1][0] == done[-1][1] > 2400
        assert done == sorted(done)


def test_every_damaged_part_is_listed(ckpt: Path, tensors: Path) -> None:
    for path, names in ((ckpt, ["record 'archive/data/0'", "record 'archive/data/1'"]), (tensors, ["'w'", "'b'"])):
        damage(path, WEIGHTS["w"], WEIGHTS["b"])
        with pytest.raises(DamagedCheckpointError) as caught:
            fastensor.verify(path)
        found = caught.value.report.damage
        assert len(found) == 2
        for name, one in zip(names, found, strict=True):
            assert name in one.part
            assert one.found != one.expected
            assert str(one) in str(caught.value)
        assert isinstance(caught.value, CorruptCheckpointError)


def test_files_of_others(tmp_path: Path) -> None:
    torch.save(CHECKPOINT, tmp_path / "torch.pt")
    safetensors.torch.save_file(WEIGHTS, tmp_path / "x.safetensors")
    torch.save(WEIGHTS, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    with torch.utils.serialization.config.patch({"save.compute_crc32": False}):
        torch.save(WEIGHTS, tmp_path / "unchecked.pt")
    assert fastensor.verify(tmp_path / "torch.pt").complete
    for name in ("x.safetensors", "legacy.pt", "unchecked.pt"):
        report = fastensor.verify(tmp_path / name)
        assert not report.complete
        assert report.compared == 0
    data = bytearray((tmp_path / "torch.pt").read_bytes())
    data[data.index(WEIGHTS["w"].numpy().tobytes()) + 9] ^= 1
    (tmp_path / "torch.pt").write_bytes(data)
    with pytest.raises(DamagedCheckpointError, match=r"'torch/data/0'"):
        fastensor.verify(tmp_path / "torch.pt")


def test_a_compressed_archive(ckpt: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(ckpt) as old, zipfile.ZipFile(tmp_path / "z", "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    assert fastensor.verify(tmp_path / "z").complete
    with pytest.raises(UnsupportedContentError, match="compressed"):
        fastensor.inspect(tmp_path / "z")
    data = bytearray((tmp_path / "z").read_bytes())
    data[data.index(b"data/0") + 40] ^= 1
    (tmp_path / "z").write_bytes(data)
    with pytest.raises(CorruptCheckpointError):
        fastensor.verify(tmp_path / "z")


def test_verifying_takes_bounded_memory(tmp_path: Path) -> None:
    fastensor.save({"w": torch.zeros(300 << 20, dtype=torch.uint8)}, tmp_path / "x.ckpt")
    code = (
        "import fastensor, resource, sys\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"fastensor.verify({str(tmp_path / 'x.ckpt')!r})\n"
        f"fastensor.convert({str(tmp_path / 'x.ckpt')!r}, {str(tmp_path / 'x.safetensors')!r})\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    assert int(programs.run("-c", code).stdout) << 10 < 130 << 20


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    for content in (bytes(2000), os.urandom(2000), b"hello"):
        (tmp_path / "x").write_bytes(content)
        for attempt in (fastensor.verify, fastensor.inspect, fastensor.load):
            with pytest.raises(CorruptCheckpointError, match=r"x: .*offset 0"):
                attempt(tmp_path / "x")  # type: ignore[operator]


def test_a_damaged_pickle_is_listed_with_the_rest(ckpt: Path) -> None:
    data = bytearray(ckpt.read_bytes())
    data[data.index(b"state_dict")] ^= 1
    ckpt.write_bytes(data)
    damage(ckpt, WEIGHTS["w"])
    with pytest.raises(DamagedCheckpointError) as caught:
        fastensor.verify(ckpt)
    assert [one.part for one in caught.value.report.damage] == [
        "record 'archive/data.pkl'",
        "record 'archive/data/0'",
    ]
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.report == caught.value.report


# inspect


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_of_pickle(tmp_path: Path, protocol: int) -> None:
    fastensor.save(CHECKPOINT, tmp_path / "x", pickle_protocol=protocol)
    found = fastensor.inspect(tmp_path / "x")
    assert len(found.tensors) == 4
    assert bool(found.refused) == (protocol > 3)


@pytest.mark.parametrize("protocol", [2, 4])
def test_values_are_shown_in_few_words(protocol: int, tmp_path: Path) -> None:
    state = {"int": 10**2000, "longer": 10**5000, "text": "x" * 1000, "set": {1, 2}, "order": list(range(99))}
    state |= {"pair": (1, 2), "frozen": frozenset({1}), "size": torch.Size([1]), "complex": 1 + 2j, "bytes": b""}
    state |= {"no pair": (), "nothing frozen": frozenset(), "no size": torch.Size([])}
    torch.save(state, tmp_path / "x", pickle_protocol=protocol)
    found = fastensor.inspect(tmp_path / "x").others
    assert (found["int"], found["longer"]) == ("<int of 6644 bits>", "<int of 16610 bits>")
    assert (found["set"], found["order"]) == ("<set of 2>", "<list of 99>")
    assert (found["pair"], found["no pair"]) == ("<tuple of 2>", "()")
    frozen = ("<frozenset of 1>", "frozenset()") if protocol == 4 else ("<__builtin__.frozenset>",) * 2
    assert (found["frozen"], found["nothing frozen"]) == frozen
    assert (found["size"], found["no size"]) == ("<Size of 1>", "torch.Size([])")
    assert (found["complex"], found["bytes"]) == ("(1+2j)", "b''")
    assert found["text"].startswith("'xxx")
    assert len(found["text"]) <= 60


@pytest.mark.parametrize("count", [65, 1000])
def test_a_tensor_of_many_dimensions(count: int, tmp_path: Path) -> None:
    state = {"w": torch.arange(3).reshape([1] * (count - 1) + [3])}
    fastensor.save(state, tmp_path / "x")
    (found,) = fastensor.inspect(tmp_path / "x").tensors
    assert found.shape == state["w"].shape
    assert torch.equal(fastensor.load(tmp_path / "x", keys=["w"])["w"], state["w"])
    with fastensor.open(tmp_path / "x") as opened:
        assert torch.equal(opened["w"], state["w"])


def test_what_is_inside(ckpt: Path, tensors: Path) -> None:
    found = fastensor.inspect(ckpt)
    assert [one.name for one in found.tensors] == ["state_dict.w", "state_dict.b", "state_dict.s", "lists.0"]
    assert dict(found.others) == {"epoch": "3", "lists.1": "'text'"}
    assert (found.container, found.checked, found.tensor_bytes, found.refused) == ("torch", True, 2430, ())
    found = fastensor.inspect(tensors)
    assert (found.container, found.checked) == ("safetensors", True)
    assert found.metadata == {"format": "pt", "made": "here"}
    assert {one.name: one.crc32 is not None for one in found.tensors} == dict.fromkeys(WEIGHTS, True)


def test_ties_and_refused_classes(tmp_path: Path) -> None:
    shared = torch.ones(3)
    fastensor.save({"a": shared, "b": shared[1:], "c": torch.ones(3), "hyper": Hyper()}, tmp_path / "x")
    found = fastensor.inspect(tmp_path / "x")
    assert found.ties == (("a", "b"),)
    assert len(found.refused) == 1
    assert found.refused[0].endswith("Hyper")


def test_keys_that_look_the_same(tmp_path: Path) -> None:
    fastensor.save({1: torch.ones(1), "1": torch.zeros(2)}, tmp_path / "x")
    assert [one.name for one in fastensor.inspect(tmp_path / "x").tensors] == ["1", "1#2"]
    with fastensor.open(tmp_path / "x") as found:
        assert (found["1"].shape, found["1#2"].shape) == ((1,), (2,))


@given(tree=states.trees().filter(states.has_names_of_its_own))
def test_anything_can_be_looked_into(tree: Any) -> None:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = os.path.join(folder, "x")
        fastensor.save({"tree": tree}, path, durable=False)
        found = fastensor.inspect(path)
        whole = fastensor.load(path, weights_only=False)
        by_name = dict(states.names_of(whole))
        for one in found.tensors:
            tensor = by_name[one.name]
            assert (tuple(tensor.shape), tensor.dtype) == (one.shape, one.dtype)
        with fastensor.open(path) as lazy:
            for name in lazy.info:
                try:
                    tensor = lazy[name]
                except UnsupportedContentError:
                    continue
                expected = by_name[name].detach().as_subclass(torch.Tensor)
                bits = [one.contiguous().view(-1).view(torch.uint8) for one in (tensor, expected)]
                assert torch.equal(*bits)


# convert


@pytest.mark.parametrize("backend", available_names())
def test_there_and_back(ckpt: Path, tmp_path: Path, backend: str) -> None:
    fastensor.convert(ckpt, tmp_path / "a.safetensors", root="state_dict", metadata={"k": "v"}, backend=backend)
    assert all(torch.equal(safetensors.torch.load_file(tmp_path / "a.safetensors")[k], v) for k, v in WEIGHTS.items())
    assert fastensor.inspect(tmp_path / "a.safetensors").metadata == {"format": "pt", "k": "v"}
    assert fastensor.verify(tmp_path / "a.safetensors").complete
    fastensor.convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", backend=backend)
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    fastensor.convert(tmp_path / "a.safetensors", tmp_path / "c.pt", backend=backend)
    loaded = torch.load(tmp_path / "c.pt")
    assert all(torch.equal(loaded[k], v) for k, v in WEIGHTS.items())
    assert fastensor.verify(tmp_path / "c.pt").complete
    fastensor.convert(tmp_path / "c.pt", "memory://c.safetensors", backend=backend)
    assert torch.equal(fastensor.load("memory://c.safetensors")["w"], WEIGHTS["w"])


@pytest.mark.filterwarnings("ignore::fastensor.errors.UnverifiedCheckpointWarning")
@given(state=st.dictionaries(st.text(max_size=5), states.dense(), max_size=4), checksums=st.booleans())
def test_any_dict_of_tensors(state: dict[str, torch.Tensor], checksums: bool) -> None:
    state = {
        name: tensor
        for name, tensor in state.items()
        if tensor.dtype != torch.complex128 and name < "\ud800" and name != "__metadata__"
    }
    with tempfile.TemporaryDirectory() as folder:
        torch.save(state, f"{folder}/a.pt")
        fastensor.convert(f"{folder}/a.pt", f"{folder}/b.safetensors", checksums=checksums, durable=False)
        fastensor.save(state, f"{folder}/c.safetensors", checksums=checksums, durable=False)
        assert Path(f"{folder}/b.safetensors").read_bytes() == Path(f"{folder}/c.safetensors").read_bytes()
        fastensor.convert(f"{folder}/b.safetensors", f"{folder}/d.pt", durable=False)
        states.assert_equal({name: torch.load(f"{folder}/d.pt")[name] for name in state}, state)


def test_checksums_are_added_to_files_of_others(tmp_path: Path) -> None:
    safetensors.torch.save_file(WEIGHTS, tmp_path / "x.safetensors", {"k": "v"})
    fastensor.convert(tmp_path / "x.safetensors", tmp_path / "y.safetensors")
    assert fastensor.verify(tmp_path / "y.safetensors").complete
    assert fastensor.inspect(tmp_path / "y.safetensors").metadata == {"format": "pt", "k": "v"}


def hard_link(path: Path, name: str) -> Path:
    os.link(path, path.with_name(name))
    return path.with_name(name)


def symlink(path: Path, name: str) -> Path:
    path.with_name(name).symlink_to(path.name)
    return path.with_name(name)


SAME: dict[str, Callable[[Path], Any]] = {
    "itself": lambda path: path,
    "relative": lambda path: os.path.relpath(path),
    "through a folder": lambda path: path.parent / ".." / path.parent.name / path.name,
    "a URL": lambda path: f"file://{path}",
    "a symlink": lambda path: symlink(path, "link.ckpt"),
    "a hard link": lambda path: hard_link(path, "hard.ckpt"),
}


@pytest.mark.parametrize("spelling", SAME)
def test_a_file_is_not_replaced_while_it_is_read(tmp_path: Path, spelling: str) -> None:
    path = tmp_path / "x.ckpt"
    fastensor.save({"w": torch.ones(2)}, path)
    before = path.read_bytes()
    other = SAME[spelling](path)
    for source, target in ((path, other), (other, path)):
        with pytest.raises(UnsupportedContentError, match=r"the target is the source.*another target"):
            fastensor.convert(source, target)
    assert path.read_bytes() == before


def test_an_open_file_is_not_written_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    fastensor.save({"w": torch.ones(2)}, path)
    before = path.read_bytes()
    buffer = io.BytesIO(before)
    with path.open("r+b") as file:
        for source, target in ((path, file), (file, file), (buffer, buffer)):
            with pytest.raises(UnsupportedContentError, match="the target is the source"):
                fastensor.convert(source, target)  # type: ignore[arg-type]
    assert path.read_bytes() == buffer.getvalue() == before


def test_a_model_in_a_folder_gets_nothing_of_another_container_into_it(tmp_path: Path) -> None:
    fastensor.save_sharded({"w": torch.ones(2), "v": torch.ones(3)}, tmp_path / "model", shard_nbytes=8)
    (tmp_path / "model" / "optimizer.bin").write_bytes(b"x")
    before = sorted(os.listdir(tmp_path / "model"))
    for target in (tmp_path / "model", tmp_path / "model" / "optimizer.bin"):
        for container in ("dcp", "torch"):
            with pytest.raises(UnsupportedContentError, match="the target is the source, or one of its files"):
                fastensor.convert(tmp_path / "model", target, container=container)  # type: ignore[arg-type]
    assert sorted(os.listdir(tmp_path / "model")) == before
    assert (tmp_path / "model" / "optimizer.bin").read_bytes() == b"x"


def test_a_url_is_not_replaced_while_it_is_read() -> None:
    fastensor.save({"w": torch.ones(2)}, "memory://part.ckpt")
    with pytest.raises(UnsupportedContentError, match="the target is the source"):
        fastensor.convert("memory://part.ckpt", "memory:///part.ckpt")


def test_ties_are_refused_or_copied(tmp_path: Path) -> None:
    base = torch.arange(100.0)
    fastensor.save({"a": base, "b": base[10:20], "c": torch.ones(1)}, tmp_path / "x.ckpt")
    with pytest.raises(UnsupportedContentError, match=r"\[\['a', 'b'\]\]; pass copy_ties=True"):
        fastensor.convert(tmp_path / "x.ckpt", tmp_path / "x.safetensors")
    fastensor.convert(tmp_path / "x.ckpt", tmp_path / "x.safetensors", copy_ties=True)
    found = fastensor.load(tmp_path / "x.safetensors")
    assert torch.equal(found["a"], base)
    assert torch.equal(found["b"], base[10:20])


def odd_states() -> dict[str, tuple[Any, str]]:
    return {
        "nested": (CHECKPOINT, "'state_dict' in it is no tensor; choose.*root: 'state_dict'"),
        "a list": ([torch.ones(1)], "expected a dict of tensors, found none; it holds no such dict"),
        "a number": ({"a": 3}, "'a' in it is no tensor"),
        "an int for a name": ({3: torch.ones(1)}, "3 in it is called by a key of type int"),
        "transposed": ({"a": torch.ones(2, 3).t()}, "not contiguous"),
        "sparse": ({"a": torch.ones(2).to_sparse()}, "'a' in it is a tensor that is more than its bytes"),
        "complex128": ({"a": torch.ones(1, dtype=torch.complex128)}, "no torch.complex128"),
    }


@pytest.mark.parametrize("name", odd_states())
def test_what_cannot_be_converted_leaves_the_target(tmp_path: Path, tensors: Path, name: str) -> None:
    state, message = odd_states()[name]
    fastensor.save(state, tmp_path / "odd.ckpt")
    before = tensors.read_bytes()
    with pytest.raises(UnsupportedContentError, match=message):
        fastensor.convert(tmp_path / "odd.ckpt", tensors)
    assert tensors.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["odd.ckpt", "x.safetensors"]


def test_damage_is_not_carried_over(ckpt: Path, tensors: Path) -> None:
    before = tensors.read_bytes()
    damage(ckpt, WEIGHTS["w"])
    with pytest.raises(CorruptCheckpointError, match=r"'archive/data/0' \(2400 bytes"):
        fastensor.convert(ckpt, tensors, root="state_dict")
    assert tensors.read_bytes() == before
    fastensor.convert(ckpt, tensors, root="state_dict", verify=False)
    assert not torch.equal(fastensor.load(tensors)["w"], WEIGHTS["w"])


def test_names_that_look_the_same_are_not_confused(tmp_path: Path) -> None:
    fastensor.save({"m.a": {"b": torch.ones(2)}, "m": {"a.b": torch.zeros(2)}}, tmp_path / "x.ckpt")
    fastensor.convert(tmp_path / "x.ckpt", tmp_path / "y.safetensors", root="m")
    states.assert_equal(fastensor.load(tmp_path / "y.safetensors"), {"a.b": torch.zeros(2)})


def test_disjoint_views_of_one_storage_are_no_ties(tmp_path: Path) -> None:
    base = torch.arange(10.0)
    fastensor.save({"a": base[:4], "b": base[4:], "c": base[2:3]}, tmp_path / "x.ckpt")
    assert fastensor.inspect(tmp_path / "x.ckpt").ties == (("a", "c"),)
    fastensor.save({"a": base[:4], "b": base[4:]}, tmp_path / "x.ckpt")
    fastensor.convert(tmp_path / "x.ckpt", tmp_path / "y.safetensors")
    states.assert_equal(fastensor.load(tmp_path / "y.safetensors"), {"a": base[:4].clone(), "b": base[4:].clone()})


def test_inner_dicts_are_found(tmp_path: Path) -> None:
    fastensor.save({"model": {"state_dict": WEIGHTS}}, tmp_path / "x.ckpt")
    with pytest.raises(UnsupportedContentError, match=r"root: 'model\.state_dict'"):
        fastensor.convert(tmp_path / "x.ckpt", tmp_path / "y.safetensors")
    fastensor.convert(tmp_path / "x.ckpt", tmp_path / "y.safetensors", root="model.state_dict")
    assert fastensor.verify(tmp_path / "y.safetensors").complete


def test_a_file_that_is_larger_than_memory(tmp_path: Path) -> None:
    """A sparse one: its conversion is planned, and stopped at the first byte."""
    nbytes = 1 << 40
    header = json.dumps({"w": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}}).encode()
    with open(tmp_path / "x.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + nbytes)

    class Enough(Exception):
        pass

    def stop(done: int, total: int) -> None:
        assert total == nbytes
        raise Enough

    with pytest.warns(fastensor.UnverifiedCheckpointWarning), pytest.raises(Enough):
        fastensor.convert(tmp_path / "x.safetensors", io.BytesIO(), container="torch", progress=stop)


# the command line


def test_verify_prints_and_exits(capsys: Any, ckpt: Path, tensors: Path, tmp_path: Path) -> None:
    status, out, err = command_line(capsys, "verify", ckpt, tensors)
    assert (status, err, out.count("intact")) == (0, "", 2)
    plain = tmp_path / "plain.safetensors"
    safetensors.torch.save_file(WEIGHTS, plain)
    status, out, _ = command_line(capsys, "verify", ckpt, plain)
    assert status == 3
    assert "no checksums" in out
    assert command_line(capsys, "verify", "--allow-unchecked", ckpt, plain)[0] == 0
    damage(tensors, WEIGHTS["w"])
    (tmp_path / "cut").write_bytes(ckpt.read_bytes()[:999])
    status, out, _ = command_line(capsys, "verify", ckpt, tensors, tmp_path / "cut", plain, tmp_path / "nothing")
    assert status == 1
    for text in ("damaged", "tensor 'w' (2400 bytes", "unreadable", "cut off", "No such file"):
        assert text in out
    status, out, _ = command_line(capsys, "verify", "--json", ckpt, tensors)
    first, second = json.loads(out)
    assert (first["result"], first["uncompared"], second["result"]) == ("intact", 0, "damaged")
    assert second["damage"][0]["nbytes"] == 2400


def test_inspect_prints(capsys: Any, ckpt: Path) -> None:
    status, out, _ = command_line(capsys, "inspect", ckpt)
    assert status == 0
    for text in ("state_dict.w", "float32", "20 × 30", "2.34 KiB", "scalar", "epoch", "with checksums"):
        assert text in out
    status, out, _ = command_line(capsys, "inspect", ckpt, "--key", "*.w", "--json")
    found = json.loads(out)
    assert [one["name"] for one in found["tensors"]] == ["state_dict.w"]
    assert found["tensors"][0]["dtype"] == "float32"
    status, _, err = command_line(capsys, "inspect", ckpt, "--key", "x")
    assert (status, "nothing in it" in err) == (1, True)
    status, out, _ = command_line(capsys, "inspect", ckpt, "--key", "state_dict", "--json")
    assert len(json.loads(out)["tensors"]) == 3


def test_convert_writes(capsys: Any, ckpt: Path, tmp_path: Path) -> None:
    status, out, _ = command_line(
        capsys, "convert", ckpt, tmp_path / "y.safetensors", "--root", "state_dict", "--drop", "--no-checksums"
    )
    assert (status, "y.safetensors" in out, "left out: epoch, lists\n" in out) == (0, True, True)
    assert not fastensor.inspect(tmp_path / "y.safetensors").checked
    status, _, err = command_line(capsys, "convert", ckpt, tmp_path / "z.safetensors")
    expected = "choose one of its dicts of tensors with --root, and leave the rest out with --drop: 'state_dict'"
    assert (status, expected in err) == (1, True), "one message names all that is needed"
    assert not (tmp_path / "z.safetensors").exists()


def test_convert_refuses_to_write_a_part_over_the_whole(capsys: Any, ckpt: Path) -> None:
    before = ckpt.read_bytes()
    status, _, err = command_line(capsys, "convert", ckpt, ckpt, "--root", "state_dict", "--drop", "--force")
    assert (status, "the target is the source" in err) == (1, True)
    assert ckpt.read_bytes() == before


def test_the_program(ckpt: Path) -> None:
    script = Path(sys.executable).with_name("fastensor")
    assert "intact" in run(script, "verify", ckpt, cold=True).stdout
    assert "intact" in run("-m", "fastensor", "verify", ckpt).stdout
    result = run(script, check=False)
    assert result.returncode == 2
    assert "COMMAND" in result.stderr


def test_a_reader_that_has_seen_enough(tmp_path: Path) -> None:
    fastensor.save({f"tensor {i}": torch.ones(1) for i in range(3000)}, tmp_path / "x.ckpt")
    command = f"{sys.executable} -m fastensor inspect {tmp_path / 'x.ckpt'} | head -1"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120)
    assert result.stdout.startswith(str(tmp_path / "x.ckpt"))
    assert result.stderr == ""


def test_a_progress_bar_on_long_work(ckpt: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("fastensor.files.progress_bar._PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    status, out, err = command_line(capsys, "verify", ckpt)
    assert (status, "intact" in out) == (0, True)
    assert "x.ckpt" in err
    assert "3.9/3.9 KiB" in err
    assert "B/s" in err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    assert command_line(capsys, "verify", ckpt)[2] == "", "no bar where there is no terminal"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--no-checksums"], "--metadata and --no-checksums are for safetensors"),
        (["--metadata", "no equals sign"], "Invalid value for '--metadata': expected KEY=TEXT, found 'no equals sign'"),
        (["--rename", "w"], "Invalid value for '--rename': expected OLD=NEW, found 'w'"),
        (["--rename", "w=b"], "'w' and 'b' would both be called 'b'"),
        (["--rename", "*=b"], "as many * as the old one"),
        (["--shard-size", "big"], "Invalid value for '--shard-size': expected a size such as 5GB or 2GiB, found 'big'"),
        (["--memory", "1KiB"], "--memory is at least 1048576"),
        (["--dtype", "bf16"], "'bfloat16'"),
        (["--dtype", "float16", "--container", "dcp"], "--dtype and --rename are for files"),
        (["--backend", "turbo"], "'turbo'"),
        (["--forc"], "--force"),
    ],
)
def test_wrong_arguments(capsys: Any, ckpt: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    status, out, err = command_line(
        capsys, "convert", ckpt, tmp_path / "y.pt", "--root", "state_dict", "--drop", *arguments
    )
    assert (status, out) == (2, "")
    assert message in " ".join(err.split())
    assert "Traceback" not in err
    assert os.listdir(tmp_path) == ["x.ckpt"]


def test_names_that_would_move_the_cursor(capsys: Any, tmp_path: Path) -> None:
    fastensor.save({"\x1b[2J\nfoo × \ud800": torch.ones(1)}, tmp_path / "x.ckpt")
    status, out, _ = command_line(capsys, "inspect", tmp_path / "x.ckpt")
    assert status == 0
    assert r"\x1b[2J\nfoo × \ud800" in out


def test_inspect_summarizes_very_many_tensors(capsys: Any, tmp_path: Path) -> None:
    state = {
        f"layers.{layer}.experts.{expert}.{name}": torch.ones(3, dtype=dtype)
        for layer in range(10)
        for expert in range(15)
        for name, dtype in (("weight", torch.float32), ("scale", torch.bfloat16))
    }
    fastensor.save({**state, "embedding": torch.ones(4)}, tmp_path / "x")
    assert main(["inspect", str(tmp_path / "x")]) == 0
    shown = capsys.readouterr().out
    assert [line.split() for line in shown.splitlines()[3:11] if line] == [
        ["dtype", "tensors", "parameters", "size"],
        ["float32", "151", "454", "1.77", "KiB"],
        ["bfloat16", "150", "450", "900", "B"],
        ["names", "tensors", "parameters", "dtype", "size"],
        ["layers.*.experts.*.weight", "150", "450", "float32", "1.76", "KiB"],
        ["layers.*.experts.*.scale", "150", "450", "bfloat16", "900", "B"],
        ["embedding", "1", "4", "float32", "16", "B"],
    ]
    assert main(["inspect", str(tmp_path / "x"), "--all"]) == 0
    assert "layers.9.experts.14.scale" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "x"), "--key", "layers.*.experts.3.scale"]) == 0
    assert capsys.readouterr().out.count("bfloat16") == 10
    assert main(["inspect", str(tmp_path / "x"), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["tensors"]) == 301


def test_inspect_summarizes_names_that_have_nothing_in_common(capsys: Any, tmp_path: Path) -> None:
    state = {f"a{number % 20}.b{number}.c": torch.ones(2) for number in range(300)}
    fastensor.save(state, tmp_path / "x")
    assert main(["inspect", str(tmp_path / "x")]) == 0
    lines = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert [f"a{number}.*" for number in range(20)] == [line[0] for line in lines if line[1:] == ["15"]]


def test_inspect_cuts_off_very_many_values_and_groups(capsys: Any, tmp_path: Path) -> None:
    tensors = {f"t{number}": torch.ones(1) for number in range(250)}
    fastensor.save({**tensors, "steps": {str(number): number for number in range(300)}}, tmp_path / "x")
    assert main(["inspect", str(tmp_path / "x")]) == 0
    shown = capsys.readouterr().out
    assert shown.count("which --all shows") == 2
    assert "t249" not in shown
    assert "steps.299" not in shown
    assert main(["inspect", str(tmp_path / "x"), "--all"]) == 0
    shown = capsys.readouterr().out
    assert "t249" in shown
    assert "steps.299" in shown
