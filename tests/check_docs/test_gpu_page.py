"""docs/gpu.md: what is written there is what docs/gpu.jsonl says, and nothing else."""

import sys

from helpers.paths import ROOT


def test_the_page_is_what_its_generator_writes(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    from gpu_parts import page
    from gpu_parts.results import RESULTS, Line, read

    assert page.PAGE.read_text() == page.page(read(RESULTS))

    line = Line("head", "ours", "abc1234", {"device": "GPU", "torch": "2"}, {"ms": 1.5})
    text = page.page([line])

    assert text.count(page.NOT_RUN) == len(page.PARTS) - 1
    assert "`make gpu PART=head` at abc1234 on GPU, torch 2:\n\n|  | ms |\n| --- | --- |\n| ours | 1.5 |" in text
