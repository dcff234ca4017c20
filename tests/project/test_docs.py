"""What the documents show, runs."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import programs
import pytest
import yaml  # type: ignore[import-untyped]  # it has no stubs
from programs import Program, free_port

import fastensor
from fastensor.cli import main

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "core/FORMAT.md",
    *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md")),
]
PRINTED = {
    "docs/offload.md": r".*a day of training.*",
    "docs/data.md": r"1000 torch\.Size\(\[8, 8\]\) tensor\(7\.\)\n0\.40\n",
    "docs/provision.md": r"2000 True\nTrue\n",
}
"""What the Python of a document prints."""
PUBLIC = {
    "fastensor": "core/fastensor",
    **{
        f"fastensor.{part}": f"core/fastensor/{part.replace('.', '/')}"
        for part in ("backends", "checkpoint.cooperative", "checkpoint.dcp", "data", "offload", "provision", "testing")
    },
    "fastensor_accelerate": "fastensor_accelerate",
    "fastensor_lightning": "fastensor_lightning",
}
"""Modules whose names are public, and their folders."""


class Command(NamedTuple):
    """A command that a document shows."""

    words: list[str]
    output: str
    """What it shows as its first line; empty if it shows nothing."""


def text_of(document: str) -> str:
    return (ROOT / document).read_text()


def blocks_of(document: str, language: str) -> list[str]:
    """The blocks of code in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text_of(document), re.MULTILINE | re.DOTALL)


def commands_of(document: str) -> Iterator[Command]:
    """The commands of all blocks of the console."""
    for block in blocks_of(document, "console"):
        lines = [*block.splitlines(), ""]
        for line, following in pairwise(lines):
            if line.startswith("$ "):
                yield Command(shlex.split(line[2:], comments=True), "" if following.startswith("$ ") else following)


DOCUMENTS_WITH_PYTHON = [document for document in DOCUMENTS if blocks_of(document, "python")]


def run(*arguments: object, cwd: Path, lightning: bool = False) -> str:
    return programs.run(*arguments, folder=cwd, timeout=1200, lightning=lightning).stdout


@pytest.mark.parametrize("document", DOCUMENTS_WITH_PYTHON)
def test_python_runs_in_order_and_then_commands_show_what_they_do(tmp_path: Path, document: str) -> None:
    """In the folder in which the Python has left its files. A command that shows no output is not run."""
    code = "\n".join(blocks_of(document, "python"))
    (tmp_path / "tour.py").write_text(code)
    port = str(free_port())
    job = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    done = programs.run(
        "tour.py", folder=tmp_path, lightning="lightning" in code, accelerate=document == "docs/accelerate.md",
        **(job if "init_process_group" in code else {}),
    )  # fmt: skip
    assert re.fullmatch(PRINTED.get(document, ".*"), done.stdout, re.DOTALL)
    if document == "docs/lightning.md":
        assert re.search(r"^fastensor: 2 checkpoints saved durably \(", done.stderr, re.MULTILINE), done.stderr
    if document == "docs/offload.md":
        assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    for command in commands_of(document):
        if command.words[0] == "fastensor" and command.output:
            out = run("-m", "fastensor", *command.words[1:], cwd=tmp_path)
            assert out.split()[:2] == command.output.split()[:2]


@pytest.mark.parametrize("number", range(3))
def test_each_block_of_the_readme_runs_alone(tmp_path: Path, number: int) -> None:
    (tmp_path / "block.py").write_text(blocks_of("README.md", "python")[number])
    programs.run("block.py", folder=tmp_path, lightning=number == 1, accelerate=number == 2)


def test_enough_python_is_found() -> None:
    assert len(blocks_of("README.md", "python")) == 3
    assert len(DOCUMENTS_WITH_PYTHON) >= 14
    for document, least in {"docs/offload.md": 2, "docs/data.md": 5, "docs/provision.md": 2}.items():
        assert len(blocks_of(document, "python")) >= least
    commands = [command for document in DOCUMENTS_WITH_PYTHON for command in commands_of(document)]
    assert len([command for command in commands if command.words[0] == "fastensor" and command.output]) >= 8


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_have_the_flags_that_documents_show(capsys: pytest.CaptureFixture[str], document: str) -> None:
    for command in commands_of(document):
        if command.words[0] == "fastensor":
            assert main([*command.words[1:], "--help"]) == 0, command
    of_accelerate = text_of("fastensor_accelerate/config.py") + text_of("fastensor_accelerate/launcher.py")
    for flag in re.findall(r"--(?:no_)?(fastensor\w*)", text_of(document)):
        assert f'"--{flag}"' in of_accelerate, flag


@pytest.mark.parametrize("document", DOCUMENTS)
def test_programs_that_documents_name_are_there(document: str) -> None:
    text = text_of(document)
    benchmarks = "".join(path.read_text() for path in ROOT.glob("benchmarks/*.py"))
    for program, flags in re.findall(r"((?:benchmarks|examples)/\w+\.py)((?:\s+[-\w./]+)*)`", text):
        assert (ROOT / program).exists(), program
        if program.startswith("benchmarks/"):
            assert all(f'"{flag}"' in benchmarks for flag in re.findall(r"--[a-z-]+", flags)), flags
    targets = set(re.findall(r"^([a-z-]+):", text_of("Makefile"), re.MULTILINE))
    assert set(re.findall(r"(?:`|\$ )make ([a-z-]+)", text)) <= targets
    extras = set(re.findall(r"^(\w+) = \[", text_of("pyproject.toml").partition("optional-dep")[2], re.MULTILINE))
    for names in re.findall(r"pip install '(?:\.|fastensor)\[([\w,]+)\]", text):
        assert set(names.split(",")) <= extras, names


def test_yaml_configures_accelerate() -> None:
    """What is for Lightning is tested by ``test_lightning_cli.py``."""
    found = [yaml.safe_load(block) for document in DOCUMENTS for block in blocks_of(document, "yaml")]
    sections = [one["fastensor_config"] for one in found if "trainer" not in one]
    assert len(sections) >= 2
    code = "import json, sys; from fastensor_accelerate import FastensorConfig\n"
    code += "for section in json.loads(sys.argv[1]): FastensorConfig.from_mapping(section)"
    programs.run("-c", code, json.dumps(sections), accelerate=True)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_nothing_is_left_to_be_filled_in(document: str) -> None:
    assert not re.search(r"@[A-Z]+@|TODO|FIXME", text_of(document))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_to_files_and_their_headings(document: str) -> None:
    for link, heading in re.findall(r"\]\((?!https?://)([^)#]*)(?:#([^)]*))?\)", text_of(document)):
        target = (ROOT / document).parent / link if link else ROOT / document
        assert target.exists(), link
        if heading:
            assert heading in headings_of(target), f"{link}#{heading}"


def headings_of(document: Path) -> set[str]:
    """The anchors of a document's headings."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


def test_the_readme_is_short() -> None:
    assert len(text_of("README.md").encode()) <= 8192


@pytest.mark.parametrize("module", PUBLIC)
def test_the_api_pages_have_each_public_name(module: str) -> None:
    tree = ast.parse(text_of(f"{PUBLIC[module]}/__init__.py"))
    (names,) = (
        ast.literal_eval(one.value)
        for one in tree.body
        if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "__all__"
    )
    documented = {
        name
        for path in ROOT.glob("docs/api/*.md")
        for name in re.findall(r"^::: (\S+)$", path.read_text(), re.MULTILINE)
    }
    elsewhere = {"fastensor.__version__", "fastensor_lightning.OffloadConfig"}
    assert {f"{module}.{name}" for name in names} - elsewhere <= documented


def test_the_demo_kills_and_resumes(tmp_path: Path) -> None:
    demo = str(ROOT / "examples" / "resume_after_kill.py")
    options = ["--epochs", "2", "--kill-in-epoch", "1", "--compare-mib", "1", "--required-accuracy", "0"]
    out = run(demo, *options, cwd=tmp_path, lightning=True)
    assert "Killed by SIGKILL" in out
    assert "Resumed from it and trained to epoch 2" in out
    assert len(re.findall(r"^  (?:fastensor|torch) (?: +[0-9.]+){10}   median ", out, re.M)) == 2, "the first ten saves"
    loads = re.findall(
        r"^Loads .*: 5, each the first of a new process, in seconds\n  fastensor(?: +[0-9.]+){5} ", out, re.M
    )
    assert len(loads) == 2, "from the disk and from the page cache"
    assert out.count("× as fast as torch, by the medians") == 3
    assert not os.listdir(tmp_path)


def test_the_example_of_training_data_resumes_with_the_remaining_images(tmp_path: Path) -> None:
    out = run(str(ROOT / "examples" / "lmdb_training.py"), "--stride", "40", cwd=tmp_path, lightning=True)
    count = re.search(r"(\d+) images in", out)
    killed = re.search(r"checkpoint is of epoch (\d), after (\d+) of", out)
    assert count
    assert killed
    left = int(count[1]) - int(killed[2])
    assert 0 < left < int(count[1])
    assert f"trained with the {left} images that epoch {killed[1]} lacked" in out
    assert f"Each of the {count[1]} images has trained the network exactly 2 times." in out
    assert not os.listdir(tmp_path)


@pytest.mark.torture
def test_the_example_of_the_data_service_goes_on_without_its_server(tmp_path: Path) -> None:
    out = run(str(ROOT / "examples" / "provisioned_training.py"), "--stride", "40", cwd=tmp_path)
    count = re.search(r"(\d+) images,", out)
    assert count
    assert "The server was killed by SIGKILL, after step 6 of 10." in out
    assert f"Each of the {count[1]} images has trained the network exactly 3 times." in out
    assert not os.listdir(tmp_path)


def test_the_example_of_shards_goes_on_with_another_number_of_processes(tmp_path: Path) -> None:
    example = ROOT / "examples" / "shard_lightning.py"
    port = str(free_port())
    ranks = [
        Program(
            example, "--epochs", "1", folder=tmp_path, lightning=True, RANK=str(rank), LOCAL_RANK=str(rank),
            WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", GROUP_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
            TORCHELASTIC_RUN_ID="1",
        )
        for rank in range(2)
    ]  # fmt: skip
    with ThreadPoolExecutor(2) as threads:
        (out, err), _ = threads.map(Program.communicate, ranks)
    assert "epoch 1" in out, err
    assert out.count(".distcp") == 2
    assert fastensor.verify(tmp_path / "sharded" / "last.ckpt").complete
    out = run(str(example), "--epochs", "2", "--processes", "1", cwd=tmp_path, lightning=True)
    assert "epoch 2" in out
    assert out.count(".distcp") == 1


def test_the_example_of_offloading_trains_alike(tmp_path: Path) -> None:
    out = run(str(ROOT / "examples" / "offload_lightning.py"), "--epochs", "1", cwd=tmp_path, lightning=True)
    assert "equal to the last bit" in out
    assert re.search(r"activations took at most [0-9.]+ [KM]iB of memory in place of [1-9][0-9.]* MiB", out)
    assert re.search(r"A step took [0-9.]+ ms, offloaded [0-9.]+ ms", out)
    assert re.search(r"[1-9][0-9.]* [MG]iB written", out)


@pytest.mark.parametrize("most", [0, 1, 5, 255, 256, 1000])
def test_the_largest_batch_is_found(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    import larger_batch

    tried: list[int] = []

    def trains(task: larger_batch.Task) -> larger_batch.Outcome | str:
        tried.append(task.batch)
        return ([], None) if task.batch <= most else f"no memory for {task.batch} rows"

    monkeypatch.setattr(larger_batch, "in_its_own_process", trains)
    found, why = larger_batch.largest(larger_batch.Task("plain", 256, False, 1, 1, 1, "cpu", "."), 1.1)
    assert most / 1.1 <= found <= most
    assert why == f"no memory for {min(batch for batch in tried if batch > most)} rows"
    assert len(tried) == len(set(tried))


def test_a_batch_that_is_too_large_trains_with_offloading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process whose address space is limited. All of its activations would take twice the room."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "examples"), prepend=os.pathsep)
    import larger_batch

    task = larger_batch.Task("plain", 2048, False, 256 << 20, 48, 128, "cpu", str(tmp_path))
    assert "can't allocate memory" in larger_batch.in_its_own_process(task)
    trained = larger_batch.in_its_own_process(dataclasses.replace(task, offloads=True))
    assert not isinstance(trained, str), trained
    assert trained[1].offloaded_bytes > 0


def test_the_example_says_what_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even one row trains; or a batch does not train again that has trained before."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    import larger_batch

    options = ["--directory", str(tmp_path), "--blocks", "1", "--step", "2", "--room", "7"]
    monkeypatch.setattr(larger_batch, "in_its_own_process", lambda task: "no room for 8 bytes")
    with pytest.raises(SystemExit, match=r"Not even one row trains with offloading in this room \(no room for 8 bytes"):
        larger_batch.main(options)
    for room, wanted in (("7", 14), ("1", 97)):  # twice the room, or three times the gradients
        wide = [*options, "--width", "1024" if room == "1" else "128", "--room", room]
        with pytest.raises(SystemExit, match=rf"try --room {wanted}$"):
            larger_batch.main(wide)
    tried: list[int] = []

    def once(task: larger_batch.Task) -> larger_batch.Outcome | str:
        tried.append(task.batch)
        return ([], None) if tried.count(task.batch) == 1 and task.batch < 1000 else "no room"

    monkeypatch.setattr(larger_batch, "in_its_own_process", once)
    with pytest.raises(SystemExit, match=r"\d+ rows does not train with offloading in 7 MiB again: no room"):
        larger_batch.main(options)


@pytest.mark.torture
@pytest.mark.parametrize("by", ["plain", "lightning", "accelerate"])
def test_larger_batches_train_alike_in_the_same_memory(tmp_path: Path, by: str) -> None:
    example = str(ROOT / "examples" / "larger_batch.py")
    options = ["--by", by, "--room", "512", "--step", "2", "--directory", "."]
    out = run(example, *options, cwd=tmp_path, lightning=by == "lightning")
    assert "The losses are equal to the last bit" in out
    (times,) = re.findall(r"with: ([0-9.]+) ×", out)
    assert float(times) > 2


def test_the_example_of_accelerate_is_killed_and_resumes_as_without_the_flag(tmp_path: Path) -> None:
    """Killed in a run that saves asynchronously. The run that resumes saves synchronously, and offloads activations; it
    ends as Accelerate alone does."""
    example, last = str(ROOT / "examples" / "train_accelerate.py"), {}

    def train(
        project: str, *options: str, asynchronous: bool = False, **settings: Any
    ) -> subprocess.CompletedProcess[str]:
        enabled = () if project == "stock" else ("-m", "fastensor_accelerate")
        return programs.run(
            *enabled, example, "--epochs", "3", "--project", project, *options, accelerate=True, folder=tmp_path,
            ACCELERATE_FASTENSOR_ASYNCHRONOUS=str(asynchronous).lower(),
            ACCELERATE_FASTENSOR_OFFLOAD=str(not asynchronous).lower(), ACCELERATE_FASTENSOR_OFFLOAD_SCHEDULE="all",
            **settings,
        )  # fmt: skip

    killed = train("ours", "--kill-after", "2", asynchronous=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    for project in ("stock", "ours"):
        done = train(project)
        assert bool(re.search(r"Resumed after epoch [12]\.", done.stdout)) == (project == "ours")
        assert ("fastensor: saved" in done.stderr) == (project == "ours")
        offloaded = re.search(
            r"fastensor: activation offload of Sequential: activations .*; [1-9][0-9.]* [KMG]iB written", done.stderr
        )
        assert (offloaded is not None) == (project == "ours"), done.stderr
        assert sorted(os.listdir(tmp_path / project / "checkpoints")) == ["checkpoint_1", "checkpoint_2"]
        model = fastensor.verify(tmp_path / project / "checkpoints" / "checkpoint_2" / "model.safetensors")
        assert model.complete == (project == "ours")
        last[project] = done.stdout.splitlines()[-1]
    assert last["stock"].startswith("Validation accuracy")
    assert last["ours"] == last["stock"]


def test_the_example_of_a_big_model_computes_what_it_does_in_memory(tmp_path: Path) -> None:
    """112 MiB of weights."""
    example = str(ROOT / "examples" / "big_model_inference.py")
    small = ("--layers", "3", "--width", "768", "--tokens", "2", "--memory", "0.6", "--read-ahead", "16")
    done = programs.run(example, *small, accelerate=True, folder=tmp_path)
    assert re.search(r"MiB of weights, 60% of that for data: the same tokens as in memory", done.stdout)
    assert not os.listdir(tmp_path)


@pytest.mark.torture
def test_the_benchmark_of_inference_measures_every_way(tmp_path: Path) -> None:
    benchmark = str(ROOT / "benchmarks" / "accelerate_inference.py")
    tiny = ["--size", "tiny", "--runs", "1", "--passes", "2"]
    folders = ["--folder", str(tmp_path / "files"), "--output", str(tmp_path / "out")]
    out = run(benchmark, *tiny, *folders, cwd=tmp_path)
    for start in ("cold", "warm"):
        for way in ("disk_offload", "fastensor, checkpoint", "fastensor, folder"):
            for number in ("first", "later"):
                assert f"| {start} | {way} | {number} |" in out
    assert len(json.loads((tmp_path / "out.json").read_text())["verdicts"]) == 6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["files", "out.json", "out.md"]
    assert not os.listdir(tmp_path / "files")


@pytest.mark.torture
def test_the_benchmark_of_accelerate_measures_every_way(tmp_path: Path) -> None:
    benchmark = str(ROOT / "benchmarks" / "accelerate_state.py")
    tiny = ["--model", "tiny", "--runs", "1", "--saves", "2"]
    folders = ["--folder", str(tmp_path / "files"), "--output", str(tmp_path / "out")]
    out = run(benchmark, *tiny, *folders, cwd=tmp_path)
    for way in ("accelerate", "accelerate, synced", "fastensor", "fastensor, asynchronous"):
        assert f"| save | {way} | first |" in out
        assert f"| save | {way} | later |" in out
    for row in ("| cold load | fastensor |", "| warm load | accelerate |", "durable save / accelerate, synced ≤ 0.6"):
        assert row in out
    found = json.loads((tmp_path / "out.json").read_text())
    assert len(found["verdicts"]) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["files", "out.json", "out.md"]
    assert not os.listdir(tmp_path / "files")


@pytest.mark.torture
def test_the_benchmark_of_distributed_checkpoints_measures_every_way(tmp_path: Path) -> None:
    benchmark = str(ROOT / "benchmarks" / "distributed.py")
    tiny = ["--model", "tiny", "--worlds", "1", "2", "--runs", "1", "--saves", "2"]
    folders = ["--folder", str(tmp_path / "files"), "--output", str(tmp_path / "out")]
    out = run(benchmark, *tiny, *folders, cwd=tmp_path)
    for world in (1, 2):
        for way in ("fastensor", "torch, 2 threads, sync_files", "torch, 4 threads", "planning and metadata alone"):
            assert f"| {world} | save | {way} | later |" in out
        for way in ("fastensor", "torch", "torch, staged asynchronously"):
            assert f"| {world} | asynchronous save | {way} | later |" in out
        for way in ("fastensor", "torch", "planning and metadata alone"):
            assert f"| {world} | cold load | {way} | first |" in out
        assert f"| {world} | save of replicas | fastensor, rank 0 alone | later |" in out
    assert "| cold load | fastensor | grows with N |" in out
    assert len(json.loads((tmp_path / "out.json").read_text())["verdicts"]) in (10, 12)  # without fio, or with it
    assert sorted(path.name for path in tmp_path.iterdir()) == ["files", "out.json", "out.md"]
    assert not os.listdir(tmp_path / "files")


@pytest.mark.torture
def test_the_benchmark_of_training_data_measures_every_way(tmp_path: Path) -> None:
    benchmark = str(ROOT / "benchmarks" / "lmdb_reading.py")
    tiny = ["--tiny", "--worlds", "1", "2", "--rounds", "1", "--seconds", "1"]
    folders = ["--folder", str(tmp_path / "files"), "--output", str(tmp_path / "out")]
    out = run(benchmark, *tiny, *folders, cwd=tmp_path)
    for size in ("300 B", "110 KB"):
        for order in ("sequential", "strided", "full", "block"):
            for world in (1, 2):
                for way in ("py-lmdb", "py-lmdb, readahead=False", "py-lmdb + WILLNEED, far", "fastensor", "raw files"):
                    assert f"| {size} | {order} | {world} | cold | {way} |" in out
                assert f"| {size} | {order} | {world} | warm | fastensor |" in out
        assert f"| {size} | full | 1 | cold | + past the page cache (direct) |" in out
        for strategy in ("LMDB", "LMM-DIO-COAL", "LMM-DIO-COAL-STAG"):
            assert f"| {size} | strided | 2 | cold | {strategy} |" in out
        assert f"| index | {size} | fastensor |" in out
        assert f"| scan | {size} | py-lmdb |" in out
    found = json.loads((tmp_path / "out.json").read_text())
    promises = [verdict["promise"] for verdict in found["verdicts"]]
    assert "110 KB, full shuffle, cold: rate / best py-lmdb ≥ 3" in promises
    assert "110 KB, index: best py-lmdb / time ≥ 4" in promises
    assert sorted(path.name for path in tmp_path.iterdir()) == ["files", "out.json", "out.md"]
    assert not os.listdir(tmp_path / "files")


@pytest.mark.torture
def test_the_benchmark_of_the_data_service_measures_every_way(tmp_path: Path) -> None:
    benchmark = str(ROOT / "benchmarks" / "provision.py")
    tiny = ["--tiny", "--worlds", "2", "--times", "1", "--rounds", "1", "--epochs", "2", "--peers"]
    link = ["--compute-ms", "2", "--delay-ms", "1"]
    folders = ["--folder", str(tmp_path / "files"), "--output", str(tmp_path / "out")]
    out = run(benchmark, *tiny, *link, *folders, cwd=tmp_path)
    for kind in ("32 KB", "JPEG"):
        for way in ("DataLoader", "service", "service, half", "service, killed"):
            assert re.search(rf"^\| {kind} \| 2 \| {way} \| \d+ \| later \|", out, re.M), (kind, way)
    assert "| service: each sample once in each epoch | 1.000 | yes |" in out
    starts = out.partition("## starting")[2].splitlines()
    assert len([line for line in starts if line.startswith(("| 32 KB | 2 |", "| JPEG | 2 |"))]) == 8
    assert sorted(path.name for path in tmp_path.iterdir()) == ["files", "out.json", "out.md"]
    assert not os.listdir(tmp_path / "files")


@pytest.mark.torture
def test_the_benchmark_of_offloading_measures_every_contender(tmp_path: Path) -> None:
    benchmark = str(ROOT / "benchmarks" / "offload.py")
    tiny = ["--models", "tiny", "--rounds", "1", "--steps", "1", "--min-bytes", "4096", "--device", "cpu"]
    to = ["--directory", str(tmp_path), "--output", str(tmp_path / "out")]
    out = run(benchmark, *tiny, *to, "--parts", "steps", cwd=tmp_path)
    contenders = (
        "none", "dropped", "pt", "npy", "checkpointing", "auto", "half", "oracle", "all", "csr", "equal"
    )  # fmt: skip
    for name in contenders:
        assert f"| {name} |" in out
    assert "(but for dropped) are equal" in out
    beside = ["--beside-model", "tiny", "--array-bytes", str(1 << 20)]
    small = ["--room", "48", "--blocks", "4", "--width", "64"]
    out = run(benchmark, *tiny, *to, "--parts", "largest", "beside", *beside, *small, cwd=tmp_path)
    assert "## Largest batch" in out
    for target in ("none", "SSD", "memory"):
        assert f"| {target} |" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "out.md"]
    kept = (tmp_path / "out.md").read_text()
    assert "## tiny" in kept, "what was measured before stays"
    assert "## A job beside the training" in kept


@pytest.mark.torture
def test_the_benchmark_of_offloading_under_trainers_measures_every_way(tmp_path: Path) -> None:
    benchmark = str(ROOT / "benchmarks" / "offload_trainers.py")
    tiny = ["--models", "tiny", "--rounds", "1", "--steps", "1"]
    out = run(benchmark, *tiny, "--directory", str(tmp_path), "--output", str(tmp_path / "out"), cwd=tmp_path)
    for trainer in ("transformers", "TRL", "Lightning"):
        table = out.partition(f"## {trainer}, tiny")[2].partition("\n## ")[0]
        for way in ("none", "checkpointing", "checkpointing, inputs moved", "auto, room of checkpointing", "default"):
            assert f"\n| {way} |" in table
        assert "losses and trained weights of all ways are equal" in table
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "out.md"]


@pytest.mark.torture
def test_the_benchmark_of_asynchronous_saves_measures_every_contender(tmp_path: Path) -> None:
    benchmark = str(ROOT / "benchmarks" / "async_checkpoint.py")
    tiny = ["--sizes", "1", "--rounds", "1", "--saves", "2", "--throughput-size", "1", "--spells", "1"]
    folders = ["--folder", str(tmp_path / "files"), "--output", str(tmp_path / "out")]
    out = run(benchmark, *tiny, "--spell-seconds", "0.05", *folders, cwd=tmp_path)
    for word in ("lightning async", "dcp async", "pure Python", "stall / copy", "throughput with saves"):
        assert word in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["files", "out.json", "out.md"]
    assert not os.listdir(tmp_path / "files")


@pytest.mark.torture
def test_the_benchmark_of_single_tensors_measures_every_backend(tmp_path: Path) -> None:
    benchmark = str(ROOT / "benchmarks" / "tensor_io.py")
    tiny = ["--sizes", "0.01", "--rounds", "1", "--models", "tiny", "--mixes", "BERT", "--iterations", "1"]
    folders = ["--folder", str(tmp_path / "files"), "--output", str(tmp_path / "out")]
    out = run(benchmark, *tiny, *folders, cwd=tmp_path)
    for word in ("durable write", "warm read", "Table 9", "the sizes of BERT", "in hindsight", "in a second run"):
        assert word in out
    verdicts = json.loads((tmp_path / "out.json").read_text())["verdicts"]
    promises = {verdict["promise"].rpartition(": ")[2].split(" ≤")[0].split(" <")[0] for verdict in verdicts}
    assert promises >= {"time / hindsight", "explored in a second run", "to choose for a write, µs"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["files", "out.json", "out.md", "out.png"]
    assert not os.listdir(tmp_path / "files")


def test_the_benchmark_of_a_gpu_runs_without_one(tmp_path: Path) -> None:
    """Its figures mean nothing then; what it would do is done."""
    out = run(*gpu_benchmark(tmp_path, rounds=1), cwd=tmp_path)
    for word in ("fastensor, auto", "safetensors", "the disk alone", "pinned copy to the host", "stall", "GB/s on the"):
        assert word in out
    assert "- tiny: kvikio alone: ModuleNotFoundError" in out
    found = json.loads((tmp_path / "out.json").read_text())
    assert [verdict["measured"] is not None for verdict in found["details"]["verdicts"]] == [True] * 6
    assert {row["resident"] is not None for row in found["details"]["medians"] if row["contender"] == "torch"} == {
        True,
        False,
    }
    assert (tmp_path / "out.md").read_text() in out
    ours = {path.name for path in tmp_path.iterdir()} - {
        "cufile.log"
    }  # of NVIDIA's library, where torch has brought it
    assert ours == {"files", "out.json", "out.md"}
    assert not os.listdir(tmp_path / "files")


def test_the_benchmark_of_a_gpu_shows_what_it_has_when_it_is_terminated(tmp_path: Path) -> None:
    with Program(*gpu_benchmark(tmp_path, rounds=10_000), folder=tmp_path) as process:
        next(line for line in process.stderr if "round 1" in line)
        process.terminate()
        out, err = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert "| torch | 0 |" in out
    assert "## promises" in out
    assert json.loads((tmp_path / "out.json").read_text())["details"]["samples"]
    assert not os.listdir(tmp_path / "files")


GPU_PROGRAMS_THAT_TAKE_LONG = ("transformers.Trainer: a small Llama in bf16", "torch.compile and offload")
"""To be imported, or to be compiled."""


def test_users_programs_for_a_gpu_run_without_one(tmp_path: Path) -> None:
    listed = run("-c", "import gpu_use; print(*gpu_use.PROGRAMS, sep='\\n')", cwd=ROOT / "benchmarks").splitlines()
    assert {*GPU_PROGRAMS_THAT_TAKE_LONG} < {*listed}
    programs = [title for title in listed if title not in GPU_PROGRAMS_THAT_TAKE_LONG]
    assert gpu_rows(tmp_path, "gpu_use.py", "--programs", *programs) == dict.fromkeys(programs, True)


def test_the_offload_of_a_transformer_on_a_gpu_runs_without_one(tmp_path: Path) -> None:
    rows = gpu_rows(tmp_path, "gpu_offload.py", "--steps", "1")
    unpromised = [name for name, holds in rows.items() if holds is None]
    assert unpromised == ["nothing offloaded", "nothing offloaded, again"]
    assert len(rows) == 12
    assert False not in rows.values()


def gpu_rows(folder: Path, program: str, *options: str) -> dict[str, bool | None]:
    """What a part of `make gpu` finds on a CPU: what is in its rows, and whether that is as it was promised."""
    where = ["--device", "cpu", "--tiny", "--folder", str(folder), "--output", str(folder / "out.json")]
    run(str(ROOT / "benchmarks" / program), *where, *options, cwd=folder)
    found = json.loads((folder / "out.json").read_text())
    assert found["doing"] == ""
    assert os.listdir(folder) == ["out.json"]
    return {row["what"]: row["holds"] for row in found["rows"]}


def test_the_table_of_a_gpu_is_shown_when_its_programs_are_told_to_end(tmp_path: Path) -> None:
    tiny = ["--tiny", "--folder", str(tmp_path / "files"), "--output", str(tmp_path / "out")]
    with Program(str(ROOT / "benchmarks" / "gpu.py"), *tiny, folder=tmp_path) as process:
        next(line for line in process.stderr if "=== tests" in line)
        process.terminate()
        out, err = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert re.search(r"^\| tests \|.*\| cut off(: begun| after \d+ s)", out, re.MULTILINE)
    assert "| saves and loads |  | saves and loads | cut off: not begun | **no** |" in out
    assert (tmp_path / "out.md").read_text() in out
    assert not os.listdir(tmp_path / "files")


@pytest.mark.torture
def test_all_that_make_gpu_does_runs_without_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    command = [str(ROOT / "benchmarks" / "gpu.sh"), sys.executable, str(tmp_path / "no-wheels")]
    environment = {**os.environ, "OUT": str(tmp_path / "out"), "GPU_SECONDS": "3000"}
    tiny = ["--tiny", "--folder", str(tmp_path / "files")]
    done = subprocess.run([*command, *tiny], env=environment, capture_output=True, text=True, check=False)
    table = (tmp_path / "out" / "gpu.md").read_text()
    assert "cut off" not in table
    assert table in done.stdout
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "out" / "gpu.log").read_text() == done.stdout
    assert not os.listdir(tmp_path / "files")


def gpu_benchmark(folder: Path, *, rounds: int) -> list[str]:
    tiny = ["--device", "cpu", "--model", "tiny", "--gib", "0.002", "--rounds", str(rounds), "--seconds", "600"]
    folders = ["--folder", str(folder / "files"), "--output", str(folder / "out.json")]
    return [str(ROOT / "benchmarks" / "gpu_saves.py"), *tiny, *folders]


@pytest.mark.torture
def test_the_benchmark_measures_every_contender(tmp_path: Path) -> None:
    benchmark = str(ROOT / "benchmarks" / "checkpoint.py")
    options = [
        "--models",
        "tiny",
        "--rounds",
        "1",
        "--folder",
        str(tmp_path / "files"),
        "--output",
        str(tmp_path / "out"),
    ]
    out = run(benchmark, *options, cwd=tmp_path)
    for word in ("safetensors", "dcp, 2 threads", "torch, no crc", "cold load", "warm load", "durable save"):
        assert word in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["files", "out.json", "out.md", "out.png"]
    assert not os.listdir(tmp_path / "files")


@pytest.mark.torture
def test_the_benchmark_of_loaders_measures_every_tool(tmp_path: Path) -> None:
    benchmark = str(ROOT / "benchmarks" / "loaders.py")
    tiny = ["--mib", "1", "2", "--rounds", "1", "--tries", "1"]
    folders = ["--folder", str(tmp_path / "files"), "--output", str(tmp_path / "out")]
    out = run(benchmark, *tiny, *folders, cwd=tmp_path)
    for operation in ("cold load", "warm load", "durable save"):
        rows = out.partition(f"## {operation}: median seconds")[2].partition("##")[0]
        for tool in ("fastensor, safetensors", "safetensors", "fastensor", "torch"):
            assert re.search(rf"^\| {tool} \| \d\S+ \(.*\) \| \d\S+ \(.*\) \|$", rows, re.M), (operation, tool)
    assert len(json.loads((tmp_path / "out.json").read_text())["verdicts"]) == 12
    assert sorted(path.name for path in tmp_path.iterdir()) == ["files", "out.json", "out.md", "out.png"]
    assert not os.listdir(tmp_path / "files")


@pytest.mark.torture
def test_the_benchmark_of_small_loads_counts_calls(tmp_path: Path) -> None:
    benchmark = str(ROOT / "benchmarks" / "small_loads.py")
    folders = ["--folder", str(tmp_path / "files"), "--output", str(tmp_path / "out")]
    out = run(benchmark, "--sizes", "64 KiB", *folders, cwd=tmp_path)
    for container in ("ckpt", "safetensors"):
        for state in ("cold", "warm"):
            row = rf"^\| 64 KiB in 16 tensors, `.{container}` \| {state} \| \d+ \| \d+ \| (\d+|–) \| \d+\.\d\d \|"
            assert re.search(row, out, re.M), (container, state)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["files", "out.md"]
    assert not os.listdir(tmp_path / "files")


@pytest.mark.torture
def test_the_benchmark_of_the_first_epoch_measures_all_ways(tmp_path: Path) -> None:
    benchmark = str(ROOT / "benchmarks" / "provision_first.py")
    folders = ["--folder", str(tmp_path / "files"), "--output", str(tmp_path / "out")]
    out = run(benchmark, "--tiny", "--rounds", "1", "--kinds", "2 KB", "JPEG", *folders, cwd=tmp_path)
    for kind in ("2 KB", "JPEG"):
        for way in ("DataLoader", "DataLoader, forkserver", "service"):
            assert re.search(rf"^\| {kind} \| {way} \|.*\| yes \| 1 \|$", out, re.M), (kind, way)
        for way in ("DataLoader", "DataLoader, forkserver"):
            assert re.search(rf"^\| {kind} \| service / {way} \|", out, re.M), (kind, way)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["files", "out.json", "out.md"]
    assert not os.listdir(tmp_path / "files")


@pytest.mark.torture
def test_the_benchmark_of_clients_of_a_service_measures_each_number(tmp_path: Path) -> None:
    benchmark = str(ROOT / "benchmarks" / "provision_clients.py")
    out = run(benchmark, "--clients", "1", "3", "--seconds", "0.5", "--output", str(tmp_path / "out"), cwd=tmp_path)
    assert re.findall(r"^\| (\d) \| \d+ \|", out, re.MULTILINE) == ["1", "3"]
    assert out.count("Fitted: ") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "out.md"]
