"""A script: what torch says of its devices. It initialises CUDA, which whoever asks must not."""

import json

import torch


def _found() -> dict[str, object]:
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # torch has no types for it
        devices = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    except (RuntimeError, AssertionError) as error:
        return {"devices": [], "reason": str(error).strip().partition("\n")[0]}
    return {
        "devices": [{"name": device.name, "nbytes": device.total_memory} for device in devices],
        "reason": "" if devices else "torch finds no device",
    }


if __name__ == "__main__":
    print(f"\nfastensor: {json.dumps(_found())}", flush=True)
