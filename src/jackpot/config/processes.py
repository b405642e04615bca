"""Decides which processes of a run generate, where the settings leave that open (`placement.engines: auto`)."""

from jackpot.config.arms import build_config
from jackpot.config.config import Config
from jackpot.config.engines import VLLMEngineConfig, is_remote
from jackpot.core.errors import ConfigError


def place_engines(config: Config, ranks: int, on_gpu: bool, local_ranks: int | None = None) -> Config:
    """Replace `placement.engines: auto` and every `enable_sleep_mode: auto` by values, and return the new settings.

    Several ranks on GPUs, or with vLLM, get one engine process beside each rank of rank 0's machine. On a GPU the
    engine process sleeps while the ranks train, unless it generates meanwhile or the rollout model drafts.

    Args:
        config: settings of the run; they are returned as they are where `placement.engines` is a number.
        ranks: number of processes that train.
        on_gpu: whether the ranks train on GPUs.
        local_ranks: number of ranks on the machine where engine processes start; None: all.

    Raises:
        ConfigError: other settings do not fit what was decided.
    """
    if config.placement.engines != "auto":
        return config

    engines = [config.engine, config.evaluation.engine or config.engine]
    has_vllm = any(isinstance(engine, VLLMEngineConfig) for engine in engines)
    # Whether there are engine processes, one beside each rank on rank 0's machine.
    is_beside = ranks > 1 and (on_gpu or has_vllm) and not all(map(is_remote, engines))
    # Whether the engine processes sleep while the ranks train. They stay awake with `batch.ahead`, as they generate
    # meanwhile, and with drafts, as two engines generate together.
    is_asleep = is_beside and on_gpu and not config.batch.ahead and config.draft is None

    settings = config.model_dump(mode="json")
    settings["placement"]["engines"] = (local_ranks or ranks) if is_beside else 0

    # With a rollout model there are two engines, and of two vLLM engines in a process only one can sleep. So the second
    # engine gets a copy of the settings, in which the sleep mode can differ.
    if is_asleep and config.rollout_model and config.evaluation.engine is None:
        settings["evaluation"]["engine"] = dict(settings["engine"])

    engine_settings = [settings["engine"], settings["evaluation"]["engine"] or {}]  # {}: no second engine
    undecided = [engine for engine in engine_settings if engine.get("enable_sleep_mode") == "auto"]
    for engine in undecided:
        engine["enable_sleep_mode"] = is_asleep
    # Only one of two vLLM engines sleeps: the last one whose mode the settings left open stays awake.
    if all(engine.get("name") == "vllm" and engine["enable_sleep_mode"] for engine in engine_settings) and undecided:
        undecided[-1]["enable_sleep_mode"] = False

    return build_config(settings)


def check_ranks(config: Config, ranks: int) -> None:
    """Refuse a vLLM engine in the process of rank 0 where several ranks train.

    Args:
        config: settings with `placement.engines` decided.
        ranks: number of processes that train.

    Raises:
        ConfigError: an engine is vLLM, and no engine process holds it.
    """
    engines = (config.engine, config.evaluation.engine)
    if ranks > 1 and config.placement.engines == 0 and any(isinstance(engine, VLLMEngineConfig) for engine in engines):
        raise ConfigError(
            "placement.engines is 0, and engine vllm sets up torch.distributed in the process that trains, which has "
            "set it up for its ranks; leave placement.engines out, and each rank has an engine process beside it, or "
            "use engine=vllm_server, or one process"
        )
