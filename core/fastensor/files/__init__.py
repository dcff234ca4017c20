"""What every part of the library shares about files and the machine. Nothing here imports another part but errors."""
