"""The part of ``offload.py`` that gives each way the same room: keep, move or recompute, block by block.

For each model the bytes that a step saves are counted. Rooms are a half, a quarter and a tenth of them
(``memory_bytes``):

- ``auto``: with ``recompute="auto"``; ``moving``: without;
- ``oracle``: as ``auto``, by the best plan that two seconds of simulated annealing find for the same measurements.

Beside them is what does not know of rooms: ``all`` (everything moves), ``checkpointing``, ``checkpointing, inputs
moved`` (by ``all``), and ``half``. ``auto, room of checkpointing`` has the room that checkpointing takes: what the
process has grown in the same round, or what the inputs of all blocks and one block take, if that is more. The process
grows by less than that where gradients of parameters, which come later, take more. ``--shares`` without numbers leaves
the other rooms out.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from measuring import settle

AUTO, MOVING, ORACLE = "auto", "moving", "oracle"
ALL, CHECKPOINTING, INPUTS_MOVED, HALF, NONE, DROPPED = (
    "all", "checkpointing", "checkpointing, inputs moved", "half", "none", "dropped",
)  # fmt: skip
EQUAL = "auto, room of checkpointing"
SHARES = (2, 4, 10)
"""A room is the bytes that a step saves, by this."""
ANYWHERE = (NONE, DROPPED, ALL, CHECKPOINTING, INPUTS_MOVED, HALF)
MOST_OF_BEST, MOST_OF_ORACLE = 1.03, 1.05


def options_of(name: str, room: int) -> dict[str, Any]:
    """The options of an offload.

    Args:
        name: of the way.
        room: bytes that it may take.
    """
    if name in (ALL, INPUTS_MOVED):
        return {"schedule": "all"}
    if name == HALF:
        return {"schedule": 0.5}
    return {"memory_bytes": room} | ({} if name == MOVING else {"recompute": "auto"})


def measure(task: Any, rounds: int, shares: Sequence[int] = SHARES) -> dict[str, Any]:
    """All ways of a model."""
    from offload import Run, checkpointed_nbytes, in_fresh_process, sparse_nbytes, train

    _, saved = in_fresh_process(sparse_nbytes, task)
    checkpointed = in_fresh_process(checkpointed_nbytes, task)
    runs = [(name, 0) for name in ANYWHERE]
    runs += [(name, saved // share) for share in shares for name in (AUTO, MOVING, ORACLE)]
    of: dict[str, list[Run]] = {}

    def run(name: str, room: int) -> None:
        settle()
        options = {} if name in (NONE, DROPPED, CHECKPOINTING) else options_of(name, room)
        found = in_fresh_process(train, task, name, options)
        of.setdefault(f"{name}/{0 if name == EQUAL else room}", []).append(found)
        print(task.model, room >> 20, found, flush=True)

    for number in range(rounds):
        for name, room in random.Random(number).sample(runs, len(runs)):
            run(name, room)
        taken = of[f"{CHECKPOINTING}/0"][-1].memory_nbytes - of[f"{DROPPED}/0"][-1].memory_nbytes
        run(EQUAL, max(taken, checkpointed))
    return {
        "saved": saved,
        "shares": list(shares),
        "runs": {name: [asdict(run) for run in found] for name, found in of.items()},
    }


def report(found: Mapping[str, Any]) -> Iterator[str]:
    """The tables, and what was promised."""
    from offload import Run, mib

    saved, shares = found["saved"], found["shares"]
    of = {name: [Run(**run) for run in runs] for name, runs in found["runs"].items()}

    def seconds(name: str, room: int = 0) -> float:
        return median(run.step_seconds for run in of[f"{name}/{room}"])

    def memory(name: str, room: int = 0) -> float:
        """What activations have taken: memory, less what a step takes that forgets them."""
        pairs = zip(of[f"{name}/{room}"], of[f"{DROPPED}/0"], strict=True)
        return max(median(one.memory_nbytes - base.memory_nbytes for one, base in pairs), 0)

    def counted(name: str, room: int) -> str:
        """What the offload says of that."""
        found = [run.counted_nbytes for run in of[f"{name}/{room}"] if run.counted_nbytes is not None]
        return str(mib(median(found))) if found else "–"

    yield (
        f"A step saves {mib(saved)} MiB. Memory is what activations take of the process, with what the C library keeps "
        "of freed memory. Counted are the saved tensors in memory, by the offload."
    )
    yield from (
        "",
        "| way | room, MiB | step, s | : none | predicted | memory, MiB | counted, MiB |",
        "|---|---:|---:|---:|---:|---:|---:|",
    )
    rows = [(name, 0) for name in (*ANYWHERE, EQUAL) if name != DROPPED]
    rows += [(name, saved // share) for share in shares for name in (AUTO, MOVING, ORACLE)]
    for name, room in rows:
        predictions = [run.predicted_ratio for run in of[f"{name}/{room}"] if run.predicted_ratio is not None]
        predicted = f"{median(predictions):.2f}" if predictions else "–"
        yield (
            f"| {name} | {mib(room) or '–'} | {seconds(name, room):.3f} | {seconds(name, room) / seconds(NONE):.2f} "
            f"| {predicted} | {mib(memory(name, room))} | {counted(name, room)} |"
        )
    yield ""
    gradients = {run.gradients for name, runs in of.items() if not name.startswith(DROPPED) for run in runs}
    yield f"- gradients of all ways are {'equal' if len(gradients) == 1 else '**differ**'}"
    ratio = seconds(EQUAL) / seconds(CHECKPOINTING)
    yield (
        f"- in the room of checkpointing: a step takes {_bold(ratio, ratio <= 1)} of one by checkpointing "
        f"(promised: 1), and {mib(memory(EQUAL))} MiB of {mib(memory(CHECKPOINTING))}"
    )
    for share in shares:
        yield _judge(saved // share, share, seconds, memory)


def _judge(room: int, share: int, seconds: Any, memory: Any) -> str:
    """How a room compares with what takes no more memory."""
    peers = [name for name in (ALL, CHECKPOINTING, INPUTS_MOVED, HALF) if memory(name) <= max(room, memory(AUTO, room))]
    against = "no other way fits"
    if peers:
        best = min(peers, key=seconds)
        ratio = seconds(AUTO, room) / seconds(best)
        against = f"{_bold(ratio, ratio <= MOST_OF_BEST)} of {best}, the best that fits (promised: {MOST_OF_BEST})"
    ratio = seconds(AUTO, room) / seconds(ORACLE, room)
    fits = "" if memory(AUTO, room) <= room else "; memory is **beyond the room**"
    return (
        f"- a room of 1/{share}: a step takes {against}, and {_bold(ratio, ratio <= MOST_OF_ORACLE)} of the oracle's "
        f"(promised: {MOST_OF_ORACLE}){fits}"
    )


def _bold(value: float, kept: bool) -> str:
    return f"{value:.2f}" if kept else f"**{value:.2f}**"
