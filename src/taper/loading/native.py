"""The tokenizers library is native: it raises bare exceptions and panics, and a panic prints lines of its own."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext

from ..errors import TaperError

_LOCK = threading.RLock()  # one thread at a time turns standard error aside


@contextmanager
def library_errors(error: Callable[[str], TaperError], *, quiet: bool = False) -> Iterator[None]:
    """Turn whatever the library raises here into an error of ours; ours and interrupts pass.

    Args:
        error: makes it from the library's reason.
        quiet: keep a panic's own lines from standard error; too slow for what is called at every token.
    """
    try:
        with _without_panic_lines() if quiet else nullcontext():
            yield
    except (TaperError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as raised:  # a panic is not an Exception
        raise error(str(raised) or type(raised).__name__) from None


@contextmanager
def _without_panic_lines() -> Iterator[None]:
    """Hold back what this process writes to file descriptor 2, and give it out unless it comes from a panic."""
    with _LOCK, ExitStack() as stack:
        try:
            held = stack.enter_context(tempfile.TemporaryFile())
            standard_error = os.dup(2)
        except OSError:  # there is no folder for temporary files, or standard error is closed
            held = None
        if held is None:
            yield
            return
        panicked = False
        try:
            os.dup2(held.fileno(), 2)
            yield
        except BaseException as raised:
            panicked = type(raised).__name__ == "PanicException"
            raise
        finally:
            os.dup2(standard_error, 2)
            os.close(standard_error)
            held.seek(0)
            if not panicked and (lines := held.read()):
                os.write(2, lines)
