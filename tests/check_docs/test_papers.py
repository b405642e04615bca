"""The papers' recipes: every row of every table, settings with their sources, and the regime that each row is about."""

import re
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from functools import cache

import pytest
import yaml

from helpers.paths import ROOT
from jackpot.config.config import Config
from jackpot.config.recipes import load_recipe, recipe_files, recipe_names, recipe_notes, resolve
from jackpot.config.recipes.listing import list_recipe
from jackpot.rollout.tasks.benchmarks import BENCHMARKS

PAPERS = [name for name in recipe_names() if recipe_notes(name, load_recipe(name)).published]
RUNNABLE = [(name, arm) for name in PAPERS for arm in list_recipe(name).arms]
PAGE = (ROOT / "docs" / "reproducing.md").read_text()

# Rows of each table, its numbers and their sum in percent, counted in the papers.
TABLES = {
    ("Jackpot", "Table 1"): (4 + 4 + 3, 72, "3267.7600"),
    ("Jackpot", "Table 2"): (2 + 2, 32, "1624.07"),
    ("Jackpot", "Table 3"): (4 + 3 + 4, 88, "3635.82"),
    ("submission", "Table 1"): (5 + 3 + 4, 96, "3889.90"),
    ("submission", "Table 2"): (3 + 3, 80, "2704.4"),
    ("submission", "Table 3"): (5 + 3 + 4, 72, "5216.711"),
    ("submission", "Table 4"): (5 + 3 + 4, 72, "2080.260"),
    ("submission", "Table 5"): (3, 12, "783.334"),
    ("submission", "Table 6"): (2, 8, "505.089"),
    ("submission", "Table 7"): (4, 16, "1064.731"),
    ("submission", "Table 8"): (5, 20, "1137.6"),
    ("submission", "Table 9"): (3, 12, "795.792"),
}


@cache
def published() -> list[tuple[str, str, str, str, str, str]]:
    """Return recipe, paper, table, row, column and number of each number, which is text."""
    return [
        (name, table["paper"], table["table"], row["row"], column, value)
        for name in PAPERS
        for table in yaml.load(recipe_files(name)[0].read_text(), yaml.BaseLoader)["published"]
        for row in table["rows"]
        for column, value in zip(table.get("columns", ()), row.get("numbers", ()), strict=False)
    ]


def test_every_row_of_every_table_is_there_once() -> None:
    rows = [
        (table.paper, table.table, row.row)
        for name in PAPERS
        for table in list_recipe(name).published
        for row in table.rows
    ]

    assert Counter(rows).most_common(1)[0][1] == 1

    counts = Counter((paper, re.match(r"(Table \d+)?", table)[0]) for paper, table, _ in rows)
    assert {key: counts[key] for key in TABLES} == {key: rows for key, (rows, _, _) in TABLES.items()}
    assert {paper for paper, _, _ in rows} == {"Jackpot", "submission", "Jet-RL", "TIS post"}


@pytest.mark.parametrize(("paper", "table"), TABLES)
def test_the_numbers_of_a_table_are_those_of_the_paper(paper: str, table: str) -> None:
    values = [
        Decimal(value)
        for _, its_paper, its_table, _, _, value in published()
        if (its_paper, its_table.partition(",")[0]) == (paper, table) and value != "null"
    ]
    _, count, total = TABLES[paper, table]

    assert len(values) == count and sum(values) == Decimal(total)


def test_what_cannot_run_is_an_engine_on_several_gpus() -> None:
    reasons = {row.not_runnable for name in PAPERS for table in list_recipe(name).published for row in table.rows}
    assert all("one GPU" in reason for reason in reasons - {""})

    waiting = Counter(
        (name, row.arm)
        for name in PAPERS
        for table in list_recipe(name).published
        for row in table.rows
        if row.not_runnable
    )

    assert waiting == {("jet_rl", "jet_rl_32b"): 1}


SOURCE = re.compile(
    r"source: (Jackpot|submission|Jet-RL|TIS post|verl's (default|quickstart|DAPO script))[ ,:;]"
    r"|source: verl's (default|quickstart|DAPO script)$"
    r"|not published\b[^:]*: \S"
)


def leaves(node: yaml.Node) -> Iterator[yaml.ScalarNode]:
    """Yield the scalars below a node."""
    if isinstance(node, yaml.ScalarNode):
        yield node
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from leaves(item)
    else:
        for _, value in node.value:
            yield from leaves(value)


def unsourced(text: str) -> list[str]:
    """Lines with a setting but without a word on where its value is from."""
    lines = text.splitlines()
    keys = [(key.value, value) for key, value in yaml.compose(text).value]
    settings = [value for key, value in keys if key not in ("description", "base", "published")]
    indices = sorted({leaf.start_mark.line for value in settings for leaf in leaves(value)})
    return [lines[index] for index in indices if not SOURCE.match(lines[index].partition("  # ")[2])]


@pytest.mark.parametrize("name", PAPERS)
def test_every_setting_says_where_its_value_is_from(name: str) -> None:
    assert unsourced(recipe_files(name)[0].read_text()) == []


def test_a_setting_without_a_source_or_a_reason_is_seen() -> None:
    text = (
        "description: x\na: 1  # source: Jackpot Table 1\nb: {c: 2}\nd: 3  # not published\ne: 4  # source: somebody\n"
    )
    assert unsourced(text) == ["b: {c: 2}", "d: 3  # not published", "e: 4  # source: somebody"]


@pytest.mark.parametrize(("name", "figures"), [("tis_dapo_32b", {"1"}), ("tis_dapo_distill", {"3"})])
def test_a_recipe_of_the_post_cites_the_figures_of_its_own_model(name: str, figures: set[str]) -> None:
    """Figure 1 is of 32B, and so is "the first 250 steps"; Figure 3 is of 1.5B."""
    text = recipe_files(name)[0].read_text()
    assert set(re.findall(r"source: TIS post, Figure (\d)", text)) <= figures

    source = next(line for line in text.splitlines() if line.startswith("iterations: "))
    assert ("not published for this model" in source) == (name == "tis_dapo_distill")


@pytest.mark.parametrize("name", PAPERS)
def test_the_page_has_a_row_for_the_recipe_with_its_tables(name: str) -> None:
    [sources] = re.findall(rf"^\|[^|]*`{name}`[^|]*\|[^|]*\|([^|]*)\|$", PAGE, re.M)

    numbers = {
        (table.paper, number)
        for table in list_recipe(name).published
        for number in re.findall(r"Table (\d+)", table.table)
    }
    for paper, number in numbers:
        assert re.search(rf"{paper},? [^;]*Tables? [^;]*\b{number}\b", sources), (paper, number)


def test_published_means_can_occur_or_are_listed() -> None:
    """A mean of n answers to P problems is a multiple of 1 / (nP): 16 answers for AIME, 4 for the rest."""
    impossible, checked = set(), 0
    for name, paper, table, row, column, value in published():
        benchmark, _, measure = column.partition(" ")
        repeats = paper == "submission" and re.match(r"Table [134],", table)  # of Jackpot's numbers
        if name == "threshold_4b" or repeats or benchmark not in BENCHMARKS or value == "null":
            continue  # Table 8 has one decimal
        if measure.startswith("mean@") or measure == "pass@1":
            answers = BENCHMARKS[benchmark].test.size * (16 if benchmark.startswith("aime") else 4)
            nearest = round(float(value) * answers / 100) * 100 / answers
            checked += 1
            if abs(nearest - float(value)) > 10 ** -len(value.partition(".")[2]) + 1e-9:  # rounded, or cut off
                impossible.add((f"{paper} {table}", row, f"{column} {value}"))

    listed_there = set(
        re.findall(r"^\| (Jackpot Table \d, \w+ block) \| (.+?) \| (\w+ mean@\d+ [\d.]+) \|$", PAGE, re.M)
    )

    assert checked > 150 and impossible == listed_there


def regime(config: Config) -> tuple:
    """Return the steps on one batch, and the correction with its target, its proximal point and the clip."""
    correction, objective = config.objective.correction, config.objective
    clip = None if correction.proximal == "new" else (objective.clip_low, objective.clip_high)
    target = getattr(correction, "target", correction.proximal)
    return config.batch.steps_per_iteration, correction.name, target, correction.proximal, clip


# Clips below and above.
DEFAULT = (0.2, 0.2)
DAPO = (0.2, 0.28)
WIDE = (0.4, 0.7)
REGIMES = {  # DESIGN of the papers' experiments: read there, not from the recipes
    **{("joint_3b", arm): (1, name, "old", "old", DEFAULT) for arm, name in
       {"jackpot": "obrs", "tis_kl": "tis", "only_kl": "none", "on_policy": "none"}.items()},
    **{("joint_8b", arm): (1, name, "old", "old", DEFAULT) for arm, name in
       {"jackpot": "obrs", "tis_kl": "tis", "on_policy": "none"}.items()},
    ("stale_4b", "jackpot"): (64, "obrs", "new", "new", None),
    ("stale_4b", "no_clip"): (64, "none", "old", "old", (None, None)),
    ("stale_4b_128", "no_clip"): (128, "none", "old", "old", (None, None)),
    ("stale_4b", "tis_adjusted"): (64, "tis", "new", "new", None),
    ("stale_4b", "tis"): (64, "tis", "old", "old", DAPO),
    ("stale_4b", "off_policy"): (64, "none", "old", "old", DAPO),
    ("stale_4b", "on_policy"): (1, "none", "old", "old", DAPO),
    ("stale_4b_128", "jackpot"): (128, "obrs", "new", "new", None),
    ("stale_4b_128", "off_policy"): (128, "none", "old", "old", DAPO),
    ("stale_8b", "jackpot"): (64, "obrs", "new", "new", None),
    ("stale_8b", "on_policy"): (1, "none", "old", "old", DAPO),
    ("clipped_4b", "jackpot"): (64, "obrs", "new", "old", WIDE),
    ("clipped_4b", "off_policy"): (64, "none", "old", "old", WIDE),
    ("ablation_4b", "reference"): (32, "obrs", "new", "old", WIDE),
    ("ablation_4b", "mask_only"): (32, "mask_only", "new", "old", WIDE),
    ("fp8_kv_4b", "jackpot"): (2, "obrs", "old", "old", WIDE),
    ("fp8_kv_4b", "tis"): (2, "tis", "old", "old", WIDE),
    ("fp8_kv_4b", "none"): (1, "none", "old", "old", WIDE),
    ("fp8_kv_4b", "mask_only"): (1, "mask_only", "old", "old", (None, None)),
    ("fp8_kv_4b", "mask_reweight"): (1, "obrs", "old", "old", (None, None)),
    ("fp8_kv_4b", "tis_bf16"): (2, "tis", "old", "old", WIDE),
    ("frozen_3b", "math_none"): (1, "none", "old", "old", DEFAULT),
    ("tis_gsm8k", "ppo"): (4, "none", "old", "old", DEFAULT),
    ("tis_gsm8k", "ppo_is"): (4, "none", "rollout", "rollout", DEFAULT),
    ("tis_gsm8k", "tis_8_int8"): (4, "tis", "old", "old", DEFAULT),
    ("tis_gsm8k", "vanilla_is_int8"): (4, "is", "old", "old", DEFAULT),
    ("tis_dapo_32b", "tis"): (16, "tis", "old", "old", DAPO),
}  # fmt: skip


@pytest.mark.parametrize(("name", "arm"), REGIMES)
def test_an_arm_is_the_regime_of_its_row(name: str, arm: str) -> None:
    assert regime(resolve(name, arm, [])) == REGIMES[name, arm]


# Quantization of weights and of the cache, by arm.
FEWER_BITS = {
    **dict.fromkeys(("jackpot", "tis", "none", "mask_only", "mask_reweight"), (None, "fp8")),
    **dict.fromkeys(("ppo_int8", "tis_int8", "tis_8_int8", "ppo_is_int8", "vanilla_is_int8"), ("int8_w8a8", None)),
    **dict.fromkeys(("fp8_rollouts_7b", "jet_rl_7b", "jet_rl_8b"), ("fp8", None)),
}


@pytest.mark.parametrize("name", ["fp8_kv_4b", "tis_gsm8k", "jet_rl"])
def test_rollouts_have_fewer_bits_where_the_paper_says_so(name: str) -> None:
    for arm in list_recipe(name).arms:
        engine = resolve(name, arm, []).engine
        assert (engine.quantization, engine.kv_cache_dtype) == FEWER_BITS.get(arm, (None, None))
        assert (engine.name, engine.dtype) == ("vllm", "bf16")


# Examples that each paper's run trains on.
EXAMPLES = {"joint_3b": 14_000, "joint_4b": 20_000, "joint_8b": 15_000, "stale_4b": 30_000, "stale_4b_128": 30_000}
EXAMPLES |= {"stale_8b": 50_000, "ablation_4b": 100_000, "threshold_4b": 9_000}


@pytest.mark.parametrize(("name", "arm"), [(name, arm) for name, arm in RUNNABLE if name in EXAMPLES])
def test_a_run_is_as_long_as_its_examples_allow(name: str, arm: str) -> None:
    config = resolve(name, arm, [])
    assert 0 <= EXAMPLES[name] - config.iterations * config.batch.prompts < config.batch.prompts


# Policy and rollout model.
MODELS = {
    "joint_3b": ("Qwen/Qwen2.5-3B", "Qwen/Qwen2.5-1.5B"),
    "joint_4b": ("Qwen/Qwen3-4B-Base", "Qwen/Qwen3-1.7B-Base"),
    "joint_8b": ("Qwen/Qwen3-8B-Base", "Qwen/Qwen3-1.7B-Base"),
    "threshold_4b": ("Qwen/Qwen3-4B-Base", "Qwen/Qwen3-1.7B-Base"),
    "frozen_3b": ("Qwen/Qwen2.5-3B", "Qwen/Qwen2.5-1.5B-Instruct"),
    **dict.fromkeys(("stale_4b", "stale_4b_128", "clipped_4b", "ablation_4b"), ("Qwen/Qwen3-4B-Base", None)),
    "stale_8b": ("Qwen/Qwen3-8B-Base", None),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_recipe_has_the_papers_models_and_its_8192_tokens(name: str) -> None:
    config = resolve(name, None, [])
    assert (config.policy.path, config.rollout_model and config.rollout_model.path) == MODELS[name]
    assert config.sampling.max_new_tokens == (3072 if name == "frozen_3b" else 8192)
    assert (config.rollout_model is not None and config.rollout_model.optimizer is None) == (name == "frozen_3b")


@pytest.mark.parametrize(("name", "arm"), RUNNABLE)
def test_every_arm_fits_its_own_limits(name: str, arm: str) -> None:
    """The longest problem with the longest response fits the engine's context and one forward pass."""
    config = resolve(name, arm, [])
    longest = config.task.max_prompt_tokens + config.sampling.max_new_tokens

    assert longest <= config.engine.max_model_len and longest <= config.batch.micro_batch_tokens
    assert {
        *(source.source for split in ("train", "test") for source in config.task.sources(split)),
        *config.evaluation.benchmark_names,
    } - BENCHMARKS.keys() <= {"hub:open-r1/DAPO-Math-17k-Processed"}
    assert config.evaluation.every % config.checkpoint.every == 0 and list_recipe(name).gpus
