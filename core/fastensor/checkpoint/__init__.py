"""Saving and loading whole checkpoints: atomic, durable, verified. Begin with ``save.py`` and ``load.py``. A save is a
transaction (``save_transaction.py``) that writes an output (``outputs.py``); a load reads verified parts by
``reader.py``. ``verify.py``, ``inspect.py``, ``diff.py`` and ``convert.py`` are the tools: they know what
``containers/`` says of a container, and what ``contents.py`` says of a checkpoint."""
