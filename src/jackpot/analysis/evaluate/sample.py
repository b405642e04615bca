"""The command `jackpot sample`: responses of a run's models to held-out problems, before and after training."""

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from jackpot.config.engines import TransformersEngineConfig
from jackpot.core.roles import Role
from jackpot.core.types import Prompt, Version
from jackpot.launch.build import run_task
from jackpot.launch.engines import make_engine
from jackpot.models.device import pick_device
from jackpot.models.load import load_tokenizers
from jackpot.rollout.evaluate import evaluate
from jackpot.training.run_folder.checkpoint import newest_checkpoint
from jackpot.training.run_folder.folder import run_config


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledResponse:
    """A response of one model to a held-out problem, with its reward, and whether it is correct."""

    role: Role
    after: bool  # True: from the model in the newest checkpoint; False: from the model that the run began with
    response: str
    reward: float
    correct: bool | None  # None where the task has no verdict


def sample_answers(run: Path, problems: int, seed: int) -> list[tuple[Prompt, list[SampledResponse]]]:
    """Sample responses to the first held-out problems from the models at the start and at the newest whole checkpoint.

    Args:
        run: the run folder.
        problems: number of problems.
        seed: seed of the sampling.

    Returns:
        Each problem with the responses to it: of every model, before and after.

    Raises:
        CheckpointError: the folder has no run, no checkpoint yet, or only corrupt ones.
    """
    config = run_config(run)
    checkpoint = newest_checkpoint(run, config)
    before, after = config.model_paths(), config.model_paths(checkpoint.folder)
    tokenizer, device = load_tokenizers(before), pick_device(config.device)
    settings = TransformersEngineConfig(dtype=config.engine.dtype)  # not a server's engine: up to four models are read

    with closing(run_task(config, before, tokenizer)) as task:
        prompts = [task.prompt("test", index) for index in range(problems)]
        answers: list[list[SampledResponse]] = [[] for _ in prompts]

        for role in before:
            for is_after, path in ((False, before[role]), (True, after[role])):
                with closing(make_engine(settings, path, device, Version(policy=0, rollout_model=0))) as engine:
                    result = evaluate(engine, task, tokenizer, prompts, config.sampling, seed, k=1)
                for row, response, score in zip(answers, result.responses, result.scores, strict=True):
                    row.append(
                        SampledResponse(
                            role=role,
                            after=is_after,
                            response=response,
                            reward=score.reward,
                            correct=score.correct,
                        )
                    )
    return list(zip(prompts, answers, strict=True))
