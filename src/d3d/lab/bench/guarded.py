"""Run a program that a model has written, in a process of its own that is held on a short rein.

Against accidents, not against attacks: the child has no environment, an empty directory of its own,
limits on time, memory and output, and an audit hook that refuses to write files, start processes or
open connections. Whoever has to expect malice runs the whole benchmark in a virtual machine. That
is why code is run only where it was asked for."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

OUTPUT_BYTES = 1 << 20

_BOOT = """
import resource, sys
def limit(kind, value):
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value, value) if hard == resource.RLIM_INFINITY else (min(value, hard), hard))
limit(resource.RLIMIT_CPU, int(sys.argv[1]))
limit(resource.RLIMIT_AS, int(sys.argv[2]))
limit(resource.RLIMIT_FSIZE, int(sys.argv[3]))
limit(resource.RLIMIT_CORE, 0)
source = sys.stdin.read()
refused = ("socket.", "subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.kill", "os.remove",
           "os.rename", "os.rmdir", "os.mkdir", "os.chmod", "os.chown", "os.link", "os.symlink", "os.truncate", "shutil.", "ctypes.")
def guard(event, arguments):
    if event.startswith(refused) or event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
        raise PermissionError(event + " is refused here")
sys.argv = ["answer"]
sys.addaudithook(guard)
exec(compile(source, "answer.py", "exec"), {"__name__": "__main__"})
"""


def runs_through(program: str, *, timeout_s: float = 10.0, memory_bytes: int = 1 << 30) -> bool:
    """Whether the program reaches its end within the limits, without an exception and without
    leaving earlier.

    Needs a POSIX system. `memory_bytes`: of address space.
    """
    mark = secrets.token_hex(16)
    program = f"{program}\nprint()\nprint({mark!r})\n"
    with (
        tempfile.TemporaryDirectory() as directory,
        (Path(directory) / "output").open("w+b") as output,
    ):
        arguments = [str(max(1, round(timeout_s))), str(memory_bytes), str(OUTPUT_BYTES)]
        child = subprocess.Popen(
            [sys.executable, "-I", "-B", "-c", _BOOT, *arguments],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.DEVNULL,
            cwd=directory,
            env={"HOME": directory},
            start_new_session=True,
        )
        try:
            child.communicate(program.encode(), timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return False
        finally:
            _end(child)
        output.seek(0)
        return child.returncode == 0 and output.read().decode(errors="replace").split()[-1:] == [
            mark
        ]


def _end(child: subprocess.Popen[bytes]) -> None:
    """The child, and whatever it may have started after all."""
    with contextlib.suppress(ProcessLookupError):  # it has ended by itself
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
