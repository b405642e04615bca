"""One of the processes of a run of TRL: `torchrun trl_ranks.py FOLDER SEQUENCES_OF_THIS_PROCESS ['two models']`."""

import json
import os
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from helpers.trl_runs import LINEAR, ROLLOUT_MODEL, arguments, movement
from jackpot.adapters.trl import CorrectedGRPOTrainer, EngineRollouts, JackpotGRPOTrainer, rollouts, writers
from jackpot.core.prng import fold_in
from jackpot.models.load import load_model

requests_of = rollouts.requests
SHARE = "jackpot/sampling/rollout_model_share"


def by_prompt(prompts, trainer, name, top):
    """Return the same requests with seeds by their prompts, which do not depend on the process."""
    counts = Counter()  # of requests by prompt
    requests = []
    for request in requests_of(prompts, trainer, name, top):
        key = (name, request.prompt.text, counts[request.prompt.text])
        counts[request.prompt.text] += 1
        requests.append(replace(request, seed=fold_in(*key)))
    return requests


rollouts.requests = writers.requests = by_prompt
folder, has_two_models = Path(sys.argv[1]), len(sys.argv) > 3
changes = {"max_steps": 2} if has_two_models else {}
changes |= {"ddp_backend": "gloo"} if "WORLD_SIZE" in os.environ else {}  # under torchrun
settings = arguments(folder, per_device_train_batch_size=int(sys.argv[2]), logging_steps=1, **changes)
settings["correction"] = {"name": "obrs", "mask": "expected"}
if has_two_models:
    rollout_model = {"path": ROLLOUT_MODEL, "optimizer": LINEAR.model_dump(), "share": 0.5, "split": "group"}
    trainer = JackpotGRPOTrainer(**settings, rollout_model=rollout_model)
else:
    trainer = CorrectedGRPOTrainer(**settings, rollout_func=EngineRollouts(ROLLOUT_MODEL))
trainer.train()
if trainer.accelerator.is_main_process:
    models = {"policy": trainer.accelerator.unwrap_model(trainer.model)}
    models |= {"rollout_model": trainer.rollout_model} if has_two_models else {}
    start_weights = [list(load_model(f"starter:{role}", torch.float32).parameters()) for role in models]
    weights = [list(model.parameters()) for model in models.values()]
    lines = trainer.state.log_history
    result = {
        "weights": torch.cat([weight.detach().flatten()[:50] for model in weights for weight in model]).tolist(),
        "moved": [movement(model, model, start)[1] for model, start in zip(weights, start_weights, strict=True)],
        "kappa": [line["jackpot/obrs/kappa"] for line in lines if "jackpot/obrs/kappa" in line],
        "share": [line[SHARE] for line in lines if SHARE in line],
    }
    (folder / "result.json").write_text(json.dumps(result))
