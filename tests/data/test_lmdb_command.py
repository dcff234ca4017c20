"""``fastensor data index`` and ``inspect``."""

from __future__ import annotations

import json
from pathlib import Path

import lmdb
import pytest
from data.databases import ENGINES, by_engine, make, some_records
from programs import command_line

from fastensor.data import LmdbIndex


def test_an_index_is_built_and_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make(tmp_path / "data", some_records(100, (10, 3000)).items())
    status, out, _ = command_line(capsys, "data", "index", path)
    assert status == 0
    index = LmdbIndex.open(path, progress=lambda done, total: pytest.fail("the index was not kept"))
    assert f"{index.path}: 100 records of" in out
    assert "sizes: from 10 B to 2.93 KiB" in out
    assert f"the index is kept as {index.sidecar}" in out

    status, out, _ = command_line(capsys, "data", "index", path, "-o", tmp_path / "other", "--json")
    found = json.loads(out)
    assert found["sidecar"] == str(tmp_path / "other")
    assert found["records"] == 100
    assert found["nbytes"] == index.lengths.sum()
    assert found["fingerprint"] == index.fingerprint


def test_databases_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "data"
    with lmdb.open(str(path), max_dbs=1, **by_engine(ENGINES[-1])) as env:
        labels = env.open_db(b"labels", dupsort=True)
        with env.begin(write=True, db=labels) as txn:
            for number in range(5):
                txn.put(b"key", b"%d" % number)
    status, out, _ = command_line(capsys, "data", "inspect", path)
    assert status == 0
    assert f"LMDB, data version {3 if 1 in ENGINES else 1}" in out
    assert "labels" in out
    _, out, _ = command_line(capsys, "data", "inspect", path, "--json")
    main, other = json.loads(out)["databases"]
    assert main["name"] is None
    assert (other["name"], other["records"], other["flags"]) == ("labels", 5, ["dupsort"])
    status, out, _ = command_line(capsys, "data", "index", path, "--db", "labels")
    assert "5 records of 5 B" in out


def test_what_cannot_be_read_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(1000))
    for action in ("index", "inspect"):
        assert command_line(capsys, "data", action, path) == (
            1,
            "",
            f"fastensor: {path}: this is no LMDB file: neither byte 16 nor byte 24 begins LMDB's magic number\n",
        )
    status, _, err = command_line(capsys, "data", "index", tmp_path / "missing")
    assert status == 1
    assert "No such file" in err
