"""lm-evaluation-harness's own command line, with the model class `taper`:

python -m taper.lab.evals run --model taper --model_args model=...,policy=... --tasks gsm8k
"""

import sys

from ...errors import TaperError


def main() -> None:
    """Run it; a user's mistake is one line and exit code 2."""
    try:
        try:
            from lm_eval.__main__ import cli_evaluate
        except ImportError:
            raise TaperError("evaluation needs lm-evaluation-harness", 'pip install "taper-llm[eval]"') from None
        from . import harness  # noqa: F401  # registers the class

        cli_evaluate()
    except TaperError as error:
        print(f"taper: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
