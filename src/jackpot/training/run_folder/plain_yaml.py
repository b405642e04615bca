"""Parses YAML that another wrote: without code and without aliases, by which a few bytes stand for gigabytes."""

from typing import Any

import yaml


class _PlainLoader(yaml.SafeLoader):
    """A loader that refuses aliases."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has an alias (*NAME), and files of runs have none")
        return super().compose_node(parent, index)


def parse_yaml(text: bytes) -> Any:
    """Parse YAML.

    Raises:
        ValueError: it is no YAML, no text, has an alias, or is nested too deeply.
    """
    try:
        return yaml.load(text.decode(), Loader=_PlainLoader)  # noqa: S506  it is a SafeLoader
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
