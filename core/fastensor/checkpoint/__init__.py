"""Saving and loading whole checkpoints: atomic, durable, verified. Begin with ``writing/save.py`` and
``reading/load.py``. ``models/`` has the weights of modules, in a file or in several; ``asynchronous/`` saves while
training goes on, ``cooperative/`` one file by several ranks, ``dcp/`` is for ``torch.distributed.checkpoint``.
``ordering.py`` keeps the order of the calls at each path, for all of them; ``nested.py`` knows calls from inside a
signal handler. ``tools/`` looks into checkpoints and converts them: they know what ``containers/`` says of a
container."""
