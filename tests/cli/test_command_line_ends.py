"""How commands end: what they print cannot be written, a flag is wrong, or a program reads their JSON."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import command_line

import fastensor
from fastensor.files.printed import output_errors

LIGHT = (["--help"], ["--version"], ["convert", "--help"], ["verfy"], ["verify"], ["dictionary", "show", "--all"])
"""Arguments of programs that start fast."""
LAUNCHER = ("-c", "from fastensor_accelerate.launcher import main; main()")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    fastensor.save({"w": torch.ones(3)}, tmp_path / "x.ckpt")
    return tmp_path / "x.ckpt"


@pytest.fixture(scope="module")
def closed() -> Any:
    """The end of a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


def ended(*arguments: object, **streams: Any) -> tuple[int, str]:
    """The status of a program, and what it says on the stream that it was not given."""
    taken = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    done = subprocess.run([sys.executable, *map(str, arguments)], text=True, check=False, timeout=120, **taken)
    return done.returncode, done.stdout or done.stderr or ""


# the output


def test_a_closed_pipe_ends_every_command_as_other_unix_tools(saved: Path, closed: int) -> None:
    for arguments in (["inspect", saved], ["inspect", "--json", saved], *LIGHT):
        kind = "stderr" if arguments[0] in ("verfy", "verify") else "stdout"
        assert ended("-m", "fastensor", *arguments, **{kind: closed}) == (141, ""), arguments
    assert ended("-u", "-m", "fastensor", "inspect", saved, stdout=closed) == (141, "")


def test_output_that_the_shell_has_closed_is_missed_by_nobody(saved: Path) -> None:
    line = f"{sys.executable} -m fastensor inspect {saved} >&-"
    done = subprocess.run(line, shell=True, text=True, capture_output=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_error_is_no_other_one_because_the_output_is_closed(closed: int) -> None:
    code = """
import sys
from fastensor.files.printed import output_errors
sys.stdout = open(1, "w", closefd=False)  # PYTHONUNBUFFERED may be set
with output_errors("x"):
    print("y")
    raise RuntimeError("a bug")
"""
    status, said = ended("-c", code, stdout=closed)
    assert status == 1
    assert said.endswith("RuntimeError: a bug\n")


def test_a_closed_pipe_ends_the_launcher_as_other_unix_tools(closed: int) -> None:
    # Accelerate before 1.15 fails if the shell does not find it.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    assert ended(*LAUNCHER, "env", stdout=closed, env={**os.environ, "PATH": path}) == (141, "")


def test_an_error_that_nobody_reads(closed: int) -> None:
    assert ended("-m", "fastensor", "data", "inspect", "nowhere", stderr=closed) == (141, "")


def test_a_full_disk_is_named(saved: Path) -> None:
    with open("/dev/full", "w") as full:
        for arguments in (["inspect", saved], ["inspect", "--json", saved]):
            status, said = ended("-m", "fastensor", *arguments, stdout=full)
            assert (status, said.count("No space left on device"), "Traceback" in said) == (1, 1, False)


def test_another_broken_pipe_is_an_error_like_others() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours, pytest.raises(BrokenPipeError), output_errors("test"):
        ours.send(b"x")


# JSON


@pytest.mark.parametrize(
    "arguments",
    [["inspect", "nowhere"], ["diff", "nowhere", "x"], ["convert", "nowhere", "x.pt"], ["data", "inspect", "nowhere"]],
)
def test_a_program_that_wants_json_gets_it_for_what_is_not_there(capsys: Any, arguments: list[str]) -> None:
    status, out, err = command_line(capsys, *arguments, "--json")
    assert (status, "nowhere" in json.loads(out)["error"]) == (1, True)
    assert err == f"fastensor: {json.loads(out)['error']}\n"


def test_json_of_several_files_has_those_that_cannot_be_read(capsys: Any, saved: Path) -> None:
    status, out, err = command_line(capsys, "inspect", "--json", "nowhere", saved)
    broken, sound = json.loads(out)
    assert (status, broken["path"], sound["path"]) == (1, "nowhere", str(saved))
    assert err == f"fastensor: {broken['error']}\n"
    assert command_line(capsys, "inspect", "nowhere")[1] == "", "people read the error once"


# statuses


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["provision", "up", "os:getcwd", "--workers", "0"], "--workers is at least 1, found 0"),
        (["provision", "up", "os:getcwd", "--workers", "0", "--detach"], "--workers is at least 1, found 0"),
        (["provision", "up", "os:getcwd", "--listen", "x:1"], "--listen is gone: fastensor provision up --engine ray"),
        (["provision", "up", "os:getcwd", "--address", "x:1"], "only --engine ray has the address of a cluster"),
        (["provision", "up", "no.such:name"], "found 'no.such:name'"),
        (
            ["provision", "status", "x"],
            "local:NAME or ray:CLUSTER/NAME, found 'x'",
        ),
        (["convert", "x", "y", "--backend", "direkt"], "did you mean 'direct'?"),
    ],
)
def test_wrong_arguments_end_with_2(capsys: Any, saved: Path, arguments: list[str], said: str) -> None:
    status, out, err = command_line(
        capsys, *(saved if one == "x" and "convert" in arguments else one for one in arguments)
    )
    assert (status, out) == (2, "")
    assert said in err


@pytest.mark.parametrize("flag", ["--fastensor_bakend=direct", "--fastensor_backend=direkt", "--no_such_flag"])
def test_wrong_flags_of_the_launcher_end_with_2(flag: str) -> None:
    assert ended(*LAUNCHER, "launch", "--cpu", flag)[0] == 2


def test_status_without_a_service_says_how_there_is_one(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastensor.cli.services._supervisors", lambda: iter(()))
    for command in ("status", "down"):
        status, _, err = command_line(capsys, "provision", command)
        assert status == 1
        assert err == (
            "fastensor: no data service runs here that fastensor provision up has started; name the ADDRESS of another "
            "one\n"
        )
