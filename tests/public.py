"""What the packages promise: all public names, for tests that look at each of them."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

PACKAGES = (
    "fastensor", "fastensor.backends", "fastensor.checkpoint.cooperative", "fastensor.checkpoint.dcp", "fastensor.data",
    "fastensor.data.decoders", "fastensor.offload", "fastensor.provision", "fastensor.testing", "fastensor_accelerate",
    "fastensor_lightning",
)  # fmt: skip
GIVEN = {
    "fastensor.LazyCheckpoint", "fastensor.TensorInfo", "fastensor.SaveHandle", "fastensor.WriterStatistics",
    "fastensor.VerifyReport", "fastensor.Damage", "fastensor.Inspection", "fastensor.Difference",
    "fastensor.TensorDifference", "fastensor.StoreStatistics", "fastensor.Choice", "fastensor.Explanation",
    "fastensor.SelectorStatistics", "fastensor.SaveReport", "fastensor.LoadReport", "fastensor.Fallback",
    "fastensor.backends.Extent", "fastensor.backends.Window", "fastensor.offload.EncodedBytes",
    "fastensor.offload.OffloadEstimate",
    "fastensor.offload.OffloadStatistics", "fastensor.offload.PlanReport", "fastensor.offload.PlannedTensor",
    "fastensor.provision.LoaderStatistics", "fastensor.testing.Fault",
}  # fmt: skip
"""Classes whose objects Fastensor makes, and users only get: nobody writes the keywords of their constructors."""


def public_names() -> Iterator[tuple[str, Any]]:
    """All names that are promised, but the modules among them, which are in ``PACKAGES`` themselves."""
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in getattr(module, "__all__", None) or [one for one in vars(module) if not one.startswith("_")]:
            value = getattr(module, name)
            if inspect.ismodule(value):
                assert value.__name__ in PACKAGES or not hasattr(module, "__all__"), name
            elif hasattr(module, "__all__") or getattr(value, "__module__", "") == package:
                yield f"{package}.{name}", value
