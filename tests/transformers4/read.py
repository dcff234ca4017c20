"""Load models with the transformers of this environment, and save what they hold: ``read.py FOLDER...``

Each state dict goes into ``FOLDER/read.pt``. The version of transformers is printed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers

if __name__ == "__main__":
    for folder in map(Path, sys.argv[1:]):
        found = transformers.GPT2LMHeadModel.from_pretrained(folder)
        torch.save(dict(found.state_dict()), folder / "read.pt")
    print(transformers.__version__)
