"""A server of a folder, in a process of its own: ``http_folder.py FOLDER KIND`` prints its port."""

from __future__ import annotations

import contextlib
import http.server
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path


class Ranges(http.server.SimpleHTTPRequestHandler):
    """Serves a folder, also by ranges."""

    protocol_version = "HTTP/1.1"
    by_ranges = True

    def do_GET(self) -> None:
        data = Path(self.translate_path(self.path)).read_bytes()
        asked = self.headers.get("Range", "") if self.by_ranges else ""
        first, _, last = asked.removeprefix("bytes=").partition("-")
        part = data[int(first) : int(last) + 1] if asked else data
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # fsspec may have seen enough
            self.wfile.write(part)

    def log_message(self, *arguments: object) -> None:
        pass


class WholeFiles(Ranges):
    """Serves a folder, and no ranges."""

    by_ranges = False


KINDS = {"ranges": Ranges, "whole": WholeFiles}


@contextmanager
def served(folder: Path, kind: str) -> Iterator[str]:
    """Serve a folder. Neither a thread of this process nor a forked one does: the first would not live in forked
    children, and the second may wait for locks that other threads held."""
    with subprocess.Popen(
        [sys.executable, __file__, str(folder), kind], stdout=subprocess.PIPE, text=True
    ) as server:  # fmt: skip
        try:
            assert server.stdout is not None
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.kill()


if __name__ == "__main__":
    _, directory, name = sys.argv
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(KINDS[name], directory=directory)) as listening:
        print(listening.server_port, flush=True)
        listening.serve_forever()
