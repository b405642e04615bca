"""Fused parts of a model compute what the modules that they replace do, outputs and gradients, and keep less; a module
that computes otherwise stays as it is.
"""

import copy
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from helpers.runs import small_config
from helpers.token_batches import PROMPTS, RESPONSES, token_batch
from jackpot.config.config import LoraConfig
from jackpot.core.types import TokenBatch
from jackpot.launch.build import load_trained
from jackpot.models import fused
from jackpot.models.forward import checkpoint_activations, response_hidden
from jackpot.models.fused import RMSNorm, fuse
from jackpot.models.lora import add_adapter
from jackpot.models.packed_row import pack_row

SHAPE = {"vocab_size": 30, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2, "pad_token_id": 0}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
EXPERTS |= {"shared_expert_intermediate_size": 16}
LINEAR = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8, "linear_num_key_heads": 2}
LINEAR |= {"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "attn_layer_indices": [1]}
MAMBA |= {"mamba_chunk_size": 8}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
LATENT |= {"num_key_value_heads": 4, "first_k_dense_replace": 2}
MODELS: dict[str, tuple[str, dict, int]] = {  # kind, its settings, and how many parts are replaced: 2 layers, last norm
    "Qwen3": ("qwen3", {"head_dim": 16}, 2 * 6 + 1),
    "Llama": ("llama", {"attention_bias": True}, 2 * 4 + 1),
    "Mistral, sliding window": ("mistral", {"sliding_window": 4}, 2 * 4 + 1),
    "Qwen2": ("qwen2", {}, 2 * 4 + 1),
    "OLMo 2, other rounding": ("olmo2", {}, 2 * 2),
    "Gemma, 1 + weight and GELU": ("gemma", {"head_dim": 16}, 2 * 1),
    "GLM 4, other halves, one product before the gate": ("glm4", {"head_dim": 8}, 2 * 4 + 1),
    "Cohere, LayerNorm": ("cohere", {}, 2 * 1),
    "Qwen3.5, a norm with a gate": ("qwen3_5_text", LINEAR, 2 + 1),
    "Qwen3-Next, a norm with a gate": ("qwen3_next", LINEAR | EXPERTS, 2 + 1),
    "GPT-OSS, angles of half the width": ("gpt_oss", {"head_dim": 8} | EXPERTS, 0),
    "Bamba, an optional gate": ("bamba", MAMBA, 2 * 3 + 2),
    "Nemotron, a part of each head": ("nemotron", {"head_dim": 8}, 2),
    "DeepSeek-V3": ("deepseek_v3", LATENT, 2 * 6 + 1),
    "GPT-2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}, 0),
}
TOLERANCE = 2e-6  # float32 rounds by 6e-8, and its errors grow over two layers


def model_of(kind: str, options: dict) -> PreTrainedModel:
    """Return a small model of this kind whose norms have weights other than one."""
    torch.manual_seed(0)
    shape = {"vocab_size": 30} if kind == "gpt2" else SHAPE
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**(shape | {"initializer_range": 0.2} | options)))
    for name, weight in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(weight, 1.0, 0.2)
    return model.eval()


def packed_batch() -> TokenBatch:
    """Return the token batch of the helpers, packed in a row."""
    ids = [torch.tensor(tokens, dtype=torch.int64) for _, tokens in RESPONSES]
    return replace(token_batch(), packed=pack_row(PROMPTS, [prompt for prompt, _ in RESPONSES], ids))


def states_and_gradients(
    model: PreTrainedModel, dtype: torch.dtype | None = None, batch: TokenBatch | None = None
) -> list[Tensor]:
    """Return the states that predict a batch's tokens and the gradients of all weights, in float64."""
    model.zero_grad()
    with torch.autocast("cpu", dtype) if dtype else nullcontext():
        states = response_hidden(model, batch or packed_batch()).float()
    (states.sin() * torch.arange(1, states.numel() + 1).view_as(states)).sum().backward()
    gradients = [weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]
    return [states.detach().double(), torch.cat(gradients).double()]


def largest_distance(tensors: list[Tensor], references: list[Tensor]) -> float:
    """Return the largest relative distance of a tensor from its reference."""
    pairs = zip(tensors, references, strict=True)
    return max(float((tensor - reference).norm() / reference.norm()) for tensor, reference in pairs)


@pytest.fixture(params=[2**18, 64], ids=["one run", "several"])
def runs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the fused parts read all rows in one run, or several runs of a few rows."""
    monkeypatch.setattr(fused, "CHUNK", request.param)
    monkeypatch.setattr(fused, "PRODUCT_ROWS", request.param)


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_stay_as_they_were(name: str) -> None:
    kind, options, expected_part_count = MODELS[name]
    model = model_of(kind, options)
    names = list(model.state_dict())
    original_results = states_and_gradients(model)
    random_state = torch.random.get_rng_state()

    part_count = fuse(model)

    assert part_count == expected_part_count
    assert largest_distance(states_and_gradients(model), original_results) < TOLERANCE
    assert fuse(model) == 0  # nothing is replaced twice
    assert list(model.state_dict()) == names
    assert torch.equal(torch.random.get_rng_state(), random_state)
    with torch.no_grad():
        assert torch.allclose(response_hidden(model, packed_batch()).double(), original_results[0], atol=1e-5)


def test_padded_rows_are_read_as_before() -> None:
    model = model_of(*MODELS["Qwen3"][:2])
    original_results = states_and_gradients(model, batch=token_batch(padding=2))

    fuse(model)

    assert largest_distance(states_and_gradients(model, batch=token_batch(padding=2)), original_results) < TOLERANCE


@pytest.mark.parametrize("name", ["Qwen3", "Llama"])
def test_autocast_rounds_as_before(name: str) -> None:
    """The gradient of the last product is no longer rounded before it is summed, so it comes closer to float32."""
    model = model_of(*MODELS[name][:2])
    exact_results = states_and_gradients(model)
    original_results = states_and_gradients(model, torch.bfloat16)

    fuse(model)
    fused_results = states_and_gradients(model, torch.bfloat16)

    assert largest_distance(fused_results, original_results) < 0.3 * largest_distance(original_results, exact_results)
    assert largest_distance(fused_results, exact_results) < 1.1 * largest_distance(original_results, exact_results)


def test_checkpointed_layers_compute_so_again_in_backward() -> None:
    model = model_of(*MODELS["Qwen3"][:2])
    original_results = states_and_gradients(model)
    fuse(model)
    fused_results = states_and_gradients(model)

    checkpoint_activations(model)

    assert all(torch.equal(*pair) for pair in zip(states_and_gradients(model), fused_results, strict=True))
    assert largest_distance(fused_results, original_results) < TOLERANCE


def test_an_adapter_on_every_product_is_trained_as_before() -> None:
    original = model_of(*MODELS["Qwen3"][:2])
    model = model_of(*MODELS["Qwen3"][:2])
    fuse(model)
    for adapted_model in (original, model):
        add_adapter(adapted_model, LoraConfig(rank=2, alpha=4), 0)
        for name, weight in adapted_model.named_parameters():
            if "lora_B" in name:
                nn.init.constant_(weight, 0.1)

    assert largest_distance(states_and_gradients(model), states_and_gradients(original)) < TOLERANCE


def test_a_copy_computes_with_its_own_weights() -> None:
    model = model_of(*MODELS["Qwen3"][:2])
    fuse(model)
    model_copy = copy.deepcopy(model)
    original_results = states_and_gradients(model)

    with torch.no_grad():
        for weight in model_copy.parameters():
            weight.zero_()

    assert largest_distance(states_and_gradients(model), original_results) == 0.0
    assert not response_hidden(model_copy, packed_batch()).any()


class OtherEpsilon(nn.Module):
    """Has the attributes of an RMSNorm and reads one of them differently."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 2 * self.variance_epsilon)


def test_a_module_that_computes_otherwise_stays_as_it_is() -> None:
    model = model_of(*MODELS["Llama"][:2])
    model.model.norm = OtherEpsilon()
    _, _, part_count = MODELS["Llama"]

    assert fuse(model) == part_count - 1
    assert "forward" not in vars(model.model.norm)


def test_fewer_activations_wait_for_backward() -> None:
    def kept_bytes(model: PreTrainedModel) -> int:
        sizes: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            states = response_hidden(model, packed_batch())
        assert states.requires_grad
        weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
        return sum(size for address, size in sizes.items() if address not in weights)

    model = model_of("qwen3", {"hidden_size": 64, "head_dim": 16, "intermediate_size": 192})
    original_bytes = kept_bytes(model)

    fuse(model)

    assert kept_bytes(model) < 0.7 * original_bytes


def test_a_second_derivative_is_refused() -> None:
    x = torch.ones(2, 4, requires_grad=True)
    (first_derivative,) = torch.autograd.grad(RMSNorm.apply(x, torch.ones(4), 1e-6).sin().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first_derivative.sum().backward()


@pytest.mark.parametrize("role", ["policy", "rollout_model", "critic", "reference"])
def test_models_in_training_are_fused(role: str) -> None:
    """All but the reference, which is never trained."""
    config = small_config("objective.advantage=gae", "critic={optimizer: {learning_rate: 1e-3}}")

    model = load_trained(config, role, config.model_paths()["policy"], torch.device("cpu"), resumes=False)

    assert ("forward" in vars(model.base_model.norm)) == (role != "reference")
    assert (fuse(model) == 0) == (role != "reference")  # nothing is left to fuse
