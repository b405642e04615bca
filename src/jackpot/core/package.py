"""The version of the package that runs, and how its extras are installed. Standard library only."""

from importlib import metadata

_TRAIN = {  # modules that the extra `train` installs
    *("transformers", "tokenizers", "safetensors", "numpy", "pyarrow", "datasets", "yaml", "rich", "math_verify"),
    *("tensorboard", "typer"),
}


def version() -> str:
    """Return the version of the package; "unknown" where its source is used without being installed."""
    try:
        return metadata.version("jackpot-rl")
    except metadata.PackageNotFoundError:
        return "unknown"


def install(extra: str) -> str:
    """Return the command that installs the package with an extra: from a clone, as no index has the package yet."""
    return f"pip install -c constraints.txt '.[{extra}]' in a clone of the repository"


def needs_train(error: ModuleNotFoundError) -> bool:
    """Tell whether the missing module is one that the extra `train` installs."""
    return error.name is not None and error.name.partition(".")[0] in _TRAIN
