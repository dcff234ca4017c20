"""The parts of :func:`fastensor.convert`: ``selection.py`` and ``renames.py`` choose tensors (pure), ``layout.py`` lays
out the new file, ``copying.py`` and ``casting.py`` bring the bytes, ``losses.py`` says what a conversion would leave
out."""
