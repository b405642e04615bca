"""What drafts are worth and what they cost, counted by every engine in the same way."""

import math
from collections import deque
from dataclasses import dataclass, fields


@dataclass(slots=True)
class DraftCounts:
    """Counts what drafts are worth and what they cost, over responses."""

    tokens: int = 0  # generated
    passes: int = 0  # of a row through the policy, that of its prompt too
    verifications: int = 0  # those of these passes that verified drafts
    verified: int = 0  # tokens that they gave, the one behind the last accepted draft too
    judged: int = 0  # drafts before which all were accepted
    accepted: int = 0  # of these
    read_alone: int = 0  # tokens that the policy reads to generate the same responses alone
    read_by_policy: int = 0
    read_by_draft: int = 0

    def __iadd__(self, other: "DraftCounts") -> "DraftCounts":
        for count in fields(self):
            setattr(self, count.name, getattr(self, count.name) + getattr(other, count.name))
        return self

    def metrics(self) -> dict[str, float]:
        """Return the metrics of drafts by name; none where nothing was generated."""
        if not self.tokens:
            return {}
        return {
            "draft/accepted_length": self.verified / self.verifications if self.verifications else math.nan,
            "draft/acceptance": self.accepted / self.judged if self.judged else math.nan,
            "draft/policy_passes_per_token": self.passes / self.tokens,
            "draft/policy_reads": self.read_by_policy / self.read_alone,
            "draft/draft_reads": self.read_by_draft / self.read_alone,
        }


def take_all(waiting: deque[DraftCounts]) -> DraftCounts:
    """Remove all counts from a queue, to which another thread may append, and return their sum."""
    total = DraftCounts()
    while waiting:
        total += waiting.popleft()
    return total
