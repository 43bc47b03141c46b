"""The machines that kernels are written for, and the facts about each that kernels and planners need."""

from __future__ import annotations

from dataclasses import dataclass

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
    target_config: str


_MIB = 1 << 20
TPU_CHIPS = {
    chip.name: chip
    for chip in (
        TpuChip("v5e", 128 * _MIB, 1, 819e9, 197e12, "v5e"),
        TpuChip("v5p", 64 * _MIB, 2, 2765e9, 459e12, "v5p"),
        TpuChip("v6e", 128 * _MIB, 1, 1640e9, 918e12, "v6e"),
        # two devices a chip, one TensorCore each
        TpuChip("tpu7x", 64 * _MIB, 1, 3690e9, 1153e12, "tpu7x"),
    )
}
GPU_CHIPS = {
    chip.name: chip
    for chip in (
        GpuChip("a100", "sm_80", 108, 166912, 2039e9, 312e12, "a100_sxm_80.txtpb"),
        GpuChip("h100", "sm_90a", 132, 232448, 3352e9, 989e12, "h100_sxm.txtpb"),
        GpuChip("h200", "sm_90a", 132, 232448, 4800e9, 989e12, "h200.txtpb"),
        GpuChip("b200", "sm_100a", 148, 232448, 8000e9, 2250e12, "b200.txtpb"),
    )
}


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
