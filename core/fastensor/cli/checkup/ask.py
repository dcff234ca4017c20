"""Asking what may crash whoever asks, in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

ANSWER = "fastensor: "
"""What a probe's answer begins with, a line of JSON; libraries print other lines."""
_TIMEOUT_SECONDS = 120.0


class NoAnswerError(Exception):
    """A probe failed; the message says how."""


def ask(probe: Literal["probe_cuda", "probe_kvikio"]) -> dict[str, Any]:
    """Run one of the scripts beside this one, with the modules that this process would import.

    Raises:
        NoAnswerError: it crashed, or did not answer in time.
    """
    script = Path(__file__).with_name(f"{probe}.py")
    modules = os.pathsep.join(map(os.path.abspath, sys.path))
    try:
        done = subprocess.run(
            [sys.executable, "-P", script],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            env={**os.environ, "PYTHONPATH": modules, "PYTHONIOENCODING": "utf-8"},
            timeout=_TIMEOUT_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise NoAnswerError(f"it did not return within {_TIMEOUT_SECONDS:.0f} s") from error
    except OSError as error:
        raise NoAnswerError(f"no process could be started to ask: {error}") from error
    answers = [line.removeprefix(ANSWER) for line in done.stdout.splitlines() if line.startswith(ANSWER)]
    if done.returncode or not answers:
        raise NoAnswerError(_describe_end(done.returncode, done.stderr))
    found: dict[str, Any] = json.loads(answers[-1])
    return found


def _describe_end(status: int, stderr: str) -> str:
    """
    >>> _describe_end(-6, "loading\\nassertion failed\\n")
    'it ended the interpreter by SIGABRT (assertion failed)'
    >>> _describe_end(0, "")
    'it ended the interpreter with status 0'
    """
    how = f"by {_signal_name(-status)}" if status < 0 else f"with status {status}"
    said = [line.strip() for line in stderr.splitlines() if line.strip()]
    return f"it ended the interpreter {how}" + (f" ({said[-1]})" if said else "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
