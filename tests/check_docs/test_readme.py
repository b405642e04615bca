"""The README's own code runs, and its commands exist."""

import json
import re
from statistics import fmean, geometric_mean, stdev

import pytest
import torch

from helpers.paths import ROOT
from jackpot import obrs
from jackpot.analysis.compare.comparison import compare
from jackpot.analysis.compare.summary import RunSummary
from jackpot.config.config import Config
from jackpot.config.recipes import parse_override, resolve
from jackpot.ui.cli import app
from research.study import committed, read_summary
from research.study_page import ALLOWED, Arms

README = (ROOT / "README.md").read_text()
STUDY = (ROOT / "docs" / "study.md").read_text()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_python_block_gives_the_loss_of_equation_5(device: str) -> None:
    torch.manual_seed(0)
    logits, rollout_logits = torch.randn(2, 2, 3, 5, device=device)
    rollout = rollout_logits.log_softmax(-1)
    top, top_ids = rollout.topk(5, -1)
    ids = torch.randint(5, (2, 3, 1), device=device)
    names = {
        "policy_logits": logits,
        "rollout_top_ids": top_ids,
        "rollout_top_log_probs": top,
        "rollout_log_probs": rollout.gather(-1, ids)[..., 0],
        "old_log_probs": logits.log_softmax(-1).gather(-1, ids)[..., 0],
        "response_mask": torch.tensor([[True, True, False], [True, True, True]], device=device),
        "surrogate": torch.randn(2, 3, device=device),
    }

    [block] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(block, names)

    mask, rho = names["response_mask"], (names["old_log_probs"] - names["rollout_log_probs"]).exp()
    z = obrs.exact_z(rollout, logits.log_softmax(-1), 1.0)
    assert names["loss"].device.type == device

    if device == "meta":
        return
    kappa = rho.clamp(max=1.0)[mask].sum() / z[mask].sum()
    weights = (kappa * z * rho.clamp(min=1.0)).clamp(max=3.0)
    kept = names["accept_mask"].bool()

    expected = -(weights * names["surrogate"])[kept & mask].sum() / mask.sum()
    assert kept.any() and torch.allclose(names["loss"], expected, rtol=1e-5)


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 110


def test_every_jackpot_command_in_the_readme_parses() -> None:
    commands = re.findall(r"^jackpot (\w+) ?(.*?)(?:\s+#.*)?$", README, re.MULTILINE)
    assert {name for name, _ in commands} == {"train", "diagnose", "report", "compare"}

    known = {command.name or command.callback.__name__ for command in app.registered_commands}
    for name, arguments in commands:
        assert name in known
        words = arguments.split()
        if name == "train":
            arm = words[words.index("--arm") + 1] if "--arm" in words else None
            overrides = [word for word in words if "=" in word]
            assert isinstance(resolve(words[0], arm, overrides), Config)
            assert all(parse_override(word) for word in overrides)


def summaries(path: str) -> list[RunSummary]:
    """Return the runs of a committed file, a line each; the study's lines say of which commit a run is."""
    lines = map(json.loads, (ROOT / "docs" / path).read_text().splitlines())
    return [read_summary(json.dumps(line.get("run", line))) for line in lines]


def costs_of(runs: list[RunSummary]) -> list[float]:
    """Return the means over runs of rollout FLOPs, all FLOPs and CPU seconds."""
    ends = [run.last for run in runs]
    rows = [(end.flops, end.flops + end.training_flops, end.cpu_seconds) for end in ends]
    return [fmean(column) for column in zip(*rows, strict=True)]


def mean_costs(runs: list[RunSummary], arm: str) -> list[float]:
    """Return the means over an arm's seeds: accuracy, rollout FLOPs, all FLOPs, CPU seconds."""
    of_arm = [run for run in runs if run.arm == arm]
    assert len(of_arm) == 5
    return [fmean(run.last.policy_accuracy for run in of_arm), *costs_of(of_arm)]


def test_the_table_of_costs_is_that_of_the_studys_runs() -> None:
    runs = summaries("study/first.jsonl")
    base = mean_costs(runs, "alone/on_policy")
    arms = ["alone/on_policy", *(f"close/{arm}" for arm in ("none", "tis", "obrs", "annealed_none"))]
    row_of = r"^\|[^|]*\|[^|]*\| ([\d.]+) \| (\d+) % \| (\d+) % \| (\d+) % \| ([^|]+) \|$"
    table = re.findall(row_of, README, re.MULTILINE)
    reached = Arms(committed().read("first"), "close")

    for row, arm in zip(table, arms, strict=True):
        accuracy, *costs = mean_costs(runs, arm)
        shares = [f"{100 * cost / total:.0f}" for cost, total in zip(costs, base[1:], strict=True)]
        ratios = reached.reaching_cost(arm.partition("/")[2], "all", ALLOWED[-1])
        until = f"{100 * geometric_mean(ratios):.0f} %" if ratios else "never"
        seeds = "" if len(ratios) in (0, 5) else f" ({len(ratios)} of 5)"
        assert list(row) == [f"{100 * accuracy:.1f}", *shares, until + seeds], arm

    text = " ".join(README.split())
    assert f"here ({100 * base[1] / base[2]:.0f} % of the FLOPs)" in text

    models = re.findall(r"^\| `(policy|close)` \| ([\d,]+) \| [\d,]+ \| ([\d.]+) ", STUDY, re.MULTILINE)
    _, (_, _, times) = models
    assert f"a model with {float(times):.0f} times fewer FLOPs" in text


def test_the_end_of_the_quickstart_is_that_of_a_committed_run() -> None:
    [run] = [run for run in summaries("quickstart.jsonl") if run.seed == 0]
    assert run.problems == resolve("quickstart", None, []).evaluation.problems and run.settings["threads"] == 1

    first, last = run.points[0], run.last
    pattern = r"^│ (?:policy|rollout model) +│ +([\d.]+) ± .* ([\d.]+) ± .* │ +\+([\d.]+) ± "
    box = re.findall(pattern, README, re.MULTILINE)
    before = (first.policy_accuracy, first.rollout_model_accuracy)
    after = (last.policy_accuracy, last.rollout_model_accuracy)

    assert box == [
        tuple(f"{100 * value:.1f}" for value in (start, end, end - start))
        for start, end in zip(before, after, strict=True)
    ]
    assert f"after {last.cpu_seconds:.0f} CPU seconds of training" in " ".join(README.split())


def test_the_quickstart_tables_are_of_the_committed_runs() -> None:
    page = (ROOT / "docs" / "tutorial.md").read_text()
    by_arm: dict[str, list[RunSummary]] = {}
    for run in sorted(summaries("quickstart.jsonl"), key=lambda run: run.seed):
        if run.seed in (101, 102, 103):
            by_arm.setdefault(run.arm, []).append(run)
    assert {"on_policy", "none", "tis", "obrs"} < set(by_arm)

    base = costs_of(by_arm["on_policy"])
    for arm, runs in by_arm.items():
        rate = runs[0].settings["policy"]["optimizer"]["learning_rate"]
        assert resolve("quickstart", arm, []).policy.optimizer.learning_rate == rate  # the recipe's own

        after = [100 * run.last.policy_accuracy for run in runs]
        shares = [f"{100 * cost / total:.0f} %" for cost, total in zip(costs_of(runs), base, strict=True)]
        seeds = " / ".join(f"{value:.1f}" for value in after)
        row = [
            f"`{arm}`",
            f"{rate:.0e}".replace("e-0", "e-"),
            seeds,
            f"{fmean(after):.1f} ({stdev(after):.1f})",
            *shares,
        ]

        assert f"| {' | '.join(row)} |" in page
        if f"| `{arm}` | 38" in page:
            assert f"| {fmean(after):.1f} ± {stdev(after):.1f} |" in page

    compared = compare([run for arm in ("obrs", "tis", "none", "on_policy") for run in by_arm[arm]])
    for row in compared.rows:
        cost = row.cost
        assert f"| {cost.flops:.2e} | {cost.all_flops:.2e} | {cost.cpu_seconds:.1f} |" in page


def test_no_other_number_stands_in_the_readme() -> None:
    """What is left without code, links, tables and names is computed above, or is a name of something."""
    prose = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)|^\|[^\n]*$", " ", README, flags=re.DOTALL | re.MULTILINE)
    names = (
        "arXiv 2602.06107",
        "ICLR 2026",
        "Python 3.11 to 3.13",
        "on 3.11",
        "Qwen2.5-0.5B",
        "Qwen2.5-1.5B",
        "SmolLM2-135M",
        "FP8",
        "Apache-2.0",
    )

    for name in names:
        assert name in prose
        prose = prose.replace(name, "")

    numbers = set(re.findall(r"[\d][\d.,]*\d|\d", prose))
    [seconds] = re.findall(r"after (\d+) CPU seconds", README)
    assert numbers == {"25", seconds}
