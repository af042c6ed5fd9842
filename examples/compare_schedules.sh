#!/usr/bin/env bash
# GPT-2 Medium under several schedules on one node, a few hundred iterations each, same seed and
# data; a report with loss, throughput, idle time and memory of each in OUTPUT. Long enough for the
# speed of each schedule and the start of the loss curve, not for a verdict on the final loss.
#
#   examples/compare_schedules.sh
#   SCHEDULES=1f1b,paci ACCUMS=2,4,8 TRAIN_ITERS=2000 examples/compare_schedules.sh
#
# The model and all else are variables of gpt2_medium_flags.sh. More flags of Megatron's go behind.
set -euo pipefail

TRAIN_ITERS=${TRAIN_ITERS:-300}
EVAL_INTERVAL=${EVAL_INTERVAL:-$TRAIN_ITERS}     # at the end, the same for all
LOG_INTERVAL=${LOG_INTERVAL:-1}
source "$(dirname "$0")/gpt2_medium_flags.sh"

SCHEDULES=${SCHEDULES:-1f1b,interleaved,paci}
CHUNKS=${CHUNKS:-$((NUM_LAYERS / NPROC))}        # of a stage, for interleaved: a layer each
ACCUMS=${ACCUMS:-$microbatches}                  # for paci, one run each; for example 4,8
OUTPUT=${OUTPUT:-$EXAMPLES/../out/compare}
PYTHON=${PYTHON:-python}

require_numbers CHUNKS
if [[ ,$SCHEDULES, == *,interleaved,* ]]; then
    require_multiple NUM_LAYERS "$NUM_LAYERS" $((NPROC * CHUNKS)) "NPROC * CHUNKS for interleaved"
fi
IFS=, read -ra windows <<<"$ACCUMS"
for window in "${windows[@]}"; do
    require_numbers window
    require_multiple "GLOBAL_BATCH / MICRO_BATCH" "$microbatches" "$window" "the window (ACCUMS)"
done
require_device "$NPROC"

start "$PYTHON" -m megatron_paci compare --nproc "$NPROC" --schedules "$SCHEDULES" \
    --accum "$ACCUMS" --chunks "$CHUNKS" --output "$OUTPUT" --device "$DEVICE" \
    "$SCRIPT" "${flags[@]}" "$@"
