"""Hidden states of padded batches with shared prompts equal those of each sequence read alone, and the head computes
the model's own logits; models of which that does not hold are refused.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from helpers.token_batches import PROMPTS, RESPONSES, token_batch
from jackpot.core.errors import DataError, ModelError
from jackpot.core.types import TokenBatch
from jackpot.models.forward import (
    backbone,
    can_share_prompts,
    check_head,
    head_logits,
    logit_softcap,
    output_layer,
    pad_tokens,
    predicting_hidden,
    response_hidden,
    token_hidden,
    widen_head,
)
from jackpot.objectives.kernels.linear_head import LinearHead

V = 30
SHAPE = {"vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
SHAPE |= {"num_key_value_heads": 1, "max_position_embeddings": 64, "initializer_range": 0.2}
MODELS = {
    "Qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=32, tie_word_embeddings=True)),
    "Llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "Mistral, sliding window": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=4)),
    "Gemma 2, soft cap": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SHAPE, head_dim=16, sliding_window=4, final_logit_softcapping=2.0)
    ),
    "GPT-2, absolute positions": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=V, n_embd=32, n_layer=2, n_head=2, n_positions=64, initializer_range=0.2)
    ),
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """Return each model of MODELS in turn."""
    torch.manual_seed(0)
    return MODELS[request.param]().eval()


@pytest.mark.parametrize("padding", [0, 5])
def test_hidden_states_predict_each_token_whatever_the_padding(model, padding):
    batch = token_batch(padding)

    hidden = token_hidden(model, batch, batch.attention_mask.flatten().nonzero()[:, 0])

    assert hidden.shape == (batch.attention_mask.sum(), 32)
    assert torch.equal(response_hidden(model, batch), hidden[batch.response_mask[batch.attention_mask]])

    logits = head_logits(model, hidden).split([len(response) for _, response in RESPONSES])
    for row, (prompt, response) in enumerate(RESPONSES):
        ids = torch.tensor([[*PROMPTS[prompt], *response]])
        single_logits = model(input_ids=ids).logits[0, len(PROMPTS[prompt]) - 1 : -1]
        assert torch.allclose(logits[row], single_logits, atol=2e-5)


def repeat_prompts(batch: TokenBatch) -> TokenBatch:
    """Return the same sequences, each with a prompt of its own: nothing is there to share."""
    index = batch.prompt_index
    return replace(
        batch,
        prompt_ids=batch.prompt_ids[index],
        prompt_mask=batch.prompt_mask[index],
        prompt_index=torch.arange(len(index)),
    )


@pytest.mark.parametrize("padding", [0, 5])
def test_a_shared_prompt_gives_the_same_states_and_gradients(model, padding):
    assert can_share_prompts(model)
    model = model.double()
    shared_batch = token_batch(padding)
    grads = []
    states = []

    for batch in (shared_batch, repeat_prompts(shared_batch)):
        model.zero_grad()
        hidden = response_hidden(model, batch)
        (hidden.sin() * torch.arange(hidden.shape[1])).sum().backward()
        states.append(hidden.detach())
        grads.append(torch.cat([parameter.grad.flatten() for parameter in backbone(model).parameters()]))

    shared_states, repeated_states = states
    shared_grad, repeated_grad = grads
    assert torch.allclose(shared_states, repeated_states, rtol=0, atol=1e-12)
    assert (shared_grad - repeated_grad).norm() < 1e-6 * repeated_grad.norm()  # norms and angles are float32 inside


def test_a_shared_prompt_is_read_once(model):
    token_counts = []
    backbone(model).get_input_embeddings().register_forward_hook(lambda _, ids, __: token_counts.append(ids[0].numel()))
    batch = token_batch()

    response_hidden(model, batch)

    assert token_counts == [batch.prompt_ids.numel(), batch.response_ids[:, :-1].numel()]


@pytest.mark.parametrize("shares_prompt", [True, False])
def test_without_padding_masks_change_nothing(model, shares_prompt):
    index = torch.tensor([0, 0, 1] if shares_prompt else [0, 1])
    prompts = torch.arange(8).view(2, 4)
    responses = torch.arange(8, 8 + 5 * len(index)).view(-1, 5)
    prompt_mask = torch.ones(prompts.shape, dtype=torch.bool)
    response_mask = torch.ones(responses.shape, dtype=torch.bool)

    masked_states = predicting_hidden(model, prompts, prompt_mask, index, responses, response_mask)
    states = predicting_hidden(model, prompts, None, index, responses, None)  # without masks

    assert torch.allclose(states, masked_states, atol=2e-5)


def test_responses_of_one_token_are_predicted_by_prompts(model):
    batch = token_batch()
    short_batch = replace(batch, response_ids=batch.response_ids[:, :1], attention_mask=batch.attention_mask[:, :1])
    first_positions = torch.arange(len(RESPONSES))

    states_in_long_batch = token_hidden(model, batch, first_positions * batch.response_ids.shape[1])

    assert torch.allclose(token_hidden(model, short_batch, first_positions), states_in_long_batch, atol=2e-5)

    empty_batch = replace(batch, response_ids=batch.response_ids[:, :0], attention_mask=batch.attention_mask[:, :0])
    for batch_without_tokens in (empty_batch, repeat_prompts(empty_batch)):
        assert token_hidden(model, batch_without_tokens, first_positions[:0]).shape == (0, 32)


@pytest.mark.parametrize(
    "settings",
    [
        {"layer_types": ["full_attention", "linear_attention"]},
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "dynamic"},
                "sliding_attention": {"rope_type": "default"},
            }
        },
    ],
)
def test_prompts_that_cannot_be_shared_are_read_each_time(settings):
    model = MODELS["Llama"]().eval()
    for name, value in settings.items():
        setattr(model.config, name, value)

    assert not can_share_prompts(model)


def test_checkpointed_activations_leave_nothing_to_share():
    model = MODELS["Llama"]().eval()
    assert can_share_prompts(model)
    model.gradient_checkpointing_enable()
    assert not can_share_prompts(model)


def test_hidden_states_carry_gradient(model):
    loss = response_hidden(model, token_batch()).sum()
    loss.backward()

    for parameter in backbone(model).parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()


def test_the_head_computes_what_the_model_does(model):
    check_head(model)

    ids = torch.tensor([[3, 4, 5]])
    hidden = backbone(model)(input_ids=ids).last_hidden_state
    assert torch.allclose(head_logits(model, hidden), model(input_ids=ids).logits, atol=1e-5)
    assert output_layer(model).weight.shape == (V, 32)


def test_only_gemma_has_a_soft_cap(model):
    assert logit_softcap(model) == (2.0 if isinstance(model, Gemma2ForCausalLM) else None)


def test_a_head_that_the_model_scales_is_refused(model):
    forward = model.forward

    def scaled(**inputs):
        output = forward(**inputs)
        output.logits = output.logits * 1.5
        return output

    model.forward = scaled
    with pytest.raises(ModelError, match="computes more than its output layer"):
        check_head(model)


def test_logits_are_float32_in_a_bfloat16_model():
    model = MODELS["Qwen3"]().to(torch.bfloat16)
    assert head_logits(model, torch.zeros(2, 32, dtype=torch.bfloat16)).dtype == torch.float32


def test_a_model_without_a_linear_head_or_a_base_is_refused():
    model = MODELS["Qwen3"]()
    with pytest.raises(ModelError, match="no causal language model"):
        backbone(model.model)

    model.lm_head = nn.Identity()
    with pytest.raises(ModelError, match="no linear output layer"):
        output_layer(model)


@pytest.mark.parametrize("mask", [[[True, True], [True, False]], [[True, True], [False, False]]])
def test_prompts_that_are_empty_or_padded_right_are_refused(mask):
    ids = torch.ones(2, 2, dtype=torch.int64)  # of the prompts and of the responses
    with pytest.raises(DataError, match=r"prompts \[1\]"):
        predicting_hidden(MODELS["Qwen3"](), ids, torch.tensor(mask), torch.tensor([0, 1]), ids, ids.bool())


@pytest.mark.parametrize(
    ("side", "ids", "mask"),
    [
        ("left", [[0, 0, 5], [1, 2, 3]], [[0, 0, 1], [1, 1, 1]]),
        ("right", [[5, 0, 0], [1, 2, 3]], [[1, 0, 0], [1, 1, 1]]),
    ],
)
def test_tokens_are_padded_on_the_side_asked_for(side, ids, mask):
    padded_ids, padded_mask = pad_tokens([[5], [1, 2, 3]], side, torch.device("cpu"))

    assert padded_ids.tolist() == ids
    assert padded_mask.int().tolist() == mask


@pytest.mark.parametrize("tied", [True, False])
def test_a_wide_head_of_an_engine_is_that_of_training(tied):
    """The engine holds bfloat16, training float32 under autocast; both have the same weights and hidden states."""
    torch.manual_seed(0)
    training_model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=tied)).bfloat16()
    engine_model = LlamaForCausalLM(training_model.config).bfloat16()
    engine_model.load_state_dict(training_model.state_dict())
    hidden = torch.randn(64, 32).bfloat16()
    ids = torch.arange(64) % V
    training_model = training_model.float()
    gaps = []

    for widen in (lambda model: None, widen_head):
        for model in (training_model, engine_model):
            names = [name for name, _ in model.named_parameters()]
            weight = output_layer(model).weight

            widen(model)

            assert output_layer(model).weight is weight
            assert [name for name, _ in model.named_parameters()] == names

        with torch.autocast("cpu", torch.bfloat16):
            trained_log_probs = LinearHead(output_layer(training_model))(
                hidden.float(), None, ids, temperature=1.0
            ).log_probs
        engine_log_probs = head_logits(engine_model, hidden).log_softmax(-1).gather(1, ids[:, None])[:, 0]
        exact_log_probs = (hidden.double() @ weight.double().t()).log_softmax(-1).gather(1, ids[:, None])[:, 0]
        training_gap = (trained_log_probs - exact_log_probs).abs().max().item()
        engine_gap = (engine_log_probs - exact_log_probs).abs().max().item()
        gaps.append([training_gap, engine_gap])

    plain_gaps, wide_gaps = gaps
    assert min(plain_gaps) > 1e-4  # bfloat16 rounds the logits
    assert max(wide_gaps) < 1e-6
