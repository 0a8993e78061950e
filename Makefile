# Set-up, tests and demo in one command each; `make help` lists them. Needs GNU make 3.81 and Python 3.11.
#   VENV=dir         where the virtual environment is made (default .venv)
#   PYTHON=python    the Python to make it with
#   TORCH_INDEX=url  package index that torch is taken from (default: the one pip uses)
#   ARGS="..."       more arguments for the command that is run

VENV ?= .venv
PYTHON ?= $(shell for p in python3.11 python3; do \
	if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then echo $$p; break; fi; done)
TORCH_INDEX ?=
ARGS ?=

PIP := "$(VENV)/bin/python" -m pip install --quiet --no-input --disable-pip-version-check
TORCH := $(shell grep '^torch==' constraints.txt)

.PHONY: help demo test slow lint

help:
	@echo "make demo    install into $(VENV) and train a small agent on examples/babyai.yaml"
	@echo "make test    install into $(VENV) and run the tests"
	@echo "make slow    run the tests that take minutes"
	@echo "make lint    format check, lint, types, import contracts"
	@echo "Variables: VENV=dir PYTHON=python TORCH_INDEX=url ARGS=\"...\""

# One OpenMP thread a process: two beside a busy neighbour make torch many times slower.
demo test slow: export OMP_NUM_THREADS := 1
# A test never fetches a model.
test slow: export HF_HUB_OFFLINE := 1

demo: $(VENV)/.stamp-demo
	"$(VENV)/bin/tiderl" train examples/babyai.yaml $(ARGS)

test: $(VENV)/.stamp-dev
	"$(VENV)/bin/python" -m pytest $(ARGS)

slow: $(VENV)/.stamp-dev
	"$(VENV)/bin/python" -m pytest -m "slow and not gpu and not ray and not vllm" $(ARGS)

lint: $(VENV)/.stamp-dev
	"$(VENV)/bin/ruff" format --check .
	"$(VENV)/bin/ruff" check .
	"$(VENV)/bin/mypy"
	"$(VENV)/bin/lint-imports" --no-logo

# A stamp says that a step is done: a second call installs nothing.
$(VENV)/.stamp-venv:
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "TideRL needs Python 3.11 or newer and found none." >&2; \
		echo "Install it, or name it: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 1; }
	@echo "making $(VENV) with $(PYTHON)"
	@"$(PYTHON)" -m venv "$(VENV)" || { \
		echo "Python's venv module does not work here (Debian and Ubuntu: install python3-venv)." >&2; exit 1; }
	@$(PIP) --upgrade pip
	@touch "$@"

# torch comes first and by its exact version: a bare range may choose a much larger build. --no-deps lets
# TORCH_INDEX hold torch alone; the next step installs what torch needs.
$(VENV)/.stamp-torch: $(VENV)/.stamp-venv constraints.txt
	@echo "installing $(TORCH)"
	@$(PIP) --no-deps $(if $(TORCH_INDEX),--index-url "$(TORCH_INDEX)") -c constraints.txt $(TORCH)
	@touch "$@"

$(VENV)/.stamp-demo: $(VENV)/.stamp-torch pyproject.toml
	@echo "installing tiderl[babyai]"
	@$(PIP) -c constraints.txt -e '.[babyai]'
	@touch "$@"

$(VENV)/.stamp-dev: $(VENV)/.stamp-torch pyproject.toml
	@echo "installing tiderl[babyai,track,dev]"
	@$(PIP) -c constraints.txt -e '.[babyai,track,dev]'
	@touch "$@"
