"""The names of the package's recipes, found without reading any recipe, for `jackpot --help`."""

from pathlib import Path


def recipe_names() -> list[str]:
    """Return the names of the package's recipes."""
    return sorted(path.stem for path in (Path(__file__).parent / "recipes").glob("*.yaml"))
