"""How much there is to know: statements, files, classes, names that occur twice, and what common calls pass through.

    python benchmarks/structure.py            # a table in Markdown
    python benchmarks/structure.py --walk save_state   # the modules and functions of one walk
    python benchmarks/structure.py --imported load .ckpt    # the modules that a first call imports

A *walk* is one call that has been made before in the process, so that nothing is imported or begun any more. Counted
are the functions of Fastensor that run, in all threads, each once, and the modules that they are in. What a first call
imports is seen in a process of its own. Statements are those of Python's grammar, docstrings included.
"""

from __future__ import annotations

import argparse
import ast
import logging
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import fastensor
from fastensor.offload import ActivationOffload, OffloadConfig

ROOT = Path(__file__).parents[1]
PACKAGES = ("core/fastensor", "fastensor_lightning", "fastensor_accelerate")
LARGEST = 12
"""The table names so many of the largest files."""
_FEATURES = 1 << 20
"""A float32 tensor of so many has 4 MiB."""

Call = Callable[[], object]
Prepare = Callable[[Path, ExitStack], Call]


class Walk:
    """The functions of Fastensor that run while the walk is on, in this thread and those that are started later."""

    def __init__(self) -> None:
        self.functions: set[CodeType] = set()
        self._is_on = False
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    @property
    def modules(self) -> set[str]:
        return {module_of(function) for function in self.functions}

    @contextmanager
    def on(self) -> Iterator[None]:
        self._is_on = True
        yield
        self._is_on = False

    def end(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  # None is what ends it

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if self._is_on and event == "call" and is_ours(frame.f_code.co_filename):
            self.functions.add(frame.f_code)


def is_ours(filename: str) -> bool:
    return any(filename.startswith(f"{ROOT / package}/") for package in PACKAGES)


def module_of(function: CodeType) -> str:
    return str(Path(function.co_filename).relative_to(ROOT)).removeprefix("core/")


def _state() -> dict[str, torch.Tensor]:
    return {f"weight{number}": torch.ones(_FEATURES // 8) for number in range(8)}


def _save(folder: Path, _: ExitStack) -> Call:
    state = _state()
    return lambda: fastensor.save(state, folder / "model.ckpt")


def _save_async(folder: Path, stack: ExitStack) -> Call:
    state, writer = _state(), stack.enter_context(fastensor.AsyncWriter())
    return lambda: writer.save(state, folder / "model.ckpt").result()


def _load(suffix: str) -> Prepare:
    def prepare(folder: Path, _: ExitStack) -> Call:
        fastensor.save(_state(), path := folder / f"model{suffix}")
        return lambda: fastensor.load(path)

    return prepare


def _lightning(folder: Path, stack: ExitStack) -> Call:
    from fastensor_lightning import FastensorCheckpointIO

    plugin, state = FastensorCheckpointIO(), {"state_dict": _state(), "epoch": 1}
    stack.callback(plugin.teardown)
    return lambda: plugin.save_checkpoint(state, folder / "model.ckpt")


def _accelerate(folder: Path, stack: ExitStack) -> Call:
    from accelerate import Accelerator

    import fastensor_accelerate

    fastensor_accelerate.enable()
    stack.callback(fastensor_accelerate.disable)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(_FEATURES // 1024, 1024)
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    return lambda: accelerator.save_state(str(folder / "state"))


def _saved_tensor(folder: Path, stack: ExitStack) -> Call:
    config = OffloadConfig(directories=(folder,), schedule="all", ssd_bytes="64MiB", staging_bytes="16MiB")
    offload = stack.enter_context(ActivationOffload(config))
    weight = torch.ones(_FEATURES, requires_grad=True)

    def step() -> None:
        with offload.step():
            loss = (weight * 2).square().sum()
        loss.backward()  # type: ignore[no-untyped-call]  # torch gives it no types

    return step


WALKS: dict[str, tuple[str, Prepare]] = {
    "save": ("a save of 4 MiB", _save),
    "load": ("a load of 4 MiB", _load(".ckpt")),
    "save_async": ("the same, asynchronous", _save_async),
    "lightning": ("a save by Lightning's plugin", _lightning),
    "save_state": ("Accelerate's `save_state`", _accelerate),
    "saved_tensor": ("a saved tensor of 4 MiB, and back", _saved_tensor),
}
FIRST = {
    "load .ckpt": "import fastensor, sys; fastensor.load(sys.argv[1] + '/model.ckpt')",
    "load .safetensors": "import fastensor, sys; fastensor.load(sys.argv[1] + '/model.safetensors')",
    "save .ckpt": "import fastensor, sys, torch; fastensor.save({'a': torch.ones(9)}, sys.argv[1] + '/new.ckpt')",
}
"""First calls of a process."""


def walk_of(name: str) -> Walk:
    """The walk of a call, after three that were not looked at."""
    walk = Walk()
    try:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            call = WALKS[name][1](Path(folder), stack)
            for _ in range(3):
                call()
            with walk.on():
                call()
    finally:
        walk.end()
    return walk


def imported_by(first: str) -> list[str]:
    """The modules of Fastensor that a process has imported after its first call."""
    show = "print(*sorted(name for name in sys.modules if name.startswith('fastensor')), sep='\\n')"
    with tempfile.TemporaryDirectory() as folder:
        for suffix in (".ckpt", ".safetensors"):
            fastensor.save(_state(), Path(folder) / f"model{suffix}")
        command = [sys.executable, "-c", f"{FIRST[first]}\n{show}", folder]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


def files() -> dict[Path, ast.Module]:
    """The product's files, as Python reads them."""
    found = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {path: ast.parse(path.read_text()) for path in found}


def statements_of(tree: ast.Module) -> int:
    return sum(isinstance(node, ast.stmt) for node in ast.walk(tree))


def classes_in(trees: dict[Path, ast.Module]) -> Counter[str]:
    """How many classes of each name there are."""
    return Counter(node.name for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def twice() -> list[str]:
    """Names that more than one class has."""
    return [name for name, count in classes_in(files()).items() if count > 1]


def sizes() -> list[tuple[str, int]]:
    """What is counted in the files."""
    trees = files()
    classes = classes_in(trees)
    names = Counter(path.name for path in trees if path.name != "__init__.py")
    return [
        ("statements", sum(map(statements_of, trees.values()))),
        ("files", len(trees)),
        ("classes", classes.total()),
        ("names of classes that occur twice", sum(count > 1 for count in classes.values())),
        ("names of files that occur twice", sum(count > 1 for count in names.values())),
    ]


def table() -> str:
    lines = ["| counted | |", "|---|---:|", *(f"| {what} | {count:,} |" for what, count in sizes())]
    lines += ["", "| walk | modules | functions |", "|---|---:|---:|"]
    for name, (what, _) in WALKS.items():
        walk = walk_of(name)
        lines.append(f"| {what} | {len(walk.modules)} | {len(walk.functions)} |")
    lines += ["", "| first call of a process | modules of Fastensor |", "|---|---:|"]
    lines += [f"| {first} | {len(imported_by(first))} |" for first in FIRST]
    lines += ["", "Classes of one name:", "", ", ".join(sorted(twice()))]
    lines += ["", "| largest files | statements |", "|---|---:|"]
    largest = sorted(((statements_of(tree), path) for path, tree in files().items()), reverse=True)[:LARGEST]
    lines += [f"| {path.relative_to(ROOT)} | {count} |" for count, path in largest]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--walk", choices=WALKS, help="show the modules and functions of one walk")
    parser.add_argument("--imported", choices=FIRST, help="show what the first call of a process imports")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    if options.imported:
        print(*imported_by(options.imported), sep="\n")
    elif options.walk:
        found = sorted((module_of(one), one.co_firstlineno, one.co_qualname) for one in walk_of(options.walk).functions)
        print(*(f"{module}:{line} {name}" for module, line, name in found), sep="\n")
    else:
        print(table())


if __name__ == "__main__":
    main()
