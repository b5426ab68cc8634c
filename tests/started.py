"""`diptych` in processes of their own, as a user starts them, without loading torch for each: that takes seconds.

    done = run("generate", "Once", "--max-tokens", "4")
    with Started("serve", stdout=subprocess.PIPE) as process: ...

The first start makes a warm process, which imports what the commands import and does nothing else. For every start it forks a
child, which takes over arguments, environment, folder and streams and runs `python -m diptych` from its first line to the last:
streams, signals and exit codes are those of a user's process. Behind the last line threads are waited for, what is to be done
at exit is done and streams are flushed, as Python does it; only modules are not taken apart, which would write to every page
that is shared with the warm process: 0.25 s of processor time of 0.3. Each one's first look at the memory, which takes 0.4 s,
is one that was taken before. Starts from nothing are tests/cli/test_commands.py's.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import huge_pages
from diptych.cli import working
from diptych.compute.ops.cpu.kernels import is_available
from diptych.compute.ops.cpus import Placement, allowed_cpus, choose_cpus
from diptych.ground.clock import sleep_s

IMPORTED = ("serve", "bench", "lab")  # commands, whose modules the others need a part of
MOST_BYTES = 1 << 17  # of a message


class _Warm:
    """The warm process of this one."""

    def __init__(self) -> None:
        self._door, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self._lock = threading.Lock()
        atexit.register(self._end)

    def ask(self, question: dict[str, Any], streams: tuple[int, ...] = ()) -> Any:
        with self._lock:
            socket.send_fds(self._door, [json.dumps(question).encode()], streams)
            return json.loads(self._door.recv(MOST_BYTES))

    def _end(self) -> None:
        self._door.close()
        self._process.wait()


_warm: list[_Warm] = []


class Started(subprocess.Popen[str]):
    """`python -m diptych ARGUMENTS`, or `python SCRIPT ARGUMENTS`."""

    def __init__(self, *arguments: str, script: Path | None = None, **options: Any) -> None:
        begin = ["-m", "diptych"] if script is None else [str(script)]
        super().__init__([sys.executable, *begin, *arguments], text=True, **options)

    def _execute_child(self, args: list[str], *others: Any) -> None:
        if sys.platform != "linux":
            return super()._execute_child(args, *others)  # type: ignore[misc]
        if not _warm:
            _warm.append(_Warm())
        cwd, env, pipes = others[4], others[5], others[9:15]
        question = {"arguments": args[1:], "cwd": str(cwd or os.getcwd()), "environment": dict(env or os.environ)}
        streams = tuple(fd if at == -1 else at for fd, at in enumerate((pipes[0], pipes[3], pipes[5])))
        self.pid = _warm[0].ask(question, streams)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if sys.platform != "linux":
            return super()._try_wait(wait_flags)  # type: ignore[misc,no-any-return]
        while True:
            pid, status = _warm[0].ask({"wait": self.pid})
            if pid or wait_flags:
                return pid, status
            sleep_s(0.005)

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid:
                self._handle_exitstatus(status)  # type: ignore[attr-defined]
        return self.returncode


def run(
    *arguments: str, input: str | None = None, timeout: float = 240, **options: Any
) -> subprocess.CompletedProcess[str]:
    """The command from its start to its end, as `subprocess.run` does it; streams that nobody names are captured."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with Started(*arguments, **options) as process:
        try:
            out, err = process.communicate(input, timeout=timeout)
        finally:
            process.kill()
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def _serve(door: socket.socket) -> dict[str, Any] | None:
    """Fork at every request; returns in the child, with what it is to become, or without when nobody is there to ask."""
    while True:
        message, streams, _, _ = socket.recv_fds(door, MOST_BYTES, 3)
        if not message:
            return None
        question = json.loads(message)
        if "wait" in question:
            door.send(json.dumps(os.waitpid(question["wait"], os.WNOHANG)).encode())
            continue
        pid = os.fork()
        if pid == 0:
            door.close()
            for fd, stream in enumerate(streams):
                os.dup2(stream, fd)
        for stream in streams:
            os.close(stream)
        if pid == 0:
            return question
        door.send(json.dumps(pid).encode())


def _become(question: dict[str, Any]) -> None:
    """Run what was asked for."""
    os.chdir(question["cwd"])
    os.environ.clear()
    os.environ.update(question["environment"])
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by what a shell has put into the background
    sys.argv = question["arguments"]
    if sys.argv[0] == "-m":
        del sys.argv[0]
        sys.path[0] = os.getcwd()
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(sys.argv[0]).parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


def _leave(code: int) -> None:
    """End as Python does; returns where a stream cannot be flushed, of which Python is to tell."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with suppress(OSError, ValueError):
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
        os._exit(code)


def _look_at_memory_once() -> None:
    """By one thread, as servers of the tests have it, in a child: what it touched would be every other child's, too."""
    ceilings = import_module("diptych.compute.ceilings")
    measure, asked = ceilings.measure_read_bytes_per_s, (2 * ceilings.READ_BYTES, 1)
    if not is_available()[0]:
        return
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        found = measure(asked[0], choose_cpus(1, "off", allowed_cpus()), ceilings.REPEATS)
        os.write(theirs, repr(found).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    looks = [float(os.read(ours, MOST_BYTES))]
    os.close(ours)
    os.close(theirs)

    def look(n_bytes: int, placement: Placement, repeats: int) -> float:
        if (n_bytes, placement.threads) == asked and looks:
            return looks.pop()
        return float(measure(n_bytes, placement, repeats))

    ceilings.measure_read_bytes_per_s = look


if __name__ == "__main__":
    huge_pages.allow(True)  # as users have them
    for command in IMPORTED:
        import_module(f"diptych.cli.{command}")
    for home in working.HOMES:
        import_module(home)
    import_module("pydantic.v1")  # FastAPI does as the first route is made
    _look_at_memory_once()
    gc.freeze()
    asked = _serve(socket.socket(fileno=int(sys.argv[1])))
    if asked is not None:
        try:
            _become(asked)
        except SystemExit as ended:
            if ended.code is None or isinstance(ended.code, int):
                _leave(ended.code or 0)
            raise
        _leave(0)
