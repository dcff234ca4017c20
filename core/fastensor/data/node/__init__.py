"""One process of a machine that reads data for all others."""
