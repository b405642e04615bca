"""With checkpointed activations a model has the same states and gradients, and fewer numbers wait for backward."""

from functools import partial

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from helpers.runs import SHORT, run, small_config, weights
from jackpot.core.errors import ModelError
from jackpot.launch.build import load_trained
from jackpot.models.forward import backbone, can_share_prompts, checkpoint_activations, pad_tokens, predicting_hidden

pytestmark = pytest.mark.seconds  # runs, and whole models

MODELS = {
    "Qwen3": lambda: Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=30,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
        )
    ),
    "GPT-2, with dropout": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=30, n_embd=32, n_layer=4, n_head=2)),
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """Return each model of MODELS in turn."""
    torch.manual_seed(0)
    return MODELS[request.param]().eval()


def states_and_gradients(model: PreTrainedModel) -> tuple[Tensor, list[Tensor], int]:
    """Return hidden states, gradients, and the bytes that wait for backward, of one pass of two sequences."""
    kept_bytes: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            kept_bytes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    prompts, prompt_mask = pad_tokens([[1, 2], [3, 4, 5]], "left", torch.device("cpu"))
    responses, mask = pad_tokens([[6, 7, 8, 9], [10, 11]], "right", torch.device("cpu"))
    model.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = predicting_hidden(model, prompts, prompt_mask, torch.tensor([0, 1]), responses, mask)
    hidden[mask].sin().sum().backward()
    return hidden.detach(), [parameter.grad for parameter in backbone(model).parameters()], sum(kept_bytes.values())


def test_states_and_gradients_are_bit_equal_and_less_is_kept(model: PreTrainedModel) -> None:
    hidden, grads, kept_bytes = states_and_gradients(model)

    checkpoint_activations(model)
    model.eval()
    hidden_again, grads_again, kept_bytes_again = states_and_gradients(model)

    assert torch.equal(hidden, hidden_again)
    assert all(torch.equal(grad, grad_again) for grad, grad_again in zip(grads, grads_again, strict=True))
    assert kept_bytes_again < kept_bytes / 3


def test_a_model_without_such_layers_is_refused(model: PreTrainedModel) -> None:
    model.supports_gradient_checkpointing = False
    with pytest.raises(ModelError, match="activation_checkpointing: false"):
        checkpoint_activations(model)


def test_every_trained_model_is_checkpointed_and_no_other() -> None:
    config = small_config("activation_checkpointing=true", "rollout_model.optimizer=null")
    loaded_models = {
        role: load_trained(config, role, path, torch.device("cpu"), False)
        for role, path in config.model_paths().items()
    }

    shares_prompts = {role: can_share_prompts(loaded_model) for role, loaded_model in loaded_models.items()}
    assert shares_prompts == {"policy": False, "rollout_model": True}  # a checkpointed model does not

    settings = ("objective.advantage=gae", "critic.optimizer.learning_rate=1e-4", "activation_checkpointing=true")
    critic = load_trained(small_config(*settings), "critic", config.policy.path, torch.device("cpu"), False)
    for model in (loaded_models["policy"], critic):
        layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
        assert layers
        assert all(isinstance(layer.forward, partial) for layer in layers)


@pytest.mark.slow
def test_a_run_learns_the_same_with_checkpointed_activations(tmp_path) -> None:
    """Up to rounding: a group's prompt is read once without, and with each response with it. The policy has an adapter,
    the rollout model has none."""
    for name in ("false", "true"):
        settings = (f"activation_checkpointing={name}", "iterations=1", "policy.lora.rank=2", "batch.prompts=2", SHORT)
        run(small_config(*settings), tmp_path / name)

    for role in ("policy", "rollout_model"):
        kept_weights = weights(tmp_path / "false", role)
        recomputed_weights = weights(tmp_path / "true", role)
        assert kept_weights.keys() == recomputed_weights.keys()
        assert all(torch.allclose(kept_weights[name], recomputed_weights[name], atol=2e-5) for name in kept_weights)
