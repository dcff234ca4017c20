"""Weights of modules. ``modules.py`` saves and loads a module, ``huggingface.py`` models in several files, whose index
``sharded.py`` reads; ``into.py`` reads into tensors that are there already. ``names.py``, ``ties.py`` and
``contested.py`` say which tensors there are, and which share memory."""
