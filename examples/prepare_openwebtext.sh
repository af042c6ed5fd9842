#!/usr/bin/env bash
# OpenWebText as GPT-2's tokens in Megatron's indexed format: 8 million documents, about 9 billion
# tokens.
#
#   git clone --branch core_v0.19.0 --depth 1 https://github.com/NVIDIA/Megatron-LM
#   pip install datasets transformers
#   MEGATRON_LM=Megatron-LM examples/prepare_openwebtext.sh
#
# Writes OUTPUT/openwebtext.jsonl (about 40 GB) and OUTPUT/openwebtext_text_document.{bin,idx}
# (about 18 GB), where gpt2_medium.sh looks for them. What is there already is kept. A file of one's
# own is taken with JSONL=FILE: one {"text": ...} per line.
#
# The vocabulary and the merges are those of the tokenizer `gpt2` on the Hugging Face Hub (50,257
# tokens; Megatron pads the embedding to 50,304). It is downloaded once, to HF_HOME. For nodes
# without a network give a shared folder, HF_HOME=/shared/huggingface, and HF_HUB_OFFLINE=1 in
# training.
set -euo pipefail

source "$(dirname "$0")/common.sh"

OUTPUT=${OUTPUT:-$EXAMPLES/../out/openwebtext}
JSONL=${JSONL:-$OUTPUT/openwebtext.jsonl}
PREFIX=$OUTPUT/openwebtext
TOKENIZER_MODEL=${TOKENIZER_MODEL:-gpt2}
WORKERS=${WORKERS:-$(nproc)}
PYTHON=${PYTHON:-python}

require_numbers WORKERS
tool=$MEGATRON_LM/tools/preprocess_data.py
[[ -n $MEGATRON_LM && -f $tool ]] || fail \
    "MEGATRON_LM=$MEGATRON_LM has no tools/preprocess_data.py; let it name a checkout of" \
    "Megatron-LM (the head of this script has the command);" \
    "examples/prepare_corpus.py builds a small corpus without one"
[[ $JSONL == "$OUTPUT/openwebtext.jsonl" || -f $JSONL ]] || fail "JSONL=$JSONL is not there"

mkdir -p "$OUTPUT"
if [[ ! -f $JSONL && $DRY_RUN != 1 ]]; then
    # The set's own loading script is refused by `datasets` from version 4 on; this revision is the
    # Hub's conversion of it. Under another name until it is whole.
    "$PYTHON" - "$JSONL.partial" "$WORKERS" <<'PYTHON_SCRIPT'
import sys

from datasets import load_dataset

texts = load_dataset("Skylion007/openwebtext", revision="refs/convert/parquet", split="train")
texts.to_json(sys.argv[1], lines=True, num_proc=int(sys.argv[2]))
PYTHON_SCRIPT
    mv "$JSONL.partial" "$JSONL"
fi

if [[ -f ${PREFIX}_text_document.idx ]]; then  # written last, when the .bin is whole
    echo "${PREFIX}_text_document: there already, kept"
    exit
fi
# --append-eod: documents follow each other in one stream, with <|endoftext|> between them.
start "$PYTHON" "$tool" --input "$JSONL" --output-prefix "$PREFIX" --workers "$WORKERS" \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER_MODEL" --append-eod
