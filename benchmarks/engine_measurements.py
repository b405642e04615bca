"""One measurement of `engines.py`, in a process of its own: takes a job as JSON, prints its result as JSON."""

import hashlib
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

Job = dict[str, Any]
Result = dict[str, float]
RESULT: Result = {}
CONTEXT, PROMPT = 128, 16  # tokens
SIZES = {  # vocabulary, hidden, intermediate, layers, heads of 32
    "tiny": (512, 64, 96, 2, 2),
    "1M": (512, 128, 384, 4, 4),
    "25M": (4096, 384, 1536, 10, 12),
    "100M": (8192, 768, 3072, 10, 24),
    "400M": (8192, 1536, 4096, 14, 48),
}


@contextmanager
def clock(name: str):
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    RESULT[f"{name}/wall"] = time.perf_counter() - wall
    RESULT[f"{name}/cpu"] = time.process_time() - cpu


with clock("import"):
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from jackpot.config.engines import TransformersEngineConfig, VLLMEngineConfig
    from jackpot.config.sampling import Sampling
    from jackpot.core.digest import weights_digest
    from jackpot.core.types import Prompt, Rollout, Version
    from jackpot.launch.engines import make_engine
    from jackpot.rollout.engines.base import Engine, Request
    from jackpot.rollout.engines.vllm.library import import_vllm

START, NEXT = Version(0, 0), Version(1, 1)


def new_model(size: str, seed: int) -> Qwen3ForCausalLM:
    vocab, hidden, intermediate, layers, heads = SIZES[size]
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        initializer_range=2.0 * hidden**-0.5,  # logits of a standard deviation near 2
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,  # every response has its full length
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config)


def model_folder(job: Job) -> str:
    folder = Path(job["folder"]) / job["model"]
    if not folder.exists():
        new_model(job["model"], 0).save_pretrained(folder)
    return str(folder)


def new_engine(job: Job, engine: str) -> Engine:
    folder = model_folder(job)
    dtype = job.get("dtype", "fp32")
    if engine == "vllm":
        with clock("import vllm"):
            import_vllm(compiles=job["device"] != "cpu")
        for part in ("wall", "cpu"):
            RESULT[f"import/{part}"] += RESULT.pop(f"import vllm/{part}")
        config = VLLMEngineConfig(dtype=dtype, max_num_seqs=64)
    else:
        config = TransformersEngineConfig(dtype=dtype, max_num_seqs=64)
    with clock("construction"):
        return make_engine(config, folder, torch.device(job["device"]), START)


def requests(job: Job, count: int, sampling: Sampling) -> list[Request]:
    draw = torch.Generator().manual_seed(0)
    vocab = SIZES[job["model"]][0]
    prompts = [tuple(torch.randint(vocab, (PROMPT,), generator=draw).tolist()) for _ in range(count)]
    return [
        Request(uid=f"{number}", prompt=prompt_of(f"{number}", ids), seed=number, sampling=sampling)
        for number, ids in enumerate(prompts)
    ]


def prompt_of(uid: str, ids: Sequence[int]) -> Prompt:
    return Prompt(uid=uid, text="", answer="", token_ids=tuple(ids))


def speed(job: Job) -> None:
    engine = new_engine(job, job["engine"])

    def write(top: int) -> None:
        sampling = Sampling(max_new_tokens=job["tokens"], num_top_log_probs=top)
        rollouts = engine.generate(requests(job, job["responses"], sampling))
        assert sum(len(rollout.token_ids) for rollout in rollouts) == job["responses"] * job["tokens"]

    write(20)  # the first time is another one
    RESULT["tokens"] = job["responses"] * job["tokens"]
    fastest({"top 0": lambda: write(0), "top 20": lambda: write(20)})
    if job["engine"] == "vllm":
        parameters = engine._vllm.SamplingParams
        without = SimpleNamespace(**vars(engine._vllm) | {"SamplingParams": lambda seed, **words: parameters(**words)})
        fastest({"top 0, no seeds": lambda: with_names(engine, without, lambda: write(0))})
    engine.close()


def with_names(engine: Any, names: Any, action: Callable[[], None]) -> None:
    before, engine._vllm = engine._vllm, names
    action()
    engine._vllm = before


def fastest(actions: dict[str, Callable[[], None]], times: int = 2) -> None:
    """Of a few times each, taking turns, the one with the fewest CPU seconds."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in actions}
    for _ in range(times):
        for name, action in actions.items():
            with clock(name):
                action()
            found[name].append((RESULT[f"{name}/cpu"], RESULT[f"{name}/wall"]))
    for name, pairs in found.items():
        RESULT[f"{name}/cpu"], RESULT[f"{name}/wall"] = min(pairs)


def update(job: Job) -> None:
    engine = new_engine(job, job["engine"])
    with torch.device(job["device"]):
        weights = [(name, parameter.detach()) for name, parameter in new_model(job["model"], 1).named_parameters()]
    RESULT["parameters"] = sum(tensor.numel() for _, tensor in weights)
    engine.update_weights(weights, NEXT)
    held = []

    def synchronised(action: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            held.append(action())
            if job["device"] != "cpu":
                torch.cuda.synchronize()

        return run

    fastest(
        {
            "update": synchronised(lambda: engine.update_weights(weights, NEXT)),
            "digest": synchronised(lambda: weights_digest(weights, torch.float32)),
        }
    )
    assert len(set(held)) == 1
    engine.close()


def sha256(tensor: torch.Tensor) -> None:
    hashlib.sha256().update(tensor.cpu().view(torch.uint8).numpy())


def digest(job: Job) -> None:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[job["dtype"]]
    tensors = [torch.randn(25_000_000, device=job["device"]).to(dtype) for _ in range(job["parameters"] // 25_000_000)]
    fastest(
        {
            "sha256": lambda: [sha256(tensor) for tensor in tensors],
            "digest": lambda: weights_digest([(f"{n}", tensor) for n, tensor in enumerate(tensors)], dtype),
        }
    )


TEMPERATURES = (1.0, 0.7)
SCORED = 8  # responses, at temperatures where vLLM has to be asked for every token


def agreement(job: Job) -> None:
    if job["stage"] == "exact":
        exact(job)
        return
    place, key = Path(job["folder"]), f"{job['model']}-{job['dtype']}"
    engine = new_engine(job, job["stage"].partition("_")[0])
    written = {}
    for temperature in TEMPERATURES:
        sampling = Sampling(temperature=temperature, max_new_tokens=64, num_top_log_probs=20)
        if "reads" in job["stage"]:
            other = "transformers" if job["stage"] == "vllm_reads" else "vllm"
            rollouts = torch.load(place / f"{key}-{other}.pt", weights_only=False)[temperature]
            read(engine, rollouts, sampling, f"{other} generated, temperature {temperature:g}")
        if "writes" in job["stage"]:
            written[temperature] = engine.generate(requests(job, 64, sampling))
    if written:
        torch.save(written, place / f"{key}-{job['stage'].partition('_')[0]}.pt")
    engine.close()


def read(engine: Engine, rollouts: Sequence[Rollout], sampling: Sampling, what: str) -> None:
    """Compare the log-probs of the engine that generated `rollouts` with this engine's: sampled and top tokens."""
    few = rollouts[:SCORED]
    scores = torch.cat(engine.score(few, sampling.temperature))
    compare(f"{what}: sampled", torch.cat([rollout.rollout_log_probs for rollout in few]), scores)
    places = [(rollout, token) for rollout in rollouts for token in range(0, len(rollout.token_ids), 8)]
    asked = [
        Request(
            uid=f"{number}",
            prompt=prompt_of(f"{number}", [*rollout.prompt.token_ids, *rollout.token_ids[:token].tolist()]),
            seed=number,
            sampling=sampling.model_copy(update={"max_new_tokens": 1}),
        )
        for number, (rollout, token) in enumerate(places)
    ]
    ours, theirs, lost = [], [], 0
    for (rollout, token), answer in zip(places, engine.generate(asked), strict=True):
        mine = dict(zip(answer.top_ids[0].tolist(), answer.top_log_probs[0].tolist(), strict=True))
        named = zip(rollout.top_ids[token].tolist(), rollout.top_log_probs[token].tolist(), strict=True)
        for token_id, log_prob in named:
            lost += token_id not in mine
            if token_id in mine:
                ours.append(mine[token_id])
                theirs.append(log_prob)
    compare(f"{what}: top 20", torch.tensor(theirs), torch.tensor(ours))
    RESULT[f"{what}: top 20/share in one top 20 alone"] = lost / (lost + len(ours))
    RESULT[f"{what}: mean largest probability"] = statistics.mean(
        rollout.top_log_probs[:, 0].exp().mean().item() for rollout in rollouts
    )


@torch.no_grad()
def exact(job: Job) -> None:
    """Compare what each engine said of its own text with the model in float64, all positions."""
    model = Qwen3ForCausalLM.from_pretrained(model_folder(job), dtype=torch.float64).eval()
    for engine in ("transformers", "vllm"):
        written = torch.load(Path(job["folder"]) / f"{job['model']}-{job['dtype']}-{engine}.pt", weights_only=False)
        for temperature, rollouts in written.items():
            ids = torch.tensor([[*rollout.prompt.token_ids, *rollout.token_ids.tolist()] for rollout in rollouts])
            logits = model(ids).logits[:, PROMPT - 1 : -1]
            every = torch.log_softmax(logits / temperature, dim=-1)
            top = torch.stack([rollout.top_ids for rollout in rollouts])
            said = torch.stack([rollout.top_log_probs for rollout in rollouts])
            what = f"{engine} against float64, temperature {temperature:g}: top 20"
            compare(what, said.flatten(), every.gather(2, top).flatten())


def compare(what: str, theirs: torch.Tensor, ours: torch.Tensor) -> None:
    gap = (theirs.double().exp() - ours.double().exp()).abs()
    RESULT.update({f"{what}/max": gap.max().item(), f"{what}/mean": gap.mean().item(), f"{what}/count": len(gap)})


def main() -> None:
    job = json.loads(sys.argv[1])
    {"speed": speed, "update": update, "digest": digest, "agreement": agreement}[job["what"]](job)
    RESULT["peak_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print("RESULT " + json.dumps(RESULT))


if __name__ == "__main__":
    main()
