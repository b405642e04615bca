"""The shapes of published models, known without the hub: the sizes that its pages name, and the papers' own tables.

A folder or a hub that is there comes before the table, and the table stands for no weights.
"""

import http.server
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from helpers.hub import without_hub
from jackpot.config.recipes import load_recipe, recipe_names, resolve
from jackpot.core.errors import DataError, ModelError
from jackpot.models.cost import cached_numbers
from jackpot.models.hub import hub_answers
from jackpot.models.load import eos_token_ids, load_config, load_meta_model, load_model, load_tokenizer
from jackpot.models.published import PUBLISHED, is_from_table

PARAMETERS = {  # of the weights on the hub, tied ones once
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M-Instruct": 361_821_120,
    "smollm2/writer": 134_515_008 - 15 * 3_540_096,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen2.5-Math-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen3-1.7B-Base": 1_720_574_976,
    "Qwen/Qwen3-4B-Base": 4_022_468_096,
    "Qwen/Qwen3-8B-Base": 8_190_735_360,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
}
ATTENTION = {  # Qwen2.5's report, Table 1, and Qwen3's, Table 1: layers, query heads, key heads, tied
    "Qwen/Qwen2.5-0.5B-Instruct": (24, 14, 2, True),
    "Qwen/Qwen2.5-1.5B": (28, 12, 2, True),
    "Qwen/Qwen2.5-3B": (36, 16, 2, True),
    "Qwen/Qwen2.5-7B": (28, 28, 4, False),
    "Qwen/Qwen2.5-32B": (64, 40, 8, False),
    "Qwen/Qwen3-1.7B-Base": (28, 16, 8, True),
    "Qwen/Qwen3-4B-Base": (36, 32, 8, True),
    "Qwen/Qwen3-8B-Base": (36, 32, 8, False),
}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let no test reach the hub or find files of it."""
    without_hub(monkeypatch, tmp_path)


def test_the_table_has_every_model_of_every_recipe_and_no_other() -> None:
    paths = set()
    for recipe in recipe_names():
        for arm in load_recipe(recipe)["arms"]:
            config = resolve(recipe, arm, [])
            paths |= {config.policy.path, *([config.rollout_model.path] if config.rollout_model else [])}

    published_paths = {path for path in paths if not path.startswith("starter:")}
    assert published_paths == PUBLISHED.keys()
    assert published_paths == PARAMETERS.keys()


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_table_has_the_published_parameter_counts(name: str) -> None:
    model = load_meta_model(name)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", ATTENTION)
def test_layers_and_heads_are_those_of_the_reports(name: str) -> None:
    config = load_config(name)
    layers, queries, keys, tied = ATTENTION[name]

    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (layers, queries, keys)
    assert config.tie_word_embeddings == tied
    assert is_from_table(config)


def test_keys_and_values_of_a_token_are_counted_over_all_layers() -> None:
    # keys and values, times layers, key heads and the width of a head
    assert cached_numbers(load_meta_model("Qwen/Qwen3-8B-Base")) == 2 * 36 * 8 * 128
    assert cached_numbers(load_meta_model("Qwen/Qwen2.5-0.5B-Instruct")) == 2 * 24 * 2 * (896 // 14)


def test_the_tokens_that_end_a_text_are_the_familys() -> None:
    assert eos_token_ids(load_meta_model("Qwen/Qwen3-4B-Base")) == (151_643,)
    assert eos_token_ids(load_meta_model("Qwen/Qwen2.5-1.5B-Instruct")) == (151_645,)


def test_the_table_stands_for_no_weights_and_no_other_name() -> None:
    for load in (load_config, load_meta_model):
        with pytest.raises(ModelError, match="somebody/unknown-8B"):
            load("somebody/unknown-8B")
    with pytest.raises(ModelError, match="cannot load a causal language model from the hub"):
        load_model("Qwen/Qwen3-8B-Base", torch.float32)
    with pytest.raises(DataError, match="cannot load a tokenizer from the hub"):
        load_tokenizer("Qwen/Qwen3-8B-Base")


def test_a_folder_is_read_and_not_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    small_config = load_config("Qwen/Qwen3-8B-Base")
    small_config.num_hidden_layers = 2
    small_config.layer_types = ["full_attention"] * 2
    small_config.save_pretrained("Qwen/Qwen3-8B-Base")

    config = load_config("Qwen/Qwen3-8B-Base")

    assert config.num_hidden_layers == 2
    assert not is_from_table(config)

    modules = load_meta_model("Qwen/Qwen3-8B-Base").modules()
    layers = next(module for module in modules if isinstance(module, nn.ModuleList))
    assert len(layers) == 2


def test_the_hub_is_there_if_anything_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)

    class NotFoundHandler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), NotFoundHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        assert hub_answers.__wrapped__()
        server.shutdown()
    assert not hub_answers.__wrapped__()  # the port is closed


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", r"python -m tools\.smollm2 FOLDER"),
        ("smollm2/writer", r"python -m examples\.shrink MODEL smollm2/writer"),
    ],
)
@pytest.mark.parametrize("read", [load_config, load_tokenizer])
def test_without_a_hub_the_error_says_how_a_model_is_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path, read, name, command
) -> None:
    monkeypatch.delitem(PUBLISHED, name)
    monkeypatch.chdir(tmp_path)  # the folder that the command makes may be here
    with pytest.raises((DataError, ModelError), match=command):
        read(name)
