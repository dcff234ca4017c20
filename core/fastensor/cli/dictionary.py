"""``fastensor dictionary show|export|import|clear|plot``"""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from fastensor.checkpoint.publish import write_text
from fastensor.cli.output import FAILED, OK, print_json, print_table, printable
from fastensor.cli.plot import plot
from fastensor.files.words import human_seconds, human_size
from fastensor.select.context import Context
from fastensor.select.dictionary import Dictionary, DictionaryError, Entry, replacing
from fastensor.select.files import DictionaryFile, default_folder, file_for, files_in, read, read_text
from fastensor.select.paper_csv import Which, from_csv, to_csv
from fastensor.select.sizes import size_of
from fastensor.select.winners import in_order


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "dictionary",
        help="show or move what was learned about the speed of each backend here",
        description="Show and move what Fastensor has learned, by size and context, about how long each backend takes. "
        "There is one dictionary for each machine and kind of filesystem, one for single tensors, and one for "
        "offloaded activations; the environment variable FASTENSOR_DICTIONARIES names the folder where they are.",
    )
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    for add_action in (_add_show, _add_export, _add_import, _add_clear, _add_plot):
        add_action(actions)


def _add_show(actions: Any) -> None:
    show = _add(actions, "show", _show, "print the dictionary as a table, the fastest backend marked")
    _add_path(show.add_mutually_exclusive_group()).add_argument(
        "--all", action="store_true", help="list all dictionaries and their machines"
    )
    show.add_argument("--json", action="store_true", help="print JSON")


def _add_export(actions: Any) -> None:
    export = _add(actions, "export", _export, "write the dictionary for other machines, or in the form of the paper")
    _add_path(export)
    form = export.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="the whole dictionary; the default")
    form.add_argument("--csv", choices=get_args(Which), help="a dictionary of the paper: for writing, reading or both")
    export.add_argument("--device", default="cpu", help="for CSV: kind of the device that bytes come from or go to")
    export.add_argument("--unsynced", action="store_true", help="for CSV: writes that need not be durable")
    export.add_argument("--resident", action="store_true", help="for CSV: reads from the page cache")
    export.add_argument(
        "-o", "--output", metavar="FILE", default="-", help="the file to write; default: standard output"
    )


def _add_import(actions: Any) -> None:
    imported = _add(actions, "import", _import, "take over the timings of a file, in place of the known ones")
    imported.add_argument("file", metavar="FILE", help="a dictionary of Fastensor, or CSV in the form of the paper")
    _add_path(imported)
    imported.add_argument(
        "--context",
        type=_context,
        help="for CSV: the context of the timings, such as 'write cpu durable' or 'read cuda cold'",
    )


def _add_clear(actions: Any) -> None:
    clear = _add(actions, "clear", _clear, "remove the dictionary: everything is learned anew")
    _add_path(clear.add_mutually_exclusive_group()).add_argument(
        "--all", action="store_true", help="remove all dictionaries, those of other machines included"
    )


def _add_plot(actions: Any) -> None:
    drawn = _add(actions, "plot", _plot, "draw the bandwidth of each backend by size (needs matplotlib)")
    _add_path(drawn)
    drawn.add_argument("-o", "--output", metavar="FILE", required=True, help="such as dictionary.png")


def _add(actions: Any, name: str, run: Callable[[argparse.Namespace], int], what: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
    kinds = parser.add_mutually_exclusive_group()
    for kind, whose in (("tensors", "single tensors in a TensorStore"), ("activations", "offloaded activations")):
        kinds.add_argument(f"--{kind}", action="store_const", const=kind, dest="of", help=f"the dictionary of {whose}")
    parser.set_defaults(of="files")
    parser.set_defaults(run=run)
    return parser


def _add_path(parser: Any) -> Any:
    parser.add_argument(
        "path",
        metavar="PATH",
        nargs="?",
        default=".",
        help="a file or folder on the filesystem in question; default: this folder",
    )
    return parser


def _file(options: argparse.Namespace) -> DictionaryFile:
    return file_for(options.path, of=options.of)


def _context(text: str) -> Context:
    try:
        return Context.parse(text)
    except ValueError:
        expected = "write DEVICE durable|unsynced or read DEVICE cold|resident"
        raise argparse.ArgumentTypeError(f"expected {expected}, found {text!r}") from None


def _known(file: DictionaryFile) -> Dictionary:
    try:
        return read(file.path).dictionary
    except FileNotFoundError:
        return Dictionary()


# show


def _show(options: argparse.Namespace) -> int:
    if options.all:
        return _show_all(options)
    file = _file(options)
    dictionary = _known(file)
    if options.json:
        print_json(_as_json(file.path, dictionary, file.machine))
        return OK
    print(printable(f"Dictionary for files at {options.path}: {file.path}"))
    print(printable(_facts(file.machine)))
    print()
    if dictionary:
        _print(dictionary)
    else:
        print("Nothing is known yet.")
    return OK


def _as_json(path: Path, dictionary: Dictionary, machine: dict[str, str]) -> dict[str, Any]:
    return {"path": str(path), **json.loads(dictionary.to_json(machine))}


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


@dataclass(frozen=True, slots=True)
class _Listed:
    path: Path
    dictionary: Dictionary
    machine: dict[str, str] = field(default_factory=dict)
    error: str = ""


def _all_files() -> Iterator[_Listed]:
    for path in files_in(default_folder()):
        try:
            yield _Listed(path, *read(path))
        except FileNotFoundError:  # the file was removed, its lock or damaged copy was not
            continue
        except (OSError, DictionaryError) as error:
            yield _Listed(path, Dictionary(), error=str(error))


def _show_all(options: argparse.Namespace) -> int:
    found = list(_all_files())
    if options.json:
        print_json(
            [
                {"path": str(one.path), "error": one.error}
                if one.error
                else _as_json(one.path, one.dictionary, one.machine)
                for one in found
            ]
        )
    elif found:
        rows = [
            [one.path.name, str(len(one.dictionary)), str(_measured(one.dictionary)), one.error or _facts(one.machine)]
            for one in found
        ]
        print(printable(f"Dictionaries in {default_folder()}:"))
        print_table(["file", "sizes", "measurements", "machine"], rows, right=(1, 2))
    else:
        print(printable(f"There are no dictionaries in {default_folder()}"))
    return FAILED if any(one.error for one in found) else OK


def _measured(dictionary: Dictionary) -> int:
    return sum(timing.count for _, entry in dictionary for timing in entry.timings.values())


def _facts(machine: dict[str, str]) -> str:
    return ", ".join(f"{name}: {fact}" for name, fact in machine.items())


# the others


def _export(options: argparse.Namespace) -> int:
    file = _file(options)
    dictionary = _known(file)
    if options.csv:
        text = to_csv(dictionary, options.csv, options.device, unsynced=options.unsynced, resident=options.resident)
    else:
        text = dictionary.to_json(file.machine) if dictionary else ""
    if not text:
        raise ValueError(f"nothing is known that could be exported: see fastensor dictionary show {options.path}")
    if options.output == "-":
        sys.stdout.write(text)
    else:
        write_text(options.output, text)
    return OK


def _import(options: argparse.Namespace) -> int:
    file = _file(options)
    source = Path(options.file)
    if options.context is None:
        dictionary, machine = _read_json(source)
    else:
        dictionary, machine = _read_csv(source, options.context), {}
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


def _clear(options: argparse.Namespace) -> int:
    """
    Raises:
        FileNotFoundError: there is nothing at the path, which is likely a mistake.
    """
    if not os.path.lexists(options.path):
        what = "there is no such file or folder; expected one on the disk whose dictionary is to be forgotten"
        raise FileNotFoundError(errno.ENOENT, what, options.path)
    files = [DictionaryFile(path, {}) for path in files_in(default_folder())] if options.all else [_file(options)]
    removed = [path for file in files for path in file.remove()]
    for path in removed:
        print(printable(f"removed {path}"))
    if not removed:
        print("There was nothing to remove.")
    return OK


def _plot(options: argparse.Namespace) -> int:
    file = _file(options)
    plot(_known(file), _facts(file.machine), Path(options.output))
    print(printable(f"{options.output}: drawn from {file.path}"))
    return OK
