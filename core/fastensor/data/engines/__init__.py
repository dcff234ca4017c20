"""Ways to read values of a file: ``base.py`` is the protocol, ``choice.py`` chooses by a rule the fastest one for a
file."""
