"""What the parts of ``make gpu`` hand to its table: rows, in a file that is written anew with each of them."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table."""

    what: str
    found: str
    holds: bool | None = None
    """Whether it is as it was promised. None: nothing was promised."""


@dataclass(slots=True)
class Rows:
    """The rows of a part, and what it is doing now, in case that it is killed there.

    Each method that changes something writes ``path``, whose folder exists. A reader finds a whole file at any time.
    """

    path: Path
    rows: list[Row]
    doing: str = ""
    machine: dict[str, str] | None = None
    details: Any = None
    """What the part has measured, as JSON."""

    @classmethod
    def at(cls, path: Path) -> Rows:
        """No rows yet."""
        rows = cls(path, [])
        rows.write()
        return rows

    @classmethod
    def read(cls, path: Path) -> Rows:
        """What a part has written so far; no rows if there is no file."""
        if not path.exists():
            return cls(path, [])
        found = json.loads(path.read_text())
        return cls(path, [Row(**row) for row in found["rows"]], found["doing"], found["machine"], found["details"])

    def begin(self, what: str) -> None:
        """Say what comes next."""
        print(f"{what} ...", file=sys.stderr, flush=True)
        self.doing = what
        self.write()

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.write()

    def end(self) -> None:
        """Nothing is being done any more."""
        self.doing = ""
        self.write()

    def write(self) -> None:
        found = {"machine": self.machine, "doing": self.doing, "rows": [asdict(row) for row in self.rows]}
        temporary = self.path.with_name(f"{self.path.name}.new")
        temporary.write_text(json.dumps({**found, "details": self.details}, indent=1, ensure_ascii=False) + "\n")
        temporary.rename(self.path)
