"""How the runs of `jackpot compare` go. Layer 7."""

from rich.console import Console

from jackpot.launch.arms import Job, Lines, Listener


def arms_progress(console: Console) -> Listener:
    """A listener that prints a line for every evaluation, and for every run that ends."""
    shown: dict[str, int] = {}

    def listen(job: Job, lines: Lines, end: str) -> None:
        evaluated = [line for line in lines if line.get("eval/policy_accuracy") is not None]
        newest = evaluated[-1]["iteration"] if evaluated else -1
        if end or newest > shown.get(job.name, -1):
            shown[job.name] = newest
            accuracy = f"policy {evaluated[-1]['eval/policy_accuracy']:.1%}" if evaluated else ""
            console.print(
                f"{job.name}  iteration {newest}/{job.iterations}  {accuracy}  {end}", highlight=False, soft_wrap=True
            )

    return listen
