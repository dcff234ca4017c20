"""``fastensor dictionary show``, ``export``, ``import``, ``clear`` and ``plot``."""

from __future__ import annotations

import errno
import os
import sys
from dataclasses import dataclass
from json import loads
from pathlib import Path
from typing import Any

import typer

from fastensor.checkpoint.writing.target import write_text
from fastensor.cli.output import FAILED, OK, print_json, print_table, printable
from fastensor.cli.plot import plot
from fastensor.errors import FastensorError
from fastensor.files.words import human_seconds, human_size
from fastensor.select.choice import in_order
from fastensor.select.context import Context, size_of
from fastensor.select.dictionary import Dictionary, DictionaryError, Entry, replacing
from fastensor.select.files import DictionaryFile, Kind, default_folder, file_for, files_in, read, read_text
from fastensor.select.paper_csv import Which, from_csv, to_csv


@dataclass(frozen=True, slots=True)
class CsvForm:
    """A dictionary in the form of the paper, which is of one context."""

    which: Which
    device: str
    unsynced: bool
    resident: bool


def _context(text: str) -> Context:
    try:
        return Context.parse(text)
    except ValueError as error:
        expected = "write DEVICE durable|unsynced or read DEVICE cold|resident"
        raise typer.BadParameter(f"expected {expected}, found {text!r}", param_hint="'--context'") from error


def _known(file: DictionaryFile) -> Dictionary:
    try:
        return read(file.path).dictionary
    except FileNotFoundError:
        return Dictionary()


# show


def show(where: str, of: Kind, *, json: bool) -> int:
    """Show the dictionary for a path."""
    file = file_for(where, of=of)
    dictionary = _known(file)
    if json:
        print_json(_as_json(file.path, dictionary, file.machine))
        return OK
    print(printable(f"Dictionary for files at {where}: {file.path}"))
    print(printable(_facts(file.machine)))
    print()
    if dictionary:
        _print(dictionary)
    else:
        print("Nothing is known yet.")
    return OK


def _as_json(path: Path, dictionary: Dictionary, machine: dict[str, str]) -> dict[str, Any]:
    return {"path": str(path), **loads(dictionary.to_json(machine))}


def _print(dictionary: Dictionary) -> None:
    names = in_order(sorted({name for _, entry in dictionary for name in entry.timings}))
    rows = [
        [str(key.context), human_size(size_of(key.bucket)), *(_cell(entry, name) for name in names)]
        for key, entry in dictionary
    ]
    print_table(["context", "up to", *names], rows, right=range(1, len(names) + 2))
    print("\n* the fastest; in brackets, how often it was measured")


def _cell(entry: Entry, name: str) -> str:
    if name not in entry.timings:
        return "–"
    timing = entry.timings[name]
    return f"{'*' if name == entry.best else ''}{human_seconds(timing.seconds)} ({timing.count})"


def show_all(*, json: bool) -> int:
    """List all dictionaries."""
    shown: list[dict[str, Any]] = []
    rows = []
    for path in files_in(default_folder()):
        try:
            dictionary, machine = read(path)
        except FileNotFoundError:  # the file was removed, its lock or damaged copy was not
            continue
        except (OSError, DictionaryError) as error:
            shown.append({"path": str(path), "error": str(error)})
            rows.append([path.name, "0", "0", str(error)])
            continue
        shown.append(_as_json(path, dictionary, machine))
        measured = sum(timing.count for _, entry in dictionary for timing in entry.timings.values())
        rows.append([path.name, str(len(dictionary)), str(measured), _facts(machine)])
    if json:
        print_json(shown)
    elif rows:
        print(printable(f"Dictionaries in {default_folder()}:"))
        print_table(["file", "sizes", "measurements", "machine"], rows, right=(1, 2))
    else:
        print(printable(f"There are no dictionaries in {default_folder()}"))
    return FAILED if any("error" in one for one in shown) else OK


def _facts(machine: dict[str, str]) -> str:
    return ", ".join(f"{name}: {fact}" for name, fact in machine.items())


# the others


def export(where: str, of: Kind, form: CsvForm | None, output: str, *, force: bool) -> int:
    """Write the dictionary into a file, or to the standard output."""
    file = file_for(where, of=of)
    dictionary = _known(file)
    text = ""
    if form is not None:
        text = to_csv(dictionary, form.which, form.device, unsynced=form.unsynced, resident=form.resident)
    elif dictionary:
        text = dictionary.to_json(file.machine)
    if not text:
        raise FastensorError(f"nothing is known that could be exported: see fastensor dictionary show {where}")
    if output == "-":
        sys.stdout.write(text)
    else:
        _check_is_free(output, force=force)
        write_text(output, text)
    return OK


def _check_is_free(output: str, *, force: bool) -> None:
    if os.path.lexists(output) and not force:
        raise FastensorError(f"{output}: it is there already; --force replaces it, or choose another file")


def import_(source_name: str, where: str, of: Kind, context: str | None) -> int:
    """Take over what a file holds."""
    file = file_for(where, of=of)
    source = Path(source_name)
    if context is None:
        dictionary, machine = _read_json(source)
    else:
        dictionary, machine = _read_csv(source, _context(context)), {}
    file.update(replacing(dictionary))
    print(printable(f"{file.path}: {len(dictionary)} sizes and contexts were taken over from {source}"))
    for name in {**machine, **file.machine}:
        if machine and machine.get(name) != file.machine.get(name):
            print(printable(f"measured with another {name}: {machine.get(name)}, here {file.machine.get(name)}"))
    return OK


def _read_json(source: Path) -> tuple[Dictionary, dict[str, str]]:
    try:
        return read(source)
    except DictionaryError as error:
        raise DictionaryError(f"{error}; if it is CSV, --context has to say what its timings are of") from error


def _read_csv(source: Path, context: Context) -> Dictionary:
    try:
        return from_csv(read_text(source), context)
    except ValueError as error:
        raise DictionaryError(f"{source}: {error}") from error


def clear(where: str | None, of: Kind) -> int:
    """Remove the dictionary for a path, or all if that is None.

    Raises:
        FileNotFoundError: there is nothing at the path, which is likely a mistake.
    """
    if where is not None and not os.path.lexists(where):
        what = "there is no such file or folder; expected one on the disk whose dictionary is to be forgotten"
        raise FileNotFoundError(errno.ENOENT, what, where)
    every = [DictionaryFile(path, {}) for path in files_in(default_folder())] if where is None else []
    files = every if where is None else [file_for(where, of=of)]
    removed = [path for file in files for path in file.remove()]
    for path in removed:
        print(printable(f"removed {path}"))
    if not removed:
        print("There was nothing to remove.")
    return OK


def draw(where: str, of: Kind, output: str, *, force: bool) -> int:
    """Draw the dictionary for a path."""
    _check_is_free(output, force=force)
    file = file_for(where, of=of)
    plot(_known(file), _facts(file.machine), Path(output))
    print(printable(f"{output}: drawn from {file.path}"))
    return OK
