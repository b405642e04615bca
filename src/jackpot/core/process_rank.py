"""Says which of the processes of a run this one is, from the variables that torchrun sets. Standard library only."""

import os
from typing import NamedTuple

from jackpot.core.errors import ConfigError

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class ProcessRank(NamedTuple):
    """The rank of a process, and how many processes train one run together."""

    rank: int  # 0 leads
    size: int  # ranks of the run
    local_rank: int  # on this machine
    local_size: int  # ranks on this machine


def process_rank() -> ProcessRank:
    """Return the rank of this process; (0, 1, 0, 1) where no launcher started several.

    Raises:
        ConfigError: the variables do not fit each other.
    """
    given = {name: os.environ[name] for name in _NAMES if os.environ.get(name)}
    if given.get("WORLD_SIZE", "1") == "1":
        return ProcessRank(0, 1, 0, 1)
    try:
        found = ProcessRank(*(int(given[name]) for name in _NAMES))
    except (KeyError, ValueError):
        found = None
    if found is None or not (0 <= found.rank < found.size and 0 <= found.local_rank < found.local_size <= found.size):
        shown = ", ".join(f"{name}={given[name]}" for name in given)
        raise ConfigError(
            f"the environment has {shown}, and a run of several processes needs {', '.join(_NAMES)}, as torchrun sets "
            f"them; start it with torchrun --nproc-per-node N -m jackpot train RECIPE, or unset WORLD_SIZE"
        )
    return found
