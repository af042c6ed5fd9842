#!/usr/bin/env bash
# A launch script as many have one: Megatron's own 1F1B on the GPUs of a node. paci.diff, beside it,
# makes it train under PACI:
#
#   git apply -p0 paci.diff        # here; git apply -R -p0 paci.diff takes it back
set -euo pipefail

SCRIPT=${SCRIPT:-Megatron-LM/pretrain_gpt.py}
NPROC=${NPROC:-8}
NUM_LAYERS=${NUM_LAYERS:-24}
HIDDEN=${HIDDEN:-1024}
HEADS=${HEADS:-16}
SEQ_LENGTH=${SEQ_LENGTH:-1024}
MICRO_BATCH=${MICRO_BATCH:-8}
GLOBAL_BATCH=${GLOBAL_BATCH:-64}
TRAIN_ITERS=${TRAIN_ITERS:-100000}
DATA=${DATA:-data/my_text_document}
SPLIT=${SPLIT:-99,1,0}
TOKENIZER_MODEL=${TOKENIZER_MODEL:-gpt2}
EVAL_ITERS=${EVAL_ITERS:-10}
SAVE=${SAVE:-checkpoints}

torchrun --nproc-per-node "$NPROC" \
    "$SCRIPT" \
    --pipeline-model-parallel-size "$NPROC" \
    --num-layers "$NUM_LAYERS" \
    --hidden-size "$HIDDEN" \
    --num-attention-heads "$HEADS" \
    --seq-length "$SEQ_LENGTH" \
    --max-position-embeddings "$SEQ_LENGTH" \
    --micro-batch-size "$MICRO_BATCH" \
    --global-batch-size "$GLOBAL_BATCH" \
    --train-iters "$TRAIN_ITERS" \
    --bf16 \
    --lr 3e-4 \
    --min-lr 3e-5 \
    --lr-decay-style cosine \
    --lr-warmup-fraction 0.01 \
    --weight-decay 0.1 \
    --clip-grad 1.0 \
    --data-path "$DATA" \
    --split "$SPLIT" \
    --tokenizer-type HuggingFaceTokenizer \
    --tokenizer-model "$TOKENIZER_MODEL" \
    --eval-interval 1000 \
    --eval-iters "$EVAL_ITERS" \
    --save "$SAVE" \
    --load "$SAVE" \
    --save-interval 1000 \
    --log-interval 1 \
    "$@"
