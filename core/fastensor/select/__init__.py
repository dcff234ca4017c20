"""The choice of the backend for each transfer. Begin with ``transfer.py``, which moves bytes by the backend that
``selector.py`` chooses, by a rule or by measured timings. ``dictionary.py`` has these (the paper's dictionaries, pure);
``files.py`` keeps them on the disk by machine, and ``share.py`` sends them to other ranks."""
