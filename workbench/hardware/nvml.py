"""NVIDIA's management library, where it is there: what the driver knows of a GPU that torch does not tell."""

from typing import Any

import torch


class Nvml:
    """One GPU as the driver knows it, found by UUID: torch counts only the visible ones, the driver all.

    Every question gives ``None`` where there is no library, no driver, or a card that does not answer it.
    """

    def __init__(self, device: torch.device) -> None:
        self._library: Any = None
        if device.type != "cuda":
            return
        try:
            import pynvml

            pynvml.nvmlInit()
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
            self._library = pynvml
        except Exception:  # every way of not being there ends alike
            self._library = None

    def energy_joules(self) -> float | None:
        """Joules since the driver was loaded."""
        return self._ask("nvmlDeviceGetTotalEnergyConsumption", 1e-3)

    def power_cap_watts(self) -> float | None:
        return self._ask("nvmlDeviceGetEnforcedPowerLimit", 1e-3)

    def driver(self) -> str | None:
        if self._library is None:
            return None
        version = self._library.nvmlSystemGetDriverVersion()
        return version.decode() if isinstance(version, bytes) else str(version)

    def _ask(self, question: str, unit: float) -> float | None:
        if self._library is None:
            return None
        try:
            return getattr(self._library, question)(self._handle) * unit
        except self._library.NVMLError:
            return None
