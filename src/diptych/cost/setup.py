"""One way to run one model: the device, how many of them, the number formats, and the constants to predict with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

from diptych.cost.calibrated import CalibratedModel
from diptych.cost.calibration import Calibration
from diptych.cost.components import check_tp
from diptych.cost.parameters import parameter_count
from diptych.cost.profile import load_profile, read_profile
from diptych.cost.roofline import compute_dtype, link_rate
from diptych.cost.stacks import calibration_for
from diptych.cost.tables import device_spec, kv_spec, model_spec, quant_spec
from diptych.ground.specs import HardwareSpec, KVSpec, QuantSpec
from diptych.models.read import load_model_file
from diptych.models.spec import ModelSpec
from diptych.models.stored import check_stored

BUNDLED = "diptych-10m"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A model on `tp` devices of one kind."""

    model: ModelSpec
    hardware: HardwareSpec
    quant: QuantSpec
    kv: KVSpec
    tp: int
    calibration: Calibration

    def __post_init__(self) -> None:
        """Refuse a split the model or the device cannot do."""
        check_tp(self.model, self.tp)
        link_rate(self.hardware, self.tp)
        compute_dtype(self.hardware, self.quant.compute)

    def model_of_time(self) -> CalibratedModel:
        """The predictor of step times for this setup."""
        return CalibratedModel(
            self.model, self.hardware, self.quant, calibration=self.calibration, kv=self.kv, tp=self.tp
        )

    def with_weights(self, quant: QuantSpec) -> Setup:
        """The same setup with weights in another format."""
        return replace(self, quant=quant)

    @property
    def label(self) -> str:
        """Short text that names the setup."""
        count = f"{self.tp} x " if self.tp > 1 else ""
        return f"{self.model.name} {self.quant.name} on {count}{self.hardware.name}"


def find_model(name: str) -> ModelSpec:
    """A model by table or hub name, by the path of a config.json or of a folder that holds one, or the bundled one.

    LoadError when the weights beside a config are of another size than it says.
    """
    path = Path(str(files("diptych").joinpath("bundled", BUNDLED)) if name == "bundled" else name)
    if not (path.exists() or name.endswith(".json") or name.startswith((".", "/", "~"))):
        return model_spec(_table_name(name))
    path = path.expanduser()
    spec = load_model_file(path)
    if path.is_dir() or path.name == "config.json":
        check_stored(path if path.is_dir() else path.parent, spec, parameter_count(spec))
    return spec


def _table_name(name: str) -> str:
    """A hub name without its owner and the endings that do not change the shape: Qwen/Qwen3-8B-FP8 is qwen3-8b."""
    short = name.lower().removeprefix("meta-").rpartition("/")[2].removeprefix("meta-")
    for ending in ("-fp8", "-hf", "-instruct", "-chat", "-it", "-base"):
        short = short.removesuffix(ending)
    return short


def find_hardware(name: str, *, stack: str | None = None) -> tuple[HardwareSpec, Calibration]:
    """A device by table name with its calibration, or this machine (`local`) with its measured profile."""
    if name == "local":
        return read_profile(load_profile())
    hardware = device_spec(name.lower())
    return hardware, calibration_for(hardware, stack=stack)


def setup_of(
    model: str, hardware: str, *, weights: str = "bf16", kv: str = "bf16", tp: int = 1, stack: str | None = None
) -> Setup:
    """A setup from names. Raises ConfigError with the nearest names for an unknown one."""
    quant = quant_spec(weights)
    device, calibration = find_hardware(hardware, stack=stack)
    return Setup(model=find_model(model), hardware=device, quant=quant, kv=kv_spec(kv), tp=tp, calibration=calibration)
