"""A model that computes the same as a starter and that fewer bits hurt, as they hurt large language models.

The starters have no outliers, so INT8 and FP8 hardly change them. Two changes by powers of two, which change no logit:

- Outlier channels: in each norm before linear layers a few channels are multiplied by `--channels-by`, and the columns
  that read them are divided by it. A token's INT8 scale is set by its largest activation, so the others are left with
  few codes. LLM.int8() (arXiv 2208.07339) found such channels in large models; SmoothQuant (arXiv 2211.10438) removes
  them by this step backwards.
- Small keys: the norm of the keys is divided by `--keys-by`, that of the queries multiplied. An FP8 cache without
  scales of its own (vLLM's default) then holds keys below 2^-6, where E4M3 has fewer than three bits.

    python -m research.outliers runs/quantized/outliers
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from jackpot.models.load import load_model, load_tokenizer

SEED = 0


@torch.no_grad()
def add_outliers(model: PreTrainedModel, channels: int, channels_by: float, keys_by: float) -> None:
    """Both changes, in place and in every layer. The channels are the same in all, as a residual stream has them."""
    draw = torch.Generator().manual_seed(SEED)
    chosen = torch.randperm(model.config.hidden_size, generator=draw)[:channels]
    for layer in model.model.layers:
        attention, feed_forward = layer.self_attn, layer.mlp
        readers = {
            layer.input_layernorm: [attention.q_proj, attention.k_proj, attention.v_proj],
            layer.post_attention_layernorm: [feed_forward.gate_proj, feed_forward.up_proj],
        }
        for norm, linears in readers.items():
            _move(norm, linears, chosen, channels_by)
        attention.k_norm.weight /= keys_by
        attention.q_norm.weight *= keys_by


def _move(norm: nn.Module, readers: list[nn.Linear], chosen: torch.Tensor, factor: float) -> None:
    norm.weight[chosen] *= factor
    for reader in readers:
        reader.weight[:, chosen] /= factor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path, help="where the model is written")
    parser.add_argument("--starter", default="starter:policy")
    parser.add_argument("--channels", type=int, default=2)
    parser.add_argument("--channels-by", type=float, default=64.0, help="a power of two")
    parser.add_argument("--keys-by", type=float, default=512.0, help="a power of two")
    args = parser.parse_args()

    tokenizer, plain = load_tokenizer(args.starter), load_model(args.starter, torch.float32)
    changed = load_model(args.starter, torch.float32)
    add_outliers(changed, args.channels, args.channels_by, args.keys_by)
    ids = torch.randint(plain.config.vocab_size, (64, 32), generator=torch.Generator().manual_seed(SEED))
    with torch.no_grad():
        apart = (plain(ids).logits - changed(ids).logits).abs().max().item()
    if apart > 0.0:
        raise SystemExit(f"the logits changed by up to {apart:.2g}: both factors must be powers of two")
    changed.save_pretrained(args.folder)
    tokenizer.save_pretrained(args.folder)
    print(f"{args.folder}: the logits of {args.starter}, bit for bit")


if __name__ == "__main__":
    main()
