"""Makes a process on Linux look like Windows, as far as Taper's Python code can see: for test_windows.py.

What Windows lacks is gone, and what only Windows has stands on its counterpart here: locks of bytes, the limit of a
job, DLLs. It shows that nothing of POSIX is used and that the other branches run, not how Windows itself behaves.
"""

from __future__ import annotations

import _ctypes
import ctypes
import ctypes.util
import faulthandler  # noqa: F401  (what is imported before asks the real system)
import fcntl
import importlib
import mmap
import os
import random  # noqa: F401
import resource
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile  # noqa: F401
import types
import warnings
from pathlib import Path
from typing import Any

_MISSING = {
    os: (
        *("fork", "register_at_fork", "sched_getaffinity", "sched_setaffinity", "memfd_create", "set_blocking"),
        *("getuid", "geteuid", "getpgid", "setsid", "killpg", "mkfifo", "sysconf", "uname", "pread", "pwrite"),
    ),
    mmap: tuple(name for name in dir(mmap) if name.startswith(("MAP_", "PROT_", "MADV_"))),
    signal: (
        *("SIGHUP", "SIGKILL", "SIGPROF", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGCHLD", "SIGPIPE", "SIGQUIT"),
        *("setitimer", "ITIMER_PROF", "pthread_sigmask", "SIG_UNBLOCK", "alarm"),
    ),
    _ctypes: ("dlclose",),
}
_MODULES = ("fcntl", "resource", "termios", "tty", "pty", "pwd", "grp", "syslog", "readline", "posix")
# Taper's own modules that import what is installed beside it.
_ROOTS = ("cli", "llm", "backends.ggml", "server.app", "lab.evals.records", "models.preview", "models.chat_template")
_JOB_FLAG, _JOB_LIMIT = 16, 112  # where they stand in JOBOBJECT_EXTENDED_LIMIT_INFORMATION


def pretend(dlls: str) -> None:
    """Make this process look like Windows, with ggml's DLLs in a folder; modules of Taper are imported anew."""
    for name in _ROOTS:
        importlib.import_module(f"taper.{name}")
    for name in (
        "huggingface_hub.utils._cache_manager",
        "starlette.testclient",
        "anyio._backends._asyncio",
        "rich.live",
    ):
        importlib.import_module(name)
    for name in [name for name in sys.modules if name.split(".")[0] == "taper"]:
        del sys.modules[name]
    _be_windows()
    os.environ["TAPER_GGML"] = dlls
    # There, text has another encoding than UTF-8 wherever none is named.
    warnings.filterwarnings("error", category=EncodingWarning, module="taper")


def _be_windows() -> None:
    lock_types = {"LK_NBLCK": 2, "LK_UNLCK": 0}
    sys.modules["msvcrt"] = types.ModuleType("msvcrt")
    vars(sys.modules["msvcrt"]).update(lock_types, locking=_locking, get_osfhandle=lambda fd: fd)
    subprocess.Popen.kill = subprocess.Popen.terminate = lambda self: self.send_signal(9)  # type: ignore[method-assign]
    subprocess.CREATE_NO_WINDOW = 0  # type: ignore[attr-defined]
    socket.SO_EXCLUSIVEADDRUSE = socket.SO_REUSEADDR  # type: ignore[attr-defined]
    _ctypes.FreeLibrary = _ctypes.dlclose  # type: ignore[attr-defined]
    ctypes.FormatError = lambda number: f"error {number}"  # type: ignore[attr-defined]
    ctypes.WinDLL = lambda name, **options: _Kernel()  # type: ignore[attr-defined]
    ctypes.windll = types.SimpleNamespace(kernel32=_Kernel())  # type: ignore[attr-defined]
    set_blocking, set_wakeup_fd = os.set_blocking, signal.set_wakeup_fd

    def set_any_wakeup_fd(fd: int, **options: Any) -> int:
        if fd >= 0:
            set_blocking(fd, False)
        return set_wakeup_fd(fd, **options)

    signal.set_wakeup_fd = set_any_wakeup_fd  # type: ignore[assignment]
    ctypes.util.find_library = lambda name: None  # type: ignore[assignment]
    ctypes.CDLL = _Dll  # type: ignore[misc]
    mmap.mmap = _Map  # type: ignore[misc]
    select.select = _select_sockets  # type: ignore[assignment]
    Path.read_text, Path.exists = _without_proc(Path.read_text), _without_proc(Path.exists)  # type: ignore[method-assign]
    for module, names in _MISSING.items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    for name in _MODULES:
        sys.modules[name] = None  # type: ignore[assignment]
    sys.platform = "win32"


class _Dll(ctypes.CDLL):
    def __init__(self, name: str | None, *args: Any, **options: Any) -> None:
        if name is None:
            raise TypeError("Windows has no such library")
        super().__init__(None if name == "msvcrt" else name, *args, **options)


class _Map(mmap.mmap):
    def __new__(cls, fileno: int, length: int, tagname: str | None = None, access: int = 0, offset: int = 0) -> _Map:
        return super().__new__(cls, fileno, length, access=access, offset=offset)

    @property
    def madvise(self) -> None:
        raise AttributeError


class _Kernel:
    """kernel32; a job's limit of memory becomes this process's."""

    def __init__(self) -> None:
        self.GetCurrentProcess, self.AssignProcessToJobObject = lambda: -1, lambda job, process: 1
        self.CreateJobObjectW = lambda attributes, name: 1

    def SetInformationJobObject(self, job: ctypes.c_void_p, kind: int, limits: bytes, size: int) -> int:
        assert (kind, size, struct.unpack_from("<I", limits, _JOB_FLAG)) == (9, 144, (0x100,))
        (most,) = struct.unpack_from("<Q", limits, _JOB_LIMIT)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        return 1

    def PeekNamedPipe(self, handle: ctypes.c_void_p, *rest: Any) -> int:
        poll = select.poll()
        poll.register(handle.value or 0, select.POLLIN)
        events = dict(poll.poll(0)).get(handle.value or 0, 0)
        rest[3]._obj.value = int(bool(events & select.POLLIN))
        return int(not events & select.POLLHUP)


def _locking(fd: int, mode: int, size: int) -> None:
    """Lock bytes from the file's position on; a file that is open for reading only gets a shared lock."""
    kind = fcntl.F_UNLCK
    if mode:
        kind = fcntl.F_RDLCK if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY else fcntl.F_WRLCK
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_CUR, 0, size, 0))
    except BlockingIOError:
        raise PermissionError(13, "Permission denied") from None


def _select_sockets(*_: Any) -> Any:
    raise OSError(10038, "an operation was attempted on something that is not a socket")


def _without_proc(method: Any) -> Any:
    def checked(path: Path, *args: Any, **options: Any) -> Any:
        if path.parts[:2] in (("/", "proc"), ("/", "sys")):
            path = Path("/nowhere")
        return method(path, *args, **options)

    return checked


def python(folder: Path) -> str:
    """A program that runs Python scripts as here, for processes that Taper starts by `sys.executable`."""
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {__file__} "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    return str(program)


if __name__ == "__main__":
    assert sys.argv[1:3] == ["-I", "-S"], "as limited_process.py starts its process"
    del sys.argv[:3]
    _be_windows()
    runpy.run_path(sys.argv[0], run_name="__main__")
