"""How fast one thread encodes and decodes activations, and how much smaller they get: of the outputs of a ReLU.

    python benchmarks/offload_codecs.py

A writer or reader thread of an offload does what is measured here; there are four of each.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch

from fastensor.backends.buffers import BUFFER_NBYTES
from fastensor.offload import codecs


def seconds(work: Callable[[], object], runs: int) -> float:
    """The median time of some runs, after one to warm up."""
    times = []
    for _ in range(runs + 1):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    numbers = torch.randn(BUFFER_NBYTES // 4).relu()
    dense = torch.randn_like(numbers)
    print("| tensor, 4 MiB | codecs | smaller by | sample, GB/s | encode, GB/s | decode, GB/s |")
    print("|---|---|---:|---:|---:|---:|")
    for what, values in (("relu", numbers), ("dense", dense)):
        piece, out = values.view(torch.uint8), torch.empty(values.nbytes, dtype=torch.uint8)
        for wanted in ({"csr"}, {"fp16"}, {"bf16"}, {"csr", "fp16"}):
            rates = [
                seconds(lambda: codecs.sampled_ratio([piece], values.dtype, wanted), arguments.runs),  # noqa: B023
                seconds(lambda: codecs.encode(piece, values.dtype, wanted, out), arguments.runs),  # noqa: B023
            ]
            found = codecs.encode(piece, values.dtype, wanted, out)
            if found is not None:
                encoding, encoded, decoded = found[0], out[: found[1]], torch.empty_like(piece)
                rates.append(seconds(lambda: codecs.decode(encoded, encoding, decoded), arguments.runs))  # noqa: B023
            columns = [f"{piece.numel() / rate / 1e9:.1f}" for rate in rates] + ["–"] * (3 - len(rates))
            ratio = 1.0 if found is None else piece.numel() / found[1]
            print(f"| {what} | {', '.join(sorted(wanted))} | {ratio:.2f} | {' | '.join(columns)} |")


if __name__ == "__main__":
    main()
