"""The command `jackpot sample`: responses of a run's models to held-out problems, before and after training."""

from contextlib import closing
from pathlib import Path

from jackpot.config.engines import TransformersEngineConfig
from jackpot.core.roles import Role
from jackpot.core.types import Prompt, Version
from jackpot.launch.build import run_task
from jackpot.launch.engines import make_engine
from jackpot.models.device import pick_device
from jackpot.models.load import load_tokenizers
from jackpot.rollout.evaluate import Evaluation, evaluate
from jackpot.training.run_folder.checkpoint import newest_checkpoint
from jackpot.training.run_folder.folder import run_config


def sample_answers(run: Path, problems: int, seed: int) -> tuple[list[Prompt], dict[tuple[Role, str], Evaluation]]:
    """Sample responses to the first held-out problems from the models at the start and at the newest whole checkpoint.

    Args:
        run: the run folder.
        problems: number of problems.
        seed: seed of the sampling.

    Returns:
        The problems; and the responses of every model, one to each problem, by the model's role and whether the model
        is that from `before` training or from `after` it.

    Raises:
        CheckpointError: the folder has no run, no checkpoint yet, or only corrupt ones.
    """
    config = run_config(run)
    checkpoint = newest_checkpoint(run, config)
    before, after = config.model_paths(), config.model_paths(checkpoint.folder)
    tokenizer, device = load_tokenizers(before), pick_device(config.device)
    settings = TransformersEngineConfig(dtype=config.engine.dtype)  # not a server's engine: up to four models are read

    answers: dict[tuple[Role, str], Evaluation] = {}
    with closing(run_task(config, before, tokenizer)) as task:
        prompts = [task.prompt("test", index) for index in range(problems)]
        for role in before:
            for when, path in (("before", before[role]), ("after", after[role])):
                with closing(make_engine(settings, path, device, Version(policy=0, rollout_model=0))) as engine:
                    answers[role, when] = evaluate(engine, task, tokenizer, prompts, config.sampling, seed, k=1)
    return prompts, answers
