# Every verb of the repository. `make` alone prints them; their help is the text behind "##".
.DEFAULT_GOAL := help
.NOTPARALLEL:
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
KEEP ?= train.lr
# So that `python -m foredraft...` works in the activated environment as well.
ADD_SOURCE = echo '$(CURDIR)/src' > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/foredraft.pth"
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export PYTHONPATH := $(CURDIR)/src
export FOREDRAFT_SCRATCH ?= $(CURDIR)/.scratch
# One thread a core: PyTorch otherwise counts the machine's cores, not the container's.
# Bytecode is written as it is first needed; without it every stage would compile torch anew.
unexport PYTHONDONTWRITEBYTECODE
export OMP_NUM_THREADS ?= $(shell nproc)

help:  ## print this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */\1\t/' | awk -F'\t' '{printf "  make %-12s %s\n", $$1, $$2}'

# The lock is complete for a CPU build; the second pip lets a GPU build of torch bring what it needs beside it.
.venv/complete: requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Error: foredraft needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	rm -rf .venv
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile $$(grep '^torch==' requirements.lock)
	$(ADD_SOURCE)
	touch $@

venv: .venv/complete  ## make .venv from requirements.lock

repro: venv  ## run what is out of date of the pipeline, and print the result
	@$(BIN)/python -m foredraft.plan.check params.yaml
	@$(BIN)/python -m foredraft.plan.pipeline --check
	$(BIN)/dvc repro
	@$(BIN)/python -m foredraft.plan.table metrics/evaluate.json metrics/train.json

table: venv  ## print the result of the last run again
	@$(BIN)/python -m foredraft.plan.table metrics/evaluate.json metrics/train.json

# Two workers of one thread each: most of a whole pipeline is imports, which use one core.
test: export OMP_NUM_THREADS := 1
test: venv  ## run all tests, one whole pipeline among them
	$(BIN)/python -m pytest --numprocesses 2 --dist loadscope --no-loadscope-reorder

check: venv  ## format, lint, types, tests: all that must hold before a commit
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m foredraft.plan.pipeline --check
	$(MAKE) test

format: venv  ## format and mend what ruff can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

sources: venv  ## bring dvc.yaml in step after adding a source, or an import
	$(BIN)/python -m foredraft.plan.check params.yaml
	$(BIN)/python -m foredraft.plan.pipeline

profile: venv  ## NAME=quickstart|smoke|...: put profiles/NAME.yaml into params.yaml
	@$(BIN)/python -m foredraft.plan.profile "$(NAME)"

SAMPLES ?= 3
inspect: venv  ## SOURCE=code [SAMPLES=3]: rows, reasons, lengths, and samples with their loss mask in colour
	@$(BIN)/python -m foredraft.plan.inspect "$(SOURCE)" "$(SAMPLES)"

experiments: venv  ## KEEP='train.lr|...': tokens per step of every experiment, beside the params named
	@COLUMNS=$${COLUMNS:-160} $(BIN)/dvc exp show --no-pager --drop '.*' --keep 'Experiment|pooled.tokens_per_step|val.tokens_per_step|$(KEEP)'

accept: venv  ## STAGE=extract: record that an edit does not change a stage's outputs (see CONTRIBUTING)
	@test -n "$(STAGE)" || { echo "Error: say which stage, as in: make accept STAGE=extract"; exit 1; }
	$(BIN)/dvc commit --force $(STAGE)

push: venv  ## send artefacts and the run cache to the DVC remote
	$(BIN)/dvc push --run-cache

push-hub: export REPO := $(REPO)
push-hub: export LAYOUT := $(LAYOUT)
push-hub: venv  ## REPO=org/name [LAYOUT=zlab] [PRIVATE=1] [YES=1]: upload the drafter and its card, with your own login
	@test -n "$$REPO" || { echo "Error: say where to, as in: make push-hub REPO=org/name"; exit 1; }
	@$(BIN)/python -m foredraft.export.hub "$$REPO" --layout "$${LAYOUT:-zlab}" $(if $(YES),--yes) $(if $(PRIVATE),--private)

pull: venv  ## fetch what the next run needs, and run what is out of date
	$(BIN)/dvc repro --pull --allow-missing

peers: .peers/zlab/complete .peers/speculators/complete .peers/specforge/complete .peers/triton/complete  ## make the environments of other people's code, for the oracle tests and bench-data

.peers/%/complete: requirements-peers-%.lock .venv/complete
	rm -rf .peers/$*
	$(PYTHON) -m venv .peers/$*
	.peers/$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$(.peers/$*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz_torch.pth"
	touch $@

bench-data: .peers/specforge/complete  ## rows/s, tokens/s and memory of curate and prepare beside SpecForge's
	$(BIN)/python -m bench.data

bench-extract: venv  ## tokens/s of extract on this machine beside a plain loop (after make repro); GPUs: see the script
	$(BIN)/python -m bench.extract

bench-speculation: venv  ## speed-up over plain greedy decoding on this machine (after make repro); GPUs: see the script
	$(BIN)/python -m bench.speculation

bench-train: venv  ## anchors/s of training on this machine beside the first version (after make repro); GPUs: see the script
	$(BIN)/python -m bench.train

lock:  ## resolve pyproject.toml anew into requirements.lock
	rm -rf .venv
	$(PYTHON) -m venv .venv
	$(BIN)/python -m foredraft.plan.lock requirements | $(BIN)/python -m pip install --quiet --disable-pip-version-check -r /dev/stdin
	$(BIN)/python -m foredraft.plan.lock freeze
	$(ADD_SOURCE)
	touch .venv/complete

gc-scratch: ## delete unfinished and finished work kept for resuming (not the artefacts)
	rm -rf "$(FOREDRAFT_SCRATCH)"

.PHONY: help venv repro table test check format sources profile inspect experiments accept push push-hub pull peers bench-data bench-extract bench-speculation bench-train lock gc-scratch
