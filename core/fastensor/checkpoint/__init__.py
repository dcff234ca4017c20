"""Saving and loading whole checkpoints: atomic, durable, verified."""
