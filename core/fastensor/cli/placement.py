"""``fastensor placement``: which network card and processors are next to each GPU."""

from __future__ import annotations

import sys
from pathlib import Path

from fastensor.cli.output import FAILED, OK, print_table
from fastensor.provision.placement import listed_cpus, placements, shell_exports


def run(gpu: int | None, root: Path = Path("/")) -> int:
    """Print a table; or, of one GPU, the lines for a shell. See the command."""
    found = list(placements(root).items())
    if gpu is not None:
        if not 0 <= gpu < len(found):
            print(f"fastensor: there is no GPU {gpu}: this machine has {len(found)}", file=sys.stderr)
            return FAILED
        print(*shell_exports(found[gpu][1]), sep="\n", end="\n" if found[gpu][1].nic else "")
        return OK
    rows = [
        (
            str(number), address, "?" if one.numa_node is None else str(one.numa_node), listed_cpus(one.cpus),
            one.nic or "", " ".join(one.nearest_nics),
        )
        for number, (address, one) in enumerate(found)
    ]  # fmt: skip
    print_table(("GPU", "address", "node", "processors", "network card", "nearest"), rows, right=(0, 2))
    return OK
