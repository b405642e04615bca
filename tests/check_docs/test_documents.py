"""The pages are whole: their links lead somewhere, and the page of metrics explains every metric that a run writes."""

import re

import pytest

from helpers.paths import ROOT
from helpers.runs import run, small_config

DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_documents_have_no_placeholders_and_their_links_lead_somewhere(document):
    text = document.read_text()
    assert not re.search(r"^[A-Z_]{6,}$|TODO|FIXME", text, re.MULTILINE)
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("https://") or (document.parent / target).exists(), target


ENDINGS = re.compile(r"_stderr$|_positive$|_negative$|_at_[\w-]+$")  # explained once, at the top of the page


def test_the_metrics_page_explains_every_metric(tmp_path):
    critic = ("objective.advantage=gae", "critic={optimizer: {learning_rate: 1e-3}}")
    from_run = set()
    for number, (arm, more) in enumerate((("obrs", ()), ("on_policy", ()), ("obrs", critic))):
        for line in run(small_config("iterations=2", *more, arm=arm), tmp_path / str(number)):
            from_run |= line.keys()
    page = (ROOT / "docs" / "metrics.md").read_text()
    page = re.sub(r"`([a-z_]+)/([a-z_0-9]+)`, `_max`", r"`\1/\2` `\1/\2_max`", page)
    named = set(re.findall(r"`([a-z_]+/[a-z_0-9.]+)`", page))
    for name in from_run - {"iteration", "time"}:
        assert name.startswith(("seconds/", "cpu_seconds/", "eval/")) or ENDINGS.sub("", name) in named, name
    written = {ENDINGS.sub("", name) for name in from_run}
    elsewhere = ("seconds/", "cpu_seconds/", "eval/", "checkpoint/", "events/")
    assert {name for name in named - written if not name.startswith(elsewhere)} == set()
