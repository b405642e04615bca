"""No text has a reader install PyPI's `jackpot`, which is somebody else's: the package is called jackpot-rl."""

import re

import pytest

from helpers.paths import ROOT

SUFFIXES = {".cff", ".html", ".js", ".md", ".py", ".toml", ".txt", ".yaml", ".yml", ""}
TEXTS = [path for path in ROOT.glob("*") if path.is_file()]
TEXTS += [path for name in ("src", "docs", "examples", "benchmarks") for path in (ROOT / name).rglob("*")]
# an installer's command up to its end, with the bare name among what it installs; and the name with an extra, anywhere
STRANGERS = re.compile(
    r"\b(?:pip3?|pipx|uv|poetry|conda) (?:[^`\n;&|()#]*? )?(?:install|add|download)\b[^`\n;&|()#]*?"
    r"(?<![\w./-])jackpot(?![\w./:-])|(?<![\w./-])jackpot\[[\w,-]+\]"
)


@pytest.mark.parametrize(
    "text",
    ["pip install jackpot", "uv pip install 'jackpot==0.2.0'", "`pip install 'jackpot[vllm]'`", "jackpot[ray]"],
)
def test_an_install_line_of_the_bare_name_is_found(text: str) -> None:
    assert STRANGERS.search(text)


def test_no_text_installs_the_package_of_a_stranger() -> None:
    texts = {path: path.read_text(errors="ignore") for path in TEXTS if path.suffix in SUFFIXES and path.is_file()}
    installing = {str(path): match[0] for path, text in texts.items() if (match := STRANGERS.search(text))}
    assert len(texts) > 300 and installing == {}
