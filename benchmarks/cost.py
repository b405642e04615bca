"""What the papers' recipes need by the cost model (docs/cost.md): a table. Nothing is run.

OMP_NUM_THREADS=1 python benchmarks/cost.py [RECIPE ...]
"""

import argparse

from jackpot.analysis.plan.estimate import estimate
from jackpot.analysis.plan.sizes import model_sizes, prompt_lengths
from jackpot.config.recipes import load_recipe, recipe_names, recipe_notes, resolve
from jackpot.ui.terminal.plan import is_on_policy


def line(name: str) -> str:
    config = resolve(name, None, [])
    found = estimate(config, model_sizes(config), prompt_lengths(config), recipe_notes(name, load_recipe(name)).gpus)
    shard, hours, alone = found.stated.shard, found.stated.hours, found.stated.alone
    cells = [f"`{name}`", f"{shard.gpus} {found.stated.kind}", f"{shard.peak / 1e9:.0f}/{shard.limit / 1e9:.0f}"]
    cells.append(", ".join(f"{count} {kind}" for kind, count in found.fewest.items() if count))
    if hours is None or alone is None:
        return "| " + " | ".join([*cells, "no room"]) + " |"
    cells.append(f"{hours.all:.1f}")
    ahead = found.stated.ahead
    beside = f"{100 * hours.all / ahead.all:.0f}" if ahead else "one GPU"
    if is_on_policy(config):
        return "| " + " | ".join([*cells, "is on-policy", "", "", beside]) + " |"
    shares = (found.flops.rollouts, found.flops.all, hours.all / alone.all)
    return "| " + " | ".join([*cells, *(f"{100 * share:.0f}" for share in shares), beside]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", help="default: those that have published rows")
    papers = [name for name in recipe_names() if recipe_notes(name, load_recipe(name)).published]
    columns = ("recipe", "GPUs", "GB each", "fits on", "hours", "rollout FLOPs, %", "all FLOPs, %")
    columns += ("hours, % of on-policy's", "% of an asynchronous policy's with drafts")
    print("| " + " | ".join(columns) + " |")
    print("|---" * len(columns) + "|")
    for name in parser.parse_args().recipes or papers:
        print(line(name), flush=True)


if __name__ == "__main__":
    main()
