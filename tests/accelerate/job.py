"""A training script, which knows nothing of Fastensor. It prints what it sees, as JSON, and saves a state.

Arguments: the folder of its state, and others.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--workers", type=int, default=0)


class Doubled(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Is pickled for workers, which import this script again."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([2.0 * index])


def main() -> None:
    args, _ = parser.parse_known_args()
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    context = "spawn" if args.workers else None
    loader = torch.utils.data.DataLoader(Doubled(), num_workers=args.workers, multiprocessing_context=context)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    total = 0.0
    for batch in loader:
        total += batch.sum().item()
        accelerator.backward(model(batch).mean())
        optimizer.step()
    accelerator.save_state(str(args.folder))
    accelerator.load_state(str(args.folder))
    seen = {
        "rank": accelerator.process_index, "processes": accelerator.num_processes, "total": total,
        "argv": sys.argv, "file": __file__, "path": sys.path[0],
        "asynchronous": os.environ.get("ACCELERATE_FASTENSOR_ASYNCHRONOUS"),
    }  # fmt: skip
    (args.folder / f"seen_{accelerator.process_index}.json").write_text(json.dumps(seen))
    accelerator.end_training()


if __name__ == "__main__":
    main()
