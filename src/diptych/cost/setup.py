"""One way to run one model: the device, how many of them, the number formats, and the constants to predict with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

from diptych.cost.adapters import Loras, adapter_bytes
from diptych.cost.calibrated import CalibratedModel
from diptych.cost.calibration import Calibration
from diptych.cost.components import check_tp
from diptych.cost.layout import PLAIN, Layout
from diptych.cost.parameters import parameter_count
from diptych.cost.profile import LOCAL, load_profile, local_kind, read_profile
from diptych.cost.roofline import compute_dtype
from diptych.cost.stacks import calibration_for
from diptych.cost.tables import device_spec, kv_spec, model_spec, quant_spec
from diptych.cost.weight_formats import weight_class
from diptych.ground.errors import ConfigError
from diptych.ground.formats import ENGINE_WEIGHTS, MADE_WEIGHTS, engine_quant, head_format, mean_bytes
from diptych.ground.shape import StepShape
from diptych.ground.specs import HardwareSpec, KVSpec, QuantSpec
from diptych.models.config import read_json
from diptych.models.contents import contents_of
from diptych.models.files import has_weights, model_files
from diptych.models.gguf.checkpoint import load_gguf_spec
from diptych.models.gguf.file import SUFFIX, find_gguf
from diptych.models.quantised.method import own_section, packed_for_cpu
from diptych.models.read import load_model_file
from diptych.models.spec import ModelSpec
from diptych.models.stored import check_gguf, check_stored, without_head

BUNDLED = "diptych-10m"
GPU_KV = ("bf16", "fp32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A model on devices of one kind: `tp` of them, or as many groups and stages of tp as the layout says.

    loras: adapters that all requests have in turn; None: they ask for the model as it is.
    """

    model: ModelSpec
    hardware: HardwareSpec
    quant: QuantSpec
    kv: KVSpec
    tp: int
    calibration: Calibration
    layout: Layout = PLAIN
    loras: Loras | None = None

    def __post_init__(self) -> None:
        """Refuse a split the model or the device cannot do, and a KV format that the engine has not on this machine's GPU."""
        check_tp(self.model, self.tp)
        self.layout.check(self.model, self.tp)
        self.layout.check_links(self.hardware, self.tp)
        compute_dtype(self.hardware, self.quant.compute)
        if self.calibration.is_local and self.hardware.kind == "gpu" and self.kv.name not in GPU_KV:
            raise ConfigError(
                f"kv is {self.kv.name}; on a GPU the engine keeps keys and values as {' or '.join(GPU_KV)}"
            )

    def model_of_time(self) -> CalibratedModel:
        """The predictor of step times for this setup."""
        return CalibratedModel(
            self.model,
            self.hardware,
            self.quant,
            calibration=self.calibration,
            kv=self.kv,
            tp=self.tp,
            layout=self.layout,
        )

    def asked(self, work: StepShape) -> StepShape:
        """A step of this setup's requests: its sequences have the adapters in turn."""
        return work if self.loras is None else self.loras.spread(self.model, work)

    @property
    def adapter_bytes(self) -> float:
        """Of all adapters on one device."""
        if self.loras is None:
            return 0.0
        n_parameters = self.loras.count * self.loras.parameters(self.model)
        return adapter_bytes(self.quant, is_ours=self.calibration.is_local) * n_parameters / self.tp / self.layout.pp

    @property
    def n_devices(self) -> int:
        """Of one copy."""
        return self.tp * self.layout.parts

    def with_weights(self, name: str) -> Setup:
        """The same setup with weights in the format of that name."""
        return replace(self, quant=own_quant(name) if self.calibration.is_local else quant_spec(name))

    @property
    def label(self) -> str:
        """Short text that names the setup."""
        count = f"{self.n_devices} x " if self.n_devices > 1 else ""
        layout = f" ({self.split})" if self.layout != PLAIN else ""
        loras = "" if self.loras is None else f" with {self.loras}"
        return f"{self.model.name} {self.quant.name}{loras} on {count}{self.hardware.name}{layout}"

    @property
    def split(self) -> str:
        """How one copy lies on its devices: "tp 4", "tp 2 dp 4 ep 8"."""
        return f"tp {self.tp} {self.layout.words}".strip()


def find_model(name: str) -> ModelSpec:
    """A model by table or hub name, by the path of a config.json, of its folder, or of a GGUF file, or the bundled one.

    LoadError when the weights beside a config are of another size than it says.
    """
    path = model_path(name)
    if path is None:
        return model_spec(table_name(name))
    gguf = find_gguf(path)
    if gguf is not None:
        spec = load_gguf_spec(gguf)
        check_gguf(gguf, parameter_count(spec))
        return spec
    spec = load_model_file(path)
    if path.is_dir() or path.name == "config.json":
        folder = path if path.is_dir() else path.parent
        spec = without_head(folder, spec)
        check_stored(folder, spec, parameter_count(spec))
    return spec


def model_path(name: str) -> Path | None:
    """The file or folder that a model's name is; None for a name of the table."""
    path = Path(str(files("diptych").joinpath("bundled", BUNDLED)) if name == "bundled" else name)
    if path.exists() or name.endswith((".json", SUFFIX)) or name.startswith((".", "/", "~")):
        return path.expanduser()
    return None


def table_name(name: str) -> str:
    """A hub name without its owner and the endings that do not change the shape: Qwen/Qwen3-8B-FP8 is qwen3-8b."""
    short = name.lower().removeprefix("meta-").rpartition("/")[2].removeprefix("meta-")
    for ending in ("-fp8", "-hf", "-instruct", "-chat", "-it", "-base"):
        short = short.removesuffix(ending)
    return short


def find_hardware(
    name: str, *, stack: str | None = None, of_services: bool = False
) -> tuple[HardwareSpec, Calibration]:
    """A device by table name with its calibration, or this machine (a name of LOCAL) with its measured profile."""
    if name in LOCAL:
        if stack is not None:
            raise ConfigError(
                f"the stack is {stack!r}; this machine is priced by its own measurements, of no other software",
                hint="leave --stack out, or name the device",
            )
        hardware, calibration = read_profile(load_profile(kind=local_kind(name)))
        return replace(hardware, name=name), calibration
    hardware = device_spec(name.lower())
    return hardware, calibration_for(hardware, stack=stack, of_services=of_services)


def own_quant(name: str) -> QuantSpec:
    """The format of that name as the engine has it, which multiplies its int8 and int4 as integers; else as others do."""
    is_own = name in ENGINE_WEIGHTS or name in MADE_WEIGHTS
    return engine_quant(name, head_format(name)) if is_own else quant_spec(name)


def stored_quant(name: str) -> QuantSpec | None:
    """How the engine holds the files of a model that are quantised; None for plain ones, and where none are at hand."""
    path = model_files(model_path(name))
    if path is None or not (find_gguf(path) is not None or (path.is_dir() and has_weights(path))):
        return None
    contents = contents_of(path)
    if contents.kept is None:
        return None
    if not contents.formats:
        return own_quant(contents.kept)
    return replace(engine_quant(contents.kept, contents.head), weight_bytes=mean_bytes(contents.formats))


def is_packed(name: str) -> bool:
    """Whether a model is a folder that `diptych quantize` wrote, which the engine loads in that format alone."""
    path = model_path(name)
    config = None if path is None else path / "config.json" if path.is_dir() else path
    if config is None or config.name != "config.json" or not config.is_file():
        return False
    return own_section(read_json(config)) is not None


def refuse_packed(name: str) -> None:
    """ConfigError where a model is packed, which the engine does not load on a GPU."""
    if is_packed(name):
        raise packed_for_cpu(
            "torch",
            "a CUDA device is used",
            hint="price it on the processor: --hardware local-cpu, or name the original",
        )


def setup_of(
    model: str,
    hardware: str,
    *,
    weights: str | None = "bf16",
    kv: str = "bf16",
    tp: int = 1,
    stack: str | None = None,
    layout: Layout = PLAIN,
    loras: Loras | None = None,
    of_services: bool = False,
) -> Setup:
    """A setup from names; weights None: on this machine as a quantised model's files have them, else in 16 bits.

    of_services: priced as the software's running services are, not as its single steps.
    Raises ConfigError with the nearest names for an unknown one.
    """
    quant = quant_spec(weights or "bf16")  # its name is refused before anything is read
    spec = find_model(model)
    if not spec.has_head:
        raise ConfigError(
            f"{spec.name} writes nothing: it embeds or scores texts, and has no answers to plan for",
            hint="`diptych inspect` says what its texts take on a device",
        )
    device, calibration = find_hardware(hardware, stack=stack, of_services=of_services)
    if calibration.is_local:
        if device.kind == "gpu":
            refuse_packed(model)
        stored = stored_quant(model) if weights is None else None
        # on a GPU the engine reads the values of codes in bf16, and other formats were not timed
        if device.kind == "gpu" and stored is not None:
            is_timed = weight_class(stored.weight_bytes, stored.name) in calibration.decode.eb
            stored = stored if is_timed else None
        quant = stored or own_quant(weights or "bf16")
    return Setup(
        model=spec,
        hardware=device,
        quant=quant,
        kv=kv_spec(kv),
        tp=tp,
        calibration=calibration,
        layout=layout,
        loras=loras,
    )
