"""The node reader: one process of a machine reads LMDB files for all others. ``lease.py`` finds or starts it,
``server.py`` is its program, ``engine.py`` its client."""
