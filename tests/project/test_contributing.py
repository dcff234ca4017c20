"""What CONTRIBUTING says about the code is so."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = ROOT / "core" / "fastensor"
PACKAGES = (CORE, ROOT / "fastensor_lightning", ROOT / "fastensor_accelerate")
FOLDERS = sorted({path.parent for package in PACKAGES for path in package.rglob("*.py")})
MODULES = sorted(path for package in PACKAGES for path in package.rglob("*.py") if path.parent != CORE / "testing")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
STARTERS = ("Thread", "ThreadPoolExecutor", "Pool", "Worker", "open_pool", "run_together", "run_each", "call_within")
"""What starts threads: the standard library's classes, and ours."""
LOCKS = ("Lock", "RLock", "Condition", "Semaphore", "lock_of")


def section(title: str) -> str:
    """The text below a heading, down to the next one of its level."""
    (found,) = re.findall(rf"^{title}\n(.*?)(?=^{title.split()[0]} |\Z)", CONTRIBUTING, re.MULTILINE | re.DOTALL)
    return str(found)


def rows_of(text: str) -> list[list[str]]:
    """The cells of a table's rows, without its head."""
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in cells] for cells in lines[2:]]


def modules_in(text: str) -> list[str]:
    return re.findall(r"`([\w/]+\.py)`", text)


# --- folders


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_each_folder_says_what_is_in_it(folder: Path) -> None:
    said = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    assert said, "its __init__.py has no docstring"
    assert len(said.split()) >= 8
    for name in re.findall(r"``([\w/]+\.py)``", said):
        assert (folder / name).exists(), name
    for name in re.findall(r"``([\w/]+/)``", said):
        assert (folder / name).is_dir(), name


# --- layers


def test_the_picture_of_layers_is_that_of_the_import_linter() -> None:
    configuration = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (contract,) = (one for one in configuration["tool"]["importlinter"]["contracts"] if one["type"] == "layers")
    drawn = re.findall(r"^│ (.+?)  ", section("## Where things are"), re.MULTILINE)
    assert drawn == [layer.replace("fastensor.", "") for layer in contract["layers"]]


# --- walks and questions


WALKS = re.split(r"^### ", section("## Walks"), flags=re.MULTILINE)[1:]
QUESTIONS = rows_of(section("## Questions"))


def test_there_are_walks_and_questions() -> None:
    assert len(WALKS) >= 7
    assert len(QUESTIONS) >= 10


@pytest.mark.parametrize("walk", WALKS, ids=lambda walk: walk.partition("\n")[0])
def test_what_a_walk_names_is_there(walk: str) -> None:
    (folder,) = re.findall(r"In `([\w/]+/)`", walk)
    assert len(re.findall(r"^\d+\. ", walk, re.MULTILINE)) >= 3
    check_names(re.sub(r"^```.*?^```", "", walk, flags=re.MULTILINE | re.DOTALL), folder)


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question[0])
def test_what_an_answer_names_is_there(question: list[str]) -> None:
    check_names(question[1], "")


def check_names(text: str, folder: str) -> None:
    """Each module in a text exists, and defines, or another one of them does, each name in it."""
    paths = [path_of(module, folder) for module in modules_in(text)]
    for name in re.findall(r"`([A-Za-z_][\w.]*)`", text):
        if not name.endswith(".py"):
            assert any(name in names_of(path) for path in paths), name


def path_of(module: str, folder: str) -> Path:
    """A module that is named by its path in the folder, in the core, or in the repository."""
    found = [path for path in (CORE / folder / module, CORE / module, ROOT / module) if path.exists()]
    assert found, module
    return found[0]


@cache
def names_of(path: Path) -> frozenset[str]:
    """The names that a module defines; ``Class.name`` for those of classes, which have their own name as well."""
    return frozenset(_names(ast.parse(path.read_text()), ""))


def _names(node: ast.AST, prefix: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.ClassDef(name=name):
                yield name
                yield from _names(child, f"{name}.")
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield from (name, f"{prefix}{name}")
                yield from _names(child, prefix)
            case ast.Name(id=name, ctx=ast.Store()):
                yield from (name, f"{prefix}{name}")
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield f"{prefix}{name}"
            case _:
                yield from _names(child, prefix)


# --- threads and locks


def test_the_table_of_threads_has_each_module_that_starts_one() -> None:
    threads, _ = section("## Threads and locks").split("### Locks")
    named = {path_of(module, "") for module in modules_in("".join(row[1] for row in rows_of(threads)))}
    assert named == {path for path in MODULES if _calls(path, STARTERS)}


def test_the_table_of_locks_has_each_module_that_makes_one() -> None:
    _, locks = section("## Threads and locks").split("### Locks")
    named = {path_of(module, "") for module in modules_in("".join(row[0] for row in rows_of(locks)))}
    assert named == {path for path in MODULES if _calls(path, LOCKS)}


def _calls(path: Path, names: tuple[str, ...]) -> bool:
    """True if a module calls one of these functions or classes, none of its own, or gives it to be called."""
    called = (
        one
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        for one in (node.func, *(keyword.value for keyword in node.keywords if keyword.arg == "default_factory"))
    )
    wanted = set(names) - names_of(path)
    return any(
        (isinstance(one, ast.Attribute) and one.attr in wanted) or (isinstance(one, ast.Name) and one.id in wanted)
        for one in called
    )
