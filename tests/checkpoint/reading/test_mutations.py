"""Sound files of both containers after one to four accidents: refused, or equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from hostile import archives, crafted, headers
from hostile.attacks import COMPARING, ENTRY_POINTS, Reading, withstand
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.hostile

MOST_BYTES = 64
"""The most bytes that a mutation inserts, moves or takes away."""


@dataclass(frozen=True)
class Mutation:
    """Something that happens to a file. Positions count from its start, and go round behind its end."""

    kind: str
    at: int
    other: int
    count: int
    data: bytes

    def apply(self, sound: bytes) -> bytes:
        at, other = self.at % (len(sound) + 1), self.other % (len(sound) + 1)
        return MUTATIONS[self.kind](self, sound, at, other)


def _flip(one: Mutation, sound: bytes, at: int, other: int) -> bytes:
    return crafted.flipped(sound, 8 * at + one.count % 8) if at < len(sound) else sound


def _swap(one: Mutation, sound: bytes, at: int, other: int) -> bytes:
    first, second = sorted((at, other))
    count = min(one.count, second - first)
    between = sound[first + count : second]
    return b"".join(
        (sound[:first], sound[second : second + count], between, sound[first : first + count], sound[second + count :])
    )


MUTATIONS: dict[str, Callable[[Mutation, bytes, int, int], bytes]] = {
    "flip": _flip,
    "overwrite": lambda one, sound, at, other: sound[:at] + one.data + sound[at + len(one.data) :],
    "clear": lambda one, sound, at, other: sound[:at] + bytes(one.count) + sound[at + one.count :],
    "insert": lambda one, sound, at, other: sound[:at] + one.data + sound[at:],
    "delete": lambda one, sound, at, other: sound[:at] + sound[at + one.count :],
    "duplicate": lambda one, sound, at, other: sound[:other] + sound[at : at + one.count] + sound[other:],
    "copy over": lambda one, sound, at, other: (
        sound[:other] + sound[at : at + one.count] + sound[other + len(sound[at : at + one.count]) :]
    ),
    "swap": _swap,
    "truncate": lambda one, sound, at, other: sound[:at],
    "append": lambda one, sound, at, other: sound + one.data,
}
numbers = st.sampled_from([0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, (1 << 63) - 1, (1 << 64) - 1])
mutations = st.builds(
    Mutation,
    st.sampled_from(sorted(MUTATIONS)),
    st.integers(0, 1 << 13),
    st.integers(0, 1 << 13),
    st.integers(1, MOST_BYTES),
    st.binary(min_size=1, max_size=8)
    | st.builds(lambda value, size: value.to_bytes(8, "little")[:size], numbers, st.sampled_from([1, 2, 4, 8])),
)


SOUND_FILES = {"torch": archives.SOUND["fastensor"](), "safetensors": headers.SOUND}
IN_A_NAME = Mutation("overwrite", SOUND_FILES["torch"].rindex(b"archive/version"), 0, 1, b"A")
"""In the directory of a zip archive."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mutated")


@cache
def sound_reading(container: str, entry: str, path: Path) -> Reading:
    path.write_bytes(SOUND_FILES[container])
    return ENTRY_POINTS[entry](path)


@pytest.mark.parametrize("entry", [*COMPARING, "inspect"])
@pytest.mark.parametrize("container", ["torch", "safetensors"])
@settings(
    max_examples=min(settings.default.max_examples, 1500) if settings.default else 60,
    phases=(Phase.explicit, Phase.generate),  # four mutations say what they are without being made smaller
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@example(accidents=[IN_A_NAME])
@given(accidents=st.lists(mutations, min_size=1, max_size=4))
def test_mutated_files(
    container: str, entry: str, folder: Path, tally: Counter[str], accidents: list[Mutation]
) -> None:
    path = folder / ("x.ckpt" if container == "torch" else "x.safetensors")
    expected = sound_reading(container, entry, path)
    data = SOUND_FILES[container]
    for accident in accidents:
        data = accident.apply(data)
    path.write_bytes(data)
    forgotten = container == "safetensors" and headers.KEY.encode() not in data
    withstand(entry, path, {entry: expected}, may_be_unverified=forgotten)
    tally["mutations tried"] += 1
