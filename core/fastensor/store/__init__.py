"""Single tensors on the disk: the unified interface of the Fastensor paper (section 4). Begin with ``tensor_store.py``;
``tools.py`` chooses the backend, ``packing.py`` says which bytes of a tensor are stored, ``reading.py`` reads them."""
