"""Where it is decided how bytes move."""
