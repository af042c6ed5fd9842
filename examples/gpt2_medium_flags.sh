# shellcheck shell=bash disable=SC2034  # the variables are for the scripts that source this
#
# GPT-2 Medium with the settings of the PACI paper (arXiv 2606.07881), as Megatron's flags. Sourced
# by gpt2_medium.sh, which trains it, and by compare_schedules.sh. Every variable can come from the
# environment; the array `flags` is what comes out.

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

NPROC=${NPROC:-8}                                # GPUs of this node = pipeline stages

NUM_LAYERS=${NUM_LAYERS:-24}
HIDDEN=${HIDDEN:-1024}
HEADS=${HEADS:-16}
SEQ_LENGTH=${SEQ_LENGTH:-1024}

# m = GLOBAL_BATCH / MICRO_BATCH microbatches per iteration. The paper has a = m throughout: batch
# 128 with a = 4 and 8, batch 256 with a = 8 and 16. Its largest gain is that of batch 128, a = 8.
GLOBAL_BATCH=${GLOBAL_BATCH:-128}
MICRO_BATCH=${MICRO_BATCH:-16}

TRAIN_TOKENS=${TRAIN_TOKENS:-49800000000}        # 49.8B
DATA=${DATA:-$EXAMPLES/../out/openwebtext/openwebtext_text_document}
SPLIT=${SPLIT:-999,1,0}                          # training, validation, test
TOKENIZER_TYPE=${TOKENIZER_TYPE:-HuggingFaceTokenizer}
TOKENIZER_MODEL=${TOKENIZER_MODEL:-gpt2}         # a name on the Hugging Face Hub, or a folder
SEED=${SEED:-1234}                               # the paper has three seeds, and does not say which

require_numbers NPROC NUM_LAYERS HIDDEN HEADS SEQ_LENGTH GLOBAL_BATCH MICRO_BATCH TRAIN_TOKENS
require_multiple NUM_LAYERS "$NUM_LAYERS" "$NPROC" "the number of pipeline stages (NPROC)"
require_multiple HIDDEN "$HIDDEN" "$HEADS" "the number of attention heads (HEADS)"
require_multiple GLOBAL_BATCH "$GLOBAL_BATCH" "$MICRO_BATCH" "the microbatch size (MICRO_BATCH)"
microbatches=$((GLOBAL_BATCH / MICRO_BATCH))

TRAIN_ITERS=${TRAIN_ITERS:-$((TRAIN_TOKENS / (GLOBAL_BATCH * SEQ_LENGTH)))}
EVAL_INTERVAL=${EVAL_INTERVAL:-1000}
EVAL_ITERS=${EVAL_ITERS:-20}
LOG_INTERVAL=${LOG_INTERVAL:-10}
require_numbers TRAIN_ITERS EVAL_INTERVAL EVAL_ITERS LOG_INTERVAL

# 3e-4 at batch 256, and with the square root of the batch: 3e-4 * sqrt(1/2) at 128.
LR=${LR:-$(awk -v batch="$GLOBAL_BATCH" 'BEGIN { printf "%.6g", 3e-4 * sqrt(batch / 256) }')}
MIN_LR=${MIN_LR:-$(awk -v lr="$LR" 'BEGIN { printf "%.6g", lr / 10 }')}

require_script
require_data "$DATA"

flags=(
    --pipeline-model-parallel-size "$NPROC"      # one stage per GPU, no data parallelism
    --num-layers "$NUM_LAYERS"
    --hidden-size "$HIDDEN"
    --num-attention-heads "$HEADS"
    --seq-length "$SEQ_LENGTH"
    --max-position-embeddings "$SEQ_LENGTH"
    # The paper's own code has no tied embeddings. Leave this out for GPT-2 as it was published:
    # PACI supports both.
    --untie-embeddings-and-output-weights
    --attention-dropout 0.1
    --hidden-dropout 0.1
    --no-create-attention-mask-in-dataloader     # the mask is causal: the kernels know it

    --micro-batch-size "$MICRO_BATCH"
    --global-batch-size "$GLOBAL_BATCH"
    --train-iters "$TRAIN_ITERS"
    --bf16

    --optimizer adam                             # AdamW: Megatron decouples the weight decay
    --adam-beta1 0.9
    --adam-beta2 0.95
    --adam-eps 1e-8
    --weight-decay 0.1
    --clip-grad 0                                # no clipping
    --lr "$LR"
    --min-lr "$MIN_LR"
    --lr-decay-style cosine
    --lr-warmup-fraction 0.01

    --data-path "$DATA"
    --split "$SPLIT"
    --tokenizer-type "$TOKENIZER_TYPE"
    --tokenizer-model "$TOKENIZER_MODEL"
    --seed "$SEED"
    --eval-interval "$EVAL_INTERVAL"
    --eval-iters "$EVAL_ITERS"
    --log-interval "$LOG_INTERVAL"
    --rerun-mode disabled                        # PACI turns it off: the same for all
    "${gpu_flags[@]}"
)
