"""Loads. ``load.py`` has the call; ``opened.py`` opens the file, wherever it is; ``reader.py`` reads and verifies its
parts. ``storages.py`` rebuilds objects from them, or ``torch.load`` does by ``checked_file.py``; ``lazy.py`` reads
tensors one by one."""
