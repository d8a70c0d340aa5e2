"""Where `taper` and `python -m taper` begin."""

from __future__ import annotations

import sys


def run() -> None:
    """The command line; Ctrl-C while it is still loading ends it quietly too."""
    try:
        from .cli import main

        main()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    run()
