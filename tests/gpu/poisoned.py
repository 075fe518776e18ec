"""A worker's core whose CUDA context is lost: `python -m tests.gpu.poisoned DEVICE FOLDER`.

Prints as JSON what the step that follows did: "raised" with the error where the worker ends, as it must, or "failed"
where it went on and only failed its request.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from disagg.engine.core.engine_core import EngineCore
from disagg.engine.plan import is_fatal
from disagg.engine.runner.model_runner import TorchModelRunner
from disagg.proto.messages import Sampling
from tests.gpu.test_engine import answers, config_of


def main(device_name: str, folder: str) -> None:
    device = torch.device(device_name)
    config = config_of(Path(folder), device, num_blocks=40, max_num_seqs=4)
    core = EngineCore(TorchModelRunner(config), config=config)
    request = [Sampling(temperature=0.0, max_tokens=5)]
    before = answers(core, request)[1]
    torch.zeros(4, device=device)[torch.tensor([1 << 20], device=device)]  # an assertion of the device fails
    time.sleep(1.0)  # every later call fails from its launch on, whichever it is
    try:
        after = answers(core, request)[1]
    except Exception as error:
        print(json.dumps({"before": before, "raised": type(error).__name__, "is_fatal": is_fatal(error)}), flush=True)
        return
    print(json.dumps({"before": before, "failed": after}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
