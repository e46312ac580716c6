# Make or repair .venv and install into it. tests/run.sh, examples/quickstart/run.sh and others source
# this file from the repository's root.
#   install_project            what a run needs
#   install_project dev        the same, and the extra `dev`
py=.venv/bin/python
export PIP_DISABLE_PIP_VERSION_CHECK=1
say() { echo "$(basename "$(dirname "$0")")/$(basename "$0"): $*" >&2; }

recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

make_venv() {
    local candidate
    for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11 python; do
        if recent "$candidate"; then
            if [ -e .venv ]; then say ".venv is incomplete or its Python is too old; making a new one"; fi
            rm -rf .venv
            "$candidate" -m venv .venv && return
            say "'$candidate -m venv .venv' failed: is the venv module there? On Debian and Ubuntu: apt install python3-venv"
            exit 1
        fi
    done
    say "needs Python 3.11 or newer; found $(python3 --version 2>&1 || true). Set PYTHON=<path of a newer one>."
    exit 1
}

# pip would compile 12,000 files, which takes half a minute. Python compiles only the tenth that is
# imported; but if it may not write bytecode, every process would compile them again.
compile=--no-compile uv_compile=
[ -z "${PYTHONDONTWRITEBYTECODE:-}" ] || compile=--compile uv_compile=--compile-bytecode

# Print the options for uv that match pip's indexes and folders of wheels, from its configuration file
# and environment variables.
index_options() {
    local name kind values value
    "$py" -m pip config list | tr -d "'" | while IFS='=' read -r name values; do
        kind=${name##*.}
        case "$kind" in
            *-url | *-links)
                for value in ${values//\\n/ }; do echo "--$kind=$value"; done
                ;;
            no-index) case "$values" in 1 | [Tt]rue | yes | on) echo --no-index ;; esac ;;
        esac
    done
}

# uv takes a tenth of pip's time. Like pip, it searches all indexes for a package.
uv_install() {
    "$py" -m uv --version >/dev/null 2>&1 || "$py" -m pip install -qq uv >/dev/null || return
    local option options=()
    while read -r option; do options+=("$option"); done < <(index_options)
    "$py" -m uv pip install -q --python "$py" --index-strategy unsafe-best-match $uv_compile \
        ${options[@]+"${options[@]}"} "$@"
}

# Fall back to pip if uv is not available or finds no solution; pip prints the reason.
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
    if [ "$(uname)" != Linux ] || nvidia-smi -L >/dev/null 2>&1; then
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
    say "installing into .venv: torch (CPU build: 200 MB), ray, pyarrow, transformers and their dependencies; 450 MB to download, 1.7 GB on disk"
    free=$(df -Pk . | awk 'NR == 2 { print int($4 / 1024) }')
    if [ "$free" -lt 2000 ] && ! "$py" -c 'import torch' 2>/dev/null; then
        say "$free MB are free here, 2000 are needed. Free some space or clone to another disk."
        exit 1
    fi
    install_torch
    install_or_exit -e "$target"
    echo "$state $target" >.venv/installed
}
