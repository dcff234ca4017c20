"""Arguments in, exit status out."""

from __future__ import annotations

import argparse
import io
import os
import sys
import warnings
from collections.abc import Sequence

from fastensor import __version__
from fastensor.cli import convert, data, dictionary, diff, doctor, inspect, tune, verify
from fastensor.cli.output import FAILED, INTERRUPTED
from fastensor.errors import FastensorError

_COMMANDS = (verify, inspect, diff, convert, dictionary, doctor, tune, data)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: without the program's name; None takes those of the process.

    Returns:
        0 if all is well; 1 if something is damaged, missing, refused or different; 2 for wrong arguments; 3 if a file
        has no checksums to verify; 130 if interrupted.
    """
    parser = argparse.ArgumentParser(
        "fastensor", description="Look into checkpoints and datasets, and at how fast they are moved here."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for module in _COMMANDS:
        module.add_to(commands)
    options = parser.parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names may hold characters that the encoding lacks
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the tables show the same
            status: int = options.run(options)
            sys.stdout.flush()
    except (FastensorError, OSError, ValueError) as error:
        if isinstance(error, BrokenPipeError):  # the reader of our output has closed the pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return FAILED
        print(f"fastensor: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    return status
