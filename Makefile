# make venv         .venv with the package (editable) and all that the tests and the demo need
# make test         lint, the native programs under sanitisers, then the tests, JOBS=2 at once; of long campaigns a
#                   part, or with SSDPLAN_TESTS=full all (CONTRIBUTING.md)
# make quick        the inner loop: lint, types, and the tests that take little time (CONTRIBUTING.md says what is left out)
# make gpu          five minutes on a GPU, in six steps: WHEELS=DIR, and GPU="--steps tests" and the like
#                   (CONTRIBUTING.md), with $(PYTHON) as it is: no .venv, no network
# make demo         a real model: measured, planned, trained from ssd, and asked something
# make headline     3B parameters trained within 4 GiB: HEADLINE="--volume DIR" and other options (docs/benchmarks.md)
# make bench        each part beside its rival on this machine (docs/benchmarks.md)
# make compare      the same training by plain PyTorch, DeepSpeed and ssdplan: COMPARE="--precision fp32" (half an hour)
# make lint, make native-test, make format, make clean
#
# Needs Python 3.11 or newer with its headers, make and a C++17 compiler; cmake and ninja come with the build.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2
PARTS := plans profiler planner executor native rivals commands
CXX_SOURCES := $(wildcard native/src/*.cpp native/src/*.hpp tests/native/cpp/*.cpp tests/native/cpp/*.hpp)

.PHONY: venv test quick lint format native-test gpu demo bench compare headline clean
.DELETE_ON_ERROR:

venv: $(VENV)/.stamp

# torch is several gigabytes without the pin in constraints.txt: every installation names it. A new __init__.py is a new
# part, which an editable installation learns of only by installing again. Of the libraries' modules those are compiled
# that ssdplan imports: to compile all of them took two fifths of the time.
$(VENV)/.stamp: pyproject.toml constraints.txt CMakeLists.txt $(wildcard native/src/*) $(shell find $(PARTS) -name __init__.py)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[test,demo]'
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -c 'import ssdplan.cli, ssdplan.executor.train, ssdplan.profiler.profile'
	touch $@

# The parts as the package that they install as, for mypy.
.typing/ssdplan/.stamp: Makefile
	mkdir -p .typing/ssdplan
	ln -sfn $(PARTS:%=../../%) ../../cli.py ../../api.py .typing/ssdplan/
	printf '__version__: str = ""\n' > .typing/ssdplan/__init__.py
	touch $@

lint: venv .typing/ssdplan/.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPYPATH=.typing $(BIN)/mypy -p ssdplan
	$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES)

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_SOURCES)

# AddressSanitizer with UndefinedBehaviorSanitizer, and ThreadSanitizer.
native-test: venv
	PATH="$(CURDIR)/$(BIN):$$PATH" tests/native/cpp/run.sh build/sanitizers

# Lint and the native programs run beside each other. Many tests start processes, which had better not compile all anew.
test: venv
	$(MAKE) -j2 lint native-test
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

# The quick tests of plans, of the linear program, of the command line's help and of a kernel.
QUICK := tests/test_arrows.py tests/test_docs.py tests/commands/test_help.py tests/native/test_checksum.py \
  tests/planner/program/test_linear_program.py tests/plans/documents tests/plans/graph tests/plans/test_files.py
quick: lint
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile $(QUICK)

# With $(PYTHON) as it is: what it lacks is taken from a folder of wheels or named, and ssdplan is built into .gpu.
gpu:
	$(PYTHON) benchmarks/gpu.py $(if $(WHEELS),--wheels '$(WHEELS)') $(GPU)

demo: venv
	$(BIN)/python demo.py

bench: venv
	$(BIN)/ssdplan bench

# A budget at DeepSpeed's least memory for the whole process, and one at half of that; the interpreter takes its part.
compare: venv
	$(BIN)/ssdplan compare --shape small --sequence-length 256 --micro-batches 1 --host-memory 700MiB,1900MiB $(COMPARE)
	$(BIN)/ssdplan compare --shape small --sequence-length 256 --micro-batches 16 --host-memory 700MiB,1900MiB $(COMPARE)
	$(BIN)/ssdplan compare --shape medium --sequence-length 128 --micro-batches 1 --host-memory 2200MiB,4900MiB $(COMPARE)

headline: venv
	$(BIN)/python benchmarks/headline.py $(HEADLINE)

clean:
	rm -rf $(VENV) .typing .gpu build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
