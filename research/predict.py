"""Predicts, without training, where OBRS can be more than TIS, for a table of docs/study.md.

    python -m research.predict RECIPE LABEL=ROLLOUT_MODEL ... policy.path=FOLDER [SETTING=VALUE ...]

In expectation OBRS is TIS times Z, up to their caps, so what separates them is how Z varies over states, what the caps
cut, and the coin. Each pair of models becomes a line of docs/study/predicted.jsonl, which replaces one of its label.
"""

import argparse
import json

from jackpot.analysis.simulate.candidates import simulate_candidates
from jackpot.config.recipes import resolve
from research.reference import ROOT, git

LINES = ROOT / "docs" / "study" / "predicted.jsonl"
NUMBERS = (
    "states",
    "kl_policy_rollout",
    "acceptance",
    "acceptance_spread",
    "tis_cut",
    "obrs_cut",
    "tis_ess",
    "obrs_ess",
    "expected_ess",
    "agreement",
)


def main() -> None:
    """Measure the pairs that the command line names and write their lines."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("recipe")
    arguments.add_argument("words", nargs="+", help="label=path of rollout models without a dot in the label; settings")
    arguments.add_argument("--prompts", type=int, default=256)
    options = arguments.parse_args()

    pairs = [word.partition("=") for word in options.words]
    labels = {path: label for label, _, path in pairs if "." not in label}
    settings = [word for word in options.words if "." in word.partition("=")[0]]
    config = resolve(options.recipe, None, settings)

    lines = [json.loads(line) for line in LINES.read_text().splitlines()] if LINES.exists() else []
    known = {line["label"]: line for line in lines}
    for candidate in simulate_candidates(config, list(labels), options.prompts, seed=0):
        label = labels[candidate.name]
        numbers = {name: getattr(candidate, name) for name in NUMBERS}
        known[label] = {"label": label, "recipe": options.recipe, "commit": git("rev-parse", "HEAD"), **numbers}
    LINES.write_text("".join(json.dumps(line) + "\n" for line in known.values()))


if __name__ == "__main__":
    main()
