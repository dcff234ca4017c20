"""Hypothesis runs a small, fixed sample by default, ``make torture`` a large random one; tests tally what they did."""

from __future__ import annotations

import errno
import gc
import os
import signal

# Two workers with two threads each on two cores: OpenMP's would take the time of the others by waiting actively.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, settings

from fastensor.backends import registry
from fastensor.backends.base import Backend
from fastensor.backends.registry import announce

# Shells start background jobs with SIGINT ignored, and the tests' programs would inherit that. Tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["FASTENSOR_EXPLORE"] = "0"  # backends are chosen by size, in every run alike
os.environ["FASTENSOR_BENCHMARK_IS_TEST"] = "1"  # see benchmarks/measuring.py

# The first call of such a function in a process may be wrong in the fourth digit where several threads make it at once:
# https://github.com/pytorch/pytorch/issues/188792. Tests compare results of torch bit by bit.
for function in (torch.exp, torch.sin, torch.tanh):
    function(torch.ones(1))

settings.register_profile(
    "default", max_examples=60, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("torture", max_examples=3000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("default")


@pytest.fixture(scope="session", autouse=True)
def folder_of_dictionaries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Nothing that a test, or a program that it starts, learns about this machine is kept."""
    folder = tmp_path_factory.mktemp("dictionaries")
    with mock.patch.dict(os.environ, FASTENSOR_DICTIONARIES=str(folder)):
        yield folder


@pytest.fixture(autouse=True)
def nothing_announced() -> None:
    """Fallbacks are logged once per process: here, once per test."""
    announce.cache_clear()


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[[Backend], None]:
    """Registers backends for the test. It begins with ours, and those of packages have not been looked for."""
    monkeypatch.setattr(registry, "_backends", {point.name: point for point in registry.BUILT_IN})
    monkeypatch.setattr(registry, "_others_wanted", True)
    return registry.register


@pytest.fixture
def plugin(register: Callable[[Backend], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that brings the backend ``elsewhere``."""
    monkeypatch.syspath_prepend(Path(__file__).with_name("plugin"))


@pytest.fixture
def only_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The filesystem refuses files without names."""
    monkeypatch.setattr(os, "open", _refusing(os.open))


@pytest.fixture(params=["nameless", "named"])
def temporaries(request: pytest.FixtureRequest) -> str:
    """What files are before they are published: the filesystem may refuse those without names."""
    if request.param == "named":
        request.getfixturevalue("only_named")
    return str(request.param)


def _refusing(function: Callable[..., int]) -> Callable[..., int]:
    def refuse(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return function(path, flags, *arguments, **options)

    return refuse


_TALLY = pytest.StashKey[Counter[str]]()
_WORKER_OUTPUT = "fastensor_tally"


@pytest.fixture(scope="session")
def tally(pytestconfig: pytest.Config) -> Counter[str]:
    """What tests count by name (``tally["faults injected"] += 1``); the sums stand at the end of pytest's output."""
    return pytestconfig.stash[_TALLY]


def pytest_collection_finish() -> None:
    """Many tests collect garbage: what was imported by now is none, and is not looked at again."""
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_TALLY] = Counter()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of pytest-xdist sends its counts to the process that prints them."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput[_WORKER_OUTPUT] = dict(session.config.stash[_TALLY])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker is done; one that crashed has sent nothing."""
    node.config.stash[_TALLY].update(getattr(node, "workeroutput", {}).get(_WORKER_OUTPUT, {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.stash[_TALLY]:
        terminalreporter.section("tally")
        for name, count in sorted(config.stash[_TALLY].items()):
            terminalreporter.write_line(f"{name}: {count}")
