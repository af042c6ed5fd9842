#!/usr/bin/env bash
# GPT-2 Medium from scratch on OpenWebText with the settings of the PACI paper (arXiv 2606.07881):
# one node with 8 GPUs, one pipeline stage each.
#
#   examples/prepare_openwebtext.sh                                    # the data, once
#   examples/gpt2_medium.sh                                            # batch 128, a = m = 8
#   GLOBAL_BATCH=256 examples/gpt2_medium.sh                           # batch 256, a = m = 16
#   SCHEDULE=1f1b examples/gpt2_medium.sh                              # Megatron's schedule
#   examples/gpt2_medium.sh --tensorboard-dir out/tensorboard          # any flag of Megatron's more
#   DRY_RUN=1 examples/gpt2_medium.sh                                  # print the command
#
# What differs from the paper: it trains fp32 weights under autocast, Megatron's --bf16 keeps bf16
# weights beside fp32 ones in the optimizer (docs/design.md says why that matters to PACI).
# The sizes, and all else, are variables of gpt2_medium_flags.sh.
set -euo pipefail

source "$(dirname "$0")/gpt2_medium_flags.sh"

SCHEDULE=${SCHEDULE:-paci}                       # or 1f1b
ACCUM=${ACCUM:-$microbatches}                    # a: backward passes per update of a stage
CHECKPOINTS=${CHECKPOINTS:-$EXAMPLES/../out/gpt2_medium-$SCHEDULE}
SAVE_INTERVAL=${SAVE_INTERVAL:-2000}
CHECKPOINT_FORMAT=${CHECKPOINT_FORMAT:-torch_dist}

require_numbers ACCUM SAVE_INTERVAL
schedule_flags=(--pipeline-schedule "$SCHEDULE")
if [[ $SCHEDULE == paci ]]; then
    require_multiple "GLOBAL_BATCH / MICRO_BATCH" "$microbatches" "$ACCUM" "the window (ACCUM)"
    schedule_flags+=(--paci-accum "$ACCUM")
fi
require_device "$NPROC"

# Kernels are loaded before training: a load in its middle makes a stage wait for its whole device.
export CUDA_MODULE_LOADING=${CUDA_MODULE_LOADING:-EAGER}

# Started again, it goes on from the last checkpoint.
start torchrun --standalone --nproc-per-node "$NPROC" \
    -m megatron_paci run --device "$DEVICE" "$SCRIPT" \
    "${flags[@]}" "${schedule_flags[@]}" \
    --save "$CHECKPOINTS" --load "$CHECKPOINTS" --save-interval "$SAVE_INTERVAL" \
    --ckpt-format "$CHECKPOINT_FORMAT" "$@"
