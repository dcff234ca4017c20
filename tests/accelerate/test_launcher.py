"""Scripts that are launched: they see what they see without us, and their states go through Fastensor."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import accelerate
import pytest
import yaml
from packaging.version import Version
from programs import TIMEOUT_SECONDS, run

import fastensor

JOB = Path(__file__).with_name("job.py")
OURS = "from fastensor_accelerate.launcher import main; main()"
STOCKS = "from accelerate.commands.accelerate_cli import main; main()"
SHOWS = """
import json, sys
same = sys.modules["__main__"].__dict__ is globals()
kinds = [type(__loader__).__name__, type(__builtins__).__name__]
print(json.dumps([sys.argv, sys.path[0], len(sys.path), __name__, __file__, repr(__spec__), __package__, kinds, same]))
"""
"""A script that prints what of its process it sees."""


def launched(*arguments: object, folder: Path, program: str = OURS, check: bool = True, **variables: str) -> Any:
    return run("-c", program, "launch", *arguments, folder=folder, check=check, HF_HOME=str(folder), **variables)


def saved_by_fastensor(folder: Path) -> bool:
    for name in ("optimizer.bin", "random_states_0.pkl"):
        fastensor.verify(folder / name)
    return fastensor.inspect(folder / "model.safetensors").checked


def seen_in(folder: Path, rank: int = 0) -> dict[str, Any]:
    return dict(json.loads((folder / f"seen_{rank}.json").read_text()))


# --- what a script sees


@pytest.mark.parametrize("script", ["train.py", "sub/train.py", "link.py", "absolute"])
def test_a_script_sees_what_it_sees_without_us(tmp_path: Path, script: str) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("train.py", "sub/train.py"):
        (tmp_path / name).write_text(SHOWS)
    (tmp_path / "link.py").symlink_to("sub/train.py")
    path = str(tmp_path / "sub/train.py") if script == "absolute" else script
    arguments = [path, "--fastensor", "-m", "--", "x", ""]
    stock = subprocess.run([sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
    ours = run("-m", "fastensor_accelerate", *arguments, folder=tmp_path)
    assert json.loads(ours.stdout) == json.loads(stock.stdout)


def test_a_directory_is_run(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train/__main__.py").write_text("import sys; print(sys.argv, __name__)")
    assert run("-m", "fastensor_accelerate", "train", "-m", folder=tmp_path).stdout == "['train', '-m'] __main__\n"


def test_a_module_sees_what_it_sees_without_us(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/__init__.py").touch()
    (tmp_path / "pkg/train.py").write_text(
        "import json, sys\n"
        "class Mine: pass\n"
        "print(json.dumps([sys.argv, sys.path[0], __name__, __file__, __spec__.name, __package__]))\n"
    )
    arguments = ["-m", "pkg.train", "-m", "x"]
    stock = subprocess.run([sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
    ours = run("-m", "fastensor_accelerate", *arguments, folder=tmp_path)
    assert json.loads(ours.stdout) == json.loads(stock.stdout)


@pytest.mark.parametrize(
    ("code", "status", "last"),
    [
        ("raise ValueError('broken')", 1, "ValueError: broken"),
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('in words')", 1, "in words"),
        ("def f(:", 1, "SyntaxError"),
        (None, 2, "No such file or directory"),
    ],
)
def test_a_script_that_fails(tmp_path: Path, code: str | None, status: int, last: str) -> None:
    if code is not None:
        (tmp_path / "train.py").write_text(f"\n{code}\n")
    stock = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True)
    ours = run("-m", "fastensor_accelerate", "train.py", folder=tmp_path, check=False)
    assert ours.returncode == stock.returncode == status
    assert last in ours.stderr.splitlines()[-1] if last else not ours.stderr
    frames = [line for line in stock.stderr.splitlines() if line.startswith("  File ")]
    assert [line for line in ours.stderr.splitlines() if line.startswith("  File ")][-len(frames) or 99 :] == frames


def test_no_script_and_wrong_options(tmp_path: Path) -> None:
    for arguments in ([], ["-m"]):
        done = run("-m", "fastensor_accelerate", *arguments, check=False)
        assert (done.returncode, done.stderr[:6]) == (2, "usage:")
    done = run("-m", "fastensor_accelerate", "x.py", check=False, ACCELERATE_FASTENSOR_BAKEND="direct")
    assert done.returncode == 2
    assert "has no option 'bakend'; did you mean 'backend'?" in done.stderr


def test_safe_paths_stay_safe_and_classes_of_the_script_are_found_at_exit(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import atexit, pickle, sys\n"
        "class Mine: pass\n"
        "print(sys.path)\n"
        "atexit.register(lambda: print(type(pickle.loads(pickle.dumps(Mine()))) is Mine))\n"
    )
    out = run("-P", "-m", "fastensor_accelerate", "train.py", cold=True, folder=tmp_path).stdout
    assert str(tmp_path) not in out
    assert out.splitlines()[-1] == "True"


def test_the_environment_can_switch_it_off(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import fastensor_accelerate as f; print(f.is_enabled())")
    for value, shown in (("false", "False"), ("true", "True")):
        done = run("-m", "fastensor_accelerate", "train.py", folder=tmp_path, ACCELERATE_USE_FASTENSOR=value)
        assert done.stdout.strip() == shown


# --- launches


def test_config_asks_accelerates_questions_and_ours_and_its_file_launches(tmp_path: Path) -> None:
    answers = [
        ("In which compute environment", "\r"),
        ("Which type of machine", "\r"),
        ("on CPU only", "yes\n"),
        ("torch dynamo", "\n"),
        ("DeepSpeed?", "\n"),
        ("mixed precision", "\r"),
        ("save and load states by Fastensor?", "yes\n"),
        ("What should move the bytes?", "1\r"),
        ("Should save_state return when the state has been copied?", "yes\n"),
        ("Should activations go to an SSD", "no\n"),
    ]
    if Version(accelerate.__version__) < Version("1.13"):
        answers.insert(3, ("Intel PyTorch Extension", "\n"))
    file = tmp_path / "config.yaml"
    out = dialogue([sys.executable, "-c", OURS, "config", "--config_file", str(file)], answers)
    assert f"configuration saved at {file}" in out
    found = yaml.safe_load(file.read_text())
    assert found["use_cpu"] is True
    section = found.pop("fastensor_config")
    assert (section["asynchronous"], section["offload"]) == (True, False)
    assert section["backend"] in out
    theirs = [str(tmp_path / "state"), "--workers", "1", "--fastensor_async", "--", "-m", "--config_file", "x"]
    launched("--config_file", file, JOB, *theirs, folder=tmp_path)
    seen = seen_in(tmp_path / "state")
    assert seen["argv"] == [str(JOB), *theirs]
    assert (seen["file"], seen["path"]) == (str(JOB), str(JOB.parent))
    assert (seen["total"], seen["asynchronous"]) == (56.0, "true")
    assert saved_by_fastensor(tmp_path / "state")


def dialogue(command: list[str], answers: list[tuple[str, str]]) -> str:
    """Run a program on a terminal, and type each answer when its question is shown."""
    ours, terminal = pty.openpty()
    out = ""
    with subprocess.Popen(command, stdin=terminal, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        end = time.monotonic() + TIMEOUT_SECONDS
        try:
            for question, keys in answers:
                asked = len(out)
                while question not in out[asked:]:
                    assert select.select([process.stdout], [], [], TIMEOUT_SECONDS)[0], out
                    shown = os.read(process.stdout.fileno(), 1 << 16).decode()
                    assert shown, out
                    out += shown
                # A menu discards what is typed before it reads single keys.
                while keys.endswith("\r") and termios.tcgetattr(terminal)[3] & termios.ICANON:
                    assert time.monotonic() < end, out
                    assert process.poll() is None, out
                os.write(ours, keys.encode())
        except BaseException:
            process.kill()  # it waits for an answer
            raise
        out += process.stdout.read().decode()
    os.close(ours)
    os.close(terminal)
    assert not process.returncode, out
    return out


def test_two_processes(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps(
            {
                "compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU", "num_processes": 2,
                "use_cpu": True, "main_process_port": 0, "fastensor_config": {"asynchronous": True},
            }
        )
    )  # fmt: skip
    launched("--config_file", file, "--no_fastensor_async", JOB, tmp_path / "state", folder=tmp_path)
    seen = [seen_in(tmp_path / "state", rank) for rank in range(2)]
    assert [(one["rank"], one["processes"], one["asynchronous"]) for one in seen] == [(0, 2, "false"), (1, 2, "false")]
    assert sum(one["total"] for one in seen) == 56.0
    assert saved_by_fastensor(tmp_path / "state")
    fastensor.verify(tmp_path / "state/random_states_1.pkl")


def test_accelerates_launcher_runs_our_module(tmp_path: Path) -> None:
    done = launched("--cpu", "-m", "fastensor_accelerate", JOB, tmp_path / "state", folder=tmp_path, program=STOCKS)
    assert saved_by_fastensor(tmp_path / "state")
    assert seen_in(tmp_path / "state")["asynchronous"] is None
    assert "fastensor: saved 1 state " in done.stderr


def test_a_job_that_fails_ends_as_with_accelerate(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise ValueError('broken')")
    done = launched("--cpu", "--fastensor", "train.py", folder=tmp_path, check=False)
    assert done.returncode == 1
    assert "ValueError: broken" in done.stderr
    assert "CalledProcessError" in done.stderr.splitlines()[-1]


# --- launchers of functions


@pytest.mark.parametrize("launcher", ["debug_launcher(train)", "notebook_launcher(train, num_processes=1)"])
def test_functions_that_are_launched_after_enable(tmp_path: Path, launcher: str) -> None:
    (tmp_path / "notebook.py").write_text(
        "import torch\n"
        "from accelerate import Accelerator, debug_launcher, notebook_launcher\n"
        "import fastensor_accelerate\n"
        "fastensor_accelerate.enable()\n"
        "def train():\n"
        "    accelerator = Accelerator(cpu=True)\n"
        "    model = accelerator.prepare(torch.nn.Linear(2, 2))\n"
        "    accelerator.save_state('state')\n"
        "    accelerator.load_state('state')\n"
        "    accelerator.end_training()\n"
        f"{launcher}\n"
    )
    done = run("notebook.py", folder=tmp_path)
    assert "fastensor: saved 1 state " in done.stderr
    assert fastensor.inspect(tmp_path / "state/model.safetensors").checked
    assert (tmp_path / "state/random_states_1.pkl").exists() == launcher.startswith("debug")
