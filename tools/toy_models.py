"""Makes toy models from nothing: the two pairs that the package carries (`starter:policy`), and those of the study.

    python -m tools.toy_models FOLDER            # policy and rollout_model, the bytes of the package on its machine
    python -m tools.toy_models FOLDER --text     # the pair that reads text, and the word problems of examples/
    python -m tools.toy_models FOLDER --study    # the six models of research/study.yaml

`policy` and `rollout_model` are Qwen3 models that add small numbers; `text_policy` and `text_rollout_model` read text
byte by byte and solve word problems. All are supervised to convergence on a *mixture*: correct solutions, solutions
with wrong steps, and bare guesses. The skill is there and hidden under bad habits, as in a real base model, and
reinforcement learning brings it out within minutes. The mixtures of a pair differ, so the responses of the smaller
model are off-policy for the larger one.
"""

import argparse
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tools.lessons import SUMS, WORD_PROBLEMS, Lesson, Mixture, write_word_problems

OnStep = Callable[[str, int, int, float], None]  # model, steps done, steps in all, loss in nats per token


@dataclass(frozen=True, kw_only=True, slots=True)
class ToyModelSpec:
    """Describes the shape and the supervision of one toy model."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    mixture: Mixture
    steps: int
    batch_size: int = 96  # sequences
    learning_rate: float = 3e-3
    head_dim: int = 32  # the smallest that vLLM supports on a CPU
    lesson: Lesson = SUMS


TOY_MODELS: dict[str, ToyModelSpec] = {
    "policy": ToyModelSpec(
        hidden_size=96,
        intermediate_size=192,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        mixture=Mixture(correct=0.30, faulty=0.45, guess=0.25, offsets=(-10, -1, 1, 10)),
        steps=800,
    ),
    "rollout_model": ToyModelSpec(
        hidden_size=64,
        intermediate_size=160,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        mixture=Mixture(correct=0.20, faulty=0.40, guess=0.40, offsets=(-10, -1, 1, 10)),
        steps=800,
        learning_rate=5e-3,
    ),
}

# Of the same shapes; they read text, one byte a token.
TEXT_MODELS: dict[str, ToyModelSpec] = {
    "text_policy": replace(
        TOY_MODELS["policy"],
        mixture=Mixture(correct=0.50, faulty=0.30, guess=0.20, offsets=(-2, -1, 1, 2)),
        steps=550,
        batch_size=32,
        lesson=WORD_PROBLEMS,
    ),
    "text_rollout_model": replace(
        TOY_MODELS["rollout_model"],
        mixture=Mixture(correct=0.40, faulty=0.30, guess=0.30, offsets=(-2, -1, 1, 2)),
        learning_rate=TOY_MODELS["policy"].learning_rate,
        batch_size=32,
        lesson=WORD_PROBLEMS,
    ),
}


# The models of research/study.yaml: a policy, two rollout models of a sixth of its size, one close to it and one far,
# and one that costs a twelfth of its FLOPs a token. They are not in the package.
STUDY_MODELS: dict[str, ToyModelSpec] = {
    "policy": ToyModelSpec(
        hidden_size=128,
        intermediate_size=320,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        mixture=TOY_MODELS["policy"].mixture,
        steps=800,
    ),
    "close": replace(  # half as many steps leave three times the KL to the policy
        TOY_MODELS["rollout_model"], mixture=TOY_MODELS["policy"].mixture, steps=1600
    ),
    "far": replace(  # its mistakes are of a kind that the policy never makes
        TOY_MODELS["rollout_model"],
        mixture=Mixture(correct=0.25, faulty=0.60, guess=0.15, offsets=(-20, -2, 2, 20), fault_rate=0.7),
        steps=1000,
    ),
    "gap": ToyModelSpec(  # the policy's habits: what separates the two is their size
        hidden_size=48,
        intermediate_size=96,
        num_layers=2,
        num_heads=1,
        num_kv_heads=1,
        mixture=TOY_MODELS["policy"].mixture,
        steps=1600,
        learning_rate=5e-3,
    ),
}

# The pair of its panel `hard`: a policy of two million parameters, so that processor seconds follow FLOPs, and a
# rollout model of a sixth of its size.
HARD_MODELS: dict[str, ToyModelSpec] = {
    "large": ToyModelSpec(
        hidden_size=224,
        intermediate_size=576,
        num_layers=4,
        num_heads=7,
        num_kv_heads=1,
        mixture=TOY_MODELS["policy"].mixture,
        steps=800,
        learning_rate=2e-3,
    ),
    "small": replace(TOY_MODELS["policy"], intermediate_size=256, steps=1600),
}


def make_toy_models(
    folder: Path, specs: Mapping[str, ToyModelSpec], seed: int = 0, progress: OnStep | None = None
) -> None:
    """Train every toy model of `specs` from nothing and save it as `folder/<name>`: a minute or two each, one thread.

    The same seed on the same machine and library versions gives the same bytes; elsewhere, the same accuracy.
    """
    for name, spec in specs.items():
        make_toy_model(name, spec, seed, progress).save_pretrained(folder / name)
        spec.lesson.tokenizer().save_pretrained(folder / name)


def make_toy_model(name: str, spec: ToyModelSpec, seed: int = 0, progress: OnStep | None = None) -> Qwen3ForCausalLM:
    """Train one toy model on its mixture, on one thread and without touching the caller's random state.

    Args:
        name: first argument of every call of `progress`.
    """
    with _one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(_model_config(spec))
        _supervise(model, name, spec, random.Random(seed), progress)
    model.generation_config = GenerationConfig(
        eos_token_id=model.config.eos_token_id, pad_token_id=model.config.pad_token_id, do_sample=True
    )
    return model.eval()


def make_meta_model(spec: ToyModelSpec) -> Qwen3ForCausalLM:
    """Make a toy model without weights, on the meta device."""
    with torch.device("meta"):
        return Qwen3ForCausalLM(_model_config(spec))


def _model_config(spec: ToyModelSpec) -> Qwen3Config:
    tokenizer = spec.lesson.tokenizer()
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=tokenizer.model_max_length,
        tie_word_embeddings=True,
        initializer_range=0.1,  # near 1/sqrt(hidden_size); the usual 0.02 takes twice the steps to learn
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )


def _supervise(
    model: Qwen3ForCausalLM, name: str, spec: ToyModelSpec, draw: random.Random, progress: OnStep | None
) -> None:
    """Train with AdamW: linear warm-up over a tenth of the steps, then linear decay to zero."""
    tokenizer = spec.lesson.tokenizer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=spec.learning_rate, betas=(0.9, 0.99), weight_decay=0.01)
    warm_up = max(1, spec.steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm_up, (spec.steps - step) / (spec.steps - warm_up))
    )
    for step in range(spec.steps):
        loss = _response_loss(model, *_examples(tokenizer, spec, step * spec.batch_size, draw))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        if progress is not None:
            progress(name, step + 1, spec.steps, loss.item())


def _examples(
    tokenizer: PreTrainedTokenizerFast, spec: ToyModelSpec, first: int, draw: random.Random
) -> tuple[Tensor, Tensor]:
    """Sample one solution to each training problem from `first` on: token ids and labels, both [B, T] int64.

    Labels are -100 (ignored by cross-entropy) on the prompt and on the padding at the right.
    """
    rows = []
    for index in range(first, first + spec.batch_size):
        prompt, solution = (tokenizer.encode(text) for text in spec.lesson.example(index, spec.mixture, draw))
        rows.append((prompt, [*solution, tokenizer.eos_token_id]))
    length = max(len(prompt) + len(response) for prompt, response in rows)
    ids = torch.full((len(rows), length), tokenizer.pad_token_id)
    labels = torch.full((len(rows), length), -100)
    for row, (prompt, response) in enumerate(rows):
        end = len(prompt) + len(response)
        ids[row, :end] = torch.tensor([*prompt, *response])
        labels[row, len(prompt) : end] = torch.tensor(response)
    return ids, labels


def _response_loss(model: Qwen3ForCausalLM, ids: Tensor, labels: Tensor) -> Tensor:
    """Compute the mean cross-entropy per response token, in nats; causality hides the padding at the right."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run the body on one thread, which adds in one order, so that results are the same every time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def main() -> None:
    """Make the models that the command line asks for, and say what was written."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("folder", type=Path, help="folder in which each model gets a folder")
    arguments.add_argument("--seed", type=int, default=0, help="of weights and examples; 0 makes those of the package")
    which = arguments.add_mutually_exclusive_group()
    which.add_argument("--text", action="store_true", help="the pair that reads text, and word problems to train it on")
    which.add_argument("--study", action="store_true", help="the six models of research/study.yaml")
    options = arguments.parse_args()

    def show(name: str, step: int, steps: int, loss: float) -> None:
        if step % 100 == 0 or step == steps:
            print(f"{name}: step {step} of {steps}, {loss:.3f} nats/token", flush=True)

    specs = TEXT_MODELS if options.text else STUDY_MODELS | HARD_MODELS if options.study else TOY_MODELS
    make_toy_models(options.folder, specs, options.seed, show)

    problems = write_word_problems(options.folder) if options.text else []
    print("Wrote", ", ".join(map(str, [*(options.folder / name for name in specs), *problems])))


if __name__ == "__main__":
    main()
