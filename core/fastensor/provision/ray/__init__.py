"""The engine of several machines: actors of Ray read, keep and prepare samples, and its object store moves batches."""
