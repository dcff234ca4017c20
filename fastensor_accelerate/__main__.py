"""Runs a training script with Fastensor enabled: ``accelerate launch -m fastensor_accelerate train.py ...``."""

from __future__ import annotations

import os
import runpy
import sys

from fastensor_accelerate.config import ConfigError, FastensorConfig, is_wanted_by_environment
from fastensor_accelerate.enable import enable


def main(arguments: list[str]) -> None:
    """Enable Fastensor, unless ``ACCELERATE_USE_FASTENSOR`` is false, and run a script, or a module after ``-m``.

    Args:
        arguments: the script or module, and its arguments.

    Raises:
        SystemExit: no script is given, or the environment has options that mean nothing.
    """
    is_module = arguments[:1] == ["-m"]
    target = arguments[is_module:]
    if not target:
        sys.exit("usage: python -m fastensor_accelerate [-m] SCRIPT [ARGUMENT ...]")
    try:
        if is_wanted_by_environment() is not False:
            enable(FastensorConfig.from_environment())
    except ConfigError as error:
        sys.exit(f"fastensor_accelerate: {error}")
    sys.argv = target
    if is_module:
        runpy.run_module(target[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(target[0]))
        runpy.run_path(target[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
