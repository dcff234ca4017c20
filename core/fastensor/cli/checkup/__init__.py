"""The parts of ``fastensor doctor``: ``software.py``, ``folder.py`` and ``measurement.py``. Each finds facts, describes
them and advises."""
