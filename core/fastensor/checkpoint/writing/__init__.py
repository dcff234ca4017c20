"""Saves. ``save.py`` has the call; ``save_transaction.py`` writes a planned file to its target (``target.py``) by an
output (``outputs.py``). ``ordering.py`` keeps the order of the calls at each path; ``nested.py`` knows saves from
inside a signal handler; ``freeing.py`` gives the space of replaced files back."""
