"""A watchdog outside the daemon: when the daemon is gone, it ends whatever the daemon left running.

It is a process of its own, in a session of its own, started before anything else is. Its standard input is a pipe
whose other end only the daemon holds, so the kernel tells it of the daemon's end however that came about, SIGKILL
included. Then it kills every process that carries the daemon's instance id in its environment (all that descends
from the private Ray does), until there is none, and removes Ray's directory. A clean stop goes the same way: the
daemon closes the pipe and waits for this process.

Run as a script with the standard library alone, so that it is up within milliseconds:
`python -I -S reaper.py INSTANCE DIRECTORY`. It says `ready` on its standard output once nothing but SIGKILL ends it.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time

VARIABLE = "GSWAPD_INSTANCE"
PATIENCE = 9.0  # seconds until what cannot be killed (a process stuck in the kernel) is left alone


def main(instance: str, directory: str) -> None:
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    os.write(sys.stdout.fileno(), b"ready\n")
    while os.read(sys.stdin.fileno(), 1):  # returns nothing once the daemon has closed its end or died
        pass
    reap(instance, time.monotonic() + PATIENCE)
    shutil.rmtree(directory, ignore_errors=True)


def reap(instance: str, deadline: float) -> None:
    """Kill all processes of the instance, and look again until none is left: they may have had children meanwhile."""
    tag = f"{VARIABLE}={instance}".encode()
    while time.monotonic() < deadline:
        killed = [fd for pid in _processes() if (fd := _kill(pid, tag)) is not None]
        if not killed:
            return
        _wait(killed, deadline)


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _kill(pid: int, tag: bytes) -> int | None:
    """Kill the process if it carries the tag. Returns a descriptor that is readable once it is dead.

    The descriptor is opened before the environment is read, so a process id that is used again in between
    cannot make us kill a stranger.
    """
    try:
        fd = os.pidfd_open(pid)
    except OSError:  # gone already
        return None
    try:
        with open(f"/proc/{pid}/environ", "rb") as environ:
            if tag in environ.read().split(b"\0"):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
                return fd
    except OSError:  # another user's, or gone already
        pass
    os.close(fd)
    return None


def _wait(killed: list[int], deadline: float) -> None:
    """Return once all are dead, or at the deadline."""
    for fd in killed:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        os.close(fd)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
