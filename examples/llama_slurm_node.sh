#!/usr/bin/env bash
# One node's part of llama_slurm.sbatch: torchrun with the ranks of a Llama-like model (8B by
# default). Started by srun on every node; DRY_RUN=1 prints the command of a node.
#
# Megatron numbers ranks by tensor, then data, then pipeline. With 4 nodes of 8 GPUs, TP=2 and PP=8
# a stage has 4 ranks (2 replicas), a node two whole stages: tensor- and data-parallel communication
# stay inside the nodes, and what crosses them is what the pipeline's neighbours send each other.
set -euo pipefail

source "$(dirname "$0")/common.sh"

NPROC=${NPROC:-8}                                # GPUs of a node
TP=${TP:-2}                                      # tensor-parallel ranks
PP=${PP:-8}                                      # pipeline stages; the rest is data parallelism
NODES=${SLURM_NNODES:-4}

NUM_LAYERS=${NUM_LAYERS:-32}
HIDDEN=${HIDDEN:-4096}
FFN_HIDDEN=${FFN_HIDDEN:-14336}
HEADS=${HEADS:-32}
QUERY_GROUPS=${QUERY_GROUPS:-8}
SEQ_LENGTH=${SEQ_LENGTH:-4096}

GLOBAL_BATCH=${GLOBAL_BATCH:-256}
MICRO_BATCH=${MICRO_BATCH:-2}
TRAIN_ITERS=${TRAIN_ITERS:-100000}
WARMUP_ITERS=${WARMUP_ITERS:-$((TRAIN_ITERS / 50))}
LR=${LR:-3e-4}
MIN_LR=${MIN_LR:-3e-5}

DATA=${DATA:-$EXAMPLES/../out/openwebtext/openwebtext_text_document}
SPLIT=${SPLIT:-999,1,0}
TOKENIZER_TYPE=${TOKENIZER_TYPE:-HuggingFaceTokenizer}
TOKENIZER_MODEL=${TOKENIZER_MODEL:-gpt2}         # that of the data; a name on the Hub, or a folder
CHECKPOINTS=${CHECKPOINTS:-$EXAMPLES/../out/llama}  # on storage that all nodes see
SAVE_INTERVAL=${SAVE_INTERVAL:-500}
CHECKPOINT_FORMAT=${CHECKPOINT_FORMAT:-torch_dist}
EVAL_INTERVAL=${EVAL_INTERVAL:-1000}
LOG_INTERVAL=${LOG_INTERVAL:-10}
MAX_RESTARTS=${MAX_RESTARTS:-3}
SCHEDULE=${SCHEDULE:-paci}                       # or 1f1b

require_numbers NPROC TP PP NODES NUM_LAYERS HIDDEN FFN_HIDDEN HEADS QUERY_GROUPS SEQ_LENGTH \
    GLOBAL_BATCH MICRO_BATCH TRAIN_ITERS SAVE_INTERVAL EVAL_INTERVAL LOG_INTERVAL
require_multiple "SLURM_NNODES * NPROC" $((NODES * NPROC)) $((TP * PP)) \
    "the ranks of a replica (TP * PP)"
replicas=$((NODES * NPROC / (TP * PP)))
require_multiple NUM_LAYERS "$NUM_LAYERS" "$PP" "the number of pipeline stages (PP)"
require_multiple HEADS "$HEADS" "$TP" "the tensor-parallel ranks (TP)"
require_multiple QUERY_GROUPS "$QUERY_GROUPS" "$TP" "the tensor-parallel ranks (TP)"
require_multiple GLOBAL_BATCH "$GLOBAL_BATCH" $((MICRO_BATCH * replicas)) \
    "the microbatch size (MICRO_BATCH) times $replicas replicas"
microbatches=$((GLOBAL_BATCH / (MICRO_BATCH * replicas)))
# a: backward passes per update. A quarter of the iteration would update more often with older
# gradients; `python -m megatron_paci simulate --advise` weighs it.
ACCUM=${ACCUM:-$microbatches}
require_numbers ACCUM
require_script
require_data "$DATA"
require_device "$NPROC"

schedule_flags=(--pipeline-schedule "$SCHEDULE")
if [[ $SCHEDULE == paci ]]; then
    require_multiple "microbatches per iteration" "$microbatches" "$ACCUM" "the window (ACCUM)"
    schedule_flags+=(--paci-accum "$ACCUM")
fi
tensor_flags=(--tensor-model-parallel-size "$TP")
if ((TP > 1)); then
    tensor_flags+=(--sequence-parallel)
    # Megatron asks for it with tensor parallelism on GPUs before Blackwell.
    export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
fi

flags=(
    "${tensor_flags[@]}"
    --pipeline-model-parallel-size "$PP"
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather

    --num-layers "$NUM_LAYERS"
    --hidden-size "$HIDDEN"
    --ffn-hidden-size "$FFN_HIDDEN"
    --num-attention-heads "$HEADS"
    --group-query-attention
    --num-query-groups "$QUERY_GROUPS"
    --seq-length "$SEQ_LENGTH"
    --max-position-embeddings "$SEQ_LENGTH"
    --position-embedding-type rope
    --rotary-base 500000
    --swiglu
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0
    --hidden-dropout 0
    --no-create-attention-mask-in-dataloader

    --micro-batch-size "$MICRO_BATCH"
    --global-batch-size "$GLOBAL_BATCH"
    --train-iters "$TRAIN_ITERS"
    --bf16
    --optimizer adam
    --adam-beta1 0.9
    --adam-beta2 0.95
    --weight-decay 0.1
    --clip-grad 1.0
    --lr "$LR"
    --min-lr "$MIN_LR"
    --lr-decay-style cosine
    --lr-warmup-iters "$WARMUP_ITERS"

    --data-path "$DATA"
    --split "$SPLIT"
    --tokenizer-type "$TOKENIZER_TYPE"
    --tokenizer-model "$TOKENIZER_MODEL"
    --eval-interval "$EVAL_INTERVAL"
    --eval-iters 10
    --log-interval "$LOG_INTERVAL"
    --rerun-mode disabled

    --save "$CHECKPOINTS"
    --load "$CHECKPOINTS"
    --save-interval "$SAVE_INTERVAL"
    --ckpt-format "$CHECKPOINT_FORMAT"
    --exit-signal-handler                        # SIGTERM: save and end, all after one iteration
    "${gpu_flags[@]}"
)

# Since PyTorch 2.5 a restarted attempt shares its store with the one before and may connect to
# processes that are gone.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# Where Slurm signals all processes of a task, torchrun gets SIGTERM too and kills ranks that are
# still saving after this many seconds (30 by default).
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-270}
# A load of a kernel in the middle of training makes a stage wait for its whole device.
export CUDA_MODULE_LOADING=${CUDA_MODULE_LOADING:-EAGER}

command=(
    torchrun --nnodes "$NODES" --nproc-per-node "$NPROC" --max-restarts "$MAX_RESTARTS"
    --rdzv-backend c10d --rdzv-endpoint "${RDZV_ENDPOINT:-localhost:29400}"
    # A job that comes out of the queue again is another meeting than the one before.
    --rdzv-id "${SLURM_JOB_ID:-0}-${SLURM_RESTART_COUNT:-0}"
    --local-addr "${SLURMD_NODENAME:-localhost}"
    -m megatron_paci run --device "$DEVICE" "$SCRIPT" "${flags[@]}" "${schedule_flags[@]}" "$@"
)
if [[ $DRY_RUN == 1 ]]; then
    start "${command[@]}"
    exit
fi

# SIGTERM goes past torchrun, which would end with status 1, to its children, the ranks. They end
# with status 0 when they have saved, and so does torchrun.
"${command[@]}" &
torchrun=$!
ending=no
trap 'ending=yes; pkill -TERM -P "$torchrun" || true' TERM
status=0
wait "$torchrun" || status=$?
while [[ $ending == yes ]]; do  # a signal has ended the wait, not torchrun
    ending=no
    status=0
    wait "$torchrun" || status=$?
done
exit "$status"
