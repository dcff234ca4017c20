"""Functions that all parts share; imports no other part but the errors. System calls are in ``posix.py``, atomic
replacement in ``atomic.py``, errors of the operating system as ours in ``os_errors.py``, memory of the machine in
``budgets.py``, free parts of memory or of a file in ``ranges.py``, a thread for work after a call in ``afterwards.py``,
sizes and times in words in ``words.py``, pauses of the garbage collector in ``garbage.py``, the store by which
processes of a job talk in ``job_store.py``, and how attributes of others are replaced in ``replacing.py``.
"""
