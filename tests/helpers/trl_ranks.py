"""One of the processes of a run of TRL: `torchrun trl_ranks.py FOLDER SEQUENCES_OF_THIS_PROCESS`."""

import json
import os
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from helpers.trl_runs import ROLLOUT_MODEL, arguments, movement
from jackpot.adapters.trl import CorrectedGRPOTrainer, EngineRollouts, rollouts
from jackpot.core.prng import fold_in
from jackpot.models.load import load_model

made = rollouts.requests


def by_prompt(prompts, trainer, name, top):
    """The same requests, with seeds that say nothing of the process."""
    seen = Counter()
    found = []
    for request in made(prompts, trainer, name, top):
        key = (name, request.prompt.text, seen[request.prompt.text])
        seen[request.prompt.text] += 1
        found.append(replace(request, seed=fold_in(*key)))
    return found


rollouts.requests = by_prompt
folder = Path(sys.argv[1])
settings = arguments(folder, per_device_train_batch_size=int(sys.argv[2]), ddp_backend="gloo", logging_steps=1)
trainer = CorrectedGRPOTrainer(
    **settings,
    rollout_func=EngineRollouts(ROLLOUT_MODEL),
    correction={"name": "obrs", "mask": "expected"},
)
trainer.train()
if trainer.accelerator.is_main_process:
    start = load_model("starter:policy", torch.float32)
    own = list(trainer.accelerator.unwrap_model(trainer.model).parameters())
    result = {
        "weights": torch.cat([one.detach().flatten()[:50] for one in own]).tolist(),
        "moved": movement(own, own, list(start.parameters()))[1],
        "kappa": [line["jackpot/obrs/kappa"] for line in trainer.state.log_history if "jackpot/obrs/kappa" in line],
    }
    (folder / "result.json").write_text(json.dumps(result))
