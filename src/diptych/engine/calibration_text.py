"""Which text a model reads before its weights are made int8 or int4, so that they are balanced by what it sees
(`compute.loading.calibration`).

`auto` is the text that ships: short passages of prose, code, tables, chat and several languages, none of them in a text that
`diptych lab quality` measures with. `weights` reads nothing: channels are balanced by the weights alone. All else names a text.

    calibration = calibration_of("auto", lambda: tokenizer)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import torch

from diptych.compute.loading.calibration import Calibration
from diptych.engine.memory import memory_of
from diptych.engine.text.tokenizer import Tokenizer
from diptych.ground.config import BY_TEXT, BY_WEIGHTS
from diptych.ground.errors import ConfigError

SHIPPED = Path(__file__).resolve().parent.parent / "bundled" / "calibration.txt"
BETWEEN_PASSAGES = "\n\n\n"
PASSAGE_TOKENS = 24  # of each passage that ships; quality by their number is in LAB.md
TEXT_TOKENS, WINDOW_TOKENS = 2048, 512  # of a text that somebody names
MEMORY_SHARE = 0.5  # of what is free: nothing of it is held when the weights are packed


def calibration_of(calibrate: str, tokenizer: Callable[[], Tokenizer]) -> Calibration:
    """What `EngineConfig.calibrate` asks for. ConfigError for a text that cannot be read."""
    if calibrate == BY_WEIGHTS:
        return Calibration(name=BY_WEIGHTS, windows=None, is_asked=True)
    is_asked = calibrate != BY_TEXT
    try:
        text = (Path(calibrate).expanduser() if is_asked else SHIPPED).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"cannot read the text in {calibrate}: {error}",
            hint=f"calibrate names a text, or is {BY_TEXT} (the text that ships) or {BY_WEIGHTS} (none)",
        ) from error

    def windows() -> list[list[int]]:
        words = tokenizer()
        if is_asked:
            token_ids = words.encode(text)[:TEXT_TOKENS]
            return [token_ids[start : start + WINDOW_TOKENS] for start in range(0, len(token_ids), WINDOW_TOKENS)]
        return [words.encode(passage)[:PASSAGE_TOKENS] for passage in text.strip().split(BETWEEN_PASSAGES)]

    lengths = (TEXT_TOKENS, WINDOW_TOKENS) if is_asked else (PASSAGE_TOKENS,)
    return Calibration(
        name=f"{Path(calibrate).name} {hashlib.sha256(text.encode()).hexdigest()[:32]} {lengths}",
        windows=windows,
        is_asked=is_asked,
        most_bytes=int(memory_of(torch.device("cpu")).available_bytes * MEMORY_SHARE),
    )
