"""The layout of bytes in standard files: planning the image of a new file, and reading the directory of a file."""
