"""The engine of several machines: actors of Ray (``server.py``) read, keep and prepare samples, and its object store
moves batches. ``client.py`` is the trainer's side, ``cluster.py`` joins or starts Ray."""
