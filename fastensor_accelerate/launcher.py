"""``fastensor-accelerate``: the program ``accelerate`` with options of Fastensor.

``launch`` takes the options as flags, and from a section of the YAML file. The launcher checks them, hands them to the
processes of the job in the environment, and has each process run the script by ``python -m fastensor_accelerate``.
``config`` asks Accelerate's questions and then ours. All other commands are Accelerate's own. Parser and configuration
class are replaced in the launcher's process only.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from dataclasses import dataclass
from typing import Any

from accelerate.commands import accelerate_cli, launch
from accelerate.commands.config import cluster, config, config_args
from accelerate.commands.config.config_utils import _ask_field, _ask_options, _convert_yes_no_to_bool

from fastensor.backends import registry
from fastensor_accelerate.config import (
    SECTION,
    USE,
    ConfigError,
    FastensorConfig,
    is_wanted_by_environment,
    options_in_environment,
)

_MODULE = "fastensor_accelerate"
"""The module that runs a script with Fastensor enabled."""
_stock_launch_parser = accelerate_cli.launch_command_parser
_stock_user_input = config.get_user_input


@dataclass
class FastensorClusterConfig(config_args.ClusterConfig):  # type: ignore[misc]  # Accelerate has no types
    """Accelerate's configuration with a section for Fastensor."""

    fastensor_config: dict[str, Any] | None = None


def main() -> None:
    """Run a command of ``accelerate``, which ``sys.argv`` names.

    Raises:
        SystemExit: the options mean nothing, or the script has failed.
    """
    config_args.ClusterConfig = cluster.ClusterConfig = FastensorClusterConfig
    config.get_user_input = _ask_everything
    accelerate_cli.launch_command_parser = _launch_parser
    try:
        accelerate_cli.main()
    except ConfigError as error:
        sys.exit(f"fastensor-accelerate: {error}")


def _launch_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Accelerate's parser of ``launch`` with our flags."""
    parser: argparse.ArgumentParser = _stock_launch_parser(subparsers)
    group = parser.add_argument_group("Fastensor Arguments", "Arguments related to saving and loading by Fastensor.")
    group.add_argument(
        "--fastensor", action="store_true", default=None, help="Whether to save and load states by Fastensor."
    )
    group.add_argument(
        "--no_fastensor", action="store_true", default=None, help=f"Ignore the section {SECTION} and the environment."
    )
    for option in dataclasses.fields(FastensorConfig):
        flag, default = option.metadata["flag"], option.default
        kind: dict[str, Any] = {"action": argparse.BooleanOptionalAction} if default is False else {}
        group.add_argument(flag, dest=_dest(option.name), default=None, help=option.metadata["help"], **kind)
    parser.set_defaults(func=_launch)
    return parser


def _launch(args: argparse.Namespace) -> None:
    """Launch a script, with Fastensor if that is wanted."""
    options = _options(args)
    if options is None:
        os.environ.pop(USE, None)
    else:
        _check_can_run_module(args)
        os.environ.update(options.to_environment())
        args.training_script_args = [*(["-m"] if args.module else []), args.training_script, *args.training_script_args]
        args.training_script, args.module = _MODULE, True
    launch.launch_command(args)


def _options(args: argparse.Namespace) -> FastensorConfig | None:
    """The options: flags over YAML over the environment over defaults. None if Fastensor is not wanted.

    Raises:
        ConfigError: an option is unknown, or its value means nothing.
    """
    if args.no_fastensor:
        return None
    section = _section(args)
    environment = options_in_environment()
    named = {option.name: getattr(args, _dest(option.name)) for option in dataclasses.fields(FastensorConfig)}
    flags = {name: value for name, value in named.items() if value is not None}
    if not (args.fastensor or flags or section is not None or is_wanted_by_environment()):
        return None
    FastensorConfig.from_mapping(environment, "the environment")
    FastensorConfig.from_mapping(section or {}, f"{SECTION} of {args.config_file or config_args.default_config_file}")
    return FastensorConfig.from_mapping({**environment, **(section or {}), **flags})


def _section(args: argparse.Namespace) -> dict[str, Any] | None:
    """The section of the configuration file that Accelerate will use; None if there is none."""
    default = config_args.default_config_file
    if args.config_file is None and (args.cpu or not os.path.isfile(default)):
        return None
    found = getattr(config_args.load_config_from_file(args.config_file), SECTION, None)
    if found is not None and not isinstance(found, dict):
        raise ConfigError(f"{SECTION} of {args.config_file or default} is a section of options, found {found!r}")
    return found


def _check_can_run_module(args: argparse.Namespace) -> None:
    """
    Raises:
        ConfigError: processes of this job are not started by Python with a module.
    """
    if args.no_python:
        raise ConfigError("--no_python runs a program in which Fastensor cannot be enabled; leave one of both out")
    if args.tpu or args.tpu_use_cluster:
        raise ConfigError("Fastensor does not run on TPUs; leave --fastensor out")


def _ask_everything() -> Any:
    """Ask Accelerate's questions, then ours."""
    found = _stock_user_input()
    if isinstance(found, FastensorClusterConfig) and _ask_yes_no(
        "Do you want to save and load states by Fastensor? [yes/NO]: "
    ):
        backends = [registry.AUTO, *registry.names()]
        found.fastensor_config = {
            "backend": _ask_options("What should move the bytes?", backends, lambda index: backends[int(index)]),
            "asynchronous": _ask_yes_no("Should save_state return when the state has been copied? [yes/NO]: "),
        }
    return found


def _ask_yes_no(question: str) -> bool:
    answer: bool = _ask_field(question, _convert_yes_no_to_bool, default=False, error_message="Please enter yes or no.")
    return answer


def _dest(name: str) -> str:
    return f"{SECTION}_{name}"
