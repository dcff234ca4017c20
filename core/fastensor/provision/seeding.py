"""Random numbers of transforms: the same for a sample, whichever process makes it."""

from __future__ import annotations

import hashlib
import random
import struct

import numpy as np
import torch


def seed_all(*numbers: int) -> None:
    """Seed the generators of Python, NumPy and torch (CPU) of this process."""
    digest = hashlib.blake2b(str(numbers).encode(), digest_size=8).digest()
    (seed,) = struct.unpack("=Q", digest)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)
