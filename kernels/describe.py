"""What this machine offers to the engine, as one JSON object on standard output: `python -m disagg.kernels.describe`.

A program of its own, so that a torch that cannot be loaded does not end the caller. It compiles the C++ kernels if that
was not done yet.
"""

from __future__ import annotations

import json
import sys

import torch

from disagg.kernels import dispatch


def main() -> None:
    """Print versions, devices and kernels of this process as JSON."""
    found = {
        "torch": torch.__version__,
        "num_cuda_devices": torch.cuda.device_count(),
        "cpu_kernels": dispatch.describe(),
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
