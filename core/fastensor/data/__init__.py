"""Training data: records of a file, read at the speed of the disk in any order that is known ahead."""
