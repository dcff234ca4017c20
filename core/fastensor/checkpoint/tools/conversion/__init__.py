"""The parts of :func:`fastensor.convert`: ``settings.py`` has its keywords, ``sources.py`` opens what it reads,
``selection.py`` chooses tensors and their names (pure), ``copying.py`` brings and casts their bytes."""
