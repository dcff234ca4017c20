"""``fastensor tune``: measures a folder, and what it has measured decides."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fastensor
from fastensor import Context
from fastensor.cli import main
from fastensor.cli.checkup import measurement
from fastensor.cli.checkup.measurement import BackendState, Chosen, Rounds, Speed, advise, choices_for, time_torch_save
from fastensor.cli.tune import learned
from fastensor.select import current, torch_save
from fastensor.select.dictionary import Dictionary
from fastensor.select.files import file_for, read

MIB = 1 << 20


@pytest.fixture(autouse=True)
def own_dictionaries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTENSOR_DICTIONARIES", str(tmp_path / "dictionaries"))
    monkeypatch.setattr(current, "_made", {})


def test_what_is_measured_is_learned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    assert main(["tune", str(folder), "--sizes", "64K,1M"]) == 0
    stored = read(file_for(folder).path).dictionary
    for context in (Context("write"), Context("write", "staged"), Context("read"), Context("read", warm=True)):
        for nbytes in (64 << 10, MIB):
            timings = stored.of(context, nbytes).timings
            assert {name: timing.count for name, timing in timings.items()} == {"direct": 3, "numpy": 3}, context
    assert (stored.seconds, stored.extra_seconds) == (0.0, 0.0), "it pays for no tries"
    assert not list(folder.iterdir())
    compared = read(file_for(folder, of="torch.save").path).dictionary
    assert {name: timing.count for _, entry in compared for name, timing in entry.timings.items()} == {"torch.save": 3}
    assert len(compared) == 2
    seconds = torch_save.seconds_known(str(folder), [64 << 10, MIB])
    assert seconds is not None
    assert 0 < seconds < 60
    shown = capsys.readouterr().out
    assert shown.count("torch.save ") == 2
    assert str(file_for(folder).path) in shown
    assert shown.count("by size") == 6, "auto does not ask what is known of such small files"


def test_what_was_not_measured_is_not_invented(tmp_path: Path) -> None:
    assert torch_save.seconds_known(str(tmp_path), [MIB]) is None
    file_for(tmp_path, of="torch.save").update(torch_save.learned(MIB, [0.5, 0.5, 0.9]))
    assert torch_save.seconds_known(str(tmp_path), [MIB, 2 * MIB]) == 1.5
    assert torch_save.seconds_known(str(tmp_path), [MIB, 9 * MIB]) is None, "too far from what was measured"
    assert torch_save.seconds_known(str(tmp_path), [MIB, 1000]) is None
    assert current.current_selector(tmp_path).statistics().seconds == 0, "no selector knows it"


def test_the_very_size_that_was_measured_is_known() -> None:
    nbytes = 3 * MIB  # in the middle of a bucket
    dictionary = Dictionary()
    for size, seconds in ((nbytes, 0.5), (64 * MIB, 900.0)):
        for change in torch_save.learned(size, [seconds]):
            dictionary.apply(change)
        assert torch_save.estimate(dictionary, nbytes) == pytest.approx(0.5, rel=1e-4), "it is kept in four digits"
    assert torch_save.estimate(dictionary, 2 * MIB) is None


def test_small_files_take_the_same_time(tmp_path: Path) -> None:
    file_for(tmp_path, of="torch.save").update(torch_save.learned(1000, [0.5]))
    assert torch_save.seconds_known(str(tmp_path), [10, 4096]) == 1.0


def test_no_round_of_torch_save_replaces_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[list[str]] = []

    def watched(values: torch.Tensor, path: Path) -> None:
        found.append([one.name for one in path.parent.iterdir()])
        write(values, path)

    write = measurement._torch_save
    monkeypatch.setattr(measurement, "_torch_save", watched)
    assert len(time_torch_save(str(tmp_path), 64 << 10)) == measurement.ROUNDS
    assert found == [[]] * measurement.ROUNDS


def test_where_torch_save_fails_the_rest_is_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("the disk is full")

    monkeypatch.setattr("fastensor.cli.tune.time_torch_save", fail)
    assert main(["tune", str(tmp_path), "--sizes", "64K"]) == 0
    assert "the disk is full" in capsys.readouterr().out
    assert torch_save.seconds_known(str(tmp_path), [64 << 10]) is None


def test_what_is_learned() -> None:
    rounds = Rounds("numpy", 8 * MIB, write=[4.0 * MIB, 8.0 * MIB], warm=[16.0 * MIB])
    dictionary = Dictionary()
    for change in learned(rounds):
        dictionary.apply(change)
    assert dictionary.of(Context("write"), 8 * MIB).timings["numpy"].samples == (2.0, 1.0)
    assert dictionary.of(Context("write", "staged"), 8 * MIB).timings["numpy"].samples == (2.0, 1.0)
    assert dictionary.of(Context("read", warm=True), 8 * MIB).timings["numpy"].samples == (0.5,)
    assert dictionary.of(Context("read"), 8 * MIB).timings == {}


def test_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", str(tmp_path / "absent")]) == 1
    assert "there is no such folder" in capsys.readouterr().err
    assert not (tmp_path / "dictionaries").exists()


@pytest.mark.parametrize(("direct", "pays"), [(1.2, False), (3.0, True)])
def test_doctor_says_when_it_would_pay(direct: float, pays: bool) -> None:
    speeds = (
        Speed("numpy", MIB, 1e9, 1e9, 1e9, True, ""),
        Speed("direct", MIB, direct * 1e9, 1e9, 1e9, True, ""),
        Speed("torch", MIB, 9e9, 9e9, 9e9, True, ""),  # is no contender for files
    )
    choices = tuple(
        Chosen(str(context), MIB, "numpy", "by size: nothing was measured", False)
        for context in (Context("write"), Context("read"), Context("read", warm=True))
    )
    found = list(advise("/x", [BackendState("numpy", True, "")], speeds, choices))
    assert len(found) == pays
    if pays:
        assert "write cpu durable, 1 MiB: direct is 3.0 × as fast as numpy" in found[0].found
        assert "fastensor tune /x" in found[0].todo


def test_small_files_are_by_size_whatever_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    selector = fastensor.Selector(explore=True)
    for nbytes in (8 * MIB, 64 * MIB):
        for _ in range(3):
            selector.record(nbytes, Context("write"), "numpy", 0.1)
            selector.record(nbytes, Context("write"), "direct", 20.0)
    monkeypatch.setattr("fastensor.cli.checkup.measurement.current_selector", lambda path: selector)
    small, large, *_ = choices_for(str(tmp_path), (8 * MIB, 64 * MIB), ("direct", "numpy"))
    assert (small.backend, small.reason) == ("direct", "by size")
    assert large.backend == "numpy"
    assert large.reason.startswith("the fastest")
    speeds = [Speed(name, 8 * MIB, rate, 1e9, 1e9, True, "") for name, rate in (("direct", 1e9), ("numpy", 9e9))]
    assert not list(advise("/x", [BackendState("numpy", True, "")], speeds, [small])), "no tuning would help"
