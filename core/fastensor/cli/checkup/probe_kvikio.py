"""A script: what kvikio says of itself. Importing it loads libraries of CUDA, which may be missing, or crash."""

import ctypes
import importlib
import json
from typing import Any


def _found() -> dict[str, object]:
    try:
        kvikio = importlib.import_module("kvikio")
    except Exception as error:  # noqa: BLE001  # whatever it is, it is the reason
        return {"imports": False, "reason": _told(error)}
    found = {"imports": True, "reason": "", "version": str(getattr(kvikio, "__version__", ""))}
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        found["reason"] = str(error)
    try:
        return {**found, **_state()}
    except Exception as error:  # noqa: BLE001  # a version of kvikio that we do not know
        return {**found, "unread": _told(error)}


def _state() -> dict[str, object]:
    defaults = importlib.import_module("kvikio.defaults")
    driver = importlib.import_module("kvikio.cufile_driver")
    properties = driver.properties if hasattr(driver, "properties") else driver.DriverProperties()  # until 25.02
    version = driver.libcufile_version() if hasattr(driver, "libcufile_version") else ()
    return {
        "compat_preferred": _is_compat_preferred(defaults),
        "gds_available": bool(properties.is_gds_available),
        "libcufile": ".".join(map(str, version)) if any(version) else "",
    }


def _is_compat_preferred(defaults: Any) -> bool:
    if hasattr(defaults, "is_compat_mode_preferred"):
        return bool(defaults.is_compat_mode_preferred())
    return str(defaults.compat_mode().name) == "ON"


def _told(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


if __name__ == "__main__":
    print(f"\nfastensor: {json.dumps(_found())}", flush=True)
