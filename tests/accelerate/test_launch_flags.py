"""The flags of ``fastensor-accelerate launch``."""

from __future__ import annotations

import pytest

from fastensor_accelerate.launcher import _launch_parser, _options


@pytest.mark.parametrize(("flag", "expected"), [("--fastensor_async", True), ("--no_fastensor_async", False)])
def test_a_flag_without_a_value_leaves_the_script_alone(flag: str, expected: bool) -> None:
    args = _launch_parser().parse_args(["--cpu", "--fastensor", flag, "train.py", "--project", "runs"])
    assert (args.training_script, args.training_script_args) == ("train.py", ["--project", "runs"])
    options = _options(args)
    assert options is not None
    assert options.asynchronous is expected
