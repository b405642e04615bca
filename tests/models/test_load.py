"""Models and tokenizers are loaded as they were saved, and what is damaged or does not fit is refused by name."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    BertConfig,
    BertLMHeadModel,
    GenerationConfig,
    GraniteConfig,
    GraniteForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
)

from helpers.engines.reference import save_tiny_model
from jackpot.core.errors import DataError, ModelError
from jackpot.models import hub
from jackpot.models.hub import resolve_path
from jackpot.models.load import (
    check_same_tokenizer,
    eos_token_ids,
    head_rows,
    load_model,
    load_tokenizer,
    load_value_model,
)

SHAPE = {"vocab_size": 20, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32, "pad_token_id": 0}


def qwen(**settings) -> Qwen3ForCausalLM:
    """Return a small Qwen3, always with the same weights."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE | {"head_dim": 32, "tie_word_embeddings": True} | settings))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a saved model, which no test changes."""
    folder = tmp_path_factory.mktemp("models") / "original"
    qwen().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """Return a copy of the model's folder, for a test to damage."""
    return Path(shutil.copytree(original, tmp_path / "model"))


def edit_config(folder: Path, **changes) -> None:
    """Change settings in the config.json of a model's folder."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def tokenizer(*tokens: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of these tokens, with ids from 0 on."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token=tokens[0])))


# with a device the weights are read onto it, without one they stay in their files
DEVICES = pytest.mark.parametrize("device", ["cpu", None], ids=["read", "in files"])


# Models


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_comes_in_its_dtype_and_in_eval_mode(original, dtype):
    model = load_model(original, dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert not model.training

    pairs = zip(model.parameters(), qwen().to(dtype).parameters(), strict=True)
    assert all(torch.equal(weight, expected_weight) for weight, expected_weight in pairs)
    assert load_model(str(original), dtype).device == torch.device("cpu")


@pytest.mark.parametrize("read", [load_model, load_value_model])
def test_no_model_attends_by_cudnn(original, read):
    torch.backends.cuda.enable_cudnn_sdp(True)
    read(original, torch.float32)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_weights_lie_where_torch_puts_its_own(tmp_path):
    critic = load_value_model("starter:rollout_model", torch.float32)
    critic.save_pretrained(tmp_path)  # its bias of 4 bytes comes first, and moves the others
    loaded_critic = load_value_model(tmp_path, torch.float32)
    weights = [*critic.parameters(), *loaded_critic.parameters()]
    assert {weight.data_ptr() % 64 for weight in weights} == {0}

    tied_model = load_model("starter:rollout_model", torch.float32)
    assert tied_model.get_input_embeddings().weight is tied_model.get_output_embeddings().weight


def assert_same_model(model, expected_model) -> None:
    """Check that all but dtypes and addresses of the weights is the same, and that the model is not in training."""
    weights = dict(model.named_parameters())
    expected_weights = dict(expected_model.named_parameters())
    assert weights.keys() == expected_weights.keys()
    assert all(torch.equal(weights[name].float(), expected_weights[name]) for name in expected_weights)

    buffers = dict(model.named_buffers())
    assert all(torch.equal(buffers[name], buffer) for name, buffer in expected_model.named_buffers())

    assert model.config.to_dict() == expected_model.config.to_dict()
    assert model.name_or_path == expected_model.name_or_path
    assert getattr(model, "generation_config", None) == getattr(expected_model, "generation_config", None)
    assert not model.training


def mapped_addresses(folder: Path) -> list[range]:
    """Return the addresses at which this process has mapped files of a folder."""
    lines = Path("/proc/self/maps").read_text().splitlines()  # each begins with "START-END", in hexadecimal
    return [range(*(int(end, 16) for end in line.split()[0].split("-"))) for line in lines if str(folder) in line]


@pytest.mark.parametrize("load_it", [load_model, load_value_model])
@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, "1MB"), (torch.float32, "10KB")])
def test_weights_that_stay_in_files_are_those_that_are_loaded(folder, tmp_path, dtype, size, load_it):
    model = qwen(tie_word_embeddings=False).to(dtype)
    model.generation_config = GenerationConfig(eos_token_id=[3, 4])
    shutil.rmtree(folder)
    model.save_pretrained(folder, max_shard_size=size)

    model_in_files = load_it(folder, torch.float32, None)  # no device
    weights = list(model_in_files.base_model.parameters())

    assert {weight.dtype for weight in weights} == {dtype}
    addresses = mapped_addresses(folder)
    assert all(any(weight.data_ptr() in file_addresses for file_addresses in addresses) for weight in weights)
    assert_same_model(model_in_files, load_it(folder, torch.float32))


@pytest.mark.parametrize(("prefix", "dtype"), [("model.", torch.bfloat16), ("", torch.float64)])
def test_a_file_with_other_names_or_kinds_is_read(folder, prefix, dtype):
    weights = load_file(folder / "model.safetensors")
    renamed = {name.removeprefix(prefix): weight.to(dtype) for name, weight in weights.items()}
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})

    model = load_model(folder, torch.float32, None)

    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert_same_model(model, load_model(folder, torch.float32))


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    for path in (tmp_path / "nowhere", str(tmp_path / "nowhere"), Path("relative/path")):
        with pytest.raises(ModelError, match=f"no model folder {path}"):
            load_model(path, torch.float32)


def test_a_folder_without_a_config_is_refused(folder):
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_model(folder, torch.float32)


def name_files(folder: Path, file: Path, name: object) -> None:
    """Move the weights to `file`, a pickle where its name says so, and have the index call it `name`."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, file) if file.suffix == ".bin" else save_file(weights, file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@DEVICES
@pytest.mark.parametrize(
    "name", ["weights.bin", "../outside.safetensors", "/outside.safetensors", None, "a/../../b.bin"]
)
def test_an_index_names_safetensors_of_its_own_folder_alone(folder, name, device):
    file = folder / (name or "weights.safetensors").replace("a/../../", "../").lstrip("/")
    indexed_name = str(file) if name and name.startswith("/") else name
    name_files(folder, file, indexed_name)

    message = rf"index\.json of {folder} names {indexed_name!r} as .* inside of the model's folder"
    with pytest.raises(ModelError, match=message):
        load_model(folder, torch.float32, device)


@DEVICES
def test_files_of_an_index_may_be_links_as_in_the_hubs_cache(folder, original, device):
    name_files(folder, folder.parent / "blob", "model-00001-of-00001.safetensors")
    (folder / "model-00001-of-00001.safetensors").symlink_to("../blob")

    model = load_model(folder, torch.float32, device)

    pairs = zip(model.parameters(), load_model(original, torch.float32).parameters(), strict=True)
    assert all(torch.equal(weight, expected_weight) for weight, expected_weight in pairs)


@DEVICES
@pytest.mark.parametrize("name", ["adapter_model.bin", "other.safetensors.index.json"])
def test_a_config_that_names_weights_of_another_kind_is_refused(folder, name, device):
    name_files(folder, folder / "adapter_model.bin", "adapter_model.bin")
    (folder / "model.safetensors.index.json").rename(folder / "other.safetensors.index.json")
    edit_config(folder, transformers_weights=name)

    with pytest.raises(ModelError, match=rf"config\.json of {folder} names '{name}' as a file of weights"):
        load_model(folder, torch.float32, device)


@DEVICES
@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("model.safetensors.index.json", []),
        ("model.safetensors.index.json", {"weight_map": []}),
        ("generation_config.json", []),
        ("config.json", 5),
        ("config.json", {"model_type": "qwen3", "hidden_size": "x"}),
        ("config.json", {"model_type": "qwen3", "num_attention_heads": 0}),
        ("config.json", {"model_type": "qwen3", "layer_types": ["none"] * 32}),
    ],
)
def test_json_of_strange_content_is_no_traceback(folder, file, content, device):
    (folder / file).write_text(json.dumps(content))
    with pytest.raises(ModelError, match=f"cannot (load|read) .*{folder}.*Error: "):
        load_model(folder, torch.float32, device)


@DEVICES
@pytest.mark.parametrize("kept_share", [0.999, 0.0])
def test_truncated_weights_are_refused(folder, kept_share, device):
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[: int(len(data) * kept_share)])
    with pytest.raises(ModelError, match="SafetensorError"):
        load_model(folder, torch.float32, device)


def test_corrupt_weights_are_refused(folder):
    (folder / "model.safetensors").write_bytes(b"no weights at all" * 1000)
    with pytest.raises(ModelError, match="SafetensorError"):
        load_model(folder, torch.float32)


@DEVICES
@pytest.mark.parametrize(
    ("value", "load_it", "name"),
    [
        (math.nan, load_model, "model.embed_tokens.weight"),
        (math.inf, load_value_model, "model.embed_tokens.weight"),
        (-math.inf, load_model, "model.layers.1.mlp.down_proj.weight"),
        (1e38, load_model, "model.embed_tokens.weight"),
        (-2e6, load_value_model, "model.layers.1.mlp.down_proj.weight"),
    ],
)
def test_weights_that_are_no_numbers_are_refused_by_name(folder, value, load_it, name, device):
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights[name][-1, 3] = value  # a single number, of a token that no text may ever use
    save_file(weights, file, metadata={"format": "pt"})

    with pytest.raises(ModelError, match=rf"in {folder} are damaged: {name} has .* 1 of 2\d tensors"):
        load_it(folder, torch.float32, device)


def test_large_weights_that_models_do_have_are_loaded(folder):
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"][:] = 9e3
    save_file(weights, file, metadata={"format": "pt"})
    assert load_model(folder, torch.bfloat16).model.norm.weight.max() > 8e3


def test_a_config_that_is_no_json_is_refused(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match="JSON"):
        load_model(folder, torch.float32)


def test_pickled_weights_are_not_read(folder):
    (folder / "model.safetensors").unlink()
    torch.save(qwen().state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="safetensors"):
        load_model(folder, torch.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}, r"11 missing, such as model\.layers\.2\."),
        ({"num_hidden_layers": 1, "layer_types": ["full_attention"]}, r"11 unknown, such as model\.layers\.1\."),
        ({"vocab_size": 24}, r"1 misshapen, such as .*embed_tokens"),
        ({"tie_word_embeddings": False}, r"1 missing, such as lm_head\.weight"),
    ],
)
@DEVICES
def test_weights_that_do_not_fit_the_config_are_refused_by_name(folder, changes, message, device):
    edit_config(folder, **changes)
    with pytest.raises(ModelError, match=message):
        load_model(folder, torch.float32, device)


@pytest.mark.seconds
@pytest.mark.parametrize("model_type", ["vit", "nonsense"])
def test_a_model_that_is_not_a_causal_language_model_is_refused(folder, model_type):
    edit_config(folder, model_type=model_type)
    with pytest.raises(ModelError, match="cannot load a causal language model"):
        load_model(folder, torch.float32)


def test_a_classifier_is_refused_though_its_backbone_fits(tmp_path):
    config = Qwen3Config(**SHAPE, head_dim=32, tie_word_embeddings=True)
    Qwen3ForSequenceClassification(config).save_pretrained(tmp_path)

    with pytest.raises(ModelError, match=r"1 unknown, such as score\.weight"):
        load_model(tmp_path, torch.float32)


@pytest.mark.parametrize(
    "make_model",
    [
        lambda: GraniteForCausalLM(GraniteConfig(**SHAPE, logits_scaling=8.0)),
        lambda: BertLMHeadModel(BertConfig(vocab_size=20, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)),
    ],
    ids=["scaled logits", "transformed hidden states"],
)
def test_a_model_that_computes_more_than_its_head_is_refused(tmp_path, make_model):
    make_model().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="computes more than its output layer"):
        load_model(tmp_path, torch.float32)


def test_a_starter_resolves_to_its_folder(original, monkeypatch):
    monkeypatch.setattr(hub, "starter_path", lambda name: original.parent / name)
    assert resolve_path("starter:original") == str(original)
    assert load_model("starter:original", torch.float32).config.vocab_size == 20


def test_an_unknown_starter_is_refused_with_a_guess():
    with pytest.raises(ModelError, match="did you mean 'policy'"):
        resolve_path("starter:polcy")


def test_a_hub_name_goes_to_the_hub_and_no_relative_folder(original, monkeypatch):
    assert resolve_path("Qwen/Qwen3-0.6B-Base") == "Qwen/Qwen3-0.6B-Base"

    monkeypatch.chdir(original.parent.parent)
    relative_path = f"{original.parent.name}/original"
    assert resolve_path(relative_path) == relative_path
    assert load_model(relative_path, torch.float32).config.vocab_size == 20

    for path in ("one/two/three", "./one/two", "../one", "name"):
        with pytest.raises(ModelError, match="no model folder"):
            resolve_path(path)


@pytest.mark.parametrize(
    ("in_config", "in_generation_config", "expected_ids"),
    [(3, None, (3,)), (3, 5, (5,)), (None, [5, 7], (5, 7)), ([1, 2], None, (1, 2)), (None, None, ())],
)
def test_end_of_sequence_tokens_are_those_of_the_folder(tmp_path, in_config, in_generation_config, expected_ids):
    model = qwen(eos_token_id=in_config)
    model.generation_config = GenerationConfig(eos_token_id=in_generation_config)
    model.save_pretrained(tmp_path)

    assert eos_token_ids(load_model(tmp_path, torch.float32)) == expected_ids


# Tokenizers


def test_a_tokenizer_comes_back_as_saved(tmp_path):
    tokenizer("<unk>", "one", "two").save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).get_vocab() == {"<unk>": 0, "one": 1, "two": 2}


def test_a_folder_without_a_tokenizer_is_refused(original, tmp_path):
    """transformers makes an empty tokenizer for such a folder without a word."""
    with pytest.raises(DataError, match=r"has no tokenizer: none of tokenizer\.json"):
        load_tokenizer(original)
    with pytest.raises(ModelError, match="no model folder"):
        load_tokenizer(tmp_path / "nowhere")


def test_a_damaged_tokenizer_is_refused(tmp_path):
    tokenizer("<unk>", "one").save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match="cannot load a tokenizer"):
        load_tokenizer(tmp_path)


def test_equal_vocabularies_pass_whatever_the_object():
    check_same_tokenizer(tokenizer("<unk>", "a", "b"), tokenizer("<unk>", "a", "b"))


def test_the_first_token_that_differs_is_named_with_both_ids():
    with pytest.raises(DataError, match=r"token 'b': id 2 in the first, id 3 in the second"):
        check_same_tokenizer(tokenizer("<unk>", "a", "b", "c", "d"), tokenizer("<unk>", "a", "c", "b", "d"))


def test_a_smaller_vocabulary_is_named_with_both_sizes():
    larger = tokenizer("<unk>", "a", "b")
    smaller = tokenizer("<unk>", "a")

    for first, second, message in (
        (larger, smaller, r"id 2 in the first, id none in the second \(vocabulary sizes 3 and 2\)"),
        (smaller, larger, r"id none in the first, id 2 in the second \(vocabulary sizes 2 and 3\)"),
    ):
        with pytest.raises(DataError, match=f"token 'b': {message}"):
            check_same_tokenizer(first, second)


def test_every_token_needs_a_row_in_the_shortest_output_layer(tmp_path):
    paths = {role: str(tmp_path / role) for role in ("policy", "rollout_model")}
    for path, size in zip(paths.values(), (12, 3), strict=True):
        save_tiny_model(Path(path), seed=0, vocab_size=size)

    assert head_rows(paths) == 3
    assert head_rows(paths, tokenizer("<unk>", "a", "b")) == 3
    with pytest.raises(ModelError, match="has 4 tokens, and the output layer of the rollout model only 3 rows"):
        head_rows(paths, tokenizer("<unk>", "a", "b", "c"))
