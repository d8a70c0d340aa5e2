"""Where `taper` and `python -m taper` begin."""

from __future__ import annotations

import sys

from . import check_platform


def run() -> None:
    """The command line; Ctrl-C while it is still loading ends it quietly too."""
    try:
        check_platform()
    except ImportError as error:
        print(f"taper: {error}", file=sys.stderr)
        sys.exit(2)
    try:
        from .cli import main

        main()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    run()
