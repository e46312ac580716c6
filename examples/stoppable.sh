# Example scripts that continue after a run source this file.
#   stoppable COMMAND ...   runs COMMAND and returns its exit code. It forwards SIGTERM, SIGHUP and
#                           SIGUSR1, so that a run stops with a checkpoint. Ctrl-C reaches COMMAND
#                           from the terminal.
stoppable() {
    local child code=0 of_child=0 interrupted=
    (
        trap - INT # bash makes background jobs ignore Ctrl-C
        exec "$@"
    ) <&0 &
    child=$!
    trap 'interrupted=1; kill -TERM "$child"' TERM
    trap 'interrupted=1; kill -HUP "$child"' HUP
    trap 'interrupted=1; kill -USR1 "$child"' USR1
    trap 'interrupted=1' INT
    wait "$child" || code=$?
    while [ -n "$interrupted" ]; do # the signal may have ended the wait, not the command
        interrupted=
        of_child=0
        wait "$child" 2>/dev/null || of_child=$?
        [ "$of_child" -eq 127 ] || code=$of_child # 127: an earlier wait returned its exit code
    done
    trap - TERM HUP USR1 INT
    return "$code"
}
