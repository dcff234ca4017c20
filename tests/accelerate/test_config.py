"""The options: where they come from, which of them wins, and what is said of those that mean nothing."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from accelerate import Accelerator, DistributedType
from accelerate.commands import accelerate_cli, launch
from accelerate.commands.config import cluster, config, config_args
from accelerators import by, training

from fastensor.offload import OffloadConfig
from fastensor_accelerate import ConfigError, FastensorConfig, launcher
from fastensor_accelerate.config import is_wanted_by_environment

CLUSTER = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "num_processes": 1, "use_cpu": True}
SAGEMAKER = {
    "compute_environment": "AMAZON_SAGEMAKER", "distributed_type": "DATA_PARALLEL", "mixed_precision": "no",
    "use_cpu": False, "debug": False, "ec2_instance_type": "ml.p3.2xlarge", "iam_role_name": "role", "num_machines": 1,
}  # fmt: skip
Command = Callable[..., argparse.Namespace]


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """What the test does to the environment is undone."""
    ours = [name for name in os.environ if name.startswith(("ACCELERATE_USE_FASTENSOR", "ACCELERATE_FASTENSOR"))]
    with mock.patch.dict(os.environ):
        for name in ours:
            del os.environ[name]
        yield


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    """Runs ``fastensor-accelerate`` in this process. What it would launch is returned, and nothing is launched."""
    launched: list[argparse.Namespace] = []
    monkeypatch.setattr(launch, "launch_command", launched.append)
    monkeypatch.setattr(config_args, "default_config_file", str(tmp_path / "default_config.yaml"))
    for module, name in (
        (config_args, "ClusterConfig"),
        (config_args, "SageMakerConfig"),
        (cluster, "ClusterConfig"),
        (config, "get_user_input"),
        (accelerate_cli, "launch_command_parser"),
        (accelerate_cli, "CustomArgumentParser"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))

    def run(*arguments: object) -> argparse.Namespace:
        monkeypatch.setattr(sys, "argv", ["fastensor-accelerate", *map(str, arguments)])
        launcher.main()
        return launched.pop()

    return run


def file_with(folder: Path, section: Any, name: str = "config.yaml", base: dict[str, Any] = CLUSTER) -> Path:
    path = folder / name
    content = base if section is None else {**base, "fastensor_config": section}
    path.write_text(json.dumps(content) if name.endswith(".json") else yaml.safe_dump(content))
    return path


def handed_over() -> FastensorConfig:
    """The options that the processes of the job find."""
    assert is_wanted_by_environment()
    return FastensorConfig.from_environment()


@contextmanager
def refused(capsys: pytest.CaptureFixture[str], said: str) -> Iterator[None]:
    """The program ends as for a wrong command line, and says why."""
    with pytest.raises(SystemExit) as ended:
        yield
    assert ended.value.code == 2
    assert re.match(f"fastensor-accelerate: .*{said}", capsys.readouterr().err)


# --- records


def test_all_options_go_through_the_environment() -> None:
    options = FastensorConfig(
        backend="direct", durable=False, verify=False, asynchronous=True, staging_bytes=1 << 30,
        max_bytes_per_second=1.5e9, exit_seconds=30, preemption_seconds=5.5, offload=True,
        offload_directories=("/ssd 1", "ssd2"), offload_min_bytes=1 << 20, offload_dram_bytes=0,
        offload_ssd_bytes=1 << 40,
        offload_include=("layers.*",), offload_exclude=("*.head", "x"), offload_codecs=("csr", "fp16"),
        offload_recompute=("layers.?", "head"), offload_trace="/a trace.json",
    )  # fmt: skip
    os.environ.update(options.to_environment())
    assert handed_over() == options


def test_defaults_are_not_written_as_none() -> None:
    os.environ.update(FastensorConfig().to_environment())
    assert handed_over() == FastensorConfig()
    assert "None" not in FastensorConfig().to_environment().values()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"bakend": "direct"}, "no option 'bakend'; did you mean 'backend'"),
        ({"async": True}, "did you mean 'asynchronous'"),
        ({"zzz": 1}, "there are backend, durable, verify, asynchronous"),
        ({1: 1}, "no option 1"),
        ({"backend": "dierct"}, "did you mean 'direct'"),
        ({"backend": 3}, "backend is str, found 3"),
        ({"durable": "maybe"}, "durable is true or false, found 'maybe'"),
        ({"durable": 1}, "durable is bool, found 1"),
        ({"verify": []}, r"verify is bool, found \[\]"),
        ({"staging_bytes": "much"}, "staging_bytes: expected a size such as 5GB or 2GiB, found 'much'"),
        ({"staging_bytes": 1.5}, "staging_bytes is int | None, found 1.5"),
        ({"staging_bytes": True}, "staging_bytes is int | None, found True"),
        ({"staging_bytes": 0}, "staging_bytes"),
        ({"max_bytes_per_second": "-1"}, "max_bytes_per_second"),
        ({"max_bytes_per_second": "nan"}, "max_bytes_per_second"),
        ({"exit_seconds": -1}, "exit_seconds"),
        ({"exit_seconds": "nan"}, "exit_seconds"),
        ({"preemption_seconds": "soon"}, "preemption_seconds is a number"),
        ({"offload": "perhaps"}, "offload is true or false"),
        ({"ofload": True}, "did you mean 'offload'"),
        ({"offload_min_bytes": 0}, "offload_min_bytes is at least 1, found 0"),
        ({"offload_directories": 3}, "offload_directories is a list of texts, found 3"),
        ({"offload_include": ["a", 3]}, "offload_include is a list of texts"),
        ({"offload_codecs": "csr,zip"}, r"offload_codecs are some of .*'zip'"),
        ({"offload_recompute": True}, "offload_recompute is a list of texts, found True"),
        ({"offload_trace": 3}, "offload_trace is str | None, found 3"),
    ],
)
def test_what_means_nothing_is_refused(options: dict[Any, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        FastensorConfig.from_mapping(options)
    assert isinstance(raised.value, ValueError)


def test_values_are_read_as_their_types() -> None:
    texts = {
        "durable": "No",
        "asynchronous": " ON ",
        "staging_bytes": "8388608",
        "exit_seconds": "1e2",
        "backend": None,
    }
    found = FastensorConfig.from_mapping(texts)
    assert found == FastensorConfig(durable=False, asynchronous=True, staging_bytes=1 << 23, exit_seconds=100.0)
    assert type(FastensorConfig.from_mapping({"exit_seconds": 3}).exit_seconds) is float
    for value in ("a, b*,", ["a", "b*"]):
        assert FastensorConfig.from_mapping({"offload_include": value}).offload_include == ("a", "b*")


def test_offload_options_are_those_of_the_core() -> None:
    given = FastensorConfig(offload_directories=("x",), offload_min_bytes=1, offload_exclude=("head",)).offload_config()
    assert given == OffloadConfig(directories=("x",), min_bytes=1, exclude=("head",))
    assert FastensorConfig().offload_config() == OffloadConfig()
    read = FastensorConfig.from_mapping({"offload_codecs": "csr, bf16", "offload_trace": "t.json"})
    assert read.offload_config() == OffloadConfig(codecs=("csr", "bf16"), trace="t.json")


@pytest.mark.parametrize(
    ("value", "wanted"),
    [("auto", "auto"), ("a.*, b", ("a.*", "b")), (["a"], ("a",)), (["auto"], "auto"), (False, False), ("", False)],
)
def test_blocks_that_may_be_computed_again(value: Any, wanted: Any) -> None:
    """In YAML, flags and the environment."""
    found = FastensorConfig.from_mapping({"offload_recompute": value})
    assert found.offload_config() == OffloadConfig(recompute=wanted)
    os.environ.update(found.to_environment())
    assert handed_over() == found


def test_blocks_that_may_be_computed_again_in_code() -> None:
    assert FastensorConfig(offload_recompute="auto").offload_config() == OffloadConfig(recompute="auto")
    assert FastensorConfig(offload_recompute=False) == FastensorConfig()


@pytest.mark.parametrize(
    ("value", "wanted"),
    [("all", "all"), (0.5, 0.5), ("0.5", 0.5), (8 << 30, 8 << 30), (str(8 << 30), 8 << 30), ("0", 0), (1.0, 1.0)],
    ids=str,
)
def test_schedules_are_words_or_numbers(value: Any, wanted: Any) -> None:
    """YAML gives numbers; flags and the environment give texts."""
    config = FastensorConfig.from_mapping({"offload_schedule": value})
    with mock.patch.dict(os.environ, config.to_environment()):
        launched = FastensorConfig.from_environment()
    for one in (config, launched):
        found = one.offload_config().schedule
        assert (type(found), found) == (type(wanted), wanted)
    with pytest.raises(ConfigError, match="offload_schedule is"):
        FastensorConfig(offload_schedule=True)


@pytest.mark.parametrize(("value", "wanted"), [("true", True), ("1", True), ("False", False), ("off", False)])
def test_the_environment_switches_on_and_off(value: str, wanted: bool) -> None:
    assert is_wanted_by_environment() is None
    os.environ["ACCELERATE_USE_FASTENSOR"] = value
    assert is_wanted_by_environment() is wanted


def test_an_unknown_variable_of_the_environment_is_refused() -> None:
    os.environ["ACCELERATE_FASTENSOR_DURABEL"] = "true"
    with pytest.raises(ConfigError, match=r"ACCELERATE_FASTENSOR_\*\) has no option 'durabel'; did you mean 'durable'"):
        FastensorConfig.from_environment()


# --- the flag, the section, the environment


def test_a_flag_has_the_script_run_by_our_module(command: Command) -> None:
    args = command("launch", "--cpu", "--fastensor", "train.py", "--lr", "1")
    assert args.module
    assert (args.training_script, args.training_script_args) == ("fastensor_accelerate", ["train.py", "--lr", "1"])
    assert handed_over() == FastensorConfig()


def test_a_module_is_run_by_our_module(command: Command) -> None:
    args = command("launch", "--cpu", "--fastensor", "-m", "pkg.train", "-m", "x")
    assert args.module
    assert (args.training_script, args.training_script_args) == ("fastensor_accelerate", ["-m", "pkg.train", "-m", "x"])


def test_every_option_has_a_flag(command: Command) -> None:
    flags = [
        "--fastensor_backend", "numpy", "--no_fastensor_durable", "--no_fastensor_verify", "--fastensor_async",
        "--fastensor_staging_bytes", "8388608", "--fastensor_max_bytes_per_second", "1e9",
        "--fastensor-exit-seconds", "3", "--fastensor_preemption_seconds=2", "--fastensor_offload",
        "--fastensor_offload_codecs", "csr", "--fastensor_offload_trace", "trace.json",
        "--fastensor_offload_recompute", "auto",
    ]  # fmt: skip
    command("launch", "--cpu", *flags, "train.py")
    assert handed_over() == FastensorConfig(
        backend="numpy", durable=False, verify=False, asynchronous=True, staging_bytes=1 << 23,
        max_bytes_per_second=1e9, exit_seconds=3, preemption_seconds=2, offload=True, offload_codecs=("csr",),
        offload_trace="trace.json", offload_recompute="auto",
    )  # fmt: skip


@pytest.mark.parametrize("flag", ["--fastensor", "--fastensor_async", "--no_fastensor_verify"])
def test_a_flag_does_not_take_the_script_as_its_value(command: Command, flag: str) -> None:
    assert command("launch", "--cpu", flag, "train.py").training_script_args == ["train.py"]


def test_arguments_of_the_script_that_look_like_ours_are_passed_on(command: Command) -> None:
    theirs = [
        "--fastensor_async",
        "--fastensor_bakend",
        "direct",
        "-m",
        "--",
        "--no_fastensor",
        "--",
        "--cpu",
        "a b",
        "",
    ]
    args = command("launch", "--cpu", "--fastensor", "train.py", *theirs)
    assert args.training_script_args == ["train.py", *theirs]
    assert handed_over() == FastensorConfig()


@pytest.mark.parametrize("name", ["config.yaml", "config.json"])
def test_a_section_switches_on(command: Command, tmp_path: Path, name: str) -> None:
    path = file_with(tmp_path, {"backend": "numpy", "asynchronous": True, "exit_seconds": 5}, name)
    args = command("launch", "--config_file", path, "train.py")
    assert args.training_script == "fastensor_accelerate"
    assert handed_over() == FastensorConfig(backend="numpy", asynchronous=True, exit_seconds=5)


def test_an_empty_section_switches_on(command: Command, tmp_path: Path) -> None:
    command("launch", "--config_file", file_with(tmp_path, {}), "train.py")
    assert handed_over() == FastensorConfig()


def test_the_default_file_is_read_as_accelerate_reads_it(command: Command, tmp_path: Path) -> None:
    file_with(tmp_path, {"verify": False}, "default_config.yaml")
    assert command("launch", "--cpu", "train.py").training_script == "train.py"  # --cpu ignores it
    command("launch", "train.py")
    assert handed_over() == FastensorConfig(verify=False)


def test_the_environment_switches_on(command: Command) -> None:
    os.environ["ACCELERATE_USE_FASTENSOR"] = "yes"
    os.environ["ACCELERATE_FASTENSOR_BACKEND"] = "numpy"
    assert command("launch", "--cpu", "train.py").training_script == "fastensor_accelerate"
    assert handed_over() == FastensorConfig(backend="numpy")


def test_options_alone_in_the_environment_do_not_switch_on(command: Command) -> None:
    os.environ["ACCELERATE_FASTENSOR_BACKEND"] = "numpy"
    assert command("launch", "--cpu", "train.py").training_script == "train.py"


def test_flags_win_over_the_section_over_the_environment_over_defaults(command: Command, tmp_path: Path) -> None:
    os.environ["ACCELERATE_FASTENSOR_EXIT_SECONDS"] = "1"
    os.environ["ACCELERATE_FASTENSOR_STAGING_BYTES"] = "5000000"
    os.environ["ACCELERATE_FASTENSOR_ASYNCHRONOUS"] = "false"
    path = file_with(tmp_path, {"exit_seconds": 2, "staging_bytes": 6000000, "asynchronous": True})
    command("launch", "--config_file", path, "--fastensor_exit_seconds", 3, "--no_fastensor_async", "train.py")
    assert handed_over() == FastensorConfig(exit_seconds=3, staging_bytes=6000000)


def test_offloading_may_be_prepared_in_a_section_and_switched_by_a_flag(command: Command, tmp_path: Path) -> None:
    path = file_with(tmp_path, {"offload_min_bytes": 1})
    for flags, expected in (
        ([], FastensorConfig(offload_min_bytes=1)),
        (["--fastensor_offload"], FastensorConfig(offload=True, offload_min_bytes=1)),
        (
            ["--fastensor_offload", "--fastensor_offload_min_bytes", 2],
            FastensorConfig(offload=True, offload_min_bytes=2),
        ),
        (["--no_fastensor_offload", "--fastensor_offload_min_bytes", 2], FastensorConfig(offload_min_bytes=2)),
    ):
        command("launch", "--config_file", path, *flags, "train.py")
        assert handed_over() == expected


def test_nothing_is_changed_without_flag_section_and_environment(command: Command, tmp_path: Path) -> None:
    before = dict(os.environ)
    for arguments in (["--cpu"], ["--config_file", file_with(tmp_path, None)]):
        args = command("launch", *arguments, "train.py", "--fastensor")
        assert (args.training_script, args.training_script_args) == ("train.py", ["--fastensor"])
        assert not args.module
    assert dict(os.environ) == before


def test_no_fastensor_wins_over_everything(command: Command, tmp_path: Path) -> None:
    os.environ["ACCELERATE_USE_FASTENSOR"] = "true"
    path = file_with(tmp_path, {"bakend": "not even looked at"})
    args = command("launch", "--config_file", path, "--no_fastensor", "--fastensor_async", "train.py")
    assert args.training_script == "train.py"
    assert not args.module
    assert is_wanted_by_environment() is False  # so that `-m fastensor_accelerate` in the job does nothing


@pytest.mark.parametrize(
    ("arguments", "section", "said"),
    [
        (["--fastensor_bakend", "direct"], None, "no flag --fastensor_bakend; did you mean '--fastensor_backend'"),
        (["--fastensor-asinc"], None, "no flag --fastensor-asinc; did you mean '--fastensor_async'"),
        (["--fastensor_bakend=direct"], None, "did you mean '--fastensor_backend'"),
        (["--fastensr"], None, "no flag --fastensr; did you mean '--fastensor'"),
        (["--no_fsdp_async"], None, None),  # looks like none of ours: Accelerate refuses it
        (["--fastensor_backend", "dierct"], None, "--fastensor_backend is 'dierct', .* did you mean 'direct'"),
        (["--fastensor_async", "--fastensor_cooperative"], None, "--fastensor_cooperative and asynchronous contradict"),
        (["--fastensor_staging_bytes", "much"], None, "--fastensor_staging_bytes: expected a size such as 5GB"),
        ([], {"durabel": True}, "config.yaml has no option 'durabel'; did you mean 'durable'"),
        (["--no_fastensor_durable"], {"durable": "perhaps"}, "durable is true or false, found 'perhaps'"),
        ([], ["durable"], r"config.yaml is a section of options, found \['durable'\]"),
        ([], True, "is a section of options, found True"),
        (["--fastensor_offload_min_bytes", "1"], {}, "--fastensor_offload_min_bytes needs --fastensor_offload"),
        (["--no_python"], {}, "--no_python"),
        (["--tpu"], {}, "TPU"),
    ],
)
def test_mistakes_are_found_before_anything_is_launched(
    command: Command,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    section: Any,
    said: str | None,
) -> None:
    path = file_with(tmp_path, section)
    with pytest.raises(SystemExit) as ended:
        command("launch", "--config_file", path, *arguments, "train.py")
    assert ended.value.code == 2
    err = capsys.readouterr().err
    if said is None:
        assert "unrecognized arguments: --no_fsdp_async" in err
    else:
        assert re.match(f"fastensor-accelerate: .*{said}", err), err
    assert is_wanted_by_environment() is None


def test_a_mistake_in_the_environment_is_found_before_anything_is_launched(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    os.environ["ACCELERATE_FASTENSOR_BACKEND"] = "none"
    with refused(capsys, "backend is 'none', which is no backend"):
        command("launch", "--cpu", "--fastensor_backend", "direct", "train.py")
    os.environ["ACCELERATE_USE_FASTENSOR"] = "maybe"
    with refused(capsys, "ACCELERATE_USE_FASTENSOR is true or false, found 'maybe'"):
        command("launch", "--cpu", "train.py")


@pytest.mark.parametrize("section", [None, {"verify": True}])
def test_sagemaker_cannot_enable_fastensor(
    command: Command, capsys: pytest.CaptureFixture[str], tmp_path: Path, section: Any
) -> None:
    path = file_with(tmp_path, section, base=SAGEMAKER)
    with refused(capsys, "SageMaker runs the script by itself"):
        command("launch", "--config_file", path, "--fastensor", "train.py")
    assert command("launch", "--config_file", path, "--no_fastensor", "train.py").training_script == "train.py"


def test_a_file_for_tpus_cannot_enable_fastensor(
    command: Command, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = file_with(tmp_path, {}, base={**CLUSTER, "distributed_type": "XLA"})
    with refused(capsys, "TPU"):
        command("launch", "--config_file", path, "train.py")


def test_accelerates_own_mistakes_are_its_own(command: Command, tmp_path: Path) -> None:
    path = file_with(tmp_path, None, base={**CLUSTER, "fastensr_config": {}})
    with pytest.raises(ValueError, match=r"unknown keys \(\['fastensr_config'\]\)"):
        command("launch", "--config_file", path, "train.py")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        command("launch", "--config_file", tmp_path / "none.yaml", "--fastensor", "train.py")


# --- help, and other commands


@pytest.mark.parametrize("arguments", [["--help"], ["--num_processes", "2", "--help"]])
def test_help_lists_our_flags_beside_accelerates(
    command: Command, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command("launch", *arguments)
    assert not ended.value.code
    out = capsys.readouterr().out
    listed = out.partition("Fastensor Arguments:")[2]
    for flag in (
        "--fastensor ",
        "--no_fastensor ",
        "--fastensor_backend BACKEND",
        "--fastensor_async ",
        "_exit_seconds",
    ):
        assert flag in listed
    assert "--num_processes" in out


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["estimate-memory", "--help"], "model_name"),
        (["test", "--help"], "--config_file"),
        (["config", "--help"], "default_config.yaml"),
        (["--help"], "estimate-memory"),
    ],
)
def test_other_commands_are_accelerates(
    command: Command, capsys: pytest.CaptureFixture[str], arguments: list[str], shown: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        command(*arguments)
    assert not ended.value.code
    assert shown in capsys.readouterr().out


def test_the_environment_is_shown(
    command: Command, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Accelerate before 1.15 fails if the shell does not find it.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    path = file_with(tmp_path, {"verify": False})
    with pytest.raises(IndexError):  # nothing was launched
        command("env", "--config_file", path)
    assert "`Accelerate` version" in (out := capsys.readouterr().out)
    assert "fastensor_config: {'verify': False}" in out


def test_what_contradicts_cooperation_is_refused() -> None:
    with pytest.raises(ConfigError, match="cooperative and asynchronous contradict"):
        FastensorConfig(cooperative=True, asynchronous=True)
    with pytest.raises(ConfigError, match="cooperative_timeout is a number of seconds above 0, found 0"):
        FastensorConfig(cooperative=True, cooperative_timeout=0.0)


def test_cooperation_is_for_data_parallel_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = training(tmp_path)
    monkeypatch.setattr(Accelerator, "distributed_type", DistributedType.FSDP)
    with by(FastensorConfig(cooperative=True)), pytest.raises(ConfigError, match=r"for data parallel .* found FSDP"):
        found.accelerator.save_state()
