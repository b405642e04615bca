"""`jackpot mismatch` measures the gap between sampler and learner: what is printed and what lies in the folder."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from helpers.commands import jackpot
from helpers.pages import page_data
from jackpot.ui.terminal.progress import status

SMALL = ("--responses", "12", "--max-new-tokens", "12", "threads=1")


def saved_numbers(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "mismatch.json").read_text())


def assert_page_and_numbers_alone(folder: Path) -> None:
    """There is a page with charts, and the numbers, and nothing else."""
    assert sorted(path.name for path in folder.iterdir()) == ["mismatch.html", "mismatch.json"]
    assert '"kind":"chart"' in page_data(folder / "mismatch.html")


def test_two_sides_in_every_table(tmp_path: Path) -> None:
    arguments = (
        "--sampler",
        "quantization=int8_w8a8",
        "--learner",
        "dtype=fp32, attn_implementation=eager",
        "--all",
    )
    process = jackpot("mismatch", "starter:policy", *SMALL, *arguments, cwd=tmp_path)
    assert process.returncode == 0, process.stderr

    folder = tmp_path / "runs" / "mismatch-starter-policy"
    assert_page_and_numbers_alone(folder)

    [pair] = saved_numbers(folder)["pairs"]
    numbers = pair["numbers"]
    assert pair["sampler"] == "transformers fp32 int8_w8a8"
    assert pair["learner"] == "transformers fp32 eager"
    assert numbers["responses"] == 12
    assert numbers["kl_is_exact"]

    output = " ".join(process.stdout.split())
    for text in (
        "transformers fp32 int8_w8a8 generates",
        f"{numbers['gap']['value']:.3g} ({numbers['gap']['error']:.1g})",
        f"{numbers['kl'][0]['value']:.3g} ({numbers['kl'][0]['error']:.1g})",
        "By length",
        "By position",
        "By entropy",
        "Wrote mismatch.html, mismatch.json",
    ):
        assert text in output, text

    assert saved_numbers(folder)["settings"]["samplers"][0]["engine"]["quantization"] == "int8_w8a8"
    assert all(pair["layers"] for pair in saved_numbers(folder)["pairs"])


def test_several_sides_in_one_table_and_json_alone_on_the_output(tmp_path: Path) -> None:
    sides = ("--sampler", "dtype=bf16", "--sampler", "dtype=fp32", "--learner", "autocast=bf16", "--seed", "3")

    process = jackpot("mismatch", "starter:policy", *SMALL, *sides, "--out", "here", "--json", cwd=tmp_path)
    assert process.returncode == 0, process.stderr

    assert json.loads(process.stdout) == saved_numbers(tmp_path / "here")
    assert "transformers bf16 generates" in process.stderr
    assert [pair["name"] for pair in json.loads(process.stdout)["pairs"]] == ["transformers bf16", "transformers fp32"]
    assert json.loads(process.stdout)["settings"]["seed"] == 3
    assert_page_and_numbers_alone(tmp_path / "here")
    assert "learner: transformers fp32 autocast bf16" in page_data(tmp_path / "here" / "mismatch.html")


def test_a_terminal_has_one_line_that_changes(capsys) -> None:
    with status(Console(force_terminal=True, width=80), "starting") as listen:
        listen("one writes [not markup]")

    out = capsys.readouterr().out
    assert "one writes [not markup]" in out
    assert out.endswith("\x1b[2K")  # cleared in the end


BAD_INPUT = {
    "an unknown key of a side": (
        ["--sampler", "quantisation=fp8"],
        ["--sampler", "engine.quantization"],
    ),
    "an unknown value": (["--learner", "dtype=fp16"], ["--learner", "engine.dtype", "Valid: bf16, fp32"]),
    "no equals sign": (["--sampler", "vllm"], ["'vllm' is not an override"]),
    "an unknown key": (["respones=3"], ["did you mean 'responses'"]),
    "an unknown set": (["--benchmarks", "gsm8"], ["did you mean 'gsm8k'"]),
    "the same side twice": (
        ["--learner", "dtype=fp32", "--learner", "attn_implementation=sdpa"],
        ["--learner is given twice"],
    ),
    "a model that is not there": (["--learner", "path=nowhere"], ["nowhere", "save_pretrained"]),
    "a filter on what is read again": (["--reread", "sampling.top_k=3"], ["reread", "sampling.top_k=0"]),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_says_what_to_do_and_writes_nothing(case: str, tmp_path: Path) -> None:
    arguments, expected_texts = BAD_INPUT[case]

    process = jackpot("mismatch", "starter:policy", *arguments, cwd=tmp_path)

    assert process.returncode == 2
    assert "Traceback" not in process.stderr
    assert all(text in " ".join(process.stderr.split()) for text in expected_texts), process.stderr
    assert not list(tmp_path.iterdir())
