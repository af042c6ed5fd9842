"""A tiny corpus for the examples: texts, a tokenizer of GPT-2's kind trained on them, tokens."""

from __future__ import annotations

import json
from pathlib import Path

TEXTS = [f"Document {number} has {number**2} words. " * 30 for number in range(60)]
END = "<|endoftext|>"


def write_corpus(folder: Path) -> None:
    """Write texts.jsonl, tokenizer/ and text_document.{bin,idx} into ``folder``."""
    import numpy
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    from tokenizers import ByteLevelBPETokenizer

    (folder / "tokenizer").mkdir()
    lines = [json.dumps({"text": text}) + "\n" for text in TEXTS]
    (folder / "texts.jsonl").write_text("".join(lines))
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(TEXTS, vocab_size=300, special_tokens=[END], show_progress=False)
    tokenizer.save(str(folder / "tokenizer/tokenizer.json"))
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END)
    (folder / "tokenizer/tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", **special}))

    builder = IndexedDatasetBuilder(str(folder / "text_document.bin"), dtype=numpy.uint16)
    for text in TEXTS:
        tokens = [*tokenizer.encode(text).ids, tokenizer.token_to_id(END)]
        builder.add_document(tokens, [len(tokens)])
    builder.finalize(str(folder / "text_document.idx"))
