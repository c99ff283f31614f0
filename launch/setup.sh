#!/bin/sh
# Makes .venv ready: the Debian packages that FFCV is built against, everything in pyproject.toml, pipeline/native.
# Does nothing when that was done before for this pyproject.toml, this Python and this folder.
# Without .venv/stamp (interrupted), moved, or with its Python gone, the environment is built anew.
set -eu
cd "$(dirname "$0")/.."
log=.venv/setup.log
stamp=.venv/stamp
network='timed? ?out|connection|incomplete|name resolution|from versions: none|do not match the hashes'

say() { printf 'set-up: %s\n' "$*"; }
fail() { say "$*" >&2; exit 1; }

# run COMMAND...: its chatter goes to the log; the log's end is shown when it fails
run() { "$@" >>"$log" 2>&1 || { tail -n 20 "$log" >&2; return 1; }; }

# Where the environment lies and which Python it has; nothing when it does not work.
describe() {
    .venv/bin/python -c 'import pip, sys; v = sys.version_info; assert v >= (3, 11); print(sys.prefix, v[0], v[1])' \
        2>/dev/null || true
}

# Debian's names of what this Python lacks to create an environment, build FFCV and import OpenCV.
missing_packages() {
    "$1" - <<'END'
import ctypes, importlib.util, os, shutil, subprocess, sys, sysconfig

def library(name):
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None

def headers(name):
    return shutil.which("pkg-config") and not subprocess.run(["pkg-config", "--exists", name]).returncode

version = "python%d.%d" % sys.version_info[:2]
present = {
    version + "-venv": importlib.util.find_spec("ensurepip"),
    version + "-dev": os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")),
    "g++": shutil.which("g++"),
    "pkg-config": shutil.which("pkg-config"),
    "libopencv-dev": headers("opencv4"),
    "libturbojpeg0-dev": headers("libturbojpeg"),
    "libjpeg-dev": headers("libjpeg"),  # what pipeline/native is built against: libjpeg-turbo's own interface
    "libgl1": library("libGL.so.1"),  # PyPI's OpenCV, which FFCV imports
    "libglib2.0-0": library("libgthread-2.0.so.0"),  # the same
}
print(*(name for name, found in present.items() if not found))
END
}

apt_get() { $sudo env DEBIAN_FRONTEND=noninteractive apt-get -y -o DPkg::Lock::Timeout=300 "$@"; }

install_packages() { # one word a name
    say "system packages by apt-get, about a minute: $*"
    if ! run apt_get update || ! run apt_get install --no-install-recommends "$@"; then
        fail "apt-get failed; $log has all of its words"
    fi
}

# pip unpacks gigabytes: beside the environment, because /tmp may be memory.
pip_install() {
    mkdir -p .venv/tmp
    TMPDIR=$PWD/.venv/tmp .venv/bin/python -m pip install --use-pep517 "$@"
}

logged() { tail -n 40 "$log" | grep -Eiq "$1"; }

install_project() {
    run pip_install --editable '.[dev]' && return
    logged "$network" || return 1
    say "the network failed; once more"
    run pip_install --editable '.[dev]'
}

explain_and_fail() {
    if logged 'no space left'; then
        fail "the disk is full: the environment takes 7 GB, pip's downloads 4 GB more (PIP_CACHE_DIR moves them)"
    elif logged '(failed to build|failed building wheel for|could not build wheels for).*ffcv|required package'; then
        fail "FFCV did not build; it needs: apt-get install g++ pkg-config libopencv-dev libturbojpeg0-dev python3-dev"
    elif logged "$network"; then
        fail "the network failed twice; the same command tries again"
    fi
    fail "pip failed; $log has all of its words, and the same command tries again"
}

ffcv_loads() {
    .venv/bin/python - <<'END'
import ctypes, glob, sysconfig
for library in glob.glob(sysconfig.get_path("platlib") + "/ffcv/_libffcv*.so"):
    ctypes.CDLL(library)
END
}

inputs=$(cat pyproject.toml launch/setup.sh | sha256sum | cut -c 1-64)
have=$(describe)
if [ -n "${PYTHON:-}" ]; then # asked for by name: an environment of another version does not do
    version=$("$PYTHON" -c 'import sys; print(*sys.version_info[:2])' 2>/dev/null || true)
    case $have in *" $version") ;; *) have= ;; esac
fi
stamped=$(cat "$stamp" 2>/dev/null || true)
if [ -n "$have" ] && [ "$stamped" = "$have $inputs" ]; then exit 0; fi

started=$(date +%s)
# Begun by this script and not finished, or finished elsewhere or for another Python: not to be trusted.
if [ -e "$log" ] && [ "${stamped% *}" != "$have" ]; then have=; fi
python=${PYTHON:-python3}
[ -z "$have" ] || python=.venv/bin/python
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    fail "$python is missing or older than Python 3.11; name a newer one: make PYTHON=/path/to/python3.11 ..."

missing=$(missing_packages "$python")
if [ -n "$missing" ]; then
    command -v apt-get >/dev/null || fail "missing, by Debian's names: $missing; install them, then again"
    if [ "$(id -u)" = 0 ]; then
        sudo=
    elif sudo -n true 2>/dev/null; then
        sudo='sudo -n'
    else
        fail "system packages are missing; as root: apt-get update && apt-get install --no-install-recommends $missing; then again"
    fi
fi

mkdir -p .venv
: >"$log"
rm -f "$stamp"
# shellcheck disable=SC2086 # one word a package
[ -z "$missing" ] || install_packages $missing

if [ -z "$have" ]; then
    find .venv/ -mindepth 1 ! -path "$log" -delete
    run "$python" -m venv "$(readlink -f .venv)" || fail "$python -m venv failed"
fi
say "Python packages by pip, 3 GB to fetch the first time, some minutes"
install_project || explain_and_fail
# A wheel that pip kept from another system (a home folder that containers share) links to another OpenCV.
ffcv_loads 2>>"$log" || run pip_install --force-reinstall --no-deps --no-cache-dir ffcv || explain_and_fail
# Not needed to go on: where it does not build, Pillow decodes, the same and slower.
run .venv/bin/python -m pipeline.native || say "pipeline/native did not build, so loading pictures is slower; $log says why"
rm -rf .venv/tmp
echo "$(describe) $inputs" >"$stamp"
say "done in $(($(date +%s) - started)) s; everything is in .venv"
