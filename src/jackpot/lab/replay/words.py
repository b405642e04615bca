"""The answer of `jackpot replay` in words. Layer 6, pure."""

from collections.abc import Sequence

from jackpot.lab.replay.judged import Judged
from jackpot.ops.reduce import Sums

FEW_SEQUENCES = 0.2  # effective responses; below it a weight of whole responses is no use
_ALL = 0.99


def use(chosen: Judged, candidates: Sequence[Judged], run: Sums, limit: float, stale: bool) -> str:
    """What to use, and the numbers behind it."""
    none = next((one for one in candidates if one.setting.name == "none"), None)
    if chosen.setting.name == "none":
        clip = ", with PPO's clip as it is" if stale else ""
        text = f"No correction is needed{clip}: {_gap(run, stale)}; without one training {_what(chosen)}."
    else:
        text = (
            f"Use {chosen.setting.label}: {_gap(run, stale)}; it {_what(chosen)}{_against(chosen, none, candidates)}."
        )
    if chosen.misplaced > limit:
        text += f" Nothing that leaves enough tokens effective keeps within {limit:.0%}; this misplaces least."
    return text + _sequences(run) + _known(chosen)


def too_far(candidates: Sequence[Judged], run: Sums) -> str:
    """Where no correction mends the gap."""
    least = min(candidates, key=lambda one: one.misplaced)
    most = max((one for one in candidates if one.setting.name != "none"), key=lambda one: one.effective, default=least)
    text = (
        f"No correction mends this gap: {_gap(run, False)}; {least.setting.label} {_what(least)}, "
        f"{most.setting.label} {_what(most)}. Take a closer writer, bring it new weights more often, or distil the "
        f"policy into it."
    )
    return text + _known(least)


def doubts(halves: Sequence[str], expected: int, label: str) -> str:
    """What speaks against being sure, from what the halves that have a response say."""
    if len(halves) < expected:
        return " Not checked on two halves of the responses: one of them is empty."
    if set(halves) <= {label}:
        return ""
    return f" Not sure: of the two halves of the responses one says {halves[0]} and the other {halves[-1]}."


def _gap(run: Sums, stale: bool) -> str:
    where = "the policy that is updated" if stale else "the policy"
    apart = run["apart"]
    measured = f"total variation, {int(apart.count):,} tokens"
    return f"the writer and {where} are {_percent(float(apart.value))} apart ({measured})"


def _what(one: Judged) -> str:
    return (
        f"misplaces {_percent(one.misplaced)} of the probability and leaves {one.effective:.0%} of the tokens effective"
    )


def _against(chosen: Judged, none: Judged | None, candidates: Sequence[Judged]) -> str:
    """What happens without a correction, and the best one of another name."""
    compared = [] if none is None else [none]
    others = [one for one in candidates if one.setting.name not in (chosen.setting.name, "none")]
    near = [one for one in others if one.misplaced <= 2.0 * max(chosen.misplaced, 0.005)] or others
    if near:
        compared.append(max(near, key=lambda one: one.effective))
    parts = [f"{one.setting.label}: {_percent(one.misplaced)} and {one.effective:.0%}" for one in compared]
    return f" ({'; '.join(parts)})" if parts else ""


def _sequences(run: Sums) -> str:
    effective = float(run["mismatch/sequence_ess"].value)
    if effective >= FEW_SEQUENCES:
        return ""
    return (
        f" Nothing that weighs whole responses: over {float(run['length'].value):.0f} tokens their ratio leaves "
        f"{effective:.1%} of them effective."
    )


def _known(chosen: Judged) -> str:
    if chosen.known >= _ALL:
        return ""
    if chosen.known > 0.0:
        known = f"for {chosen.known:.0%} of the tokens"
        return f" Summed over both distributions where the top-k lists hold them, {known}, and sampled at the others."
    return " Sampled, not summed over the vocabulary: a tail that was not sampled is not in it. Top-k lists would tell."


def _percent(share: float) -> str:
    return "less than 0.01 %" if share < 5e-5 else f"{100.0 * share:.2g} %"
