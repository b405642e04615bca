"""Starts the command line, for the command `jackpot` and for `python -m jackpot`."""

import sys
from importlib import import_module

EXTRA = {"transformers", "tokenizers", "safetensors", "numpy", "pyarrow", "datasets", "yaml", "rich", "math_verify"}
EXTRA |= {"matplotlib", "plotly", "tensorboard", "typer"}  # modules of the extra `train`


def main() -> None:
    """Run the command line; where a package of the extra `train` is missing, say how to install it."""
    try:
        import_module("jackpot.ui.cli").main()
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in EXTRA:
            raise
        sys.exit(f"error: {error}. The commands need the extra `train`: pip install 'jackpot-rl[train]'")


if __name__ == "__main__":
    main()
