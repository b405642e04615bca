"""Settings of a run's processes: how many there are, what starts them, and how long they wait for each other."""

from typing import Annotated, Literal

from pydantic import Field

from jackpot.config.base import MAY_CHANGE, Conflicts, Count, Strict


class PlacementConfig(Strict):
    """Settings of a run of several processes (docs/distributed.md): ranks, of torchrun or Ray, and engines."""

    launcher: Annotated[Literal["local", "ray"], MAY_CHANGE] = "local"
    """What starts the processes: local, this command, or torchrun those that train; ray, Ray, which places all of them
    on this machine or its cluster. Status of ray, and of several processes: experimental."""
    ranks: Annotated[Count, MAY_CHANGE] = 1
    """Processes that train together, with launcher ray; torchrun has its own option for it, --nproc-per-node."""
    restarts: Annotated[int, Field(ge=0), MAY_CHANGE] = 3
    """Times that launcher ray starts all ranks again after one was lost."""
    engines: Annotated[Annotated[int, Field(ge=0, le=1024)] | Literal["auto"], MAY_CHANGE] = "auto"
    """Processes that generate, each with engines of its own, which the run or Ray starts and replaces when they die; 0:
    the process that trains generates too. auto: where several ranks train on GPUs, or have vLLM, one beside each rank
    of rank 0's machine, on its GPU, where it sleeps while the ranks train (`engine.enable_sleep_mode`); else 0. Engines
    that are servers stay where they are. On a CPU each has as many `threads` as the run, 1 where that is auto. Status:
    experimental."""
    chunk: Annotated[Count | Literal["auto"], MAY_CHANGE] = "auto"
    """Responses that an engine process is given at once; auto: a rollout batch shared out among `engines`, in whole
    groups, at most `engine.max_num_seqs`. With a number of its own a run does not depend on how many engines there are,
    but for the rounding of engines that are not batch-invariant."""
    timeout: Annotated[float, Field(ge=1.0, lt=float("inf")), MAY_CHANGE] = 600.0
    """Seconds that a rank waits for the others while all of them train, score, save or load models, before the run ends
    with an error. Between these, ranks wait for rank 0 as long as it runs, and end twice as long after it stands still.
    Also the seconds without any sign of life after which an engine process is replaced, and those without any engine
    process after which the run ends."""
    offload: Annotated[bool, MAY_CHANGE] = False
    """Keep every rank's part of weights, gradients and moments in the memory of the CPU between their uses, where
    several ranks train: room on the GPUs for time. Status: experimental. It has run with one rank on one H200."""

    @property
    def engine_processes(self) -> int:
        """Return the number of processes that generate; 0 also while `auto` is undecided (`config.processes`)."""
        return 0 if self.engines == "auto" else self.engines

    def conflicts(self) -> Conflicts:
        """Refuse a number of ranks that nothing starts, and a size of chunks without engine processes to get them."""
        return [
            (
                self.ranks > 1 and self.launcher == "local",
                f"ranks is {self.ranks}, which is for placement.launcher=ray; torchrun --nproc-per-node {self.ranks} "
                "-m jackpot train RECIPE starts ranks without it",
            ),
            (
                self.chunk != "auto" and self.engines == 0,
                f"chunk is {self.chunk}, but there are no engine processes to get chunks; set placement.engines, or "
                "leave placement.chunk out",
            ),
        ]
