"""Ways to read values of a file: ``base.py`` is the protocol, ``choice.py`` learns which one is the fastest for a
file."""
