"""The numbers of a run as series that rules can ask. Layer 6, pure."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jackpot.config import Config

LEAST = 5  # values before a smoothed one means anything

Series = list[tuple[int, float]]  # iteration and value
_PREFIX_ESS = re.compile(r"mismatch/prefix_ess_at_(\d+)")


class History:
    """The lines of metrics.jsonl, and what is derived from them and from events.jsonl:

    mismatch/prefix_ess: at the positions that the middle of a mean response is among
    events/NAME: how many events of that name there were in the newest tenth of the iterations, at each of them
    """

    def __init__(self, lines: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]], config: Config) -> None:
        self.config = config
        self._lines = [dict(line) | _prefix_ess(line) for line in lines]
        self._events = events

    def series(self, metric: str, over: str | None = None, after_steps: int = 0) -> Series:
        """Where it is not null: the metric, divided by the metric `over`, after so many optimizer steps."""
        if metric.startswith("events/"):
            newest = self._lines[-1]["iteration"] if self._lines else 0
            recent = newest - max(LEAST, newest // 10)
            those = [
                event["iteration"]
                for event in self._events
                if f"events/{event['event']}" == metric and event["iteration"] >= recent
            ]
            return [(iteration, float(count)) for count, iteration in enumerate(those, start=1)]
        steps = self.config.batch.steps_per_iteration
        return [
            (line["iteration"], line[metric] / (line[over] if over else 1.0))
            for line in self._lines
            if line.get(metric) is not None
            and (over is None or line.get(over))
            and line["iteration"] * steps >= after_steps
        ]

    def window(self, values: Sequence[float]) -> int:
        """How many values are smoothed over: a tenth of them, and LEAST at least."""
        return max(LEAST, len(values) // 10)


def _prefix_ess(line: Mapping[str, Any]) -> dict[str, float | None]:
    middle = (line.get("response/tokens") or 0.0) / 2
    begins = {int(match[1]): name for name in line if (match := _PREFIX_ESS.match(name))}
    reached = [begin for begin in begins if begin <= middle]
    return {"mismatch/prefix_ess": line[begins[max(reached)]]} if reached else {}
