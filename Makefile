# Everything a developer runs, in .venv: no Python of the system is touched, and nothing but Python's packages is
# installed. The tests on a real Slurm cluster need Debian's packages besides; .ci/run installs those.
#
#   make test    all tests, after ruff and mypy     ARGS="-k marker -x" goes to pytest
#   make quick   the tests that need no cluster and no waiting
#                both in three processes, each with a cluster of its own: JOBS=1 is one after the other
#   make lint    ruff and mypy alone
#   make demo    a run that succeeds, and one whose worker dies, both without Slurm
#   make bench   how fast it is on this machine
#   make clean   .venv and every cache; run directories stay

VENV := .venv
STAMP := $(VENV)/.synced
UV_VERSION := 0.13.9
ARGS ?=
# The tests wait more than they compute: three processes keep two cores busy.
JOBS ?= 3

# A shim of a version manager may be named python3.11 and run nothing: each candidate is asked.
CANDIDATES := $(PYTHON) python3.11 /usr/bin/python3.11 python3.12 python3.13 python3.14 python3 /usr/bin/python3

# Compiled once, not by each process of the tests; `make clean` removes what that writes.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help test quick lint demo bench clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^#   //p' Makefile

# Whoever is done takes half of what another has left, so that no long file is the last one alone.
PYTEST := $(VENV)/bin/pytest -n $(JOBS) --dist worksteal --max-worker-restart=0

test: lint
	$(PYTEST) $(ARGS)

# In memory, where programs may run from there and a gigabyte is free: the disk's fsync is a third of the time.
MEMORY = $(shell cd /dev/shm && [ -w . ] && ! findmnt -nT . -o OPTIONS | grep -qw noexec \
    && [ "$$(df --output=avail . | tail -n 1)" -gt 1000000 ] && pwd)

quick: $(STAMP)
	TMPDIR=$(or $(MEMORY),$(TMPDIR),/tmp) $(PYTEST) -o tmp_path_retention_policy=failed -m 'not slurm and not slow' --hypothesis-profile=quick $(ARGS)

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

demo: $(STAMP)
	sh config/demo.sh

bench: $(STAMP)
	$(VENV)/bin/python -m tests.bench $(ARGS)

# The name that people type.
.PHONY: $(VENV)
$(VENV): $(STAMP)

$(STAMP): pyproject.toml uv.lock | $(VENV)/bin/uv-$(UV_VERSION)
	UV_PROJECT_ENVIRONMENT='$(CURDIR)/$(VENV)' UV_PYTHON_DOWNLOADS=never VIRTUAL_ENV= \
	    $(VENV)/bin/uv sync --frozen --inexact --python $(VENV)/bin/python
	@touch $@

# A link that has the version in its name: another UV_VERSION installs that one.
$(VENV)/bin/uv-$(UV_VERSION): | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check 'uv==$(UV_VERSION)'
	@ln -sf uv $@

$(VENV)/bin/python:
	@for python in $(CANDIDATES); do \
	    "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
	    found="$$found $$python"; \
	    "$$python" -c 'import ensurepip, venv' 2>/dev/null || continue; \
	    echo "$$python -m venv $(VENV)"; \
	    exec "$$python" -m venv $(VENV); \
	done; \
	if [ -n "$$found" ]; then \
	    echo "Python is here ($${found# }), but not what makes virtual environments. On Debian:" >&2; \
	    echo "    apt-get install python3-venv" >&2; \
	else \
	    echo "allocd needs Python 3.11 or later, and none was found. On Debian 12 or later:" >&2; \
	    echo "    apt-get install python3 python3-venv" >&2; \
	    echo "Elsewhere: make PYTHON=/path/to/python3.11 ..." >&2; \
	fi; exit 1

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
