"""A stand-in for an SGLang server: the routes of SGLang 0.5.23 as its source has them, computed with a tiny model.

The names in `GENERATE`, `SAMPLING`, `UPDATE` and `CHECK` are those that its io_struct.py,
api/v1/api_types.py and sampling_params.py declare (the wheel of PyPI, sglang-0.5.23-cp311-manylinux_2_34_x86_64).
"""

import hashlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from aiohttp import web
from safetensors.torch import load_file

from helpers.engines.reference import CONTEXT, EOS, VOCAB_SIZE, tiny_model
from helpers.engines.scripted_server import ScriptedServer

GENERATE = {  # of those of GenerateReqInput, the ones about text; it ignores others
    *("rid", "text", "input_ids", "stream", "sampling_params", "return_logprob", "logprob_start_len"),
    *("top_logprobs_num", "token_ids_logprob", "return_hidden_states", "return_text_in_logprobs"),
    *("return_prompt_token_ids", "return_sampling_mask", "lora_path", "priority", "extra_key", "session_params"),
}
SAMPLING = {  # others are refused
    *("max_new_tokens", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k", "min_p"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens", "n", "beam_width"),
    *("json_schema", "regex", "ebnf", "structural_tag", "ignore_eos", "skip_special_tokens"),
    *("spaces_between_special_tokens", "no_stop_trim", "stream_interval", "logit_bias", "sampling_seed"),
    *("custom_params", "watermark", "choice"),
}
UPDATE = {
    *("model_path", "load_format", "abort_all_requests", "weight_version", "is_async", "torch_empty_cache"),
    *("keep_pause", "recapture_cuda_graph", "token_step", "flush_cache", "manifest"),
}
CHECK = {"action", "allow_quant_error", "skip_tensor_list", "selector"}
DECLARED = {"/generate": GENERATE, "/update_weights_from_disk": UPDATE, "/weights_checker": CHECK}
_FUSED = {r"\b[qkv]_proj": "qkv_proj", r"\b(gate|up)_proj": "gate_up_proj"}
_SMALLEST = float(np.finfo(np.float32).min)  # in place of minus infinity


class SGLangStandIn(ScriptedServer):
    """Serves like SGLang with `--enable-deterministic-inference`. `script` replaces the response of a path."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = {
            "device": "cpu",
            "dtype": "float32",
            "enable_deterministic_inference": True,
            "enable_fp32_lm_head": False,
            "kv_cache_dtype": "auto",
            "max_req_input_len": CONTEXT - 6,
            "preferred_sampling_params": None,
            "quantization": None,
            "speculative_algorithm": None,
        }

    def restart(self) -> None:
        model = tiny_model(seed=9).eval()
        for parameter in model.parameters():
            parameter.data.add_(0.01)  # norms too, which are 1 in other tiny models
        self.model, self.tag, self.salt = model, "default", b""  # at once: another thread may answer meanwhile

    def load(self, folder: str) -> None:
        """Take the weights of a folder."""
        weights = load_file(Path(folder) / "model.safetensors")
        del weights["lm_head.weight"]  # tied, so SGLang skips it
        self.model.load_state_dict(weights, strict=False)

    def checksums(self) -> dict[str, str]:
        """Return the first 8 bytes of SHA-256 under SGLang's names, as on a CPU; other numbers with a `salt`."""
        hashes: dict[str, Any] = {}
        for name, parameter in self.model.named_parameters():
            for pattern, fused_name in _FUSED.items():
                name = re.sub(pattern, fused_name, name)
            hashes.setdefault(name, hashlib.sha256(self.salt)).update(parameter.detach().numpy().tobytes())
        return {name: value.hexdigest()[:16] for name, value in hashes.items()}

    def _usual(self, path: str, body: dict[str, Any]) -> Any:
        """Do what a call asks for, and return SGLang's answer; what SGLang does not declare fails the test."""
        if path in DECLARED and (unknown := body.keys() - DECLARED[path]):
            raise AssertionError(f"{path} does not know {unknown}")
        match path:
            case "/model_info":
                return {"model_path": "m", "weight_version": self.tag}
            case "/server_info":
                return self.settings
            case "/weights_checker":
                rank = {"checksums": self.checksums(), "per_gpu_checksum": "", "parallelism_info": []}
                return {"success": True, "message": "", "ranks": [rank], "per_engine_checksum": ""}
            case "/update_weights_from_disk":
                self.load(body["model_path"])
                self.tag = body["weight_version"]
                return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
            case "/generate":
                return self._generate(body)
        raise AssertionError(f"SGLang has no {path} that is needed here")

    @torch.no_grad()
    def _generate(self, body: dict[str, Any]) -> Any:
        """Sample a response by Gumbel noise of its seed, one token after the other."""
        sampling, prompt = body["sampling_params"], body["input_ids"]
        if unknown := sampling.keys() - SAMPLING:
            return web.json_response({"error": f"unknown field {sorted(unknown)[0]}"}, status=400)
        tokens: list[int] = []
        sampled = []  # [log-prob, id, None] of each token
        tops, asked_entries = [], []  # lists of such entries for each token
        finish = None
        while finish is None:
            logits = self.model(torch.tensor([prompt + tokens])).logits[0]
            log_probs = torch.log_softmax(logits[-1] / sampling["temperature"], -1).clamp(min=_SMALLEST)
            draw = np.random.default_rng([sampling["sampling_seed"], len(prompt) + len(tokens)])
            token = int((log_probs.numpy() + draw.gumbel(size=VOCAB_SIZE)).argmax())
            tokens.append(token)
            sampled.append([log_probs[token].item(), token, None])
            values, ids = log_probs.topk(min(body["top_logprobs_num"], VOCAB_SIZE))
            tops.append([[value, top_id, None] for value, top_id in zip(values.tolist(), ids.tolist(), strict=True)])
            asked_ids = body.get("token_ids_logprob", [])
            asked_entries.append([[log_probs[asked_id].item(), asked_id, None] for asked_id in asked_ids])
            if not sampling["ignore_eos"] and token in {EOS, *sampling["stop_token_ids"]}:
                finish = {"type": "stop", "matched": token}
            elif len(tokens) == sampling["max_new_tokens"]:
                finish = {"type": "length", "length": len(tokens)}
        meta = {
            "finish_reason": finish,
            "weight_version": self.tag,
            "output_token_logprobs": sampled,
            "output_top_logprobs": tops,
            "output_token_ids_logprobs": asked_entries,
            "input_token_logprobs": self._of_prompt(prompt, body["logprob_start_len"]),
        }
        prompt_ids = {"prompt_token_ids": prompt} if body["return_prompt_token_ids"] else {}
        return {"text": "", "output_ids": tokens, "meta_info": meta} | prompt_ids

    def _of_prompt(self, prompt: list[int], start: int) -> list[list[Any]]:
        """Return the entries of the prompt's tokens from `start` on, the first without log-prob, at temperature 1."""
        if start == -1:
            return []
        log_probs = torch.log_softmax(self.model(torch.tensor([prompt])).logits[0], -1)
        values = [None, *(log_probs[i - 1, prompt[i]].item() for i in range(start + 1, len(prompt)))]
        ids = [token if token < VOCAB_SIZE - 1 else 0 for token in prompt[start:]]
        return [[value, token, None] for value, token in zip(values, ids, strict=True)]
