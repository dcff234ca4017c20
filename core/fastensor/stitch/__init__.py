"""The layout of bytes in standard files. ``image.py`` has the records of a planned file; ``torch_zip.py``,
``safetensors.py`` and ``shards.py`` plan files; ``zip_directory.py`` and ``torch_records.py`` read the directories of
archives, ``torch_pickle.py`` their pickles without running them. ``parts.py`` compares CRC32s."""
