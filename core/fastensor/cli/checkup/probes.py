"""Questions to torch.cuda and kvikio. A process of its own answers each: the question initialises CUDA, or may crash.

This module is also the script of that process. It imports nothing of Fastensor.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
from typing import Any, Literal

ANSWER = "fastensor: "
"""The beginning of the line with the answer; libraries print other lines."""
_TIMEOUT_SECONDS = 120.0


class NoAnswerError(Exception):
    """A probe failed; the message says how."""


def ask(about: Literal["cuda", "kvikio"]) -> dict[str, Any]:
    """Ask torch about CUDA, or kvikio about itself, with the modules that this process would import.

    Raises:
        NoAnswerError: the other process crashed, or did not answer in time.
    """
    modules = os.pathsep.join(map(os.path.abspath, sys.path))
    try:
        done = subprocess.run(
            [sys.executable, "-P", __file__, about],
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
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return f"it ended the interpreter {how}" + (f" ({lines[-1]})" if lines else "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# what the other process does


def _cuda() -> dict[str, object]:
    import torch

    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # torch has no types for it
        devices = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    except (RuntimeError, AssertionError) as error:
        return {"devices": [], "reason": _first_line(error)}
    return {
        "devices": [{"name": device.name, "nbytes": device.total_memory} for device in devices],
        "reason": "" if devices else "torch finds no device",
    }


def _kvikio() -> dict[str, object]:
    try:
        kvikio = importlib.import_module("kvikio")
    except Exception as error:  # noqa: BLE001  # whatever kvikio raises is the reason
        return {"imports": False, "reason": _first_line(error)}
    found = {"imports": True, "reason": "", "version": str(getattr(kvikio, "__version__", ""))}
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        found["reason"] = str(error)
    try:
        return {**found, **_kvikio_state()}
    except Exception as error:  # noqa: BLE001  # a version of kvikio that we do not know
        return {**found, "unread": _first_line(error)}


def _kvikio_state() -> dict[str, object]:
    defaults = importlib.import_module("kvikio.defaults")
    driver = importlib.import_module("kvikio.cufile_driver")
    properties = driver.properties if hasattr(driver, "properties") else driver.DriverProperties()  # until 25.02
    version = driver.libcufile_version() if hasattr(driver, "libcufile_version") else ()
    return {
        "compat_preferred": _is_compat_preferred(defaults),
        "gds_available": bool(properties.is_gds_available),
        "libcufile": ".".join(map(str, version)) if any(version) else "",
    }


def _is_compat_preferred(defaults: Any) -> bool:
    if hasattr(defaults, "is_compat_mode_preferred"):
        return bool(defaults.is_compat_mode_preferred())
    return str(defaults.compat_mode().name) == "ON"


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


if __name__ == "__main__":
    print(f"\n{ANSWER}{json.dumps({'cuda': _cuda, 'kvikio': _kvikio}[sys.argv[1]]())}", flush=True)
