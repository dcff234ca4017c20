"""The supervisor of a service on Ray ends with it, whatever fails."""

from __future__ import annotations

import asyncio
from threading import Event
from typing import Any

import pytest

pytest.importorskip("ray", reason="the engine on Ray needs it: the extra ray brings it")

from fastensor.provision.engine import Facts
from fastensor.provision.ray import supervisor
from fastensor.provision.ray.calls import Service
from fastensor.provision.ray.supervisor import Supervisor


@pytest.mark.parametrize("failing", ["drop", "server", "stops"])
def test_a_supervisor_ends_whatever_fails(
    failing: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that stayed would send all clients away for ever."""
    killed: list[Any] = []
    withdrawn = Event()

    def kill(actor: Any, *, no_restart: bool) -> None:
        assert no_restart
        killed.append(actor)
        if actor == "server 1" and failing == "server":
            raise ValueError("it cannot be reached")

    def drop(key: str) -> None:
        withdrawn.set()
        if failing == "drop":
            raise ValueError("it cannot be reached")

    async def stop() -> None:
        if failing == "stops":
            raise ValueError("it cannot be reached")

    async def end() -> None:
        ending = Supervisor.__new__(Supervisor)
        ending._service = Service("name", Facts(4, "samples", 0, workers=2), "key")
        ending._servers, ending._is_ending, ending._running = ["server 0", "server 1"], False, []
        monkeypatch.setattr(ending, "_stop_servers", stop)
        ending.end()
        await asyncio.gather(*ending._running)
        while "supervisor" not in killed:
            await asyncio.sleep(0)

    monkeypatch.setattr(supervisor.ray, "kill", kill)
    monkeypatch.setattr(supervisor.names, "drop", drop)
    monkeypatch.setattr(supervisor.names, "supervisor_of", lambda name: "supervisor")
    asyncio.run(asyncio.wait_for(end(), 30))
    assert sorted(killed) == ["server 0", "server 1", "supervisor"]
    assert withdrawn.is_set()
    assert "it cannot be reached" in caplog.text
