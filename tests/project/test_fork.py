"""Whatever a program has used goes on in its forked children, such as a DataLoader's workers, or says at once that it
cannot: nothing waits for threads that do not live there, nor for locks that they held."""

from __future__ import annotations

import json
import select
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from programs import Program, kill_group
from project.forked_uses import CASES, HANG_SECONDS, MOMENTS, REFUSED

Ask = Callable[[str, str, Path], str]


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    with Program(Path(__file__).with_name("forked_uses.py"), lightning=True) as process:

        def ask(name: str, moment: str, folder: Path) -> str:
            process.stdin.write(f"{name} {moment} {folder}\n")
            process.stdin.flush()
            ready, _, _ = select.select([process.stdout], [], [], 5 * HANG_SECONDS)
            if answer := process.stdout.readline() if ready else "":
                return str(json.loads(answer))
            kill_group(process.pid)  # its children hold its standard error
            return f"no answer; it has said: {process.stderr.read()}"

        yield ask
        process.kill()


@pytest.mark.parametrize(
    "moment", [pytest.param(one, marks=[pytest.mark.torture] if one == "busy" else []) for one in MOMENTS]
)
@pytest.mark.parametrize("name", CASES)
def test_a_forked_child_goes_on_or_says_at_once_that_it_cannot(
    ask: Ask, name: str, moment: str, tmp_path: Path
) -> None:
    found = ask(name, moment, tmp_path)
    if name in REFUSED:
        assert REFUSED[name] in found
    else:
        assert found == "works"
