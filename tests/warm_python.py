"""A Python that has imported what takes long, and forks a child for every program; started by ``programs.py``.

Arguments: the number of a socket, and modules to import. Each message there is a program: its arguments, environment
and folder. With it come its standard input, output and error, and a pipe, which gets the process id, and the exit
status at the end.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import socket
import sys
from contextlib import suppress
from pathlib import Path
from types import CodeType
from typing import Any

MESSAGE_NBYTES = 1 << 17


def next_program(server: socket.socket) -> dict[str, Any] | None:
    """Returns a program in the child that is to run it, and None in the server when its client is gone."""
    gc.collect()
    gc.freeze()  # so that children share its memory
    running: dict[int, tuple[int, int]] = {}  # pidfd: process id, pipe
    polled = select.poll()
    polled.register(server, select.POLLIN)
    while True:
        for ready, _ in polled.poll():
            if ready != server.fileno():
                polled.unregister(ready)
                pid, report = running.pop(ready)
                os.close(ready)
                _, status = os.waitpid(pid, 0)
                _report(report, str(os.waitstatus_to_exitcode(status)))
                os.close(report)
                continue
            message, files, _, _ = socket.recv_fds(server, MESSAGE_NBYTES, 4)
            if not message:
                return None
            *streams, report = files
            pid = os.fork()
            if not pid:
                os.setpgid(0, 0)  # so that what it starts can be killed with it
                server.close()
                for fd in (report, *running, *(pipe for _, pipe in running.values())):
                    os.close(fd)
                for number, fd in enumerate(streams):
                    os.dup2(fd, number)
                    os.close(fd)
                return dict(json.loads(message))
            for fd in streams:
                os.close(fd)
            _report(report, f"{pid}\n")
            pidfd = os.pidfd_open(pid)
            running[pidfd] = pid, report
            polled.register(pidfd, select.POLLIN)


def _report(report: int, text: str) -> None:
    with suppress(BrokenPipeError):  # the test has ended before its program
        os.write(report, text.encode())


def prepared(arguments: list[str], environment: dict[str, str], folder: str) -> CodeType:
    """The code of a program, in a process that looks as if it was started for it."""
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        # Python remembers of those of the server whether they can seek.
        stream = open(number, mode, buffering=1, errors=getattr(sys, name).errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    what, *rest = arguments
    if what == "-c":
        code, *rest = rest
        sys.argv, sys.path[0], file = [what, *rest], "", "<string>"
    elif what == "-m":
        module, *rest = rest
        sys.argv, sys.path[0], file = [module, *rest], folder, "<string>"
        code = f"import runpy\nrunpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    else:
        file = str(Path(what).resolve())
        sys.argv, sys.path[0] = [what, *rest], str(Path(file).parent)
        code = Path(what).read_text()
    return compile(code, file, "exec", dont_inherit=True)


if __name__ == "__main__":
    for _name in sys.argv[2:]:
        importlib.import_module(_name)
    _program = next_program(socket.socket(fileno=int(sys.argv[1])))
    if _program is not None:
        _code = prepared(**_program)
        for _name in {*globals()} - {"__name__", "__builtins__", "__spec__", "__loader__", "__package__", "_code"}:
            del globals()[_name]
        if _code.co_filename != "<string>":
            globals()["__file__"] = _code.co_filename  # multiprocessing looks for it
        exec(globals().pop("_code"))
