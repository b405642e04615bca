"""Compiles the Triton kernels of the head for GPUs that need not be there, and prints their registers.

    make gpu-compile
    make gpu-compile ARGS="--triton FOLDER"    # the Triton that `pip install --target FOLDER triton==...` put there

Every kernel is compiled as `TritonReader` launches it, in all combinations of flags that a run can ask for. The exit
status is 1 where a kernel cannot be compiled, or spills registers into memory.
"""

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from jackpot.objectives.kernels.reader import TileGradient
from jackpot.objectives.kernels.tiles import Tile

GPUS = {80: "A100", 89: "L40S, 4090", 90: "H100, H200", 100: "B200", 120: "5090"}  # by compute capability
BIAS, CAP = torch.zeros(8192), 30.0
HEADS = [(False, None, None), (True, None, None), (True, BIAS, None), (True, None, CAP), (True, BIAS, CAP)]
TOKENS = (5000, 8192, 50, 128, 200, 512)  # of a tile
SHARE = 7  # of the kernels of narrow tiles one in seven is compiled: their programs read less at a time
DTYPES = (torch.bfloat16, torch.float32, torch.float16)  # of gradients
POINTERS = {torch.int64: "*i64", torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
Build = tuple[Any, dict[str, str], dict[str, Any], dict[tuple[int], list]]  # kernel, signature, constants, attributes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--triton", type=Path, help="folder of another Triton")
    parser.add_argument("--sm", type=int, nargs="*", choices=GPUS, default=list(GPUS), help="compute capabilities")
    options = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)  # as tests set it
    if options.triton:
        sys.path.insert(0, str(options.triton))
    import triton

    wanted = list(launches())
    print(f"triton {triton.__version__}, {len(wanted)} kernels: registers at most\n")
    print("| | " + " | ".join(f"sm_{capability} ({GPUS[capability]})" for capability in options.sm) + " |")
    print("| --- |" + " ---: |" * len(options.sm))
    registers: dict[str, dict[int, int]] = {}
    failures = []
    for (kernel, *rest), capability in itertools.product(wanted, options.sm):
        try:
            count, spilled = usage(kernel, *rest, capability)
        except Exception as error:
            failures.append(f"sm_{capability} {kernel.__name__} {rest[1]}: {error}")
            continue
        most = registers.setdefault(kernel.__name__, dict.fromkeys(options.sm, 0))
        most[capability] = max(most[capability], count)
        if spilled:
            failures.append(f"sm_{capability} {kernel.__name__} {rest[1]}: {spilled} bytes of spilled registers")
    for name, most in registers.items():
        print(f"| `{name}` | " + " | ".join(map(str, most.values())) + " |")
    print(f"\n{len(wanted) * len(options.sm) - len(failures)} compiled without a spill, {len(failures)} not")
    print(*failures, sep="\n")
    return int(bool(failures))


def launches() -> Iterator[Build]:
    """Yield what the reader launches, each kernel with other types and flags once."""
    from jackpot.objectives.kernels import triton_reader  # here, as it imports Triton, of the folder that was named

    seen: dict[str, Build] = {}

    def note(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        build = _build(kernel, arguments, constants)
        seen.setdefault(str([kernel.__name__, *build[1:]]), build)

    with patch.object(triton_reader, "_launch", note):
        for tokens in TOKENS:
            for index, tiles in enumerate(_tiles(tokens)):
                if tokens < triton_reader.WIDTH or index % 2 == tokens % 16 // 8:  # 16 divides half of them
                    _read(triton_reader.TRITON, tiles)
    for index, build in enumerate(seen.values()):
        if build[2]["WIDTH"] == triton_reader.WIDTH or index % SHARE == 0:
            yield build


def _tiles(tokens: int) -> Iterator[list[Tile]]:
    """Yield one head and two, the second like the first or with finished logits."""

    def tile(is_raw: bool, bias: torch.Tensor | None, cap: float | None) -> Tile:
        logits, cut = torch.zeros(4, tokens), None if bias is None else bias[:tokens]
        return Tile(logits, cut, cap, 1.0, may_mask=True, is_raw=is_raw, is_kept=False)

    for head in HEADS:
        yield [tile(*head)]
        for other in (head, (not head[0], None, None)):
            yield [tile(*head), tile(*other)]


def _read(reader: Any, tiles: list[Tile]) -> None:
    """Ask for all that a run may ask for."""
    column, positions = torch.zeros(4), torch.zeros(4, dtype=torch.int64)
    for tops, moments in itertools.product((False, True), repeat=2):
        reader.read(tiles, tops, moments)
    sums = [column] * len(tiles)
    if len(tiles) == 2:
        reader.common_mass(tiles, sums, 1.0)
    for trains, dtype in zip(
        itertools.product((True, False), repeat=len(tiles)), itertools.cycle(DTYPES), strict=False
    ):
        out = tiles[0].logits.to(dtype)
        if any(trains):
            gradients = [TileGradient((column,) * 5, out) if wanted else None for wanted in trains]
            reader.differentiate(tiles, sums, gradients, positions)


def _build(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> Build:
    """Return what Triton compiles for these arguments: ones are constants, and it uses what 16 divides."""
    signature: dict[str, str] = {}
    attributes: dict[tuple[int], list] = {}
    constants = dict(constants)
    for position, parameter in enumerate(kernel.params):
        name = parameter.name
        value = constants[name] if name in constants else arguments[position]
        if name in constants or (isinstance(value, int) and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = POINTERS[value.dtype]
        else:
            signature[name] = "i32" if isinstance(value, int) else "fp32"
        if signature[name].startswith("*") or (signature[name] == "i32" and value % 16 == 0):
            attributes[(position,)] = [["tt.divisibility", 16]]
    return kernel, signature, constants, attributes


def usage(
    kernel: Any, signature: dict[str, str], constants: dict[str, Any], attributes: dict, capability: int
) -> tuple[int, int]:
    """Return the registers of a thread, and the bytes of memory that it takes for lack of them."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        dump = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    line = next(line for line in dump.splitlines() if "REG:" in line)
    numbers = dict(entry.split(":") for entry in line.split() if ":" in entry)
    return int(numbers["REG"]), int(numbers["STACK"]) + int(numbers["LOCAL"])


if __name__ == "__main__":
    sys.exit(main())
