"""Asynchronous saves. Begin with ``writer.py``, the ``AsyncWriter``; ``work.py`` has the saves in its thread,
``handle.py`` what callers get, ``exits.py`` the end of the process and SIGTERM, ``for_adapters.py`` what adapters need
besides."""
