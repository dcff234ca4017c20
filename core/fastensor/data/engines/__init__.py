"""Ways to read values of a file."""
