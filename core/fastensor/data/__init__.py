"""Training data from LMDB, read at the speed of the disk, without mapping the file."""

from fastensor.data.index import LmdbIndex

__all__ = ["LmdbIndex"]
