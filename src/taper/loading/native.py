"""The tokenizers library is native: it raises bare exceptions and panics, and a panic prints lines of its own."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from ..errors import ModelError, TaperError

_LOCK = threading.RLock()  # one thread at a time turns standard error aside


@contextmanager
def library_errors(error: Callable[[str], TaperError]) -> Iterator[None]:
    """Turn whatever the library raises here into an error of ours; ours and interrupts pass."""
    try:
        yield
    except (TaperError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as raised:  # a panic is not an Exception
        raise error(str(raised) or type(raised).__name__) from None


@contextmanager
def loading_tokenizer(source: object) -> Iterator[None]:
    """Name the file if the library fails on what it describes, and show nothing of a panic."""
    with library_errors(lambda reason: ModelError(f"{source}: the tokenizer is damaged: {reason}")), _panics_unseen():
        yield


@contextmanager
def _panics_unseen() -> Iterator[None]:
    """Hold back what this process writes to file descriptor 2, and give it out unless there was a panic.

    It holds up other threads' lines too, so it is for loading only.
    """
    with _LOCK, ExitStack() as stack:
        try:
            held = stack.enter_context(tempfile.TemporaryFile())
            standard_error = os.dup(2)
        except OSError:  # there is no folder for temporary files, or standard error is closed
            yield
            return
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(standard_error, 2)
            os.close(standard_error)
            held.seek(0)
            if (lines := held.read()) and b" panicked at " not in lines:
                os.write(2, lines)
