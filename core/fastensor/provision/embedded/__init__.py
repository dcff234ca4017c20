"""The engine of one machine: a server process, worker processes, and memory that they share with the trainers."""
