"""Whatever a program has used goes on in its forked children, such as a DataLoader's workers, or says at once that it
cannot: nothing waits for threads that do not live there, nor for locks that they held."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, cast

import pytest
from integration.forked_uses import CASES, HANG_SECONDS, MOMENTS, REFUSED

Ask = Callable[[str, str, Path], str]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    program = Path(__file__).with_name("forked_uses.py")
    errors = tmp_path_factory.mktemp("forks") / "errors"
    with (
        errors.open("wb") as log,
        subprocess.Popen(
            [sys.executable, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        ) as process,
    ):
        questions, answers = cast(IO[str], process.stdin), cast(IO[str], process.stdout)

        def ask(name: str, moment: str, folder: Path) -> str:
            questions.write(f"{name} {moment} {folder}\n")
            questions.flush()
            ready, _, _ = select.select([answers], [], [], 5 * HANG_SECONDS)
            answer = answers.readline() if ready else ""
            return str(json.loads(answer)) if answer else f"no answer; it has said: {errors.read_text()}"

        yield ask
        process.kill()


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("name", CASES)
def test_a_forked_child_goes_on_or_says_at_once_that_it_cannot(
    ask: Ask, name: str, moment: str, tmp_path: Path
) -> None:
    found = ask(name, moment, tmp_path)
    assert REFUSED[name] in found if name in REFUSED else found == "works"
