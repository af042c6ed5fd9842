# Every target sets up .venv first (tools/bootstrap.py), which costs time only once.
# Options go through ARGS:  make test ARGS="-k drift"    make corpus ARGS="--vocab-size 8192"

ARGS ?=
EXAMPLES ?= 200
# One thread per process: with several ranks on a few cores, more threads only get in each other's way.
export OMP_NUM_THREADS ?= 1
# Two test files run at a time and share the cores: distributed tests get this many times their limit.
export TEST_TIME_FACTOR ?= 3

.DEFAULT_GOAL := help
.PHONY: help setup demo test gpu property canary patch corpus docs lock clean distclean

# Any Python from 3.6 on can run the scripts in tools/; the first that really starts does.
define run-tool
for python in python3 /usr/bin/python3 /usr/local/bin/python3 python python3.12 python3.13 \
        "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.*/bin/python; do \
    if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 6))' >/dev/null 2>&1; then \
        exec "$$python" $(1); \
    fi; \
done; \
echo "megatron_paci: no Python 3 found. Install Python 3.12 with its venv module." >&2; exit 1
endef

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup:  ## set up .venv: Python 3.12 or newer, the locked packages (about 6 GB), this project
	@$(call run-tool,tools/bootstrap.py)

demo: setup  ## train a small model with PACI on this machine's CPUs
	@.venv/bin/python examples/demo.py $(ARGS)

test: setup  ## run the tests
	@.venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

gpu: setup  ## compare PACI with 1F1B on CUDA, report in out/gpu (tests/gpu/README.md)
	@.venv/bin/python tests/gpu/check.py --out out/gpu $(ARGS)

property: setup  ## try EXAMPLES=200 random combinations of flags, print what they covered
	@PROPERTY_EXAMPLES=$(EXAMPLES) .venv/bin/python -m pytest -s tests/gloo/test_property.py $(ARGS)

canary: setup  ## run the tests on another Megatron-Core: VERSION=0.18.2 or MEGATRON_LM=<checkout>
	@.venv/bin/python tools/canary.py --version "$(VERSION)" --megatron-lm "$(MEGATRON_LM)" -- $(ARGS)

patch:  ## put the hooks into the source of MEGATRON_LM=<checkout>; ARGS=--revert takes them out
	@$(call run-tool,patches/apply.py "$(MEGATRON_LM)" $(ARGS))

corpus: setup  ## build a training corpus from Python's standard library in out/corpus
	@.venv/bin/python examples/prepare_corpus.py $(ARGS)

docs: setup  ## build the API reference from the docstrings into out/api; installs Sphinx
	@.venv/bin/python -c "import sphinx" 2>/dev/null || .venv/bin/python -m pip install \
	    --quiet --no-input --disable-pip-version-check --no-build-isolation -e ".[docs]"
	@.venv/bin/python -m sphinx -q -W --keep-going -b html -d out/api.cache docs/api out/api
	@echo "out/api/index.html"

lock:  ## resolve setup.py's requirements anew and write requirements.lock
	@$(call run-tool,tools/lock.py)

clean:  ## remove what runs leave behind (out/, caches, build files)
	@rm -rf out build dist ./*.egg-info .pytest_cache .hypothesis .ruff_cache
	@find . -path ./.venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean  ## the same, and .venv
	@rm -rf .venv
