"""Entry point of the command line, for the command `jackpot` and for `python -m jackpot`."""

import sys
from importlib import import_module

from jackpot.core.package import install, needs_train


def main() -> None:
    """Run the command line; if a package of the extra `train` is missing, exit with the command that installs it."""
    try:
        import_module("jackpot.ui.cli").main()
    except ModuleNotFoundError as error:
        if not needs_train(error):
            raise
        sys.exit(f"error: {error}. The commands need the extra `train`: {install('train')}")


if __name__ == "__main__":
    main()
