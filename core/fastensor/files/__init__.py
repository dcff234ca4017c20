"""What all parts share. Imports no other part but errors.

System calls (``posix``), atomic replacement (``atomic``), errors of the operating system as ours (``os_errors``),
memory of the machine (``budgets``), variables of launchers (``launchers``), entry points of packages (``installed``), a
thread for work after a call (``afterwards``), sizes and times for people (``words``).
"""
