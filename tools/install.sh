# Sourced by tests/run.sh, tests/run_vllm.sh and examples/quickstart/run.sh, from the repository's
# root: makes or repairs .venv and installs into it.
#   install_project            what a run needs
#   install_project dev        and the extra `dev`
py=.venv/bin/python
export PIP_DISABLE_PIP_VERSION_CHECK=1
say() { echo "$(basename "$(dirname "$0")")/$(basename "$0"): $*" >&2; }

recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

make_venv() {
    local candidate
    for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11 python; do
        if recent "$candidate"; then
            if [ -e .venv ]; then say ".venv is not whole or not of a recent Python; making it anew"; fi
            rm -rf .venv
            "$candidate" -m venv .venv && return
            say "'$candidate -m venv .venv' failed: is the venv module there? On Debian and Ubuntu: apt install python3-venv"
            exit 1
        fi
    done
    say "needs Python 3.11 or newer; found $(python3 --version 2>&1 || true). Set PYTHON=<path of a newer one>."
    exit 1
}

# pip would compile 12,000 files, half a minute; Python does so with the tenth that is imported,
# unless it is told to write no bytecode: then every process would compile them again
compile=--no-compile uv_compile=
[ -z "${PYTHONDONTWRITEBYTECODE:-}" ] || compile=--compile uv_compile=--compile-bytecode

# What pip has been told of places to look in, by a file or by variables, as uv wants it.
pips_places() {
    local name kind values value
    "$py" -m pip config list | tr -d "'" | while IFS='=' read -r name values; do
        kind=${name##*.}
        case "$kind" in
            *-url | *-links) # of indexes, and of folders of wheels
                for value in ${values//\\n/ }; do echo "--$kind=$value"; done
                ;;
            no-index) case "$values" in 1 | [Tt]rue | yes | on) echo --no-index ;; esac ;;
        esac
    done
}

# uv takes a tenth of pip's time; a package is looked for in all places, as pip does.
uv_install() {
    "$py" -m uv --version >/dev/null 2>&1 || "$py" -m pip install -qq uv >/dev/null || return
    local place places=()
    while read -r place; do places+=("$place"); done < <(pips_places)
    "$py" -m uv pip install -q --python "$py" --index-strategy unsafe-best-match $uv_compile \
        ${places[@]+"${places[@]}"} "$@"
}

# Where uv cannot be had, or finds no solution: pip, which says what is wrong.
install_packages() {
    uv_install "$@" 2>/dev/null || "$py" -m pip install -qq $compile "$@"
}

install_or_exit() {
    if ! install_packages "$@"; then
        say "pip could not install $*: its message is above. Without a network, give pip a folder of wheels (PIP_FIND_LINKS, PIP_NO_INDEX=1)."
        exit 1
    fi
}

install_torch() {
    if "$py" -c 'import re, sys, torch; sys.exit(not (2, 11) <= tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < (2, 14))' 2>/dev/null; then
        return
    fi
    if nvidia-smi -L >/dev/null 2>&1; then
        install_or_exit "torch>=2.11,<2.14"
    elif ! install_packages "torch==2.13.0+cpu" 2>/dev/null; then
        say "no CPU build torch==2.13.0+cpu where pip looks; installing torch==2.13.0 (on Linux with its CUDA packages: several GB)"
        install_or_exit "torch==2.13.0"
    fi
}

install_project() {
    local target=. needed free state
    [ $# -eq 0 ] || target=".[$1]"
    recent "$py" && "$py" -m pip --version >/dev/null 2>&1 || make_venv
    state="$PWD $("$py" -c 'import hashlib; print(hashlib.sha256(open("pyproject.toml", "rb").read()).hexdigest())')"
    needed='import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, ("torch", "ray", "transformers", "matplotlib", "trainer"))))'
    if grep -qxF -e "$state $target" -e "$state .[dev]" .venv/installed 2>/dev/null && "$py" -P -c "$needed"; then
        return
    fi
    say "installing into .venv: torch (CPU build: 200 MB), ray, pyarrow, transformers and what they need; 450 MB to download, 1.7 GB on disk"
    free=$(df -Pk . | awk 'NR == 2 { print int($4 / 1024) }')
    if [ "$free" -lt 2000 ] && ! "$py" -c 'import torch' 2>/dev/null; then
        say "$free MB are free here, 2000 are needed; make room or clone to another disk"
        exit 1
    fi
    install_torch
    install_or_exit -e "$target"
    echo "$state $target" >.venv/installed
}
