"""Parsing of YAML that is not trusted: without code, and without aliases, by which few bytes expand to gigabytes."""

from typing import Any

import yaml


class _PlainLoader(yaml.SafeLoader):
    """A loader of YAML that refuses aliases."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has an alias (*NAME), and files of runs have none")
        return super().compose_node(parent, index)


def parse_yaml(text: bytes) -> Any:
    """Parse YAML into plain Python values.

    Raises:
        ValueError: the bytes are no text, are nested too deeply, or hold an impossible date.
        yaml.YAMLError: the text is no YAML, or has an alias.
    """
    try:
        return yaml.load(text.decode(), Loader=_PlainLoader)  # noqa: S506  it is a SafeLoader
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
