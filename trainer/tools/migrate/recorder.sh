# Every bash of a recorded script reads this first (BASH_ENV): what trains is recorded, not run.
exec {BASH_XTRACEFD}> /dev/null  # hides the trace of `set -x`

record() {
    { printf '%s\0' "$PWD" "$#" "$@"; "$VERL_LIKE_RECORDER/tools/env" -0; } \
        > "$VERL_LIKE_RECORDER/commands/$EPOCHREALTIME.$BASHPID"
    [[ "$*" != *" -c import torch_npu" ]]  # there is no NPU; scripts for several devices ask for it
}

command_not_found_handle() {
    record "$@"
}

# A launcher such as `srun` or `ray job submit` is recorded, and the command that it starts is run.
run_inner() {
    local launcher=$1
    record "$@"
    shift
    while (($#)); do
        if [[ $1 == --@(extra|group|package|with) ]]; then
            shift  # uv's extra `vllm` is no program
        elif [[ -f $VERL_LIKE_RECORDER/programs/${1##*/} || ${1##*/} == @(bash|sh) ]]; then
            local inner=${1##*/}
            shift
            "$inner" "$@"
            return
        elif [[ $1 == *.sh && -f $1 ]]; then
            bash "$@"
            return
        fi
        shift
    done
    if [[ $launcher == sbatch ]]; then
        bash  # the script comes on standard input
    fi
}

for file in "$VERL_LIKE_RECORDER"/programs/*; do
    eval "${file##*/}() { record ${file##*/} \"\$@\"; }"
done
for launcher in $VERL_LIKE_LAUNCHERS; do
    eval "$launcher() { run_inner $launcher \"\$@\"; }"
done
unset file launcher

trap wait EXIT  # so that commands in the background are recorded, too

sh() { bash "$@"; }
mkdir() { command mkdir "$@" 2> /dev/null || true; }
tee() { command tee "$@" 2> /dev/null || true; }
kill() { :; }
ulimit() { :; }
sleep() { :; }
source() { if [[ -f $1 ]]; then builtin source "$@"; fi; }
.() { source "$@"; }
