"""lm-evaluation-harness's own command line, with the model class `taper`:

python -m taper.evals run --model taper --model_args model=...,policy=... --tasks gsm8k
"""

import sys

from ..errors import TaperError


def main() -> None:
    """Run it; a mistake that we name is one line and exit code 2."""
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError:
        sys.exit(_told(TaperError("evaluation needs lm-evaluation-harness", 'pip install "taper-llm[eval]"')))
    from . import harness  # noqa: F401  # registers the class

    try:
        cli_evaluate()
    except TaperError as error:
        sys.exit(_told(error))


def _told(error: TaperError) -> int:
    print(f"taper: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
