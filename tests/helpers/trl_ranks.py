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

made = rollouts.requests
SHARE = "jackpot/sampling/rollout_model_share"


def by_prompt(prompts, trainer, name, top):
    """The same requests, with seeds that say nothing of the process."""
    seen = Counter()
    found = []
    for request in made(prompts, trainer, name, top):
        key = (name, request.prompt.text, seen[request.prompt.text])
        seen[request.prompt.text] += 1
        found.append(replace(request, seed=fold_in(*key)))
    return found


rollouts.requests = writers.requests = by_prompt
folder, has_two_models = Path(sys.argv[1]), len(sys.argv) > 3
changes = {"max_steps": 2} if has_two_models else {}
changes |= {"ddp_backend": "gloo"} if "WORLD_SIZE" in os.environ else {}  # under torchrun
settings = arguments(folder, per_device_train_batch_size=int(sys.argv[2]), logging_steps=1, **changes)
settings["correction"] = {"name": "obrs", "mask": "expected"}
if has_two_models:
    own = {"path": ROLLOUT_MODEL, "optimizer": LINEAR.model_dump(), "share": 0.5, "split": "group"}
    trainer = JackpotGRPOTrainer(**settings, rollout_model=own)
else:
    trainer = CorrectedGRPOTrainer(**settings, rollout_func=EngineRollouts(ROLLOUT_MODEL))
trainer.train()
if trainer.accelerator.is_main_process:
    models = {"policy": trainer.accelerator.unwrap_model(trainer.model)}
    models |= {"rollout_model": trainer.rollout_model} if has_two_models else {}
    starts = [list(load_model(f"starter:{role}", torch.float32).parameters()) for role in models]
    trained = [list(model.parameters()) for model in models.values()]
    logged = trainer.state.log_history
    result = {
        "weights": torch.cat([one.detach().flatten()[:50] for own in trained for one in own]).tolist(),
        "moved": [movement(own, own, start)[1] for own, start in zip(trained, starts, strict=True)],
        "kappa": [line["jackpot/obrs/kappa"] for line in logged if "jackpot/obrs/kappa" in line],
        "share": [line[SHARE] for line in logged if SHARE in line],
    }
    (folder / "result.json").write_text(json.dumps(result))
