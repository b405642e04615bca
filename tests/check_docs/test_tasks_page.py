"""docs/own-problem.md and the table of benchmarks say the same, and every example of the page is accepted."""

import re

import pytest
import yaml

from helpers.paths import ROOT
from jackpot.config.arms import build_config
from jackpot.config.tasks import CustomTaskConfig, EnvironmentConfig, MathConfig, ReasoningGymConfig
from jackpot.rollout.tasks.benchmarks import BENCHMARKS

PAGE = (ROOT / "docs" / "own-problem.md").read_text()
# A recipe but for its task.
REST = {
    "iterations": 1,
    "policy": {"path": "p", "optimizer": {"learning_rate": 1e-4}},
    "rollout_model": None,
    "batch": {"prompts": 1, "group_size": 2},
}
EXAMPLES = re.findall(r"```yaml\n(task:.*?)```", PAGE, re.DOTALL)  # test_own_problem.py has the whole recipes


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_of_the_page_is_accepted(example):
    settings = yaml.safe_load(example)
    kind = {
        "custom": CustomTaskConfig,
        "environment": EnvironmentConfig,
        "math": MathConfig,
        "reasoning_gym": ReasoningGymConfig,
    }[settings["task"]["name"]]

    assert isinstance(build_config(REST | settings).task, kind)


def test_the_page_lists_every_benchmark_with_its_files():
    lines = {match[1]: match[0] for match in re.finditer(r"^\| `(\w+)` \| \d.*$", PAGE, re.MULTILINE)}
    assert lines.keys() == BENCHMARKS.keys()
    for name, benchmark in BENCHMARKS.items():
        for split in filter(None, (benchmark.train, benchmark.test)):
            assert f"{split.size:,}" in lines[name] and f"`{split.file}`" in lines[name]
        assert f"`{benchmark.hub}`" in lines[name] and (benchmark.subset or "") in lines[name]
