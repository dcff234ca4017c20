"""The command line: how it answers, what it refuses, what it shows. What commands do is tested beside the library."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
from programs import command_line

import fastensor
from fastensor.checkpoint.tools.conversion.copying import cast_bytes
from fastensor.cli.errors import in_flags
from fastensor.files import progress_bar

WEIGHTS = {
    "model.a": torch.arange(600.0).reshape(20, 30),
    "model.b": torch.ones(7, dtype=torch.bfloat16),
    "head": torch.arange(5),
}
CHECKPOINT = {"state_dict": WEIGHTS, "epoch": 3, "optimizer": {"step": 5}}


class Attack:
    """What a file runs when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("false",)


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    fastensor.save(CHECKPOINT, tmp_path / "x.ckpt")
    return tmp_path / "x.ckpt"


@pytest.fixture
def tensors(tmp_path: Path) -> Path:
    fastensor.save(WEIGHTS, tmp_path / "x.safetensors")
    return tmp_path / "x.safetensors"


@pytest.fixture
def model(tensors: Path, tmp_path: Path) -> Path:
    """The folder of a model in several files."""
    fastensor.convert(tensors, tmp_path / "model", container="huggingface", shard_nbytes=50)
    assert len([*(tmp_path / "model").glob("*.safetensors")]) == 3
    return tmp_path / "model"


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert sorted(found) == sorted(expected)
    assert all(found[name].dtype == one.dtype and torch.equal(found[name], one) for name, one in expected.items())


# how it answers

LIGHT = ("--help", "verify --help", "inspect --help", "diff --help", "convert --help", "doctor --help", "tune --help")
LIGHT += ("dictionary --help", "dictionary show --help", "data --help", "data index --help", "--version", "verfy")


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from fastensor.cli import main\n"
        f"for line in {LIGHT!r}:\n"
        "    assert main(line.split()) in (0, 2), line\n"
        "print([name for name in ('torch', 'numpy', 'fsspec', 'rich', 'pydantic') if name in sys.modules])\n"
    )
    done = programs.run("-c", code, cold=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "Did you mean 'verify'?" in done.stderr


@pytest.mark.parametrize("command", [line.split()[:-1] for line in LIGHT if line.endswith("--help")])
def test_help_says_how_to_use_it(capsys: Any, command: list[str]) -> None:
    status, out, err = command_line(capsys, *command, "--help")
    assert (status, err) == (0, "")
    assert out.startswith(f"Usage: {' '.join(['fastensor', *command])} ")
    assert "..." not in out.replace("[ARGS]...", "").replace("FILE]...", "").replace("{FILE}...", "").replace(
        "SIZE,...", ""
    ), "no sentence is cut off"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["verfy"], "Did you mean 'verify'?"),
        (["verify", "--jsn", "x"], "--json"),
        (["dictionary", "shw"], "Did you mean 'show'?"),
        (["verify"], "Missing argument 'FILE'"),
        (["diff", "a"], "Missing argument 'B'"),
        (["diff", "a", "b", "--rtol", "-1"], "--rtol"),
        (["dictionary", "show", "--tensors", "--activations"], "name one of them"),
        ([], "Missing command"),
    ],
)
def test_typos(capsys: Any, arguments: list[str], said: str) -> None:
    status, out, err = command_line(capsys, *arguments)
    assert (status, out) == (2, "")
    assert said in err
    assert err.startswith("Usage: fastensor")


def test_the_shell_completes() -> None:
    script = Path(sys.executable).with_name("fastensor")

    def complete(words: str) -> list[str]:
        environment = {
            **os.environ, "_FASTENSOR_COMPLETE": "complete_bash", "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split(" ")) - 1),
        }  # fmt: skip
        done = subprocess.run([script], env=environment, capture_output=True, text=True, timeout=120)
        return done.stdout.split()

    assert complete("fastensor ver") == ["verify"]
    assert "--rename" in complete("fastensor convert --ren")
    assert complete("fastensor convert a b --dtype bf") == ["bfloat16"]


def test_the_version(capsys: Any) -> None:
    assert command_line(capsys, "--version") == (0, f"fastensor {fastensor.__version__}\n", "")


# colours and bars


def test_colours_are_for_terminals(capsys: Any, ckpt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert "\x1b" not in command_line(capsys, "verify", ckpt)[1]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert "\x1b[32mintact" in command_line(capsys, "verify", ckpt)[1], "green"
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[32m" not in command_line(capsys, "verify", ckpt)[1]


def test_a_bar_waits_for_a_second(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    now = [0.0]
    monkeypatch.setattr(progress_bar.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress_bar.progress_bar("x") as show:
        show(1 << 20, 4 << 20)
        assert capsys.readouterr().err == ""
        now[0] = 1.5
        show(3 << 20, 4 << 20)
        err = capsys.readouterr().err
    assert "3.0/4.0 MiB" in err
    assert "2 MiB/s" in err, "the unit of everything else"


# verify


def attack(path: Path, protocol: int = 2) -> None:
    torch.save({"w": torch.ones(3), "x": Attack()}, path, pickle_protocol=protocol)


@pytest.mark.parametrize("protocol", [2, 4])
def test_code_in_an_intact_file_is_flagged(capsys: Any, tmp_path: Path, ckpt: Path, protocol: int) -> None:
    attack(tmp_path / "bad.pt", protocol)
    status, out, err = command_line(capsys, "verify", ckpt, tmp_path / "bad.pt")
    assert (status, err) == (4, "")
    assert "intact, names code" in out
    assert protocol == 4 or "posix.system" in out
    assert command_line(capsys, "verify", "--allow-code", tmp_path / "bad.pt")[0] == 0
    _, out, _ = command_line(capsys, "verify", "--json", ckpt, tmp_path / "bad.pt")
    found = json.loads(out)
    assert [(one["result"], bool(one["code"])) for one in found] == [("intact", False), ("intact", True)]


def test_code_is_flagged_wherever_it_is(capsys: Any, tmp_path: Path) -> None:
    import zipfile

    attack(tmp_path / "bad.pt")
    with zipfile.ZipFile(tmp_path / "bad.pt") as old, zipfile.ZipFile(tmp_path / "z", "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    assert fastensor.verify(tmp_path / "z").code == ("posix.system",)
    torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), tmp_path / "script.pt")
    assert "TorchScript" in fastensor.verify(tmp_path / "script.pt").code[0]
    raw = tmp_path / "raw.pt"
    torch.save({"w": torch.ones(3)}, raw)
    with zipfile.ZipFile(raw) as old, zipfile.ZipFile(tmp_path / "odd.pt", "w") as new:
        for name in old.namelist():
            new.writestr(name, b"cposix\nsystem\n(Vfalse\ntR." if name.endswith("data.pkl") else old.read(name))
    assert "the pickle (" in fastensor.verify(tmp_path / "odd.pt").code[0], "torch cannot say what it calls"


def test_statuses_by_weight(capsys: Any, tmp_path: Path, ckpt: Path) -> None:
    """Damage before code before missing checksums."""
    attack(tmp_path / "bad.pt")
    torch.save(WEIGHTS, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "cut").write_bytes(ckpt.read_bytes()[:999])
    assert command_line(capsys, "verify", ckpt, tmp_path / "old.pt")[0] == 3
    assert command_line(capsys, "verify", tmp_path / "old.pt", tmp_path / "bad.pt")[0] == 4
    assert command_line(capsys, "verify", tmp_path / "old.pt", tmp_path / "bad.pt", tmp_path / "cut")[0] == 1
    both = ("--allow-code", "--allow-unchecked")
    assert command_line(capsys, "verify", *both, tmp_path / "old.pt", tmp_path / "bad.pt")[0] == 0


def test_a_model_in_several_files_is_verified(capsys: Any, model: Path) -> None:
    status, out, _ = command_line(capsys, "verify", model)
    assert (status, out.count("intact")) == (0, 3)


# inspect


def test_inspect_in_numbers(capsys: Any, tmp_path: Path) -> None:
    shared = torch.ones(1000)
    fastensor.save({"a": shared, "b": shared, "half": torch.ones(10, dtype=torch.float16)}, tmp_path / "x")
    _, out, _ = command_line(capsys, "inspect", tmp_path / "x")
    assert "3 tensors of 7.83 KiB, 1.01 thousand parameters, 3.93 KiB in memory; 0 other values\n" in out
    assert ["float32", "2", "1,000", "7.81", "KiB"] in [line.split() for line in out.splitlines()]
    assert ["float16", "1", "10", "20", "B"] in [line.split() for line in out.splitlines()]
    _, out, _ = command_line(capsys, "inspect", "--json", tmp_path / "x")
    found = json.loads(out)
    assert found["totals"] == {"tensors": 3, "parameters": 1010, "nbytes": 8020}
    assert (found["memory_nbytes"], found["dtypes"]["float16"]["parameters"]) == (4020, 10)


def test_inspect_shortens_long_names(capsys: Any, tmp_path: Path) -> None:
    name = f"callbacks.EarlyStopping{{{'x' * 100}}}"
    fastensor.save({name: {"best": torch.ones(2), "patience": 3}, "epoch": 1}, tmp_path / "x.ckpt")
    _, out, _ = command_line(capsys, "inspect", tmp_path / "x.ckpt")
    assert all(len(line) <= 120 for line in out.splitlines()[1:])
    assert re.search(r"^callbacks\.EarlyStopping.*…x+}\.best +Tensor", out, re.MULTILINE)
    assert re.search(r"^callbacks\.EarlyStopping.*…x+}\.patience +3$", out, re.MULTILINE)
    _, out, _ = command_line(capsys, "inspect", "--all", tmp_path / "x.ckpt")
    assert f"{name}.best " in out
    assert f"{name}.patience " in out


def test_inspect_by_prefix(capsys: Any, ckpt: Path) -> None:
    _, out, _ = command_line(capsys, "inspect", ckpt, "--depth", "2")
    rows = [line.split() for line in out.splitlines()]
    assert ["state_dict.model", "2", "607", "bfloat16,", "float32", "2.36", "KiB"] in rows
    assert ["state_dict.head", "1", "5", "int64", "40", "B"] in rows
    _, out, _ = command_line(capsys, "inspect", ckpt, "--depth", "1", "--json")
    assert json.loads(out)["prefixes"]["state_dict"]["parameters"] == 612


def test_inspect_several_files(capsys: Any, ckpt: Path, tensors: Path, tmp_path: Path) -> None:
    status, out, err = command_line(capsys, "inspect", ckpt, tmp_path / "absent", tensors)
    assert status == 1
    assert f"{ckpt}: torch" in out
    assert f"{tensors}: safetensors" in out
    assert "absent" in err
    _, out, _ = command_line(capsys, "inspect", "--json", ckpt, tensors)
    assert [one["container"] for one in json.loads(out)] == ["torch", "safetensors"]


def test_inspect_a_model_in_several_files(capsys: Any, model: Path) -> None:
    for path in (model, model / "model.safetensors.index.json"):
        status, out, _ = command_line(capsys, "inspect", path)
        assert status == 0
        assert "huggingface" in out
        assert "3 tensors of 2.4 KiB, 612 parameters" in out
        for text in ("model.a", "head", "total_size", "files"):
            assert text in out
    (model / "model-00002-of-00003.safetensors").rename(model / "gone")
    status, _, err = command_line(capsys, "inspect", model)
    assert (status, "model-00002-of-00003.safetensors" in err) == (1, True)


def test_an_index_of_another_model(capsys: Any, model: Path) -> None:
    index = model / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("head", "tail"))
    for command in (["inspect", model], ["convert", model, model / "x.pt"], ["diff", model, model]):
        status, _, err = command_line(capsys, *command)
        assert status == 1
        assert "'tail' is not in it" in err


# diff


def test_diff_with_tolerances(capsys: Any, tmp_path: Path) -> None:
    for name, off in (("a", 0.0), ("b", 1e-3)):
        fastensor.save({"w": torch.full((10,), 2.0) + off, "n": torch.tensor([float("nan")])}, tmp_path / name)
    fastensor.save({"w": torch.full((10,), 2.0)}, tmp_path / "c")
    paths = (tmp_path / "a", tmp_path / "b")
    assert command_line(capsys, "diff", *paths)[0] == 1
    assert command_line(capsys, "diff", *paths, "--atol", "0.002")[0] == 0
    assert command_line(capsys, "diff", *paths, "--rtol", "0.001")[0] == 0
    assert command_line(capsys, "diff", *paths, "--rtol", "0.0001")[0] == 1
    status, out, _ = command_line(capsys, "diff", *paths, "--no-values")
    assert (status, "2 the same (values were not compared)" in out) == (0, True)
    status, out, _ = command_line(capsys, "diff", tmp_path / "a", tmp_path / "c", "--no-values")
    assert (status, "only in A" in out) == (1, True)


def test_diff_of_a_model_in_several_files(capsys: Any, model: Path, tensors: Path) -> None:
    assert command_line(capsys, "diff", model, tensors)[0] == 0
    assert command_line(capsys, "diff", tensors, model / "model.safetensors.index.json")[0] == 0


# convert


def test_nothing_is_replaced_without_force(capsys: Any, ckpt: Path, tensors: Path) -> None:
    before = tensors.read_bytes()
    arguments = ("convert", ckpt, tensors, "--root", "state_dict", "--drop", "--dtype", "float64")
    status, _, err = command_line(capsys, *arguments)
    assert (status, tensors.read_bytes()) == (1, before)
    assert "it is there already; --force replaces it" in err
    assert command_line(capsys, *arguments, "--force")[0] == 0
    assert fastensor.load(tensors)["model.a"].dtype == torch.float64


def test_nothing_is_replaced_at_a_url(capsys: Any, tensors: Path) -> None:
    assert command_line(capsys, "convert", tensors, "memory://forced.pt")[0] == 0
    assert command_line(capsys, "convert", tensors, "memory://forced.pt")[0] == 1
    assert command_line(capsys, "convert", tensors, "memory://forced.pt", "-f")[0] == 0


@pytest.mark.parametrize("spelling", ["itself", "a symlink", "a hard link", "its folder"])
def test_the_source_is_never_replaced(capsys: Any, tensors: Path, spelling: str) -> None:
    before = tensors.read_bytes()
    target = tensors.with_name("other.safetensors")
    if spelling == "a symlink":
        target.symlink_to(tensors)
    elif spelling == "a hard link":
        os.link(tensors, target)
    else:
        target = tensors
    source = tensors.parent if spelling == "its folder" else tensors
    if spelling == "its folder":
        tensors = tensors.rename(tensors.with_name("model.safetensors"))
        target = tensors
    status, _, err = command_line(capsys, "convert", source, target, "--force")
    assert (status, "the target is the source" in err) == (1, True)
    assert tensors.read_bytes() == before


def test_what_is_left_out_is_listed(capsys: Any, ckpt: Path, tmp_path: Path) -> None:
    target = tmp_path / "y.safetensors"
    status, _, err = command_line(capsys, "convert", ckpt, target, "--root", "state_dict")
    assert (status, target.exists()) == (1, False)
    assert "the conversion leaves out: epoch, optimizer; --drop converts the rest" in err
    status, out, _ = command_line(capsys, "convert", ckpt, target, "--root", "state_dict", "--drop")
    assert (status, out.splitlines()[-1]) == (0, "left out: epoch, optimizer")
    assert_same(fastensor.load(target), WEIGHTS)


@pytest.mark.parametrize(
    ("target", "container"), [("y.safetensors", "safetensors"), ("y.safetensor", "torch"), ("y/", "huggingface")]
)
def test_the_container_is_named(capsys: Any, tensors: Path, tmp_path: Path, target: str, container: str) -> None:
    """An ending that is misspelt makes a file of torch."""
    _, out, _ = command_line(capsys, "convert", tensors, f"{tmp_path}/{target}")
    assert out.startswith(f"{tmp_path}/{target}: {container}, ")


def test_values_and_metadata_are_left_out_only_by_drop(capsys: Any, tmp_path: Path) -> None:
    fastensor.save({**WEIGHTS, "step": 3}, tmp_path / "flat.pt")
    fastensor.save(WEIGHTS, tmp_path / "meta.safetensors", metadata={"format": "pt", "made": "here"})
    for source, target, lost in (("flat.pt", "a.safetensors", "step"), ("meta.safetensors", "b.pt", "metadata 'made'")):
        paths = tmp_path / source, tmp_path / target
        status, _, err = command_line(capsys, "convert", *paths)
        assert (status, f"leaves out: {lost};" in err) == (1, True)
        assert command_line(capsys, "convert", *paths, "--drop")[0] == 0
        assert_same(fastensor.load(paths[1]), WEIGHTS)
    with pytest.raises(fastensor.UnsupportedContentError, match="'step' in it is no tensor"):
        fastensor.convert(tmp_path / "flat.pt", tmp_path / "c.safetensors")


@pytest.mark.parametrize("target", ["y.safetensors", "y.pt"])
def test_another_dtype(capsys: Any, tensors: Path, tmp_path: Path, target: str) -> None:
    assert command_line(capsys, "convert", tensors, tmp_path / target, "--dtype", "bfloat16")[0] == 0
    expected = {name: one.bfloat16() if one.is_floating_point() else one for name, one in WEIGHTS.items()}
    assert_same(fastensor.load(tmp_path / target), expected)
    assert fastensor.verify(tmp_path / target).complete


def test_a_damaged_tensor_is_not_cast(capsys: Any, tensors: Path, tmp_path: Path) -> None:
    data = bytearray(tensors.read_bytes())
    data[data.index(WEIGHTS["model.a"].numpy().tobytes()) + 50] ^= 1
    tensors.write_bytes(data)
    for target in ("y.safetensors", "y.pt"):
        status, _, err = command_line(capsys, "convert", tensors, tmp_path / target, "--dtype", "float64")
        assert (status, "model.a" in err) == (1, True)
        assert not (tmp_path / target).exists()


def test_values_that_would_become_infinite(capsys: Any, tmp_path: Path) -> None:
    fastensor.save({"w": torch.tensor([1.0, -1e6, float("inf")])}, tmp_path / "x.pt")
    status, _, err = command_line(capsys, "convert", tmp_path / "x.pt", tmp_path / "y.pt", "--dtype", "float16")
    assert status == 1
    assert "'w': 1 finite values would be infinite in torch.float16, the largest is 1e+06" in err
    assert not (tmp_path / "y.pt").exists()


def test_the_file_of_a_value_that_would_become_infinite_is_named(tmp_path: Path) -> None:
    fastensor.save_sharded({"a": torch.ones(9), "w": torch.full((9,), 1e6)}, tmp_path / "model", shard_nbytes=40)
    with pytest.raises(fastensor.UnsupportedContentError) as caught:
        fastensor.convert(tmp_path / "model", tmp_path / "y.safetensors", dtype=torch.float16, rename={"w": "x"})
    shard = tmp_path / "model" / "model-00002-of-00002.safetensors"
    assert str(caught.value).startswith(f"{shard}: 'x': 9 finite values")


class _Memory:
    """The bytes of a tensor that is there."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._data = tensor.view(torch.uint8).numpy().data

    def nbytes(self) -> int:
        return self._data.nbytes

    def readinto(self, begin: int, buffer: memoryview) -> int:
        import zlib

        buffer[:] = self._data[begin : begin + buffer.nbytes]
        return zlib.crc32(buffer)

    def check(self, crc32: int) -> None:
        import zlib

        assert crc32 == zlib.crc32(self._data)


@pytest.mark.parametrize(("dtype", "wanted"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float64)])
def test_bytes_are_cast_whatever_pieces_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, wanted: torch.dtype
) -> None:
    monkeypatch.setattr("fastensor.checkpoint.tools.conversion.copying._PIECE_ELEMENTS", 7)
    tensor = torch.randn(50, dtype=dtype)
    expected = tensor.to(wanted).view(torch.uint8).numpy().tobytes()
    found = cast_bytes(_Memory(tensor), dtype, wanted, "x")
    assert found.nbytes() == len(expected)
    for size in (1, 3, 8, 64, 1000):
        buffer = bytearray(len(expected))
        for begin in range(0, len(buffer), size):
            found.readinto(begin, memoryview(buffer)[begin : begin + size])
        found.check(0)
        assert buffer == expected


def test_new_names(capsys: Any, tensors: Path, tmp_path: Path) -> None:
    arguments = ("--rename", "model.*=encoder.*", "--rename", "head=tail")
    assert command_line(capsys, "convert", tensors, tmp_path / "y.pt", *arguments)[0] == 0
    assert sorted(fastensor.load(tmp_path / "y.pt")) == ["encoder.a", "encoder.b", "tail"]
    status, _, err = command_line(capsys, "convert", tensors, tmp_path / "z.pt", "--rename", "nobody=x")
    assert (status, "nothing in it can be renamed by 'nobody'" in err) == (1, True)


@pytest.mark.parametrize("target", ["one.safetensors", "one.pt", "again/"])
@pytest.mark.parametrize("whole", [False, True])
def test_several_files_become_others(capsys: Any, model: Path, tmp_path: Path, target: str, whole: bool) -> None:
    source = model if whole else model / "model.safetensors.index.json"
    done: list[tuple[int, int]] = []
    status, _, err = command_line(
        capsys, "convert", source, f"{tmp_path}/{target}", "--shard-size", "2450", "--dtype", "float32"
    )
    assert (status, err) == (0, "")
    found: dict[str, torch.Tensor] = {}
    for path in (tmp_path / target).glob("*.safetensors") if target.endswith("/") else [tmp_path / target]:
        found |= fastensor.load(path)
        done.append((len(found), path.stat().st_size))
    assert len(done) == (2 if target.endswith("/") else 1)
    assert_same(found, {name: one.float() if one.is_floating_point() else one for name, one in WEIGHTS.items()})


def test_a_model_is_not_replaced_by_one_of_its_files(capsys: Any, model: Path) -> None:
    for name in ("model-00001-of-00003.safetensors", "model.safetensors.index.json"):
        before = (model / name).read_bytes()
        status, _, err = command_line(capsys, "convert", model, model / name, "--force", "--container", "safetensors")
        assert (status, "the target is the source, or one of its files" in err) == (1, True)
        with pytest.raises(fastensor.UnsupportedContentError, match="the target is the source, or one of its files"):
            fastensor.convert(model, model / name, container="safetensors")
        assert (model / name).read_bytes() == before
    assert command_line(capsys, "convert", model, model, "--force")[0] == 1


def test_many_runs_of_two_files_are_read_in_turn(tmp_path: Path) -> None:
    """A target in the order of names, of which every other one is in the other file."""
    state = {f"t{number}": torch.full((50,), number) for number in range(9)}
    names = list(state)
    (tmp_path / "m").mkdir()
    for file, chosen in (("a.safetensors", names[::2]), ("b.safetensors", names[1::2])):
        fastensor.save({name: state[name] for name in chosen}, tmp_path / "m" / file)
    places = {name: f"{'ab'[number % 2]}.safetensors" for number, name in enumerate(names)}
    (tmp_path / "m" / "x.index.json").write_text(json.dumps({"weight_map": places}))
    done: list[tuple[int, int]] = []
    fastensor.convert(tmp_path / "m", tmp_path / "y.safetensors", progress=lambda *now: done.append(now))
    assert_same(fastensor.load(tmp_path / "y.safetensors"), state)
    assert done[-1] == (9 * 400, 9 * 400)


def test_errors_are_in_the_words_of_the_command_line(capsys: Any, tmp_path: Path, tensors: Path) -> None:
    base = torch.arange(100.0)
    fastensor.save({"a": base, "b": base[10:20]}, tmp_path / "tied.ckpt")
    _, _, err = command_line(capsys, "convert", tmp_path / "tied.ckpt", tmp_path / "y.pt")
    assert "pass --copy-ties to write each" in err
    _, _, err = command_line(capsys, "convert", tensors, tmp_path / "y.pt", "--root", "model")
    assert "leave --root 'model' out" in err
    assert in_flags("nothing of Python's in it") == "nothing of Python's in it"


# the package


def test_reprs_say_what_there_is(tmp_path: Path) -> None:
    from fastensor_lightning import FastensorCheckpointIO, SSDActivationOffload

    plugin = FastensorCheckpointIO(asynchronous=True)
    assert "FastensorCheckpointIO(backend='auto', durable=True" in repr(plugin)
    assert "asynchronous=True" in repr(plugin)
    plugin.save_checkpoint({"w": torch.ones(1)}, tmp_path / "x.ckpt")
    plugin.teardown()
    assert "last saved" in repr(plugin)
    assert repr(SSDActivationOffload()) == "<SSDActivationOffload()>"
    with fastensor.TensorStore(tmp_path / "t") as store:
        assert repr(store).startswith("<TensorStore '")
    assert "closed" in repr(store)
    assert repr(fastensor.Selector()) == "<Selector: explores, mode 'write', 0 sizes known, 0 transfers>"


def test_others_are_values(tmp_path: Path) -> None:
    state = {"epoch": 3, "lr": 0.5, "name": "x", "sizes": [1, 2], "none": None, "bytes": b"ab", "w": torch.ones(1)}
    fastensor.save({**state, "other": Attack()}, tmp_path / "x")
    with fastensor.open(tmp_path / "x") as checkpoint:
        others = dict(checkpoint.others)
        assert repr(others.pop("other")) == "<posix.system>"
        assert others == {name: value for name, value in state.items() if name != "w"}
        assert checkpoint.others_in_words["epoch"] == "3"
    assert pickle.loads(pickle.dumps(fastensor.verify(tmp_path / "x"))).code == ("posix.system",)


def test_integers_that_doubles_do_not_tell_apart(tmp_path: Path) -> None:
    extremes = [2**62 + 1, 2**63 - 1, 5, 0]
    fastensor.save({"w": torch.tensor(extremes)}, tmp_path / "a.pt")
    fastensor.save({"w": torch.tensor([2**62, -(2**63), 6, 0])}, tmp_path / "b.pt")
    for atol, count in ((0.5, 3), (1.0, 1)):
        found = fastensor.diff(tmp_path / "a.pt", tmp_path / "b.pt", atol=atol)
        assert found.tensors[0].elements == count


def test_one_value_of_a_strided_tensor_is_compared(tmp_path: Path) -> None:
    """The stride of a dimension with one element may be any."""
    for name, value in (("a.pt", 3.0), ("b.pt", 4.0)):
        one = torch.full((8,), value)[::2][:1]
        assert one.stride() == (2,)
        fastensor.save({"w": one}, tmp_path / name)
    assert fastensor.diff(tmp_path / "a.pt", tmp_path / "a.pt").same
    (found,) = fastensor.diff(tmp_path / "a.pt", tmp_path / "b.pt").tensors
    assert found.largest == 1


def test_a_broken_index_hides_no_other_results(capsys: Any, tmp_path: Path, ckpt: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("{")
    status, out, _ = command_line(capsys, "verify", ckpt, tmp_path / "model.safetensors.index.json")
    assert status == 1
    assert "intact" in out
    assert "unreadable" in out


def test_a_name_that_is_renamed_twice(capsys: Any, tmp_path: Path, tensors: Path) -> None:
    arguments = ("convert", tensors, tmp_path / "y.pt", "--rename", "head=a", "--rename", "head=b")
    status, _, err = command_line(capsys, *arguments)
    assert (status, "'head' is given twice" in err) == (2, True)


def test_one_message_names_all_that_a_conversion_needs(capsys: Any, tmp_path: Path) -> None:
    """The checkpoint is Lightning's; a second one has tensors that share memory, too."""
    base = torch.arange(100.0)
    lightning = {"epoch": 3, "state_dict": {"a": base}, "optimizer_states": [{"state": {0: {"exp_avg": base + 1}}}]}
    fastensor.save(lightning, tmp_path / "x.ckpt")
    convert = ("convert", tmp_path / "x.ckpt", tmp_path / "y.safetensors")
    status, _, err = command_line(capsys, *convert)
    assert (status, "its outermost dict holds no dense tensors" in err) == (1, True)
    assert "choose one of its dicts of tensors with --root, and leave the rest out with --drop: 'state_dict', " in err
    assert command_line(capsys, *convert, "--root", "state_dict", "--drop")[0] == 0
    fastensor.save({**lightning, "state_dict": {"a": base, "b": base[10:20]}}, tmp_path / "x.ckpt")
    status, _, err = command_line(capsys, *convert, "--root", "state_dict", "--force")
    assert status == 1
    assert "leaves out: epoch, optimizer_states; --drop converts the rest. Also, " in err
    assert "pass --copy-ties to write each" in err
    assert command_line(capsys, *convert, "--root", "state_dict", "--force", "--drop", "--copy-ties")[0] == 0


def test_a_difference_fits_the_screen(capsys: Any, tmp_path: Path) -> None:
    for number in (1, 2):
        state = {"w": torch.tensor([float(number)]), "x" * 200: number, "path": "/" + str(number) * 100}
        fastensor.save(state, tmp_path / f"{number}.ckpt")
    _, out, _ = command_line(capsys, "diff", tmp_path / "1.ckpt", tmp_path / "2.ckpt")
    assert max(map(len, out.splitlines())) < 170
    assert "1 element of float32 1" in out
    _, out, _ = command_line(capsys, "diff", tmp_path / "1.ckpt", tmp_path / "2.ckpt", "--all")
    assert "x" * 200 in out


def test_one_of_a_thing_is_in_the_singular(capsys: Any, tmp_path: Path) -> None:
    fastensor.save({"w": torch.ones(1), "epoch": 3}, tmp_path / "x.ckpt")
    fastensor.save({"w": torch.ones(1), "epoch": 4}, tmp_path / "y.ckpt")
    out = command_line(capsys, "inspect", tmp_path / "x.ckpt")[1]
    assert "1 tensor of 4 B, 1 parameter, 4 B in memory; 1 other value\n" in out
    out = command_line(capsys, "diff", tmp_path / "x.ckpt", tmp_path / "y.ckpt")[1]
    assert out.splitlines()[-1] == "1 difference, 1 the same"
