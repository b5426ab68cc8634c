"""`diptych quantize MODEL --weights int4 -o DIR`: pack a checkpoint once, load it as often as wanted."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from diptych.cli import options
from diptych.cli.options import console, loading_bar
from diptych.compute.calibration import measured_inputs
from diptych.compute.quant import save_quantised
from diptych.engine.load import model_dir
from diptych.engine.text.tokenizer import Tokenizer
from diptych.ground.errors import ConfigError

CALIBRATION_TOKENS = 2048
WINDOW_TOKENS = 512

app = options.command_app()


@app.command()
def quantize(
    model: Annotated[str, typer.Argument(help="'bundled', a checkpoint folder, or a hub name")],
    output: Annotated[Path, typer.Option("--output", "-o", help="the new folder")],
    weights: Annotated[str, typer.Option(help="int8 | int4")] = "int8",
    calibrate: Annotated[
        Path | None,
        typer.Option(
            help=f"a text: its first {CALIBRATION_TOKENS:,} tokens are read first, to find channels whose activations are "
            "large where no weight says so",
        ),
    ] = None,
    threads: options.OwnThreads = None,
) -> None:
    """Write MODEL with packed weights to a new folder; every command takes it as a model afterwards."""
    directory = model_dir(model)
    if directory.is_file():
        raise ConfigError(
            f"{directory} is a GGUF file, and what is packed is a folder with *.safetensors",
            hint="every command takes the file as it is; to pack, name the folder that it was made from",
        )
    measure = None if calibrate is None else partial(measured_inputs, windows=_windows(directory, calibrate))
    before = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    with loading_bar(f"packing {model} as {weights}") as progress:
        written = save_quantised(
            directory, output, weights=weights, threads=threads, progress=progress, measure=measure
        )
    console.print(f"{output}: {written / 1e6:.1f} MB, from {before / 1e6:.1f} MB ({written / before:.0%})")


def _windows(model: Path, text: Path) -> list[list[int]]:
    """The text's first tokens. ConfigError for one that cannot be read, or has none."""
    try:
        words = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the text in {text}: {error}") from error
    token_ids = Tokenizer.from_dir(model).encode(words)[:CALIBRATION_TOKENS]
    return [token_ids[start : start + WINDOW_TOKENS] for start in range(0, len(token_ids), WINDOW_TOKENS)]
