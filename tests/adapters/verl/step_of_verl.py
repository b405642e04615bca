"""One step of verl, with docs/verl.patch, on tiny models: from its server's answer to the gradient of its policy loss.

Run with a patched verl on the path: `python step_of_verl.py OUT ROLLOUT_IS [SETTING=VALUE ...]`. It leaves what went
in, what came out and the gradient in the file OUT. verl's own are: `generate` of its server of vLLM, the agent loop and
the worker around it, DataProto, the old log-probs and the update of its trainer, its training worker and its FSDP
engine but for how that distributes a model, the rollout correction, the advantages and the policy loss; of the trainer
with TransferQueue (`use_v1: true`) what writes rollouts, old log-probs and advantages. In place of vLLM and of a GPU
stand tiny models, in place of TransferQueue a dict.
"""

import ast
import asyncio
import logging
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from tokenizers import Tokenizer, models, pre_tokenizers
from transfer_queue import KVBatchMeta
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from verl.experimental.agent_loop import agent_loop, single_turn_agent_loop, tool_agent_loop  # noqa: F401  register
from verl.protocol import DataProto
from verl.trainer.ppo import ray_trainer
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.trainer.ppo.v1 import agent_loop_tq, trainer_base
from verl.utils import normalize_token_ids
from verl.utils import tensordict_utils as tu
from verl.utils.profiler import DistProfiler
from verl.utils.torch_functional import entropy_from_logits
from verl.workers.config import FSDPActorConfig
from verl.workers.engine.fsdp import transformer_impl as fsdp
from verl.workers.engine_workers import TrainingWorker
from verl.workers.rollout.replica import TokenOutput
from verl.workers.utils.losses import ppo_loss

TEMPERATURE = 0.8
VOCAB = 24  # tokens of the tiny models
ROWS = 6  # responses of the step
SETTINGS = """
algorithm: {adv_estimator: grpo, gamma: 1.0, lam: 1.0, use_kl_in_reward: false, rollout_correction: {}}
data: {apply_chat_template_kwargs: {}, tool_config_path: null}
actor_rollout_ref:
  rollout:
    {name: vllm, prompt_length: 6, response_length: 10, calculate_log_probs: 4, temperature: 0.8, top_p: 1.0, top_k: -1,
    n: 1, max_model_len: 64, agent: {default_agent_loop: single_turn_agent},
    multi_turn: {enable: false, format: hermes, max_user_turns: null, max_assistant_turns: null, max_parallel_calls: 1,
    max_tool_response_length: 256, tool_response_truncate_side: middle},
    full_determinism: false, enable_rollout_routing_replay: false, mtp: null}
  model: {path: tiny, use_fused_kernels: false}
  actor:
    {strategy: fsdp, calculate_entropy: false, entropy_coeff: 0.0, ppo_mini_batch_size: 6, ppo_epochs: 1,
    data_loader_seed: 0, shuffle: false, loss_agg_mode: token-mean, loss_scale_factor: null}
"""


def tiny_model(seed: int) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCAB, num_key_value_heads=1, initializer_range=0.3, **sizes))
    return model.float()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCAB)}, unk_token="w1"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", unk_token="w1", eos_token="w2")
    tokenizer.chat_template = template
    return tokenizer


class Engine:
    """Samples from a tiny model, and answers as vLLM does: the top k by rank, and the sampled token beside them."""

    def __init__(self, model: Qwen2ForCausalLM) -> None:
        self.model, self.random = model, torch.Generator().manual_seed(0)

    async def generate(self, prompt: dict, sampling_params: SimpleNamespace, **others: Any) -> Any:
        ids, log_probs = list(prompt["prompt_token_ids"]), []
        length = len(ids) + int(torch.randint(3, sampling_params.max_tokens + 1, (), generator=self.random))

        while len(ids) < length:
            with torch.no_grad():
                logits = self.model(torch.tensor([ids])).logits[0, -1] / sampling_params.temperature
            row = logits.log_softmax(-1)
            token = int(torch.multinomial(row.exp(), 1, generator=self.random))
            top = row.topk(sampling_params.logprobs)
            entries = {token: SimpleNamespace(logprob=float(row[token]), rank=int((row >= row[token]).sum()))}
            for rank, (value, other) in enumerate(zip(*top, strict=True), 1):
                entries[int(other)] = SimpleNamespace(logprob=float(value), rank=rank)
            log_probs.append(entries)
            ids.append(token)

        answer = SimpleNamespace(
            token_ids=ids[len(prompt["prompt_token_ids"]) :], logprobs=log_probs, finish_reason="stop"
        )
        yield SimpleNamespace(outputs=[answer], num_cached_tokens=0, metrics=None)


@agent_loop.register("editing_agent")
class EditingLoop(single_turn_agent_loop.SingleTurnAgentLoop):
    """A loop that takes the first sampled token out of the response."""

    async def run(self, sampling_params: dict[str, Any], **others: Any) -> Any:
        output = await super().run(sampling_params, **others)
        for tokens in (output.response_ids, output.response_mask, output.response_logprobs):
            del tokens[0]
        return output


def server_of_verl(model: Qwen2ForCausalLM, config: Any) -> SimpleNamespace:
    """Return the `generate` of verl's server, from its source: the module itself imports vLLM."""
    path = Path(fsdp.__file__).parents[2] / "rollout" / "vllm_rollout" / "vllm_async_server.py"
    source = ast.parse(path.read_text())
    [server] = [node for node in source.body if getattr(node, "name", "") == "vLLMHttpServer"]
    methods = [node for node in server.body if getattr(node, "name", "") == "generate"]
    inside = {
        "Any": Any,
        "Optional": Optional,
        "RequestOutput": Any,
        "RLInsightLogger": SimpleNamespace(trace_state=lambda *names, **others: torch.no_grad()),
        "SamplingParams": lambda **settings: SimpleNamespace(**{"prompt_logprobs": None, **settings}),
        "TokenOutput": TokenOutput,
        "TokensPrompt": dict,
        "extract_prompt_logprobs": lambda **others: None,
        "logger": logging.getLogger(),
        "normalize_token_ids": normalize_token_ids,
        "qwen2_5_vl_dedup_image_tokens": lambda ids, processor: ids,
    }
    exec(compile(ast.Module(methods, []), str(path), "exec"), inside)

    async def admitted(request_id: str) -> None:
        return None

    state = SimpleNamespace(
        config=config,
        engine=Engine(model),
        global_steps=1,
        lora_as_adapter=False,
        model_config=SimpleNamespace(processor=None),
        replica_rank=0,
        _admitting=0,
        _disaggregation_role=None,
        _park_until_admitted=admitted,
    )

    async def generate(sampling_params: dict, mm_processor_output: Any = None, **request: Any) -> TokenOutput:
        return await inside["generate"](state, sampling_params=dict(sampling_params), **request)

    return SimpleNamespace(generate=generate)


class TinyEngine(fsdp.FSDPEngineWithLMHead):
    """verl's engine on one CPU, whose model is not wrapped, and whose step keeps the gradient."""

    def __init__(self, model: Qwen2ForCausalLM) -> None:
        self.module, self.mode = model, None
        self.use_ulysses_sp, self.ulysses_sequence_parallel_size = False, 1
        self.ulysses_parallel_group = self.ulysses_device_mesh = None
        self.pad_to_length = False
        self._is_offload_param = self._is_offload_optimizer = False
        self._autocast_dtype = torch.float32
        self.compute_entropy_from_logits = entropy_from_logits
        self.engine_config = SimpleNamespace(
            entropy_checkpointing=False,
            entropy_from_logits_with_chunking=False,
            forward_only=False,
            fsdp_size=1,
            infer_max_token_len_per_gpu=1000,
            infer_micro_batch_size_per_gpu=2,
            max_token_len_per_gpu=1000,
            micro_batch_size_per_gpu=2,
            use_dynamic_bsz=False,
            use_fused_kernels=False,
        )

    def to(self, *others: Any, **more: Any) -> None:
        pass

    def get_data_parallel_group(self):
        return None

    def get_data_parallel_size(self) -> int:
        return 1

    def get_data_parallel_rank(self) -> int:
        return 0

    def is_mp_src_rank_with_outputs(self) -> bool:
        return True

    def optimizer_zero_grad(self) -> None:
        pass

    def optimizer_step(self) -> float:
        return 0.0

    def lr_scheduler_step(self) -> float:
        return 0.0


class TinyWorker(TrainingWorker):
    """verl's worker, without a process group of its own."""

    def __init__(self, engine: TinyEngine, loss: Any, use_remove_padding: bool) -> None:
        self.engine, self.loss_fn = engine, loss
        self.device_name = "cpu"
        self.engine_config = engine.engine_config
        self.model_config = {"use_remove_padding": use_remove_padding}
        self.profiler = DistProfiler(rank=0, config=None)
        self.flops_counter = SimpleNamespace(estimate_flops=lambda *others, **more: (0.0, 1.0))

    compute_log_prob = TrainingWorker.infer_batch
    update_actor = TrainingWorker.train_mini_batch


class Store:
    """Rows by key, with the functions of TransferQueue that verl calls here."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}

    def kv_batch_put(self, keys: list[str], fields: Any, **others: Any) -> Any:
        for index, key in enumerate(keys):
            self.rows.setdefault(key, {}).update({name: fields[name][index] for name in list(fields.keys())})
        return KVBatchMeta(keys=keys, tags=[{}] * len(keys))

    async def async_kv_batch_put(self, **arguments: Any) -> None:
        self.kv_batch_put(**arguments)

    def kv_batch_get(self, keys: list[str], select_fields: list[str] | None = None, **others: Any) -> Any:
        rows = [self.rows[key] for key in keys]
        names = [name for name in select_fields or rows[0] if name in rows[0]]
        return tu.list_of_dict_to_tensordict([{name: row[name] for name in names} for row in rows])


def two_models() -> tuple[Qwen2ForCausalLM, Qwen2ForCausalLM]:
    """Return the policy, and a model near it that samples."""
    policy, sampler = tiny_model(1), tiny_model(1)
    with torch.no_grad():
        for weight in sampler.parameters():
            weight += 0.1 * torch.randn_like(weight)
    return policy, sampler


def loop_worker(kind: type, config: DictConfig, sampler: Qwen2ForCausalLM) -> Any:
    """Make verl's worker of agent loops, whose server samples from a tiny model."""
    worker = object.__new__(kind)
    rollout = config.actor_rollout_ref.rollout
    parts = {"config": config, "rollout_config": rollout, "llm_client": server_of_verl(sampler, rollout)}
    rest = {"tokenizer": tiny_tokenizer(), "tools": [], "dataset_cls": object, "mm_processor_kwargs": {}}
    none = dict.fromkeys(("processor", "hf_model_type", "reward_loop_worker_handles"))
    vars(worker).update(parts | rest | none | {"distillation_enabled": False})
    return worker


def training_worker(policy: Qwen2ForCausalLM, use_remove_padding: bool) -> TinyWorker:
    """Make verl's worker that trains a tiny policy."""
    sizes = {"ppo_mini_batch_size": ROWS, "ppo_micro_batch_size_per_gpu": 2, "use_dynamic_bsz": False}
    loss = partial(ppo_loss, config=FSDPActorConfig(strategy="fsdp", rollout_n=1, **sizes))
    return TinyWorker(TinyEngine(policy), loss, use_remove_padding)


def conversations() -> list[list[dict[str, str]]]:
    """Return prompts of one word and of three, in turns."""
    prompts = [f"w3 w{4 + row} w5" if row % 2 else f"w{4 + row}" for row in range(ROWS)]
    return [[{"role": "user", "content": prompt}] for prompt in prompts]


def step(config: DictConfig, use_remove_padding: bool) -> dict[str, Any]:
    """Make one step of the trainer without TransferQueue; return its batch, metrics, models and gradient."""
    policy, sampler = two_models()
    loop = loop_worker(agent_loop.AgentLoopWorker, config, sampler)
    prompts = np.empty(ROWS, dtype=object)
    prompts[:] = conversations()
    names = {"raw_prompt": prompts, "uid": np.array([row // 3 for row in range(ROWS)], dtype=object)}
    batch = asyncio.run(loop.generate_sequences(DataProto.from_dict(non_tensors=names)))

    trainer = object.__new__(ray_trainer.RayPPOTrainer)
    trainer.config, trainer.actor_rollout_wg = config, training_worker(policy, use_remove_padding)
    batch.meta_info |= {"temperature": TEMPERATURE, "global_token_num": batch.batch["attention_mask"].sum(-1).tolist()}
    old, _ = trainer._compute_old_log_prob(batch)
    old.batch.pop("entropys")
    batch = batch.union(old)

    batch, metrics = compute_rollout_correction_and_add_to_batch(batch, config.algorithm.rollout_correction)
    batch.batch["token_level_rewards"] = torch.zeros_like(batch.batch["old_log_probs"])
    batch.batch["token_level_rewards"][:, 0] = torch.arange(ROWS) % 3 / 2
    batch = ray_trainer.compute_advantage(batch, adv_estimator="grpo")
    trainer._update_actor(batch)
    return {
        "batch": dict(batch.batch.items()),
        "metrics": metrics,
        "gradient": {name: weight.grad for name, weight in policy.named_parameters()},
        "policy": policy,
        "sampler": sampler,
    }


def step_of_v1(config: DictConfig) -> dict[str, Any]:
    """Make the same step up to the advantages in the trainer with TransferQueue; return its rows."""
    policy, sampler = two_models()
    store = Store()
    agent_loop_tq.tq = trainer_base.tq = store
    loop = loop_worker(agent_loop_tq.AgentLoopWorkerTQ.__ray_metadata__.modified_class, config, sampler)
    rollout = config.actor_rollout_ref.rollout
    sampling = {"temperature": rollout.temperature, "logprobs": rollout.calculate_log_probs}
    where = {"step": 0, "sample_index": 0, "rollout_n": 0, "validate": False}

    for row, prompt in enumerate(conversations()):
        more = {"agent_name": rollout.agent.default_agent_loop, "uid": f"u{row}", "session_id": 0, "global_steps": 0}
        asyncio.run(loop._run_agent_loop(sampling, where, trace=False, raw_prompt=prompt, **more))
    for row in store.rows.values():
        row["rm_scores"] = torch.zeros(len(row["responses"]))

    worker = training_worker(policy, use_remove_padding=False)
    asked = []

    def compute_log_prob(meta: Any) -> Any:
        data = store.kv_batch_get(meta.keys)
        tu.assign_non_tensor(data, global_token_num=[1] * ROWS, **meta.extra_info)
        asked.append(sorted(meta.extra_info))
        return store.kv_batch_put(meta.keys, worker.infer_batch(data).exclude("metrics"))

    trainer = object.__new__(
        type("Trainer", (trainer_base.PPOTrainer,), dict.fromkeys(trainer_base.PPOTrainer.__abstractmethods__))
    )
    trainer.config, trainer.actor_rollout_wg = config, SimpleNamespace(compute_log_prob=compute_log_prob)
    trainer.ref_in_actor, trainer.ref_policy_wg = False, SimpleNamespace(compute_ref_log_prob=compute_log_prob)

    batch = KVBatchMeta(keys=list(store.rows), tags=[{}] * ROWS)
    trainer._compute_old_log_prob(batch, {})
    trainer._compute_ref_log_prob(batch, {})  # of the policy itself: it must not ask for Z again
    trainer._compute_advantage(batch, metrics := {})
    return {"rows": list(store.rows.values()), "metrics": metrics, "asked": asked}


def main() -> None:
    out, rollout_is, *settings = sys.argv[1:]
    fsdp.get_device_id = fsdp.get_device_name = lambda: "cpu"
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    config = OmegaConf.create(SETTINGS)
    config.algorithm.rollout_correction.rollout_is = rollout_is
    config.merge_with_dotlist(settings)

    steps = {"padded": step(config, use_remove_padding=False), "packed": step(config, use_remove_padding=True)}
    steps["v1"] = step_of_v1(config)
    torch.save(steps, out)


if __name__ == "__main__":
    main()
