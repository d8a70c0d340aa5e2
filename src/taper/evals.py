"""`python -m taper.evals`, as it was called before the laboratory; it is `python -m taper.lab.evals` now."""

import sys

from .lab.evals.__main__ import main

if __name__ == "__main__":
    print("taper.evals is taper.lab.evals now", file=sys.stderr)
    main()
