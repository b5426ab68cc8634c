"""`--lora name=FOLDER`, as the command line gives it."""

from __future__ import annotations

import pytest

from diptych.cli.options import engine_config, one_lora
from diptych.ground.errors import ConfigError


def test_names_and_folders_become_settings() -> None:
    """A folder's name may hold an equals sign; a name may not."""
    config = engine_config(lora=["poet=a/b=c", "clerk=org/name"], max_lora_rank=8)
    assert config.loras == {"poet": "a/b=c", "clerk": "org/name"}
    assert config.max_lora_rank == 8
    assert engine_config(lora=None).loras == {}
    assert engine_config(**one_lora("folder")).loras == {"lora": "folder"}
    assert one_lora(None) == {}


@pytest.mark.parametrize("given", [["folder"], ["=folder"], ["poet="], ["poet=a", "poet=b"]])
def test_what_names_no_adapter_is_refused(given: list[str]) -> None:
    """vLLM's JSON form, a bare folder, a name twice."""
    with pytest.raises(ConfigError, match="lora"):
        engine_config(lora=given)
