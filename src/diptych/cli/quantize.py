"""`diptych quantize MODEL --weights int4 -o DIR`: pack a checkpoint once, load it as often as wanted."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from diptych.cli import options, working
from diptych.cli.options import console, loading_bar
from diptych.engine.text.tokenizer import Tokenizer
from diptych.ground.config import BY_TEXT
from diptych.ground.errors import ConfigError

app = options.command_app()


@app.command()
def quantize(
    model: Annotated[str, typer.Argument(help="'bundled', a checkpoint folder, or a hub name")],
    output: Annotated[Path, typer.Option("--output", "-o", help="the new folder")],
    weights: Annotated[str, typer.Option(help="int8 | int4")] = "int8",
    calibrate: options.Calibrate = BY_TEXT,
    threads: options.OwnThreads = None,
) -> None:
    """Write MODEL with packed weights to a new folder; every command takes it as a model afterwards."""
    directory = working.model_dir(model)
    if directory.is_file():
        raise ConfigError(
            f"{directory} is a GGUF file, and what is packed is a folder with *.safetensors",
            hint="every command takes the file as it is; to pack, name the folder that it was made from",
        )
    calibration = working.calibration_of(calibrate, lambda: Tokenizer.from_dir(directory))
    before = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    with loading_bar(f"packing {model} as {weights}") as progress:
        written = working.save_quantised(
            directory,
            output,
            weights=weights,
            threads=threads,
            progress=progress,
            measure=partial(
                working.calibrated,
                calibration=calibration,
                threads=threads,
                n_directions=working.DIRECTIONS.get(weights, 0),
            ),
        )
    told = f"{output}: {written / 1e6:.1f} MB, from {before / 1e6:.1f} MB ({written / before:.0%})"
    console.print(told, soft_wrap=True)  # a path is copied whole
