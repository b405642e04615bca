"""A batch packed in one row without padding gives the states and gradients of the padded rectangle, in many
architectures and kernels; models that cannot read such rows read the rectangle.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from helpers.token_batches import PROMPTS, RESPONSES, token_batch
from jackpot.config.config import LoraConfig
from jackpot.core.errors import ModelError
from jackpot.core.types import TokenBatch
from jackpot.models import packed_attention, packed_flex
from jackpot.models.forward import (
    backbone,
    can_pack,
    checkpoint_activations,
    response_hidden,
    response_values,
    token_hidden,
)
from jackpot.models.lora import add_adapter
from jackpot.models.packed_row import pack_row

SHAPE = {"vocab_size": 30, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2, "pad_token_id": 0}
WINDOW = {"sliding_window": 4}
MODELS: dict[str, tuple[str, dict]] = {
    "Qwen3": ("qwen3", {"head_dim": 16}),
    "Qwen2, full then sliding": ("qwen2", WINDOW | {"use_sliding_window": True, "max_window_layers": 1}),
    "Llama": ("llama", {}),
    "Llama, a key head": ("llama", {"num_key_value_heads": 1}),
    "Mistral, sliding window": ("mistral", WINDOW),
    "Gemma": ("gemma", {"head_dim": 16}),
    "Gemma 3, sliding then full": (
        "gemma3_text",
        WINDOW | {"head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "Phi 3": ("phi3", WINDOW),
    "OLMo 2": ("olmo2", {}),
    "SmolLM 3": ("smollm3", {}),
    "GLM 4": ("glm4", {"head_dim": 8}),
    "Qwen3, experts": (
        "qwen3_moe",
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "DeepSeek-V3, latents": (
        "deepseek_v3",
        {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
        | {"num_key_value_heads": 4, "first_k_dense_replace": 2},
    ),
    "GPT-2, absolute positions": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}),
}


def model_of(kind: str, options: dict, auto: type = AutoModelForCausalLM) -> PreTrainedModel:
    """Return a small model of this kind with these settings."""
    torch.manual_seed(0)
    shape = {} if kind == "gpt2" else SHAPE
    return auto.from_config(
        CONFIG_MAPPING[kind](**(shape | {"vocab_size": 30, "initializer_range": 0.2} | options))
    ).eval()


def packed_batch(batch: TokenBatch, prompts: list = PROMPTS, responses: list = RESPONSES) -> TokenBatch:
    """Return the batch with prompts and responses packed in a row as well."""
    ids = [torch.tensor(tokens, dtype=torch.int64) for _, tokens in responses]
    return replace(batch, packed=pack_row(prompts, [prompt for prompt, _ in responses], ids))


def gradient_of(model: PreTrainedModel, batch: TokenBatch, read: Callable[..., Tensor] = response_hidden) -> Tensor:
    """Return the gradient of all weights, of a sum that weighs every state differently."""
    model.zero_grad()
    states = read(model, batch).float()
    (states.sin() * torch.arange(1, states.numel() + 1).view_as(states)).sum().backward()
    return torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]).double()


def relative_distance(tensor: Tensor, reference: Tensor) -> float:
    return float((tensor - reference).norm() / reference.norm())


@pytest.mark.parametrize("name", MODELS)
def test_a_packed_row_gives_what_the_rectangle_gives(name: str) -> None:
    model = model_of(*MODELS[name])
    batch = token_batch()
    assert can_pack(model)
    attention_name = model.config._attn_implementation
    token_positions = batch.attention_mask.flatten().nonzero()[:, 0]  # a tool's tokens too

    expected_states = token_hidden(model, batch, token_positions)

    assert torch.allclose(token_hidden(model, packed_batch(batch), token_positions), expected_states, atol=1e-5)
    assert relative_distance(gradient_of(model, packed_batch(batch)), gradient_of(model, batch)) < 1e-6

    assert model.config._attn_implementation == attention_name
    assert "jackpot" not in model.config.to_json_string()


CASES = {  # prompts, and responses with the index of their prompt
    "one prompt": ([[3, 4, 5]], [(0, [5, 6, 7]), (0, [8])]),
    "one response": ([[3, 4, 5]], [(0, [5, 6, 7])]),
    "one token each": ([[3], [4]], [(0, [5]), (1, [6]), (0, [7])]),
    "empty ones": ([[3, 4], [5]], [(0, []), (1, [6, 7]), (0, []), (0, [8, 9, 10])]),
}


@pytest.mark.parametrize("case", CASES)
def test_any_batch_can_be_packed(case: str) -> None:
    prompts, responses = CASES[case]
    model = model_of(*MODELS["Qwen3"])
    row = packed_batch(token_batch(), prompts, responses).packed
    index = torch.tensor([position for position, (_, ids) in enumerate(responses) for _ in ids])
    columns = torch.tensor([column for _, ids in responses for column in range(len(ids))])
    batch = replace(token_batch(), packed=row)

    states = token_hidden(model, batch, index * row.predicting.shape[1] + columns)

    single_states = []
    for prompt, ids in responses:
        states_alone = backbone(model)(input_ids=torch.tensor([[*prompts[prompt], *ids]])).last_hidden_state
        single_states.append(states_alone[0, len(prompts[prompt]) - 1 : -1])
    assert torch.allclose(states, torch.cat(single_states), atol=1e-5)


@pytest.mark.parametrize("name", ["Qwen3", "Mistral, sliding window", "GPT-2, absolute positions"])
def test_checkpointed_layers_read_the_row_again_in_backward(name: str) -> None:
    """They do after other passes of the model, which have its own attention."""
    model, batch = model_of(*MODELS[name]), packed_batch(token_batch())
    original_gradient = gradient_of(model, batch)
    checkpoint_activations(model)

    assert torch.equal(gradient_of(model, batch), original_gradient)

    loss = response_hidden(model, batch).sum()
    weights = [model.get_input_embeddings().weight]
    (first_gradient,) = torch.autograd.grad(loss, weights, retain_graph=True)
    (second_gradient,) = torch.autograd.grad(loss, weights, retain_graph=True)

    assert torch.equal(first_gradient, second_gradient)
    assert relative_distance(gradient_of(model, token_batch()), original_gradient) < 1e-6


def test_an_adapter_is_trained_as_in_the_rectangle() -> None:
    model = model_of(*MODELS["Qwen3"])
    batch = token_batch()
    add_adapter(model, LoraConfig(rank=2, alpha=4), 0)
    for _, weight in model.named_parameters():
        if weight.requires_grad:
            torch.nn.init.normal_(weight, std=0.1)

    assert can_pack(model)
    assert relative_distance(gradient_of(model, packed_batch(batch)), gradient_of(model, batch)) < 1e-6


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_a_critic_reads_rows_without_padding(kind: str) -> None:
    options = next(options for model_kind, options in MODELS.values() if model_kind == kind)
    critic = model_of(kind, options | {"num_labels": 1}, AutoModelForTokenClassification)
    batch = token_batch()

    assert torch.allclose(response_values(critic, packed_batch(batch)), response_values(critic, batch), atol=1e-5)

    packed_gradient = gradient_of(critic, packed_batch(batch), response_values)
    assert relative_distance(packed_gradient, gradient_of(critic, batch, response_values)) < 1e-6


def test_autocast_differs_by_its_rounding() -> None:
    model = model_of(*MODELS["Qwen3"])
    batch = token_batch()
    exact_gradient = gradient_of(model, batch)

    with torch.autocast("cpu", torch.bfloat16):
        packed_gradient = gradient_of(model, packed_batch(batch))
        rectangle_gradient = gradient_of(model, batch)

    rounding_error = relative_distance(rectangle_gradient, exact_gradient)
    assert relative_distance(packed_gradient, exact_gradient) < 1.5 * rounding_error
    assert 1.5 * rounding_error < 0.05


def test_the_backbone_runs_once_over_the_tokens_that_exist() -> None:
    token_counts = []
    model = model_of(*MODELS["Llama"])
    embeddings = backbone(model).get_input_embeddings()
    embeddings.register_forward_hook(lambda _, ids, __: token_counts.append(ids[0].numel()))

    response_hidden(model, packed_batch(token_batch()))

    response_tokens = sum(len(ids) - 1 for _, ids in RESPONSES)  # nothing reads a response's last token
    assert token_counts == [sum(map(len, PROMPTS)) + response_tokens]


def by_loop(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    key_ends: Tensor,
    most_queries: int,
    most_keys: int,
    **options,
) -> Tensor:
    """Compute what torch's kernel of several lengths does: causal, the last query aligned with the last key."""
    outputs = []
    window, _ = options["window_size"]
    sizes = zip(ends.diff().tolist(), key_ends.diff().tolist(), strict=True)
    assert ends.dtype == torch.int32
    assert key_ends.dtype == torch.int32
    assert most_queries == ends.diff().max()
    assert most_keys == key_ends.diff().max()
    for (queries, keys), start, key_start in zip(sizes, ends.tolist(), key_ends.tolist(), strict=False):
        query_positions = torch.arange(keys - queries, keys)[:, None]
        key_positions = torch.arange(keys)
        mask = (key_positions <= query_positions) & ((key_positions >= query_positions - window) | (window < 0))
        q = query[start : start + queries]
        k = key[key_start : key_start + keys]
        v = value[key_start : key_start + keys]
        head_states = [states.transpose(0, 1) for states in (q, k, v)]
        options = {"scale": options["scale"], "enable_gqa": True}
        outputs.append(torch.nn.functional.scaled_dot_product_attention(*head_states, mask, **options).transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("name", ["Qwen3", "Qwen2, full then sliding", "Mistral, sliding window"])
def test_sequences_of_their_own_lengths_give_what_blocks_give(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel itself needs a GPU; here a loop over the sequences takes its place."""
    model, batch = model_of(*MODELS[name]), packed_batch(token_batch())
    block_gradient = gradient_of(model, batch)

    monkeypatch.setattr(packed_attention, "_varlen_kernel", lambda: by_loop)
    monkeypatch.setattr(packed_attention, "_suits_flash", lambda *_: True)

    assert relative_distance(gradient_of(model, batch), block_gradient) < 1e-6


@contextmanager
def gpu_without_values() -> Iterator[None]:
    """Let tensors made in the block be a GPU's, with shapes and dtypes and no values, under autocast to bf16."""
    default_dtype = torch.get_autocast_dtype("cuda")
    with FakeTensorMode(), torch.no_grad():
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        try:
            yield
        finally:
            torch.set_autocast_enabled("cuda", False)
            torch.set_autocast_dtype("cuda", default_dtype)


@pytest.mark.parametrize("kernel", ["flash", "flex"])
def test_under_autocast_a_gpu_takes_its_kernels(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm of queries and keys leaves them in fp32 there, beside values in bf16."""
    calls: list[object] = []

    def record_call(query: Tensor, key: Tensor, value: Tensor, **_: object) -> Tensor:
        calls.extend([kernel, query.dtype, key.dtype, value.dtype])
        return query

    def record_flash_call(_: object, __: object, query: Tensor, key: Tensor, value: Tensor, *___: object) -> dict:
        return {None: record_call(query, key, value)}  # a tensor without values has no [None]

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(packed_attention, "_varlen_kernel", lambda: kernel == "flash")
    monkeypatch.setattr(packed_attention, "_by_sequence", record_flash_call)
    monkeypatch.setattr(packed_attention, "flex_kernel", lambda *_: record_call)

    row = packed_batch(token_batch()).packed
    plan = packed_attention.AttentionPlan(row, model_of(*MODELS["Qwen3"]).config)
    monkeypatch.setattr(plan, "block_mask", lambda _: None)

    with gpu_without_values():
        shapes = ((4, torch.float32), (2, torch.float32), (2, torch.bfloat16))
        states = [torch.empty(1, heads, len(row.positions), 16, dtype=dtype, device="cuda") for heads, dtype in shapes]
        packed_attention.packed_attention(SimpleNamespace(layer_idx=0), *states, None, packed=plan)
    assert calls == [kernel, *[torch.bfloat16] * 3]


def by_pairs(
    query: Tensor, key: Tensor, value: Tensor, *, block_mask: BlockMask, scale: float, enable_gqa: bool
) -> Tensor:
    """Compute what flex attention does: it looks at the blocks that are listed, and asks for pairs in partial ones."""
    size = query.shape[2]
    columns = torch.arange(size)
    pairs = block_mask.mask_mod(None, None, columns[:, None], columns)
    partial_blocks = spread_blocks(block_mask.kv_num_blocks, block_mask.kv_indices, size)
    full_blocks = spread_blocks(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, size)
    assert not (full_blocks & ~pairs).any()
    assert not (full_blocks & partial_blocks).any()
    mask = full_blocks | (partial_blocks & pairs)
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=enable_gqa)


def spread_blocks(counts: Tensor, columns: Tensor, size: int) -> Tensor:
    """Return which pairs of tokens lie in listed blocks, [size, size]."""
    blocks = torch.zeros(columns.shape[-2:], dtype=torch.bool)
    for row, (count, order) in enumerate(zip(counts[0, 0].tolist(), columns[0, 0].tolist(), strict=True)):
        blocks[row, order[:count]] = True
    return blocks.repeat_interleave(packed_flex.BLOCK, 0).repeat_interleave(packed_flex.BLOCK, 1)[:size, :size]


@pytest.mark.parametrize("block_size", [1, 2, 3, 8, 128])
@pytest.mark.parametrize("name", ["Qwen3", "Qwen2, full then sliding", "Mistral, sliding window"])
def test_blocks_that_flex_attention_skips_hold_nothing(
    name: str, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backward of the kernel itself needs a GPU; here one over all pairs takes its place."""
    model, batch = model_of(*MODELS[name]), packed_batch(token_batch())
    block_gradient = gradient_of(model, batch)

    monkeypatch.setattr(packed_flex, "BLOCK", block_size)
    monkeypatch.setattr(packed_attention, "_flex_kernel", lambda *_: by_pairs)

    assert relative_distance(gradient_of(model, batch), block_gradient) < 1e-6


@pytest.mark.seconds
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_gives_what_blocks_give(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(*MODELS["Qwen2, full then sliding"])
    batch = packed_batch(token_batch())

    with torch.no_grad():
        block_states = response_hidden(model, batch)
        monkeypatch.setattr(packed_attention, "_flex_kernel", lambda *_: flex_attention)
        assert torch.allclose(response_hidden(model, batch), block_states, atol=1e-5)


def test_whole_blocks_are_listed_and_those_of_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_flex, "BLOCK", 4)
    row = pack_row([[3] * 8, [4] * 4], [0, 0, 1], [torch.arange(9), torch.arange(5), torch.arange(5)])
    # places 0 to 7 are the first prompt, 8 to 15 and 16 to 19 its responses; 20 to 27 the second prompt and its own
    mask = packed_flex.block_mask(row, None)

    assert mask.full_kv_num_blocks[0, 0].tolist() == [0, 1, 2, 3, 2, 0, 1]
    assert mask.kv_num_blocks[0, 0].tolist() == [1] * 7
    assert packed_flex.block_mask(row, 8).full_kv_num_blocks[0, 0].tolist() == [0, 1, 1, 1, 1, 0, 1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="it compiles there")
def test_blocks_serve_where_flex_attention_cannot_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_flex.importlib.util, "find_spec", lambda _: True)
    with pytest.warns(UserWarning, match="flex attention cannot be compiled here, attention in blocks serves"):
        assert packed_flex.flex_kernel(torch.float32, 16, 16, 2) is None


UNPACKABLE_MODELS: dict[str, tuple[str, dict]] = {
    "a soft cap": ("gemma2", {"head_dim": 16}),
    "sinks": ("gpt_oss", {"head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "angles that depend on the length": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
    ),
    "an attention of its own": ("falcon", {}),
    "layers that tell attention nothing": ("nemotron", {"head_dim": 8}),
    "layers that tell attention nothing, of another family": ("stablelm", {}),
}


@pytest.mark.parametrize("feature", UNPACKABLE_MODELS)
def test_other_models_read_the_rectangle(feature: str) -> None:
    model = model_of(*UNPACKABLE_MODELS[feature])
    batch = token_batch()

    assert not can_pack(model)
    assert torch.equal(response_hidden(model, packed_batch(batch)), response_hidden(model, batch))


def test_what_is_not_computed_is_an_error() -> None:
    model = model_of(*UNPACKABLE_MODELS["a soft cap"])
    model.config.attn_logit_softcapping = None  # its layers have it still

    with pytest.raises(ModelError, match="Gemma2Attention takes softcap, so it cannot read rows without padding"):
        response_hidden(model, packed_batch(token_batch()))
    assert model.config._attn_implementation != packed_attention.PACKED

    other_model = model_of(*MODELS["Qwen3"])
    other_model.model.layers[0].self_attn.is_causal = False

    with pytest.raises(ModelError, match="is not causal"):
        response_hidden(other_model, packed_batch(token_batch()))
