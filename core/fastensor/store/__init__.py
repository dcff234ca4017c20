"""Single tensors on the disk: the unified interface of the Fastensor paper (section 4)."""
