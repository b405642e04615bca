"""Makes a small rollout model for a policy that has no small sibling: drops layers, then distils the policy into it.

    python -m examples.shrink MODEL OUT --layers 15

MODEL is the policy, a folder or a name of the hub. The policy stays as it is and answers the prompts of a recipe's
task. The small model keeps the layers that turn the states of such answers most, and is trained to give every token of
these answers the policy's distribution; the divergence is exact, over the whole vocabulary. Settings such as
`iterations=20` come last. A second call goes on where the first was stopped.
"""

import argparse
import copy
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import jackpot
from jackpot.analysis.simulate.candidates import PairBench, simulate_candidates
from jackpot.config.config import Config
from jackpot.config.recipes import resolve
from jackpot.core.types import Rollout
from jackpot.models.cost import forward_cost
from jackpot.models.load import load_meta_model, load_model, load_tokenizer

DISTILLATION = (  # what differs from the recipe of the task
    "iterations=60",
    "policy.optimizer=null",
    "rollout_model.share=0.0",  # the policy generates everything
    "rollout_model.ppo_weight=0.0",
    "rollout_model.optimizer={learning_rate: 5.0e-4, warmup_steps: 5, schedule: cosine}",
    "objective.correction=none",
    "batch.mini_batch_size=32",
    "guard.check_engine=false",
    "evaluation={every: 30, problems: 64}",
)


@torch.no_grad()
def influences(model: PreTrainedModel, rollouts: Sequence[Rollout]) -> list[float]:
    """Return how much each layer turns the states of some responses: 1 - cosine of its input and its output, a mean.

    Source: ShortGPT (arXiv 2403.03853), equation 1.
    """
    states = []
    for rollout in rollouts:
        ids = torch.tensor([[*rollout.prompt.token_ids, *rollout.token_ids.tolist()]], device=model.device)
        hidden = model(ids, output_hidden_states=True, use_cache=False).hidden_states  # the last one after the norm
        states.append(torch.cat([depth[:, -len(rollout.token_ids) :] for depth in hidden]))
    depths = torch.cat(states, dim=1)  # [layers + 1, tokens, H]
    return (1.0 - torch.cosine_similarity(depths[:-1], depths[1:], dim=-1)).mean(dim=1).tolist()


def keep_layers(model: PreTrainedModel, kept: list[int]) -> PreTrainedModel:
    """Copy a model with some of its layers, in their order; what is not a layer is copied as it is."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = len(kept)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer] for layer in kept]

    small = type(model)(config)
    (layers,) = (name for name, part in model.named_modules() if name.endswith("layers"))
    for of_small, of_model in zip(small.get_submodule(layers), kept, strict=True):
        of_small.load_state_dict(model.get_submodule(layers)[of_model].state_dict())

    others = {name: weight for name, weight in model.state_dict().items() if not name.startswith(f"{layers}.")}
    small.load_state_dict(others, strict=False)
    small.tie_weights()
    small.generation_config = model.generation_config
    return small


def shrink(path: str, out: Path, layers: int | list[int], recipe: str, overrides: list[str]) -> None:
    """Write a model with some of the layers of another to `out`, distilled, and `out` with `-start` before that.

    Args:
        layers: how many are kept, those that turn the states most; or which ones.
        recipe: name or path of a recipe, whose task, batches and sampling are taken.
        overrides: further settings.
    """
    start, run = out.with_name(f"{out.name}-start"), out.with_name(f"{out.name}-run")
    settings = [f"policy.path={path}", f"rollout_model.path={start}", *DISTILLATION, *overrides]
    config = resolve(recipe, None, settings)

    if not start.exists():
        model = load_model(path, torch.float32)
        if isinstance(layers, int):
            answers = PairBench(config, path, [], prompts=24, seed=0, split="train").answers(path)
            turns = influences(model, answers.rollouts)
            layers = sorted(sorted(range(len(turns)), key=turns.__getitem__)[-layers:])
        print(f"layers {','.join(map(str, layers))} of {model.config.num_hidden_layers} are kept", flush=True)
        keep_layers(model, layers).save_pretrained(start)
        load_tokenizer(path).save_pretrained(start)

    trained = jackpot.train(recipe, *settings, folder=run, on_metrics=show)
    newest = max((run / "checkpoints").glob("step-*"), key=lambda folder: int(folder.name.partition("-")[2]))
    shutil.copytree(newest / "rollout_model", out, dirs_exist_ok=True)

    compare(path, [start, out], config)
    seconds = sum(line.get("cpu_seconds/train", 0.0) + line.get("cpu_seconds/rollout", 0.0) for line in trained.metrics)
    print(f"{seconds / 60:.0f} CPU minutes of distillation. {out} is a rollout model: rollout_model.path={out}")


def show(line: Mapping[str, Any]) -> None:
    """Print how far the two models are apart in an iteration."""
    if "mismatch/kl_policy_rollout" in line:
        print(f"iteration {line['iteration']}: KL {line['mismatch/kl_policy_rollout']:.3f} nats a token", flush=True)
    if "eval/rollout_model_accuracy" in line:
        print(
            f"  right: {line['eval/rollout_model_accuracy']:.1%}, policy {line['eval/policy_accuracy']:.1%}", flush=True
        )


def compare(policy: str, folders: list[Path], config: Config) -> None:
    """Print what each model would be as the policy's rollout model, on held-out prompts."""
    costs = {path: forward_cost(load_meta_model(path)).per_token for path in (policy, *map(str, folders))}
    measured = simulate_candidates(config, [str(folder) for folder in folders], prompts=128, seed=0)
    print(f"{'model':24s} {'FLOPs a token':>14s} {'KL':>7s} {'acceptance':>11s} {'right':>7s}")
    for model in measured:
        share = costs[model.name] / costs[policy]
        print(
            f"{Path(model.name).name:24s} {share:13.0%} {model.kl_policy_rollout:8.3f} {model.acceptance:11.3f} "
            f"{model.accuracy or 0.0:7.1%}"
        )
        print(f"  {model.answer['sentence']}")


def main() -> None:
    """Shrink the model that the command line names."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("model", help="the policy: a folder, or a name of the hub")
    arguments.add_argument("out", type=Path, help="folder of the small model")
    arguments.add_argument("--layers", type=int, default=15, help="how many layers are kept; default 15")
    arguments.add_argument("--keep", help="numbers of the layers that are kept, from 0, as 0,1,2,27,28,29")
    arguments.add_argument("--recipe", default="smollm", help="whose task is answered; default smollm")
    arguments.add_argument("overrides", nargs="*", help="settings of the distillation as key=value")
    options = arguments.parse_intermixed_args()

    layers = list(map(int, options.keep.split(","))) if options.keep else options.layers
    shrink(options.model, options.out, layers, options.recipe, options.overrides)


if __name__ == "__main__":
    main()
