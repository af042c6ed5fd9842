# shellcheck shell=bash disable=SC2034  # the variables are for the scripts that source this
#
# What the example scripts share: messages, the checks before anything starts, and the start itself.
# To be sourced. A script sets its variables first; here are those that all of them have.

EXAMPLES=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

DEVICE=${DEVICE:-gpu}            # cpu: unmodified Megatron over gloo, for trying things out
DRY_RUN=${DRY_RUN:-0}            # 1: print the command instead of running it
MEGATRON_LM=${MEGATRON_LM:-}     # a Megatron-LM checkout; without one, the wheel is enough to train
if [[ -n $MEGATRON_LM ]]; then
    SCRIPT=${SCRIPT:-$MEGATRON_LM/pretrain_gpt.py}
else
    SCRIPT=${SCRIPT:-$EXAMPLES/pretrain_gpt.py}
fi

# What Megatron takes on a GPU; on a CPU `megatron_paci run --device cpu` adds what that needs.
gpu_flags=()
if [[ $DEVICE == gpu ]]; then
    gpu_flags=(--transformer-impl transformer_engine --attention-backend flash)
fi

# fail MESSAGE: say what is wrong and what to do, and end with the status of a usage error.
fail() {
    echo "$(basename "$0"): error: $*" >&2
    exit 2
}

# require_numbers NAME...: each variable is a whole number, at least 1.
require_numbers() {
    local name
    for name in "$@"; do
        [[ ${!name} =~ ^[1-9][0-9]*$ ]] || fail "$name=${!name}: give a whole number, at least 1"
    done
}

# require_multiple NAME VALUE OF WHAT: VALUE divides by OF, which is described by WHAT.
require_multiple() {
    (($2 % $3 == 0)) || fail "$1=$2 does not divide by $3, $4; change one of them"
}

# require_data PREFIX: the two files of an indexed data set are there.
require_data() {
    local suffix
    for suffix in bin idx; do
        [[ -f $1.$suffix ]] || fail "the data set $1.$suffix is not there;" \
            "examples/README.md says how to prepare one, DATA=PREFIX takes another"
    done
}

# require_script: the launch script is there.
require_script() {
    [[ -f $SCRIPT ]] || fail "the launch script $SCRIPT is not there; let MEGATRON_LM name a" \
        "Megatron-LM checkout, or leave it empty for examples/pretrain_gpt.py"
}

# require_device COUNT: this machine has what COUNT ranks need; not asked of who only prints.
require_device() {
    local found
    case $DEVICE in
    cpu) return ;;
    gpu) ;;
    *) fail "DEVICE=$DEVICE: choose gpu or cpu" ;;
    esac
    [[ $DRY_RUN == 1 ]] && return
    found=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
    ((found >= $1)) || fail "$1 GPUs are needed and nvidia-smi shows $found; lower NPROC, or try" \
        "the script with DEVICE=cpu and small sizes (examples/README.md has the command)"
}

# start COMMAND...: become that command, or print it, quoted for a shell.
start() {
    if [[ $DRY_RUN == 1 ]]; then
        printf '%q ' "$@"
        echo
    else
        exec "$@"
    fi
}
