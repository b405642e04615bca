"""The README's own code runs, and its commands exist."""

import re
from pathlib import Path

import pytest
import torch

from helpers.paths import ROOT
from jackpot import obrs
from jackpot.config.recipes import parse_override, resolve
from jackpot.config.run import Config
from jackpot.ui.cli import app

README = (ROOT / "README.md").read_text()


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


def test_the_recipe_of_an_own_problem_is_one(tmp_path: Path) -> None:
    [block] = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    (tmp_path / "mine.yaml").write_text(block)
    config = resolve(str(tmp_path / "mine.yaml"), None, [])
    assert config.task.train.columns.problem == "question" and config.rollout_model.path != config.policy.path
    assert not config.evaluation.benchmarks


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 120


def test_every_jackpot_command_in_the_readme_parses() -> None:
    commands = re.findall(r"^jackpot (\w+) ?(.*?)(?:\s+#.*)?$", README, re.MULTILINE)
    assert {name for name, _ in commands} == {"train", "diagnose", "report", "compare"}
    known = {one.name or one.callback.__name__ for one in app.registered_commands}
    for name, arguments in commands:
        assert name in known
        words = arguments.split()
        if name == "train":
            arm = words[words.index("--arm") + 1] if "--arm" in words else None
            overrides = [word for word in words if "=" in word]
            assert isinstance(resolve(words[0], arm, overrides), Config)
            assert all(parse_override(word) for word in overrides)


def test_the_numbers_of_the_quickstart_and_of_the_study_are_those_of_their_pages() -> None:
    page, study = ((ROOT / "docs" / name).read_text() for name in ("quickstart.md", "study.md"))
    arms = re.findall(r"^\| `(\w+)`: .* \| ([\d./ ]+) \| ([\d./ ]+) \| \**([\d.]+)\** \|$", README, re.MULTILINE)
    assert {arm for arm, *_ in arms} == {"obrs", "none", "annealed", "on_policy"}
    for arm, *numbers in arms:
        [row] = re.findall(rf"^\| `{arm}`(?:, at \w+)? \| ({numbers[0]}.*)$", page, re.MULTILINE)
        assert row.startswith("{} | {} | {} (".format(*numbers)), arm
    ends = re.findall(r"^│ (?:policy|rollout model) +│ +([\d.]+) ± .* ([\d.]+) ± .* │ .* │$", README, re.MULTILINE)
    seed_0 = " and ".join(f"from {before} to {after}" for before, after in ends)
    assert f"Seed 0, which `make train` runs, goes {seed_0};" in " ".join(page.split())
    below: dict[str, list[str]] = {}  # points below on-policy and the cost, of each pair in the page's order
    for arm, *numbers in re.findall(
        r"^\| `(\w+)` \| [\d.]+ ± [\d.]+ \| -([\d.]+) \[.*?\] \| (\d+) % ", study, re.MULTILINE
    ):
        below.setdefault(arm, []).append(numbers)
    (close, cost), (far, _) = below["obrs"][:2]
    (close_none, _), (far_none, _) = below["none"][:2]
    (close_annealed, later), (far_annealed, _) = below["annealed_none"][:2]
    text = " ".join(README.split())
    assert (
        f"{cost} % of on-policy's FLOPs, the policy ends {close} (a close model) and {far} (a far one) points" in text
    )
    assert f"and {close_none} and {far_none} without correction" in text
    assert f"{later} %: {close_annealed} and {far_annealed}, then without correction" in text
