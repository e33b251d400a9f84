"""Engine: what trains the runs of a grid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from efcil.errors import SettingsError, unknown

LOCAL = "local"
ENGINES = (LOCAL, "ray", "slurm", "submitit-local")


@dataclass(frozen=True)
class Engine:
    """What trains the runs of a grid. `address` is that of a Ray cluster; `options` are passed on to the engine."""

    name: str = LOCAL
    address: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name not in ENGINES:
            raise unknown("engine", self.name, ENGINES)
        if self.address is not None and self.name != "ray":
            raise SettingsError(f"--address is that of a Ray cluster, and the engine is {self.name}. Use --engine ray.")
        if self.options and self.name == LOCAL:
            raise SettingsError("--engine-option is for clusters, and the engine is local. Give --engine too.")
        at_once = self.options.get("at_once", "1")
        if not at_once.isdecimal() or not 0 < int(at_once) < 10**9:
            raise SettingsError(f"Engine option 'at_once' must be a whole number, at least 1, but it is {at_once!r}.")

    @property
    def at_once(self) -> int | None:
        """The most runs that are submitted at a time; None for all."""
        return int(self.options["at_once"]) if "at_once" in self.options else None
