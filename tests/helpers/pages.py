"""What a written page holds, without a browser."""

import base64
import gzip
import re
from pathlib import Path


def page_data(path: Path, name: str = "page") -> str:
    """The text of one of the page's packs: by default the JSON of its sections and numbers."""
    [pack] = re.findall(rf'id="pack-{name}">([^<]*)</script>', path.read_text())
    return gzip.decompress(base64.b64decode(pack)).decode()
