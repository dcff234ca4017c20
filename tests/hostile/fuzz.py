"""Coverage-guided fuzzing of our parsers with atheris (libFuzzer): see ``targets.py``.

``python tests/hostile/fuzz.py TARGET [options of libFuzzer] FOLDER`` runs until it finds something or has had enough.
Anything but an error of ours is a finding: it ends the process with the exception, and leaves the input in the folder.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parents[1]))
with atheris.instrument_imports(include=["fastensor.stitch"]):
    from hostile.targets import FOUND, SEEDS, TARGETS, WORDS


def main() -> None:
    target, *options, folder = sys.argv[1:]
    corpus, words = Path(folder, "corpus"), Path(folder, "words")
    corpus.mkdir()
    for number, seed in enumerate([*SEEDS[target](), *FOUND.get(target, [])]):
        (corpus / f"seed_{number}").write_bytes(seed)
    quoted = ["".join(f"\\x{byte:02x}" for byte in word) for word in WORDS.get(target, [b"PK"])]
    words.write_text("".join(f'"{word}"\n' for word in quoted))
    logging.disable()
    places = (f"-dict={words}", f"-artifact_prefix={folder}/", str(corpus))
    atheris.Setup([sys.argv[0], *options, *places], TARGETS[target])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
