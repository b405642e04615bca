"""The rank of this process among those of a run, from the variables that torchrun sets. Standard library only."""

import os
from typing import NamedTuple

from jackpot.core.errors import ConfigError

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class ProcessRank(NamedTuple):
    """The rank of a process, and how many processes train one run together."""

    rank: int  # from 0; rank 0 leads
    size: int  # number of ranks of the run
    local_rank: int  # from 0, among the ranks on this machine
    local_size: int  # number of ranks on this machine

    @property
    def beside(self) -> int | None:
        """Return the number of ranks on this machine, this one included; None for a run of one process."""
        return self.local_size if self.size > 1 else None


def process_rank() -> ProcessRank:
    """Return the rank of this process; rank 0 of 1 where no launcher started several processes.

    Raises:
        ConfigError: some of the variables are missing or contradict each other.
    """
    variables = {name: os.environ[name] for name in _NAMES if os.environ.get(name)}
    if variables.get("WORLD_SIZE", "1") == "1":
        return ProcessRank(rank=0, size=1, local_rank=0, local_size=1)

    try:
        rank = ProcessRank(*(int(variables[name]) for name in _NAMES))  # _NAMES has the order of the fields
        if 0 <= rank.rank < rank.size and 0 <= rank.local_rank < rank.local_size <= rank.size:
            return rank
    except (KeyError, ValueError):
        pass  # a variable that is missing or no integer is refused below, as contradictions are

    settings = ", ".join(f"{name}={value}" for name, value in variables.items())
    raise ConfigError(
        f"the environment has {settings}, and a run of several processes needs {', '.join(_NAMES)}, as torchrun sets "
        f"them; start it with torchrun --nproc-per-node N -m jackpot train RECIPE, or unset WORLD_SIZE"
    )
