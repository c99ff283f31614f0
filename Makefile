# make demo      set up, then the main job on handwritten digits
# make quick     set up, then the tests that start few processes
# make test      set up, then the tests, in a process more than there are cores, at most four;
#                ARGS='tests/test_errors.py -x -n 0' goes to pytest, here one file in this process
# make test-all  the same with the long tests, and in all of their cases: tests/selection.py says which these are
# make check     set up, then ruff and mypy
# make site      set up, then the pages in docs/ as a site, in site/VERSION/; ARGS=serve shows it while you write
# make release   set up, then the source distribution and the wheels, in dist/, and all that can be checked of them without a
#                network; needs cmake, nasm and ninja (apt-get), and downloads libjpeg-turbo; ARGS='--jpeg FOLDER' for its
#                sources on disk
# make stress WHAT=...   set up, then what is run by hand, for hours or on special machines; ARGS go to it:
#   gpu       what needs a GPU: tests and benchmarks in parts of ten minutes, the worthiest first; results in runs/gpu, and the
#             same command goes on; ARGS='--small' tries it without one, RUN=python3 takes a Python that has all packages
#   cluster   the launchers on a real Slurm, network namespaces and sshd; as root, and what of these is missing comes by
#             apt-get; see launch/README.md
#   nights    an hour of Slurm jobs that are killed, cut off, drained, preempted and cancelled; as root;
#             ARGS='--minutes 10 --seed 3' makes it another
#   chaos     an hour of killed, damaged, starved and hung runs; ARGS='--minutes 10 --seed 3' makes it another
#   soak      an hour of training data under kills; ARGS='--minutes 5' for less
#   fuzz      100,000 damaged and intact JPEGs through the C code, built with sanitizers, and libjpeg, and for a minute damaged
#             run folders, tables, ... through their readers; ARGS='--cases 1000000 --seed 1' for others,
#             ARGS='--cases 0 --seconds 600' for readers alone
#   sanitized the tests of loader and formats with the C code built with sanitizers, and numba's indices checked;
#             ARGS=tests/data/test_decode.py for others
#   lowest    tests with the oldest versions that pyproject.toml allows, in build/lowest; needs uv; ARGS=--below says what
#             fails with the release before each bound, ARGS='--keep --below numpy scipy' for these, in the same environment
#   mutants   the code broken in 300 random places, one at a time, and the breaks that no test notices;
#             ARGS='--seed 3 --count 500 --only studies' breaks others, ARGS='--known --only schedule.py' those places of one
#             file where it was broken before, ARGS=--map brings up to date which tests run which lines
#   matrix    all tests that notice each of 500 breaks, for as long as you let it; tests/README.md says how it is read
# The set-up lives in .venv and takes no time when nothing has changed. PYTHON=python3.12 picks another Python.

STRESS = gpu cluster nights chaos soak fuzz sanitized lowest mutants matrix
.PHONY: demo quick test test-all check site release stress setup $(STRESS:%=stress-%)

demo: setup
	.venv/bin/python -m widemix.launch.demo

# Bytecode is kept, whatever the environment says, for the processes that tests start.
PYTEST = PYTHONDONTWRITEBYTECODE= .venv/bin/python -m pytest
# One more than there are CPUs, since tests wait for the processes that they start.
PROCESSES = $(shell n=$$(nproc); echo $$((n < 4 ? n + 1 : 4)))
# Each file in one process, which keeps what its tests share; the longest first: tests/conftest.py.
PARALLEL = -n $(PROCESSES) --dist loadfile --no-loadscope-reorder

test: setup
	$(PYTEST) $(PARALLEL) $(ARGS)

QUICK = tests/recipe tests/models tests/optim tests/formats tests/run tests/test_files.py tests/test_layering.py \
	tests/data/augment
SLOW = tests/optim/test_optimizer_registry.py tests/run/test_start_log.py tests/run/test_trackers.py \
	tests/data/augment/test_distribution.py

test-all: setup
	$(PYTEST) $(PARALLEL) --all $(ARGS)

quick: setup
	$(PYTEST) $(PARALLEL) $(QUICK) $(SLOW:%=--ignore %) $(ARGS)

check: setup
	.venv/bin/python -m ruff check .
	.venv/bin/python -m ruff format --check .
	.venv/bin/python -m mypy

# The results' tables and figures, which lie outside docs/, come into the site. Folders of other versions in site/ stay.
SITE = build/docs
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
site: setup
	.venv/bin/python -m pip install --quiet --editable '.[docs]'
	rm -rf $(SITE)
	mkdir -p $(SITE)/recipes/studies
	cp -r docs/. $(SITE)
	cp -r recipes/studies/results $(SITE)/recipes/studies
	sed -i 's|](\.\./recipes/|](recipes/|g' $(SITE)/results.md
	REPOSITORY=$$(sed -n 's/^Repository = "\(.*\)"/\1/p' pyproject.toml) SITE=site/$(VERSION) .venv/bin/zensical $(or $(ARGS),build --clean)
	cd site && ls -d */ | sort -rV | sed 's|\(.*\)/|{"version": "\1", "title": "\1", "aliases": []}|' | paste -sd , | sed 's|.*|[&]|' > versions.json
	echo '<!doctype html><meta http-equiv="refresh" content="0; url=$(VERSION)/">' > site/index.html

release: setup
	.venv/bin/python -m pip install --quiet --editable '.[release]'
	.venv/bin/python -m widemix.launch.wheels $(ARGS)
	.venv/bin/python -m tests.release.check

stress:
	@[ -n "$(filter $(WHAT),$(STRESS))" ] || { echo "make stress WHAT=...: one of $(STRESS)"; exit 2; }
	@$(MAKE) --no-print-directory stress-$(WHAT)

CLUSTER = PATH="$$PATH:/usr/sbin" which slurmctld slurmd sbatch munged sshd mpirun pdsh ip >/dev/null || { apt-get update && \
	DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
	slurmctld slurmd slurm-client munge openssh-server openmpi-bin pdsh iproute2; }

RUN = .venv/bin/python
stress-gpu: $(if $(filter .venv/bin/python,$(RUN)),setup)
	$(RUN) -m widemix bench gpu $(ARGS)

stress-cluster: setup
	@$(CLUSTER)
	.venv/bin/python -m pip install --quiet --editable '.[cluster]'
	.venv/bin/python -m pytest -m cluster tests/launch $(ARGS)

stress-nights: setup
	@$(CLUSTER)
	.venv/bin/python -m widemix prep digits --to runs/nights/digits
	.venv/bin/python -m tests.stress.nights runs/nights/digits "runs/nights/$$(date +%Y%m%d-%H%M%S)" --minutes 60 $(ARGS)

stress-chaos: setup
	.venv/bin/python -m widemix prep digits --to runs/chaos/digits
	.venv/bin/python -m tests.stress.chaos runs/chaos/digits "runs/chaos/$$(date +%Y%m%d-%H%M%S)" --minutes 60 $(ARGS)

stress-soak: setup
	.venv/bin/python -m tests.stress.soak $(ARGS)

stress-fuzz: setup
	.venv/bin/python -m tests.stress.fuzz $(ARGS)

stress-sanitized: setup
	.venv/bin/python -m tests.stress.sanitized $(ARGS)

stress-lowest:
	python3 tests/release/lowest.py $(ARGS)

stress-mutants: setup
	.venv/bin/python -m tests.stress.mutants $(ARGS)

stress-matrix: setup
	.venv/bin/python -m tests.stress.mutants --matrix --seed 300 --count 500 --budget 15 $(ARGS)

setup:
	@sh launch/setup.sh
