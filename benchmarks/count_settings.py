"""Count the settings of a training run: `python benchmarks/count_settings.py`.

Keys: distinct dotted keys. A key that several alternatives of a block share, such as several engines, counts once, and
so does a block that is written as what differs from another one, such as evaluation.engine.
Settings: a block that stands in several places, such as an optimizer or a data set, counts once.
"""

from jackpot.config.reference import settings


def count_settings() -> tuple[int, int]:
    """Return the number of keys and the number of distinct settings."""
    keys = settings("train")
    groups: list[set[tuple[str, str]]] = []  # classes and names of one setting; keys that share any of them are one
    for setting in keys.values():
        if any(use.same_as for use in setting.uses):
            continue
        merged = {use.origin for use in setting.uses}
        apart = [group for group in groups if not group & merged]
        groups = [*apart, merged.union(*(group for group in groups if group & merged))]
    return len(keys), len(groups)


if __name__ == "__main__":
    print("{} keys, {} distinct settings".format(*count_settings()))
