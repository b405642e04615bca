"""docs/distributed.md and the files it names: commands parse, failures have tests, an image installs as make does."""

import re
import shlex

import pytest
import yaml

from helpers.paths import ROOT, TESTS
from jackpot.config.config import Config
from jackpot.config.recipes import resolve

PAGE = (ROOT / "docs" / "distributed.md").read_text()
KUBERNETES = list(yaml.safe_load_all((ROOT / "examples" / "cluster" / "kubernetes.yaml").read_text()))
# The commands in the page's blocks of code.
COMMANDS = re.findall(r"jackpot (?:train|launch) [^`\n>]+", "\n".join(re.findall(r"```\w*\n(.*?)```", PAGE, re.DOTALL)))


def typed(words: list[str]) -> Config:
    """The settings of `jackpot train RECIPE ...` or `jackpot launch RECIPE ...`."""
    recipe = words[2] if words[2] != "RECIPE" else "quickstart"
    return resolve(recipe, None, [word for word in words[3:] if re.match(r"[a-z_.]+=", word)])


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_page_have_settings_that_exist(command: str) -> None:
    assert typed(shlex.split(command.replace("\\", "")))


def test_every_row_of_the_failure_table_names_a_test() -> None:
    table = PAGE.partition("## When something fails")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]

    assert len(rows) > 5
    for row in rows:
        named = re.findall(r"`([\w/]+\.py)`", row[-1])
        assert len(row) == 3 and named, row
        assert all((TESTS / name).is_file() for name in named), row


def test_the_network_policy_lets_the_pods_in() -> None:
    job, service, policy = KUBERNETES
    command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[0] == "torchrun" and f"--nnodes={job['spec']['completions']}" in command

    labels = job["spec"]["template"]["metadata"]["labels"]
    [rule] = policy["spec"]["ingress"]
    selectors = [policy["spec"]["podSelector"], *(peer["podSelector"] for peer in rule["from"])]

    assert all(selector == {"matchLabels": labels} for selector in selectors) and service["spec"]["selector"] == labels

    name, subdomain = job["metadata"]["name"], job["spec"]["template"]["spec"]["subdomain"]
    assert f"--rdzv-endpoint={name}-0.{subdomain}:29400" in command and subdomain == service["metadata"]["name"]


def test_the_dockerfile_installs_as_make_does() -> None:
    text, makefile = (ROOT / "Dockerfile").read_text(), (ROOT / "Makefile").read_text()
    targets = re.findall(r"^RUN make (\S+)$", text, re.MULTILINE)
    assert targets == [".venv/ready"] and "$(VENV)/ready: pyproject.toml" in makefile and "VENV := .venv\n" in makefile

    [vllm, ray] = re.findall(r"^RUN .venv/bin/(pip install .*)$", text, re.MULTILINE)
    assert f"$(BIN)/{ray}  #" in makefile and vllm in (ROOT / "docs" / "vllm.md").read_text()
    assert {"make", "gcc", "libc6-dev"} <= set(text.split()) and "\nUSER jackpot\n" in text  # Triton compiles

    [version] = re.findall(r"^FROM python:(3\.\d+)-slim$", text, re.MULTILINE)
    assert f"Python {version} to 3.13" in (ROOT / "README.md").read_text()

    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".venv*", "runs"} <= set(ignored)
