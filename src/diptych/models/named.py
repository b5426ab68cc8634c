"""The named models: the fields of public config.json files that decide what a model is, read from `data/models.json`.

>>> named_model("llama-3.1-8b").n_layers
32
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from importlib.resources import files
from typing import Any

from diptych.ground.specs import Flag, Provenance
from diptych.models.config import HfConfig
from diptych.models.read import read_model
from diptych.models.spec import ModelSpec

TABLE: dict[str, Any] = json.loads(files("diptych.models").joinpath("data", "models.json").read_text("utf-8"))
ROWS: dict[str, dict[str, Any]] = {row["name"]: row for row in TABLE["models"]}
ALIASES: dict[str, str] = TABLE["aliases"]

# what `bench --shape` and `lab --shape` run with random weights
SHAPES: dict[str, dict[str, Any]] = {
    name: ROWS[target]["config"] for name, target in ({name: name for name in ROWS} | ALIASES).items()
}


@lru_cache(maxsize=256)
def named_model(name: str) -> ModelSpec:
    """The model of that name in the table; KeyError when there is none."""
    row = ROWS[name]
    facts = (
        Provenance(field=fact["field"], flag=Flag(fact["flag"]), source=fact["source"]) for fact in row["provenance"]
    )
    spec = read_model(HfConfig(row["config"], path=f"the table's {name}"), name=name)
    return replace(spec, published_parameters=row["published_parameters"], provenance=tuple(facts))
