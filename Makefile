# make demo    set up, then the main job on handwritten digits
# make test    set up, then the tests, in a process more than there are cores, at most four;
#              ARGS='tests/test_errors.py -x -n 0' goes to pytest, here one file in this process
# make test-all   the same with the long tests, and in all of their cases: tests/selection.py says which these are
# make quick   set up, then the tests that start few processes
# make test-gpu    set up, then what needs a GPU: training by every engine against the CPU, the kernels, the benchmarks
# make bench-gpu   set up, then all that is to be measured on a GPU, each part within ten minutes; results in runs/gpu;
#                  ARGS='--small' tries it without one
# make test-cluster   the launchers on a real Slurm, network namespaces and sshd; as root, and what of these is
#                     missing comes by apt-get; see launch/README.md
# make nights  an hour of Slurm jobs that are killed, cut off, drained, preempted and cancelled; as root;
#              ARGS='--minutes 10 --seed 3' makes it another
# make chaos   an hour of killed, damaged, starved and hung runs; ARGS='--minutes 10 --seed 3' makes it another
# make mutants breaks the code in 300 random places, one at a time, and lists the breaks that no test notices;
#              ARGS='--seed 3 --count 500 --only studies' breaks others, ARGS=--map brings up to date which tests run which lines
# make known-mutants   the same in the places where it was broken before; ARGS='--only schedule.py' only those of one file
# make matrix  all tests that notice each of 500 breaks, for as long as you let it; tests/README.md says how it is read
# make soak    set up, then an hour of training data under kills; ARGS='--minutes 5' for less
# make fuzz    set up, then 100,000 damaged and intact JPEGs through the C code, built with sanitizers, and libjpeg, and for
#              a minute damaged run folders, tables, ... through their readers; ARGS='--cases 1000000 --seed 1' for others,
#              ARGS='--cases 0 --seconds 600' for readers alone
# make sanitized  set up, then the tests of loader and formats with the C code built with sanitizers, and numba's indices
#              checked; ARGS=tests/data/test_decode.py for others
# make check   set up, then ruff and mypy
# make lowest  tests with the oldest versions that pyproject.toml allows, in build/lowest; needs uv; ARGS=--below says what
#              fails with the release before each bound, ARGS='--keep --below numpy scipy' for these, in the same environment
# make site    set up, then the pages in docs/ as a site, in site/; ARGS=serve shows it while you write
# make wheels  set up, then the source distribution and the wheels, in dist/; needs cmake, nasm and ninja (apt-get),
#              and downloads libjpeg-turbo; ARGS='--jpeg FOLDER' for its sources on disk
# make release-check   make wheels, then all that can be checked of a release without a network
# The set-up lives in .venv and takes no time when nothing has changed. PYTHON=python3.12 picks another Python.

.PHONY: demo test test-all quick test-gpu bench-gpu test-cluster nights soak fuzz sanitized chaos mutants known-mutants matrix check lowest site wheels release-check setup

demo: setup
	.venv/bin/python -m widemix.launch.demo

# Bytecode is kept, whatever the environment says, for the processes that tests start.
PYTEST = PYTHONDONTWRITEBYTECODE= .venv/bin/python -m pytest
# One more than there are CPUs, since tests wait for the processes that they start.
PROCESSES = $(shell n=$$(nproc); echo $$((n < 4 ? n + 1 : 4)))
# Each file in one process, which keeps what its tests share; the longest first: tests/longest.py.
PARALLEL = -n $(PROCESSES) --dist loadfile --no-loadscope-reorder

test: setup
	$(PYTEST) $(PARALLEL) $(ARGS)

QUICK = tests/recipe tests/models tests/optim tests/formats tests/run tests/test_files.py tests/test_layering.py \
	tests/data/augment
SLOW = tests/optim/test_optimizer_registry.py tests/run/test_starts.py tests/run/test_trackers.py \
	tests/data/augment/test_distribution.py tests/data/augment/test_real_images.py

test-all: setup
	$(PYTEST) $(PARALLEL) --all $(ARGS)

quick: setup
	$(PYTEST) $(PARALLEL) $(QUICK) $(SLOW:%=--ignore %) $(ARGS)

test-gpu: setup
	$(PYTEST) -n $(PROCESSES) --all tests/gpu tests/models/test_batch_last_triton.py \
		tests/data/test_finish.py tests/data/test_device_transfer.py $(ARGS)

bench-gpu: setup
	.venv/bin/python -m widemix bench gpu $(ARGS)

CLUSTER = PATH="$$PATH:/usr/sbin" which slurmctld slurmd sbatch munged sshd mpirun pdsh ip >/dev/null || { apt-get update && \
	DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
	slurmctld slurmd slurm-client munge openssh-server openmpi-bin pdsh iproute2; }

test-cluster: setup
	@$(CLUSTER)
	.venv/bin/python -m pip install --quiet --editable '.[cluster]'
	.venv/bin/python -m pytest -m cluster tests/launch $(ARGS)

nights: setup
	@$(CLUSTER)
	.venv/bin/python -m widemix prep digits --to runs/nights/digits
	.venv/bin/python -m tests.stress.nights runs/nights/digits "runs/nights/$$(date +%Y%m%d-%H%M%S)" --minutes 60 $(ARGS)

chaos: setup
	.venv/bin/python -m widemix prep digits --to runs/chaos/digits
	.venv/bin/python -m tests.stress.chaos runs/chaos/digits "runs/chaos/$$(date +%Y%m%d-%H%M%S)" --minutes 60 $(ARGS)

mutants: setup
	.venv/bin/python -m tests.stress.mutants $(ARGS)

known-mutants: setup
	.venv/bin/python -m tests.stress.mutants --known $(ARGS)

matrix: setup
	.venv/bin/python -m tests.stress.mutants --matrix --seed 300 --count 500 --budget 15 $(ARGS)

soak: setup
	.venv/bin/python -m tests.stress.soak $(ARGS)

fuzz: setup
	.venv/bin/python -m tests.stress.fuzz $(ARGS)

sanitized: setup
	.venv/bin/python -m tests.stress.sanitized $(ARGS)

check: setup
	.venv/bin/python -m ruff check .
	.venv/bin/python -m ruff format --check .
	.venv/bin/python -m mypy

lowest:
	python3 tests/release/lowest.py $(ARGS)

# The results' tables and figures, which lie outside docs/, come into the site.
SITE = build/docs
site: setup
	.venv/bin/python -m pip install --quiet --editable '.[docs]'
	rm -rf $(SITE)
	mkdir -p $(SITE)/recipes/studies
	cp -r docs/. $(SITE)
	cp -r recipes/studies/results $(SITE)/recipes/studies
	sed -i 's|](\.\./recipes/|](recipes/|g' $(SITE)/results.md
	REPOSITORY=$$(sed -n 's/^Repository = "\(.*\)"/\1/p' pyproject.toml) .venv/bin/zensical $(or $(ARGS),build --clean)

wheels: setup
	.venv/bin/python -m pip install --quiet --editable '.[release]'
	.venv/bin/python -m widemix.launch.wheels $(ARGS)

release-check: wheels
	.venv/bin/python -m tests.release.check

setup:
	@sh launch/setup.sh
