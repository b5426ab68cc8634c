"""What one step costs, component by component: the nouns that `components` fills and that predictors read."""

from __future__ import annotations

from dataclasses import dataclass, replace

# Components whose time is attention's, not a GEMM's over the step's rows.
ATTENTION = ("scores", "values", "index")


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One component over `layers` layers. activation_bytes: unfused, in plus out; fused kernels move fewer. link_bytes: that a
    device sends to the others.
    """

    name: str
    flops: float = 0.0
    vector_flops: float = 0.0
    weight_bytes: float = 0.0
    activation_bytes: float = 0.0
    kv_read_bytes: float = 0.0
    kv_write_bytes: float = 0.0
    link_bytes: float = 0.0

    @property
    def bytes(self) -> float:
        """Traffic that no fusion can avoid: weights and KV."""
        return self.weight_bytes + self.kv_read_bytes + self.kv_write_bytes

    @property
    def intensity(self) -> float | None:
        """FLOPs per unavoidable byte; None for a component that moves none."""
        return self.flops / self.bytes if self.bytes else None

    def times(self, n: float) -> Component:
        """The same component in n layers, or its share of the work."""
        return Component(name=self.name, **{field: getattr(self, field) * n for field in _FIELDS})

    def plus(self, other: Component) -> Component:
        """Both together under this name."""
        return Component(name=self.name, **{field: getattr(self, field) + getattr(other, field) for field in _FIELDS})


_FIELDS = tuple(field for field in Component.__dataclass_fields__ if field != "name")


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseCost:
    """One step on one of `tp` devices."""

    components: tuple[Component, ...]
    tp: int

    def total(self, field: str) -> float:
        """Sum of one field over all components."""
        return float(sum(getattr(component, field) for component in self.components))

    @property
    def flops(self) -> float:
        """Matrix FLOPs."""
        return self.total("flops")

    @property
    def weight_bytes(self) -> float:
        """Weights read."""
        return self.total("weight_bytes")

    @property
    def kv_bytes(self) -> float:
        """KV read and written."""
        return self.total("kv_read_bytes") + self.total("kv_write_bytes")

    @property
    def bytes(self) -> float:
        """Weights and KV: what must cross the memory bus."""
        return self.weight_bytes + self.kv_bytes

    @property
    def intensity(self) -> float:
        """FLOPs per byte of the whole step."""
        return self.flops / self.bytes

    def shared(self, *, rows: int, experts: float) -> PhaseCost:
        """Of one of so many devices that share the rows, and so many that share the weights of the experts."""
        parts = []
        for part in self.components:
            one = part.times(1.0 / rows)
            weights = part.weight_bytes / (experts if part.name == "experts" else 1)
            parts.append(replace(one, weight_bytes=weights))
        return replace(self, components=tuple(parts))

    def component(self, name: str) -> Component:
        """A component by name; an empty one when the model has none such."""
        for component in self.components:
            if component.name == name:
                return component
        return Component(name=name)
