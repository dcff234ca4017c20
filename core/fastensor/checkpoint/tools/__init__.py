"""Looking into checkpoints, and converting them. ``contents.py`` opens checkpoints of any kind, ``catalog.py`` says
what is in one, ``folders.py`` what is in a folder; ``inspect.py``, ``verify.py``, ``diff.py`` and ``convert.py`` are
the tools."""
