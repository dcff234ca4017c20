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
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from accelerate import DistributedType
from accelerate.commands import accelerate_cli, launch
from accelerate.commands.config import cluster, config, config_args
from accelerate.commands.config.config_utils import _ask_field, _ask_options, _convert_yes_no_to_bool

from fastensor.backends import registry
from fastensor.files.arguments import nearest
from fastensor.files.printed import output_errors
from fastensor_accelerate.config import (
    SECTION,
    USE,
    ConfigError,
    FastensorConfig,
    exit_for_wrong_options,
    is_wanted_by_environment,
    options_in_environment,
)

_NAME = "fastensor-accelerate"
_MODULE = "fastensor_accelerate"
"""The module that runs a script with Fastensor enabled."""
_TITLE = "Fastensor Arguments"
_stock_launch_parser = accelerate_cli.launch_command_parser
_stock_user_input = config.get_user_input


@dataclass
class FastensorClusterConfig(config_args.ClusterConfig):  # type: ignore[misc]  # Accelerate has no types
    """Accelerate's configuration with a section for Fastensor."""

    fastensor_config: dict[str, Any] | None = None


@dataclass
class FastensorSageMakerConfig(config_args.SageMakerConfig):  # type: ignore[misc]  # Accelerate has no types
    """Accelerate's configuration for SageMaker. It may have the section, so that our message says what is wrong."""

    fastensor_config: dict[str, Any] | None = None


class _Parser(accelerate_cli.CustomArgumentParser):  # type: ignore[misc]  # Accelerate has no types
    """Accelerate's parser; it suggests the nearest name for an unknown flag that looks like ours."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:
        found, unknown = super().parse_known_args(args, namespace)
        for flag in (argument.partition("=")[0] for argument in unknown):
            if flag.replace("-", "_").startswith(("__fast", "__no_fast")):
                known = [name for name in self._option_string_actions if name.startswith(("--fast", "--no_fast"))]
                raise ConfigError(
                    f"there is no flag {flag}{nearest(flag.replace('-', '_').replace('__', '--'), known)}"
                )
        return found, unknown


class _HelpFormatter(launch.CustomHelpFormatter):  # type: ignore[misc]  # Accelerate has no types
    """Accelerate's formatter, which hides what the command line does not use, shows our flags always."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.titles.append(_TITLE)


def main() -> None:
    """Run a command of ``accelerate``, which ``sys.argv`` names.

    Raises:
        SystemExit: with 2 if the options mean nothing; or the script has failed.
    """
    config_args.ClusterConfig = cluster.ClusterConfig = FastensorClusterConfig
    config_args.SageMakerConfig = FastensorSageMakerConfig
    config.get_user_input = _ask_everything
    accelerate_cli.CustomArgumentParser = _Parser
    accelerate_cli.launch_command_parser = _launch_parser
    with output_errors(_NAME):
        try:
            accelerate_cli.main()
        except ConfigError as error:
            exit_for_wrong_options(_NAME, error)


def _launch_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Accelerate's parser of ``launch`` with our flags."""
    parser: argparse.ArgumentParser = _stock_launch_parser(subparsers)
    parser.formatter_class = _HelpFormatter
    group = parser.add_argument_group(_TITLE, "Arguments related to saving, loading and offloading by Fastensor.")
    add = partial(group.add_argument, default=None)
    add("--fastensor", action="store_true", help="Save and load states by Fastensor.")
    add("--no_fastensor", action="store_true", help=f"Ignore the section {SECTION} and the environment.")
    for option in dataclasses.fields(FastensorConfig):
        flag, text, dest = option.metadata["flag"], option.metadata["help"], _dest(option.name)
        if isinstance(option.default, bool):
            add(flag, dest=dest, action="store_true", help=text)
            add(flag.replace("--", "--no_"), dest=dest, action="store_const", const=False, help=f"not {flag}")
        else:
            add(flag, dest=dest, metavar=option.name.upper(), help=text)
    parser.set_defaults(func=_launch)
    return parser


def _launch(args: argparse.Namespace) -> None:
    """Launch a script, with Fastensor if that is wanted."""
    found = _configuration(args)
    options = None if args.no_fastensor else _options(args, found)
    if args.no_fastensor:
        os.environ[USE] = "false"
    if options is not None:
        _check_can_run_module(args, found)
        os.environ.update(options.to_environment())
        args.training_script_args = [*(["-m"] if args.module else []), args.training_script, *args.training_script_args]
        args.training_script, args.module = _MODULE, True
    launch.launch_command(args)


def _configuration(args: argparse.Namespace) -> FastensorClusterConfig | FastensorSageMakerConfig | None:
    """Contents of the configuration file that Accelerate will use; None if there is none."""
    if args.config_file is None and (args.cpu or not os.path.isfile(config_args.default_config_file)):
        return None
    found: FastensorClusterConfig | FastensorSageMakerConfig = config_args.load_config_from_file(args.config_file)
    return found


def _options(
    args: argparse.Namespace, configuration: FastensorClusterConfig | FastensorSageMakerConfig | None
) -> FastensorConfig | None:
    """The options: flags over YAML over the environment over defaults. None if Fastensor is not wanted.

    Raises:
        ConfigError: an option is unknown, or its value means nothing.
    """
    file = f"{SECTION} of {args.config_file or config_args.default_config_file}"
    section = None if configuration is None else configuration.fastensor_config
    if section is not None and not isinstance(section, dict):
        raise ConfigError(f"{file} is a section of options, found {section!r}")
    environment = options_in_environment()
    named = {option.name: getattr(args, _dest(option.name)) for option in dataclasses.fields(FastensorConfig)}
    flags = {name: value for name, value in named.items() if value is not None}
    if not (args.fastensor or flags or section is not None or is_wanted_by_environment()):
        return None
    FastensorConfig.from_mapping(environment, "the environment")
    FastensorConfig.from_mapping(section or {}, file)
    try:
        options = FastensorConfig.from_mapping({**environment, **(section or {}), **flags})
    except ConfigError as error:
        raise ConfigError(_in_flags(str(error), flags)) from error
    unused = next((name for name in flags if name.startswith("offload_")), None)
    if unused is not None and not options.offload and "offload" not in flags:
        raise ConfigError(f"--fastensor_{unused} needs --fastensor_offload, or `offload: true` in {SECTION}")
    return options


def _in_flags(message: str, given: Iterable[str]) -> str:
    """A message about an option that was given as a flag, which begins with the option's name.

    >>> _in_flags("backend is 'zip', which is no backend", ["backend"])
    "--fastensor_backend is 'zip', which is no backend"
    """
    for option in dataclasses.fields(FastensorConfig):
        if option.name in given and re.match(rf"{option.name}\b", message):
            return str(option.metadata["flag"]) + message.removeprefix(option.name)
    return message


def _check_can_run_module(
    args: argparse.Namespace, configuration: FastensorClusterConfig | FastensorSageMakerConfig | None
) -> None:
    """
    Raises:
        ConfigError: processes of this job are not started by Python with a module.
    """
    kind = getattr(configuration, "distributed_type", None)
    if args.no_python:
        raise ConfigError("--no_python runs a program in which Fastensor cannot be enabled; leave one of both out")
    if args.tpu or args.tpu_use_cluster or (kind == DistributedType.XLA and not args.cpu):
        raise ConfigError("Fastensor does not run on TPUs; launch with --no_fastensor")
    if isinstance(configuration, FastensorSageMakerConfig):
        raise ConfigError(
            "SageMaker runs the script by itself: launch with --no_fastensor, and call fastensor_accelerate.enable() "
            "in the script"
        )


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
            "offload": _ask_yes_no("Should activations go to an SSD until the backward pass? [yes/NO]: "),
        }
    return found


def _ask_yes_no(question: str) -> bool:
    answer: bool = _ask_field(question, _convert_yes_no_to_bool, default=False, error_message="Please enter yes or no.")
    return answer


def _dest(name: str) -> str:
    return f"{SECTION}_{name}"
