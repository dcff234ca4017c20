"""Saving while the program goes on."""
