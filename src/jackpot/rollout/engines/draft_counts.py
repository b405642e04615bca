"""Counts of the tokens that drafts save and cost, with one definition for all engines.

Drafts are tokens that a draft model proposes, and that the engine's own model, the policy, accepts or replaces.
"""

import math
from dataclasses import dataclass, fields


@dataclass(slots=True)
class DraftCounts:
    """Counts of drafts, of forward passes, and of the tokens that the models read, each summed over responses."""

    tokens: int = 0  # tokens generated
    passes: int = 0  # forward passes of the policy for a response, the pass over its prompt included
    verifications: int = 0  # number of these passes that verified drafts
    verified: int = 0  # tokens that verifying passes gave: accepted drafts, and the token after the last of them
    judged: int = 0  # drafts that were accepted or rejected; drafts after a rejected one are neither
    accepted: int = 0  # judged drafts that were accepted
    read_alone: int = 0  # tokens that the policy would read to generate the responses without drafts
    read_by_policy: int = 0  # tokens that the policy read
    read_by_draft: int = 0  # tokens that the draft model read

    def __iadd__(self, counts: "DraftCounts") -> "DraftCounts":
        """Add to each count the one of the same name in `counts`."""
        for count in fields(self):
            setattr(self, count.name, getattr(self, count.name) + getattr(counts, count.name))
        return self

    def clear(self) -> None:
        """Set all counts to 0."""
        for count in fields(self):
            setattr(self, count.name, 0)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of drafts (docs/metrics.md) by name; empty where no token was generated."""
        if not self.tokens:
            return {}

        # In turn: the tokens that each verifying pass gave, the share of judged drafts (accepted or rejected) that were
        # accepted, passes for each token, and the tokens that each model read, relative to those read without drafts.
        return {
            "draft/accepted_length": self.verified / self.verifications if self.verifications else math.nan,
            "draft/acceptance": self.accepted / self.judged if self.judged else math.nan,
            "draft/policy_passes_per_token": self.passes / self.tokens,
            "draft/policy_reads": self.read_by_policy / self.read_alone,
            "draft/draft_reads": self.read_by_draft / self.read_alone,
        }
