"""Device specifications as data: dense peak rates, memory, links, power. Each number has its source in a comment.

Prices are no property of a device: `example_price_per_hour` is only what `disagg plan` assumes where `--price` is not
given, and its output says so.

How close kernels come to the peaks is in `Kernels`. Those of Hopper and Blackwell are fitted to measured kernel times
(the tables that `aiconfigurator` publishes, made with vLLM 0.24, bf16, heads of 128) by least mean absolute log
error. Another device shows how general a fit is: that of Hopper, made on an H100, is off by 6 % for the GEMMs of the
H100 itself and 7 % for those of an H200, 12 % and 11 % for the attention of prompts, 7 % and 8 % for that of decodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from disagg.proto.errors import ConfigError

TERA, GIGA = 1e12, 1e9


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Performance that real kernels reach. Times are in seconds, efficiencies are shares of the device's peak."""

    gemm_start_s: float = 3.7e-6
    gemm_compute: float = 0.81
    gemm_memory: float = 0.89
    gemm_overlap: float = 3.3
    """Exponent p with which the time to multiply and the time to read make the time of a GEMM, (a^p + b^p)^(1/p): 1
    adds them, infinity takes the longer one."""
    attention_start_s: float = 12e-6
    prefill_attention_compute: float = 0.67
    prefill_attention_pairs: float = 535.0
    """Query-key pairs that a prompt token costs besides its own."""
    decode_attention_memory: float = 0.88
    decode_attention_head_s: float = 2.7e-8
    """Seconds for each sequence and KV head, however short the context."""
    decode_attention_overlap: float = 1.6
    other_memory: float = 0.7
    """Share of the peak memory bandwidth that norms, rotations and activations reach."""
    other_start_s: float = 8e-6
    """Start-up seconds of all these kernels of one layer."""
    all_reduce_start_s: float = 4e-6
    all_reduce_rank_s: float = 2e-7
    all_reduce_bandwidth: float = 0.3
    """Share of the link's bandwidth that is reached, for 2 (n - 1) / n of the bytes on each rank."""
    step_s: float = 1.5e-3
    """Seconds of each step that do not depend on its work: scheduling, inputs, sampling, the copy of the tokens."""


HOPPER = Kernels()
BLACKWELL = Kernels(
    gemm_compute=0.72,
    gemm_memory=0.79,
    gemm_overlap=2.6,
    prefill_attention_compute=0.62,
    prefill_attention_pairs=896.0,
    attention_start_s=9e-6,
    decode_attention_memory=0.86,
    decode_attention_head_s=1.15e-8,
    decode_attention_overlap=6.0,
    all_reduce_start_s=6.7e-6,
    all_reduce_bandwidth=0.25,
)
ZEN_4 = (
    Kernels(  # assumptions, about as far from the peaks as docs/benchmarks/engine.md finds; measure: disagg calibrate
        gemm_start_s=1e-6,
        gemm_compute=0.75,
        gemm_memory=0.85,
        gemm_overlap=2.0,
        attention_start_s=2e-6,
        prefill_attention_compute=0.35,
        prefill_attention_pairs=60.0,
        decode_attention_memory=0.7,
        decode_attention_head_s=2e-7,
        other_memory=0.5,
        other_start_s=1e-5,
        step_s=5e-4,
    )
)


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, or one CPU core. FLOP/s are dense peaks, bandwidths bytes per second and one direction."""

    name: str
    flops: Mapping[str, float]
    """Peak FLOP/s by dtype of the operands."""
    memory_bytes: float
    memory_bandwidth: float
    link_bandwidth: float
    """Bandwidth between devices of one node, which the ranks of a worker are: NVLink, or else PCIe."""
    network_bandwidth: float
    """Bandwidth of each device to other nodes."""
    max_tp: int = 8
    """Number of devices in one node."""
    power_w: float = 0.0
    """Maximum power of the board in watts."""
    example_price_per_hour: float
    kernels: Kernels = field(default=HOPPER)

    def peak(self, dtype: str, flag: str = "--dtype") -> float:
        """FLOP/s with operands of `dtype`.

        Raises:
            ConfigError: the device has no such units.
        """
        try:
            return self.flops[dtype]
        except KeyError:
            raise ConfigError(
                f"{flag}: {self.name} does not multiply {dtype}; it has {', '.join(sorted(self.flops))}"
            ) from None

    def ridge(self, dtype: str) -> float:
        """FLOP per byte from which on computing takes longer than reading (S. Williams et al., Roofline, 2009)."""
        return self.peak(dtype) / self.memory_bandwidth


H100 = Device(  # NVIDIA H100 Tensor Core GPU data sheet, SXM
    name="h100",
    flops={  # with sparsity 1,979 / 1,979 / 3,958 / 3,958 TFLOP/s and TOP/s in the sheet: half of it dense
        "float32": 67 * TERA,
        "bfloat16": 989.4 * TERA,
        "float16": 989.4 * TERA,
        "fp8": 1978.9 * TERA,
        "int8": 1978.9 * TERA,
    },
    memory_bytes=80 * GIGA,  # "80GB"
    memory_bandwidth=3.35 * TERA,  # "3.35TB/s"
    link_bandwidth=450 * GIGA,  # "NVLink: 900GB/s", both directions together
    network_bandwidth=50 * GIGA,  # DGX H100 data sheet: eight ConnectX-7 of 400 Gb/s for eight GPUs
    power_w=700,  # "Up to 700W"
    example_price_per_hour=3.0,
)
H200 = replace(  # NVIDIA H200 Tensor Core GPU data sheet, SXM: the compute of the H100
    H100,
    name="h200",
    memory_bytes=141 * GIGA,  # "141GB"
    memory_bandwidth=4.8 * TERA,  # "4.8TB/s"
    example_price_per_hour=3.8,
)
B200 = Device(  # NVIDIA DGX B200 data sheet, an eighth of the system
    name="b200",
    flops={  # "72 petaFLOPS FP8" with sparsity for eight: 4.5 dense for one, bf16 half of it
        "float32": 75 * TERA,  # NVIDIA Blackwell data sheet, HGX B200: 600 TFLOP/s for eight
        "bfloat16": 2250 * TERA,
        "float16": 2250 * TERA,
        "fp8": 4500 * TERA,
        "int8": 4500 * TERA,
    },
    memory_bytes=180 * GIGA,  # "1,440GB total"
    memory_bandwidth=8.0 * TERA,  # "64TB/s"
    link_bandwidth=900 * GIGA,  # "14.4 TB/s aggregate": 1.8 TB/s each, both directions together
    network_bandwidth=50 * GIGA,  # ConnectX-7 of 400 Gb/s for each GPU
    power_w=1000,  # HGX B200: "up to 1,000W"
    example_price_per_hour=6.0,
    kernels=BLACKWELL,
)
A100 = Device(  # NVIDIA A100 Tensor Core GPU data sheet, 80GB SXM
    name="a100",
    flops={  # "FP32 19.5", "BF16 312", "INT8 624", dense
        "float32": 19.5 * TERA,
        "bfloat16": 312 * TERA,
        "float16": 312 * TERA,
        "int8": 624 * TERA,
    },
    memory_bytes=80 * GIGA,
    memory_bandwidth=2.039 * TERA,  # "2,039GB/s"
    link_bandwidth=300 * GIGA,  # "NVLink: 600GB/s", both directions together
    network_bandwidth=25 * GIGA,  # DGX A100 data sheet: eight ConnectX-6 of 200 Gb/s
    power_w=400,  # "400W"
    example_price_per_hour=1.8,
)
L40S = Device(  # NVIDIA L40S data sheet
    name="l40s",
    flops={  # "362.05 | 733" TFLOP/s bf16 and "733 | 1,466" fp8, dense | sparse
        "float32": 91.6 * TERA,
        "bfloat16": 362.05 * TERA,
        "float16": 362.05 * TERA,
        "fp8": 733 * TERA,
        "int8": 733 * TERA,
    },
    memory_bytes=48 * GIGA,
    memory_bandwidth=864 * GIGA,
    link_bandwidth=32 * GIGA,  # no NVLink; PCIe 4.0 x16 "64GB/s bidirectional"
    network_bandwidth=12.5 * GIGA,  # an assumption: 100 Gb/s for each GPU, which depends on the server
    power_w=350,
    example_price_per_hour=1.0,
)
CPU_CORE = Device(  # one core of a Zen 4 server, measured by benchmarks/ceilings.py (docs/benchmarks/engine.md)
    name="cpu-core",
    flops={"float32": 109 * GIGA, "bfloat16": 218 * GIGA, "int8": 436 * GIGA},  # measured: bf16; the others by width
    memory_bytes=4 * GIGA,  # an assumption: a core's share of a server's memory
    memory_bandwidth=29 * GIGA,
    link_bandwidth=10 * GIGA,  # shared memory within a host: docs/benchmarks/transfer.md
    network_bandwidth=1.25 * GIGA,  # an assumption: 10 Gb/s
    max_tp=1,
    power_w=10,  # an assumption: a server's package power over its cores
    example_price_per_hour=0.04,
    kernels=ZEN_4,
)

DEVICES = {device.name: device for device in (H100, H200, B200, A100, L40S, CPU_CORE)}
_OTHER_NAMES = {"h100-sxm": "h100", "h200-sxm": "h200", "b200-sxm": "b200", "a100-80gb": "a100", "cpu": "cpu-core"}


def find_device(name: str, flag: str = "--device") -> Device:
    """A device by its name, in any case.

    Raises:
        ConfigError: there is none; lists those that there are.
    """
    key = name.lower().replace("_", "-").removeprefix("nvidia-")
    device = DEVICES.get(_OTHER_NAMES.get(key, key))
    if device is None:
        raise ConfigError(f"{flag}: {name!r} is not known; there is {', '.join(DEVICES)}")
    return device
