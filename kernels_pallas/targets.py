"""The machines that kernels are written for, and the facts about each that kernels and planners need.

The figures are data, ``chips.json``, with their sources.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources

BACKENDS = ("reference", "cpu", "tpu", "gpu")


@dataclass(frozen=True)
class TpuChip:
    """One TPU generation, as one JAX device of it sees it."""

    name: str
    vmem_bytes: int
    # TensorCores that share one device ("megacore"): a parallel grid axis is split over them
    cores: int
    hbm_bytes_per_second: float
    # dense bfloat16 product
    flops_per_second: float
    # to the other devices, all links and both directions together
    link_bytes_per_second: float
    # how topologies.get_topology_desc names the generation
    topology: str


@dataclass(frozen=True)
class GpuChip:
    """One NVIDIA chip. ``target_config`` is the file under ``gpu_targets/`` that lets XLA compile without the chip."""

    name: str
    sm: str
    num_sms: int
    smem_bytes: int
    hbm_bytes_per_second: float
    # dense bfloat16 product
    flops_per_second: float
    # to the other devices, all links and both directions together
    link_bytes_per_second: float
    target_config: str


_CHIPS = json.loads(resources.files("precast.kernels_pallas").joinpath("chips.json").read_text())
TPU_CHIPS = {fields["name"]: TpuChip(**fields) for fields in _CHIPS["tpu"]}
GPU_CHIPS = {fields["name"]: GpuChip(**fields) for fields in _CHIPS["gpu"]}


@dataclass(frozen=True)
class Target:
    """Where a kernel will run: a backend and, for accelerators, the chip.

    ``interpret`` runs an accelerator's kernel in Pallas's interpreter on the host (tests only).
    Raises ValueError for a backend or chip that is not known.
    """

    backend: str
    chip: str | None = None
    interpret: bool = False

    def __post_init__(self):
        if self.backend not in BACKENDS:
            raise ValueError(f"target: backend {self.backend!r} is not one of {', '.join(BACKENDS)}")
        chips = {"tpu": TPU_CHIPS, "gpu": GPU_CHIPS}.get(self.backend)
        if chips is None and self.chip is not None:
            raise ValueError(f"target: backend {self.backend!r} takes no chip, got {self.chip!r}")
        if chips is not None and self.chip not in chips:
            raise ValueError(
                f"target: chip {self.chip!r} of backend {self.backend!r} is not one of {', '.join(chips)}; "
                "kernels are compiled for a named chip, never for the one at hand"
            )

    @property
    def custom_call(self) -> str:
        """The custom call that shows in a compiled program when the kernel is in it."""
        return {"tpu": "tpu_custom_call", "gpu": "mosaic_gpu"}[self.backend]

    @property
    def tpu(self) -> TpuChip:
        return TPU_CHIPS[str(self.chip)]

    @property
    def gpu(self) -> GpuChip:
        return GPU_CHIPS[str(self.chip)]
