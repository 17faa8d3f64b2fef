# Few verbs; CI calls only these. `make demo` and `make test` need nothing but Python 3.11 to 3.13.
#
#   make demo            answer a prompt with the demo pair, show drafted and accepted tokens, compare
#   make test            the test suite (CPU, two processes of one thread, no network)
#   make test-all        the same with the tests that need the demo target (fetched once, cached)
#   make test-browser    the page at / in a real browser (needs chromium)
#   make test-ray        our engine on two replicas of Ray Serve (makes .venv-ray)
#   make test-llama-cpp-python  the gguf backend on llama-cpp-python's library (compiles it, 20 minutes)
#   make fuzz            made-up requests to a server, held to its OpenAPI document (two minutes)
#   make check           formatting, lint, types, architecture
#   make fix             format and mend what ruff can mend
#   make docs            regenerate the generated pages
#   make wheel           build the wheel and see that the demo draft is in it
#   make screenshot      draw docs/img/show-drafts.svg from a real run of the demo
#   make sizes           lines per file, now and at the merge base
#   make bench           speed and acceptance of the demo pair, report in runs/bench (minutes)
#   make peers           the same beside other programs, into the README's table (minutes)
#   make bench-demo      speed against transformers generate and plain decoding (minutes, quiet machine)
#   make bench-policy    auto against every fixed block and plain decoding (minutes, quiet machine)
#   make bench-ngram     drafting by look-up alone on prompts whose answer copies (minutes)
#   make profile         where the time of a round goes, against what the machine can do
#   make demo-draft      train the demo draft on this CPU (about an hour and a half)
#   make gpu-demo-draft  the same recipe, longer, on a CUDA machine without network
#   make parity          run the reference wheel in its own venv, hold this package to its results
#
# A verb runs in .venv, made on first use and reused. To use an interpreter of your own, with its
# packages, as it is:  make test PYTHON=/path/to/python

VENV := .venv
TORCH := 2.13.0
DRAFT := dflash/assets/smollm2-135m-dflash
ARGS ?=

ifdef PYTHON
PY := $(PYTHON)
READY :=
else
PY := $(VENV)/bin/python
READY := $(VENV)/.installed
endif

ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
# processes that share the test files; one thread each
WORKERS ?= 2

.PHONY: bench peers demo test test-all test-browser test-ray test-llama-cpp-python fuzz check fix docs screenshot wheel sizes bench-demo bench-policy bench-ngram profile demo-draft gpu-demo-draft parity
.DEFAULT_GOAL := test

$(VENV)/.installed: pyproject.toml constraints/ci.txt constraints/install.sh
	@bash constraints/install.sh $(VENV) $(TORCH)
	@touch $@

demo: $(READY)
	@$(PY) -m dflash generate "How do rainbows form?" --show-drafts --compare --max-tokens 128 $(ARGS)

test: $(READY)
	$(ONE_THREAD) $(PY) -m pytest -n $(WORKERS) --dist loadfile -m "not demo and not gpu and not network and not browser and not ray" $(ARGS)

test-all: $(READY)
	$(ONE_THREAD) $(PY) -m pytest -m "not gpu and not browser and not ray" $(ARGS)

test-browser: $(READY)
	@$(PY) -c 'import playwright' 2>/dev/null || $(PY) -m pip install -q -c constraints/ci.txt -e '.[browser]'
	$(ONE_THREAD) $(PY) -m pytest -m browser tests/browser $(ARGS)

test-ray: $(READY)
	$(ONE_THREAD) PY="$(PY)" bash constraints/ray.sh $(ARGS)

test-llama-cpp-python: $(READY)
	$(ONE_THREAD) PY="$(PY)" bash constraints/llama_cpp.sh $(ARGS)

fuzz: $(READY) .venv-fuzz/.installed
	$(PY) -m bench.fuzz $(ARGS)

.venv-fuzz/.installed:
	$(PY) -m venv .venv-fuzz
	.venv-fuzz/bin/python -m pip --disable-pip-version-check install -q schemathesis==4.32.5
	@touch $@

check: $(READY)
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(ONE_THREAD) $(PY) -m pytest -q tests/test_architecture.py tests/test_import_cost.py

fix: $(READY)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

docs: $(READY)
	$(PY) -m docs.gen_cli

screenshot: $(READY)
	$(PY) -m bench.screenshot $(ARGS)

wheel: $(READY)
	PY="$(PY)" bash constraints/wheel.sh

sizes:
	@bash bench/sizes.sh

bench: $(READY)
	$(PY) -m dflash bench --data-dir bench/prompts --dataset gsm8k,humaneval,mt-bench --max-samples 6 --out runs/bench $(ARGS)

peers: $(READY)
	$(PY) -m bench.peers $(ARGS)

bench-demo: $(READY)
	$(PY) -m bench.demo $(ARGS)

bench-policy: $(READY)
	$(PY) -m bench.policy $(ARGS)

bench-ngram: $(READY)
	$(PY) -m bench.ngram $(ARGS)

profile: $(READY)
	$(PY) -m bench.profile $(ARGS)

demo-draft: $(READY)
	$(PY) -m dflash.train.demo --device cpu --out runs/demo-draft $(ARGS)

gpu-demo-draft: $(READY)
	$(PY) -m dflash.train.demo --device cuda --out runs/gpu-demo-draft $(ARGS)

parity: $(READY)
	$(ONE_THREAD) PY="$(PY)" bash constraints/parity.sh $(TORCH)
