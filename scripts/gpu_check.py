"""Everything that needs a GPU, in one run of less than fifteen minutes: a contact (`benchmarks.gpu.contact`) with a
long budget. Its files are in build/gpu-check.

    python scripts/gpu_check.py

Needs Python, torch, Triton, transformers and pytest, but neither Ray nor a network nor an installed disagg.
`--device cpu` runs the same sections with tiny sizes, Triton's interpreter and gloo, to test them.

Exit status: 0 all is as wanted, 1 a target was missed or something failed, 3 open, because there is no CUDA device.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "src")]

from benchmarks.gpu.contact.runner import main

BUDGET_S = 840.0

if __name__ == "__main__":
    sys.exit(main(program=["scripts/gpu_check.py"], budget_s=BUDGET_S, out="build/gpu-check"))
