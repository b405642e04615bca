"""What the package ships is complete."""

import tomllib
from pathlib import Path

import jackpot
from helpers.paths import ROOT

PACKAGE = Path(jackpot.__file__).parent


def test_every_data_file_of_the_package_is_shipped():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["jackpot"]
    shipped = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    data = {path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert data and data <= shipped
    assert {"policy", "rollout_model"} <= {path.parent.name for path in shipped}


def test_the_package_names_what_it_has():
    assert set(jackpot.__all__) <= set(dir(jackpot)) and jackpot.__version__
    assert {*jackpot._MODULES, "obrs"} == set(jackpot.__all__)
    assert (PACKAGE / "py.typed").is_file()
