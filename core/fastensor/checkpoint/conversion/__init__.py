"""What :func:`fastensor.convert` is made of: which tensors are chosen, how the new file is laid out, how bytes go."""
