"""The rows of `make gpu PART=check` on the virtual GPU."""

from typing import Any

from gpu_parts import check
from gpu_parts.machine import Machine

from virtual_gpu.runs import flex_attention


def wrong_rows() -> dict[str, Any]:
    """Return the rows whose numbers are not those of the CPU, with what they say.

    Raises:
        RuntimeError: another kernel serves than on a GPU, or tensors of both devices are mixed.
    """
    with flex_attention():
        results = {row.name: row.measure() for row in check.rows(Machine(tiny=True))}
    return {name: result for name, result in results.items() if not result["right"]}
