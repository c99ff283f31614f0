#!/bin/sh
# Sets up .venv: the Debian packages that FFCV is built against, the packages of pyproject.toml by uv or pip, and
# pipeline/native.
# FFCV is left out where its Debian packages are missing and cannot be installed: only widemix.ffcv and benchmarks need it.
# Does nothing if that was done before with this pyproject.toml, this Python and this folder.
# Rebuilds the environment if it has no .venv/stamp (an interrupted set-up), was moved, or its Python is gone.
set -eu
cd "$(dirname "$0")/.."
log=.venv/setup.log
stamp=.venv/stamp
network='timed? ?out|connection|incomplete|name resolution|from versions: none|do not match the hashes|error sending request|failed to fetch'
unbuilt='(failed to build|failed building wheel for|could not build wheels for).*ffcv|required package'

say() { printf 'set-up: %s\n' "$*"; }
fail() { say "$*" >&2; exit 1; }

# run COMMAND...: write its output to the log; if it fails, show the end of the log
run() { "$@" >>"$log" 2>&1 || { tail -n 20 "$log" >&2; return 1; }; }

# Print the path of the environment and its version of Python; nothing if it does not work.
environment_id() {
    .venv/bin/python -c 'import pip, sys; v = sys.version_info; assert v >= (3, 11); print(sys.prefix, v[0], v[1])' \
        2>/dev/null || true
}

# missing_packages PYTHON all|needed: print the Debian packages that are missing to create an environment with this
# Python, and with `all` also to build pipeline/native and FFCV and to import OpenCV.
missing_packages() {
    "$1" - "$2" <<'END'
import ctypes, importlib.util, os, shutil, subprocess, sys, sysconfig

def library(name):
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None

def headers(name):
    return shutil.which("pkg-config") and not subprocess.run(["pkg-config", "--exists", name]).returncode

version = "python%d.%d" % sys.version_info[:2]
needed = {version + "-venv": importlib.util.find_spec("ensurepip")}
present = needed if sys.argv[1] == "needed" else {
    **needed,
    version + "-dev": os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")),
    "g++": shutil.which("g++"),
    "pkg-config": shutil.which("pkg-config"),
    "libopencv-dev": headers("opencv4"),
    "libturbojpeg0-dev": headers("libturbojpeg"),
    "libjpeg-dev": headers("libjpeg"),  # libjpeg-turbo, which pipeline/native is built against
    "libgl1": library("libGL.so.1"),  # of PyPI's OpenCV, which FFCV imports
    "libglib2.0-0": library("libgthread-2.0.so.0"),  # the same
}
print(*(name for name, is_present in present.items() if not is_present))
END
}

apt_get() { $sudo env DEBIAN_FRONTEND=noninteractive apt-get -y -o DPkg::Lock::Timeout=300 "$@"; }

install_packages() { # install_packages NAME...
    say "installing system packages by apt-get, about a minute: $*"
    run apt_get update && run apt_get install --no-install-recommends "$@"
}

# Print what pip's configuration says as variables of uv, which reads its own alone: where packages come from, and how they
# are reached. Fails where it says more than that.
uv_variables() {
    .venv/bin/python - <<'END'
import ast, os, shlex, subprocess, sys

NAMES = {
    "index-url": "UV_DEFAULT_INDEX", "extra-index-url": "UV_INDEX", "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX", "trusted-host": "UV_INSECURE_HOST", "cert": "SSL_CERT_FILE", "proxy": "ALL_PROXY",
}
NEEDLESS = {
    "break-system-packages", "cache-dir", "config-file", "default-timeout", "disable-pip-version-check", "no-cache-dir",
    "no-color", "no-input", "progress-bar", "quiet", "require-virtualenv", "retries", "root-user-action", "timeout",
}
listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
found = {}
for scope in ("global", "install", ":env:"):  # as pip reads them, the last one counts
    for line in listed.stdout.splitlines():
        key, _, value = line.partition("=")
        if key.startswith(scope + "."):
            found[key[len(scope) + 1 :]] = ast.literal_eval(value).split()
if set(found) - set(NAMES) - NEEDLESS:
    sys.exit(1)
# As pip does, the newest version of all indexes, not the newest of the first index that has the package.
variables = {"UV_INDEX_STRATEGY": "unsafe-best-match"} | {
    variable: ("," if name == "find-links" else " ").join(found[name]) for name, variable in NAMES.items() if found.get(name)
}
for variable, value in variables.items():
    if variable not in os.environ:
        print(f"export {variable}={shlex.quote(value)}")
END
}

# Set uv, which needs half of pip's time, to its path if it is there or pip can install it, else to nothing.
find_uv() {
    uv=
    variables=$(uv_variables 2>>"$log") || return 0
    eval "$variables"
    uv=$(command -v uv || { run .venv/bin/python -m pip install --quiet uv && ls .venv/bin/uv 2>/dev/null; }) || uv=
}

# Packages are gigabytes, so the temporary folder is next to the environment: /tmp may be in memory. Bytecode is written
# when a module is first imported: of all the modules' a fifth is ever needed.
install() {
    mkdir -p .venv/tmp
    if [ -n "$uv" ]; then
        TMPDIR=$PWD/.venv/tmp "$uv" pip install --python .venv/bin/python "$@"
    else
        TMPDIR=$PWD/.venv/tmp .venv/bin/python -m pip install --no-compile --use-pep517 "$@"
    fi
}

# with_progress LOG COMMAND...: run it; a line every 10 seconds since the start says how far the log is
with_progress() {
    while sleep $((10 - ($(date +%s) - started) % 10)) >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
        step=$(grep -Eo '(Collecting|Downloading|Downloaded|Building|Built|Prepared|Installing|Installed|Unpacking|Setting up|compiling) .*' "$1" | tail -n 1)
        say "$(($(date +%s) - started)) s: ${step:-starting}"
    done &
    progress=$!
    shift
    if "$@"; then failed=0; else failed=1; fi
    kill $progress
    return $failed
}

# Optional: without compiled code Pillow decodes images, to the same pixels but slower; the rest is compiled at its first use.
compile_ahead() {
    log=$log.compiled
    : >"$log"
    # Their bytecode, for which the ranks of the first run would wait.
    run .venv/bin/python -c 'import deepspeed, timm, torch._dynamo, torchmetrics.classification' &
    bytecode=$!
    run .venv/bin/python -m widemix.native || say "pipeline/native did not build, so loading images is slower; see $log"
    say "compiling what prepares batches, which takes a minute"
    run .venv/bin/python -m widemix.api.compile_ahead || say "it is compiled at the first batch instead; see $log"
    wait $bytecode || true
}

logged() { tail -n 40 "$log" | grep -Eiq "$1"; }

install_project() {
    with_progress "$log" run install --editable ".[$extras]" && return
    if logged "$network"; then
        say "the network failed; trying once more"
        with_progress "$log" run install --editable ".[$extras]" && return
    fi
    { [ -n "$uv" ] && ! logged "no space left|$unbuilt"; } || return 1
    say "uv cannot install them here; pip tries"
    uv=
    with_progress "$log" run install --editable ".[$extras]"
}

explain_and_fail() {
    if logged 'no space left'; then
        fail "the disk is full: the environment takes 7 GB, the downloads kept 4 GB more (PIP_CACHE_DIR or UV_CACHE_DIR moves them)"
    elif logged "$unbuilt"; then
        fail "FFCV did not build; it needs: apt-get install g++ pkg-config libopencv-dev libturbojpeg0-dev python3-dev"
    elif logged "$network"; then
        fail "the network failed twice; run the same command again"
    fi
    fail "the installation failed; see $log, then run the same command again"
}

ffcv_loads() {
    .venv/bin/python - <<'END'
import ctypes, glob, sysconfig
for library in glob.glob(sysconfig.get_path("platlib") + "/ffcv/_libffcv*.so"):
    ctypes.CDLL(library)
END
}

inputs=$(cat pyproject.toml launch/setup.sh | sha256sum | cut -c 1-64)
current=$(environment_id)
if [ -n "${PYTHON:-}" ]; then # given by the user: an environment of another version is rebuilt
    version=$("$PYTHON" -c 'import sys; print(*sys.version_info[:2])' 2>/dev/null || true)
    case $current in *" $version") ;; *) current= ;; esac
fi
stamped=$(cat "$stamp" 2>/dev/null || true)
if [ -n "$current" ] && [ "$stamped" = "$current $inputs" ]; then exit 0; fi

started=$(date +%s)
# Started by this script and not finished, or finished in another folder or for another Python: rebuild it.
if [ -e "$log" ] && [ "${stamped% *}" != "$current" ]; then current=; fi
python=${PYTHON:-python3}
[ -z "$current" ] || python=.venv/bin/python
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    fail "$python is missing or older than Python 3.11; name a newer one: make PYTHON=/path/to/python3.11 ..."

extras=dev,ffcv
missing=$(missing_packages "$python" all)
if [ -n "$missing" ]; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        sudo=
    elif command -v apt-get >/dev/null && sudo -n true 2>/dev/null; then
        sudo='sudo -n'
    else
        needed=$(missing_packages "$python" needed)
        [ -z "$needed" ] || fail "a system package is missing; as root: apt-get install $needed; then again"
        say "without FFCV, which only widemix.ffcv and benchmarks need: $missing missing, which root can install; then .venv/bin/pip install -e '.[ffcv]'"
        extras=dev
        missing=
    fi
fi

mkdir -p .venv
: >"$log"
rm -f "$stamp"
unset PYTHONDONTWRITEBYTECODE
# shellcheck disable=SC2086 # split into one word per package
if [ -n "$missing" ] && [ -n "$(missing_packages "$python" needed)" ]; then # there is no environment without these
    install_packages $missing || fail "apt-get failed; see $log"
    missing=
fi
if [ -n "$missing" ]; then # for FFCV and pipeline/native only, which come last
    # shellcheck disable=SC2086
    (log=$log.apt && : >"$log" && install_packages $missing) &
    apt_get=$!
fi

if [ -z "$current" ]; then
    say "making .venv for $("$python" --version)"
    find .venv/ -mindepth 1 ! -path "$log*" -delete
    run "$python" -m venv "$(readlink -f .venv)" || fail "$python -m venv failed"
fi
find_uv
say "installing Python packages by $([ -n "$uv" ] && echo uv || echo pip): downloads 3 GB the first time and takes some minutes"
[ -z "$missing" ] || extras=dev
install_project || explain_and_fail
[ -z "$missing" ] || with_progress "$log.apt" wait $apt_get || fail "apt-get failed; see $log.apt"
compile_ahead & # while FFCV is built
ahead=$!
if [ -n "$missing" ]; then
    extras=dev,ffcv
    install_project || explain_and_fail
fi
# A wheel that pip cached on another system (containers may share a home folder) links to another OpenCV.
[ "$extras" = dev ] || ffcv_loads 2>>"$log" || run install --force-reinstall --no-deps $([ -n "$uv" ] && echo --no-cache || echo --no-cache-dir) ffcv || explain_and_fail
with_progress "$log.compiled" wait $ahead || say "it is compiled at the first batch instead; see $log.compiled"
rm -rf .venv/tmp
echo "$(environment_id) $inputs" >"$stamp"
say "done in $(($(date +%s) - started)) s; everything is in .venv"
