"""Attributes of others are replaced for a while, and then are what they were."""

from __future__ import annotations

import threading
from types import ModuleType
from typing import Any

import pytest

from fastensor.files.replacing import replace_attribute, replacing, wrap_method


class Greeting:
    @staticmethod
    def who() -> str:
        return "world"

    def greet(self, end: str) -> str:
        return f"hello {self.who()}{end}"


class Child(Greeting):
    pass


def louder(original: Any, *arguments: Any, **options: Any) -> str:
    return str(original(*arguments, **options)).upper()


@pytest.mark.parametrize("owner", [Greeting, Child, Child()])
def test_a_method_is_wrapped_and_restored(owner: Any) -> None:
    before = dict(vars(owner))
    undo = wrap_method(owner, "greet", louder)
    one = owner() if isinstance(owner, type) else owner
    assert one.greet(end="!") == "HELLO WORLD!"
    assert owner.greet.__name__ == "greet"
    undo()
    assert dict(vars(owner)) == before
    undo()
    assert one.greet("?") == "hello world?"


def test_a_static_method_stays_one() -> None:
    before = vars(Greeting)["who"]
    undo = replace_attribute(Greeting, "who", staticmethod(lambda: "you"))
    assert Greeting().greet(".") == "hello you."
    undo()
    assert vars(Greeting)["who"] is before


def test_a_block_that_fails_is_undone() -> None:
    module = ModuleType("module")
    module.value = 1  # type: ignore[attr-defined]

    def fail() -> None:
        with replacing() as undo:
            undo.callback(replace_attribute(module, "value", 2))
            undo.callback(replace_attribute(module, "value", 3))
            wrap_method(module, "missing", louder)

    with pytest.raises(AttributeError, match="missing"):
        fail()
    assert module.value == 1


def test_blocks_of_threads_follow_one_another() -> None:
    module, found = ModuleType("module"), []
    module.value = 0  # type: ignore[attr-defined]

    def count() -> None:
        with replacing() as undo:
            undo.callback(replace_attribute(module, "value", module.value + 1))
            found.append(module.value)

    with replacing():
        threads = [threading.Thread(target=count) for _ in range(4)]
        for thread in threads:
            thread.start()
        assert found == []
        count()  # of this thread, inside
    for thread in threads:
        thread.join()
    assert found == [1] * 5
    assert module.value == 0
