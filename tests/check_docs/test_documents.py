"""The pages are whole: their links lead somewhere, and they name every metric, rule and format that the code has."""

import math
import re
from fnmatch import fnmatch
from itertools import groupby

import pytest

from helpers.paths import ROOT
from helpers.runs import SHORT, run, small_config
from jackpot.analysis.diagnose.rules import RULES
from jackpot.analysis.replay.formats import FORMATS

DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_documents_are_finished_and_their_links_lead_somewhere(document):
    text = document.read_text()
    assert not re.search(r"^[A-Z_]{6,}$|TODO|FIXME", text, re.MULTILINE)
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("https://") or (document.parent / target).exists(), target


# explained once, at the top of the page
ENDINGS = re.compile(r"_stderr$|_positive$|_negative$|_at_[\w-]+$|_by_(policy|rollout_model)$")


def test_the_metrics_page_explains_every_metric(tmp_path):
    critic = ("objective.advantage=gae", "critic={optimizer: {learning_rate: 1e-3}}")
    more_settings = (
        "objective.correction.budget=0.9",
        "objective.correction.normalizer=exact",
        "policy.ess_scaling=response",
    )
    runs = (
        ("obrs", ("batch.micro_batch_tokens=128", "rollout_model.share=0.5", "engine.draft={}")),
        ("on_policy", ("engine.quantization=int8_w8a8",)),
        ("obrs", (*critic, *more_settings)),
    )

    from_run = set()
    for index, (arm, more) in enumerate(runs):
        for line in run(small_config("iterations=2", SHORT, *more, arm=arm), tmp_path / str(index)):
            from_run |= line.keys()

    page = (ROOT / "docs" / "metrics.md").read_text()
    page = re.sub(r"`([a-z_]+)/([a-z_0-9]+)`, `_max`", r"`\1/\2` `\1/\2_max`", page)

    named = set(re.findall(r"`([a-z_]+/[a-z_0-9.]+)`", page))
    for name in from_run - {"iteration", "time"}:
        assert name.startswith(("seconds/", "cpu_seconds/", "eval/")) or ENDINGS.sub("", name) in named, name

    written = {ENDINGS.sub("", name) for name in from_run}
    elsewhere = (
        "seconds/",
        "cpu_seconds/",
        "eval/",
        "checkpoint/",
        "events/",
        "obrs/acceptance_error",
        "wandb/",
        "saved/",
        "engine/",
    )

    assert {name for name in named - written if not name.startswith(elsewhere)} == set()


def limits_on_the_page() -> dict[str, str]:
    """The limits that docs/metrics.md gives, by the pattern of a metric's name."""
    page = (ROOT / "docs" / "metrics.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    limits, above = {}, ""
    for row in rows:
        above = above if row[-1] == "as above" else row[-1]
        limits |= dict.fromkeys(re.findall(r"`([\w/.*]+)`", row[0]), above)
    return limits


def test_the_metrics_page_has_every_rule_of_diagnose():
    page = limits_on_the_page()

    for rule in RULES:
        cells = [cell for name, cell in page.items() if fnmatch(rule.metric, name)]
        assert cells, f"{rule.metric} does not stand in docs/metrics.md"
        for side, limit in (("below", rule.low), ("above", rule.high)):
            if isinstance(limit, float) and math.isfinite(limit):
                limited = rf"{side} {re.escape(f'{limit:g}')}(?![\d.])"
                assert any(re.search(limited, cell) for cell in cells), f"{rule.name}: {cells}"


def test_the_replay_page_has_every_format():
    page = (ROOT / "docs" / "replay.md").read_text()

    for name, saved_format in FORMATS.items():
        assert f"`{name}`" in page, name
        lines = groupby(saved_format.how.splitlines(), key=lambda line: line.startswith("    "))
        for is_code, block in lines:  # the code to add is the same, however its lines are broken
            words = " ".join(re.findall(r"\w+", "\n".join(block)))
            assert not is_code or words in " ".join(re.findall(r"\w+", page)), name


def test_every_place_on_the_architecture_walk_is_there():
    places = re.findall(r"`([\w/]+\.py): ([\w.]+)`", (ROOT / "ARCHITECTURE.md").read_text())

    assert len(places) >= 15
    for file, name in places:
        *classes, last = name.split(".")
        text = (ROOT / "src" / "jackpot" / file).read_text()
        for definition in (*(f"class {each}" for each in classes), rf"(?:def|class) {last}"):
            assert re.search(rf"^ *{definition}\b", text, re.MULTILINE), f"{file}: {name}"
