"""Lets `python -m jackpot` do what the command `jackpot` does."""

from jackpot.ui.cli import main

if __name__ == "__main__":
    main()
