"""New."""

import base64
import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jackpot.ui.charts import Table


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """What the inspector shows. `index` says what is there and how much of it, `packs` has the rest by name."""

    index: Mapping[str, Any]
    packs: Mapping[str, str]  # gzip in base64
    left_out: Table  # the saved iterations that had no room; without rows where all have some


def packed(value: Any) -> str:
    """JSON, compressed, as text that can stand in HTML. Equal values are packed equally."""
    data = json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    return base64.b64encode(gzip.compress(data, compresslevel=6, mtime=0)).decode()
