"""Choice of the dtype in which a cluster computes on CPUs: made once, before the workers start, and printed as one
line."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from disagg.cluster.config.cluster_config import ClusterConfig, active_pools, models_of
from disagg.cluster.models.catalog import FAKE_MODEL
from disagg.engine.config import Dtype, resolved_dtype
from disagg.engine.shell.cpu_dtype import CpuDtype, cpu_dtype_here

COMPILER_HINT = "a C++ compiler, such as g++, makes it several times faster"


def choose_cpu_dtype(config: ClusterConfig, console: Console) -> Dtype:
    """What `model.dtype: auto` is on the CPUs of this cluster, after a line about it, and about what else makes them
    slow. Compiles the kernels if that was not done yet. Raises `ConfigError`."""
    on_cpu = [
        alone
        for alone in models_of(config).values()
        if alone.model.path != FAKE_MODEL and any(pool.device == "cpu" for _, pool in active_pools(alone))
    ]
    if not on_cpu:
        return "bfloat16"
    found = cpu_dtype_here()
    dtypes = dict.fromkeys(resolved_dtype(alone.model, "cpu", found.dtype) for alone in on_cpu)
    style = "[yellow]note[/yellow]  " if found.slow_because else "[green]kernels[/green]"
    text = escape(cpu_line(found, ", ".join(dtypes), is_chosen=any(alone.model.dtype == "auto" for alone in on_cpu)))
    console.print(f"  {style} {text}", highlight=False, soft_wrap=True)
    return found.dtype


def cpu_line(found: CpuDtype, dtypes: str, *, is_chosen: bool) -> str:
    """Text such as `CPUs compute in bfloat16, by C++ for avx512`."""
    line = f"CPUs compute in {dtypes}, by {found.kernels}"
    if not found.slow_because:
        return line
    chosen = f"; {found.dtype} is the fastest here" if is_chosen else ""
    hint = f"; {COMPILER_HINT}" if "compiler" in found.slow_because else ""
    return f"{line}, which is slow: {found.slow_because}{chosen}{hint}"
