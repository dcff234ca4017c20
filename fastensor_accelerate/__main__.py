"""Runs a training script with Fastensor enabled: ``accelerate launch -m fastensor_accelerate train.py ...``."""

from __future__ import annotations

import builtins
import os
import pkgutil
import runpy
import sys
from importlib.machinery import SourceFileLoader
from types import ModuleType

from fastensor_accelerate.config import ConfigError, FastensorConfig, exit_for_wrong_options, is_wanted_by_environment
from fastensor_accelerate.enable import enable


def main(arguments: list[str]) -> None:
    """Enable Fastensor, unless ``ACCELERATE_USE_FASTENSOR`` is false, and run a script, or a module after ``-m``.

    Args:
        arguments: the script or module, and its arguments.

    Raises:
        SystemExit: with 2 if no script is given, or the environment has options that mean nothing.
    """
    is_module = arguments[:1] == ["-m"]
    target = arguments[is_module:]
    if not target:
        exit_for_wrong_options("usage", "python -m fastensor_accelerate [-m] SCRIPT [ARGUMENT ...]")
    try:
        if is_wanted_by_environment() is not False:
            enable(FastensorConfig.from_environment())
    except ConfigError as error:
        exit_for_wrong_options("fastensor_accelerate", error)
    sys.argv = target
    if is_module:
        runpy.run_module(target[0], run_name="__main__", alter_sys=True)
    else:
        _run_script(target[0])


def _run_script(script: str) -> None:
    """Run a script as ``python SCRIPT`` does. Its module stays in ``sys.modules`` for what runs at exit."""
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    if pkgutil.get_importer(script) is not None:  # a directory or an archive with a `__main__.py`
        runpy.run_path(script, run_name="__main__")
        return
    path = os.path.abspath(script)
    loader = SourceFileLoader("__main__", path)
    try:
        source = loader.get_data(path)
    except OSError as error:
        print(f"{sys.executable}: can't open file {path!r}: {error}", file=sys.stderr)
        sys.exit(2)
    module = ModuleType("__main__")
    vars(module).update(__file__=path, __loader__=loader, __builtins__=builtins)
    sys.modules["__main__"] = module
    exec(loader.source_to_code(source, path), module.__dict__)


if __name__ == "__main__":
    main(sys.argv[1:])
