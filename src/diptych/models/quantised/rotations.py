"""What configs say of rotations: `transform_config` of compressed-tensors, `rotation_config` of AutoRound.

A rotation of inputs or outputs is multiplied into the weights that are read; those of the weights themselves were multiplied in
by who wrote the file. Queries and keys that are rotated alike have the scores that they have without.

Sources: compressed-tensors 0.20 (`transform`), llm-compressor 0.14 (`modifiers/transform`), auto-round 0.16
(`algorithms/transforms/hadamard`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from diptych.ground.errors import LoadError
from diptych.models.config import HfConfig
from diptych.models.quantised.fields import is_module, one_of, pattern_of, refuse
from diptych.models.rotations import HADAMARD, LINEAR, Rotation

MATRIX = "random-matrix"
OF_WEIGHTS = ("weight_input", "weight_output")
OF_ACTIVATIONS = ("input", "output")
OF_SCORES = ("q_attn", "k_cache")
MOST_PARTS = 64
NOTE = "rotations are multiplied into the weights that they are for, which become bf16"


def read_transforms(section: HfConfig) -> tuple[Rotation, ...]:
    """Of `transform_config`, those that are not in the weights already. LoadError, by name, for what is not read."""
    groups = section.section("transform_config").section("config_groups")
    if len(groups.raw) > MOST_PARTS:
        raise LoadError(f"{groups.path} has {len(groups.raw)} groups; at most {MOST_PARTS} are read")
    return tuple(found for name in groups.raw for found in _group(name, groups.section(name)))


def _group(name: str, group: HfConfig) -> Iterator[Rotation]:
    kind = one_of(group, "type", (*HADAMARD, MATRIX), None)
    one_of(group, "randomize", (False, None), False)  # permutations, which llm-compressor does not write
    block = group.optional_integer("head_dim")
    parts = group.raw.get("apply")
    if not isinstance(parts, list) or not all(isinstance(one, Mapping) for one in parts) or len(parts) > MOST_PARTS:
        refuse(group, "apply", f"it must be a list of at most {MOST_PARTS} objects")
    each = [HfConfig(one, path=f"apply of {group.path}") for one in parts]
    places = [one_of(one, "location", (*OF_WEIGHTS, *OF_ACTIVATIONS, *OF_SCORES), None) for one in each]
    inverse = {one.flag("inverse", False) for one, place in zip(each, places, strict=True) if place in OF_ACTIVATIONS}
    if kind == MATRIX and len(inverse) > 1:
        refuse(group, "apply", f"inputs and outputs of one {MATRIX} that are rotated both ways are not read")
    of_scores = [(place, one.raw) for one, place in zip(each, places, strict=True) if place in OF_SCORES]
    _require_alike(group, kind, of_scores)
    endings = tuple(f".{name}_{place}.weight" for place in (*OF_ACTIVATIONS, *OF_SCORES))
    for one, place in zip(each, places, strict=True):
        if place in OF_WEIGHTS:
            continue
        yield Rotation(
            ending=f".{name}_{place}.weight",
            shared=endings,
            kind=kind,
            block=block,
            is_of_outputs=place == "output",
            is_inverse=one.flag("inverse", False),
            is_idle=place in OF_SCORES,
            targets=() if place in OF_SCORES else tuple(_modules(one, "targets")),
            ignored=tuple(_modules(one, "ignore")),
        )


def _require_alike(group: HfConfig, kind: str, found: list[tuple[str, Mapping[str, Any]]]) -> None:
    """LoadError where queries are not rotated as the keys that they meet."""
    sides = [
        {(str(one.get("targets")), str(one.get("ignore") or []), bool(one.get("inverse"))) for at, one in found if at == place}
        for place in OF_SCORES
    ]  # fmt: skip
    if sides[0] != sides[1] or (found and (kind not in HADAMARD or len(found) != len(OF_SCORES))):
        refuse(
            group, "apply", f"queries and keys ({' and '.join(OF_SCORES)}) that one Hadamard matrix rotates can be read"
        )


def _modules(part: HfConfig, field: str) -> Iterator[str | re.Pattern[str]]:
    found = part.raw.get(field)
    names = [found] if isinstance(found, str) else [] if found is None else found
    if not isinstance(names, list) or len(names) > MOST_PARTS or not all(isinstance(one, str) for one in names):
        refuse(part, field, f"it must be a list of at most {MOST_PARTS} names of modules")
    for name in names:
        if name.startswith("re:"):
            yield pattern_of(part.path, name.removeprefix("re:"))
        elif name == LINEAR or (is_module(name) and name[0].islower()):
            yield name
        else:
            refuse(part, field, f"names of modules, patterns of them ('re:') and {LINEAR!r} can be read")


def read_rotation(section: HfConfig) -> tuple[Rotation, ...]:
    """Of `rotation_config`: that of the inputs of all projections in MXFP4 and NVFP4."""
    found = section.section("rotation_config")
    if not found.raw:
        return ()
    one_of(found, "algorithm", ("hadamard", None), "hadamard")
    one_of(found, "hadamard_type", HADAMARD[:1], None)  # random ones are not in the files that newer versions write
    one_of(found, "backend", ("auto", "transform"), "auto")
    one_of(found, "fuse_online_to_weight", (False, None), None)
    one_of(found, "allow_online_rotation", (True,), True)
    block = found.integer("block_size")
    if block & block - 1:
        refuse(found, "block_size", "it must be a power of two")
    return (
        Rotation(
            ending=".hadamard_matrix",
            kind=HADAMARD[0],
            block=block,
            targets=(LINEAR,),
            ignored=("lm_head",),
        ),
    )
