"""Names the recipes of the package without reading them: `jackpot --help` lists them."""

from pathlib import Path


def recipe_names() -> list[str]:
    """Return the names of the package's recipes."""
    return sorted(path.stem for path in (Path(__file__).parent / "recipes").glob("*.yaml"))
