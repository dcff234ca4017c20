"""Where bytes are laid out: the flat image of a standard file, and the reading of its directory."""
