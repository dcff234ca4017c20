"""Saves. ``save.py`` has the call; ``save_transaction.py`` writes a planned file to its target (``target.py``) by an
output (``outputs.py``); ``shared_blocks.py`` leaves out what has not changed; ``freeing.py`` gives the space of
replaced files back."""
