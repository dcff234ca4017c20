"""The engine of one machine: a server process (``server.py``), worker processes (``worker.py``), and memory that they
share with the trainers, whose side is ``client.py``."""
