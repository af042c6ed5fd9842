"""Build a real training corpus from what every machine has: Python's standard library.

The sources of the standard library (docstrings included) and Python's language reference, which
ships with it as `pydoc_data.topics`, become documents. A SentencePiece BPE tokenizer is trained on
them, and they are written in Megatron-Core's indexed format, split into training and validation.

    python examples/prepare_corpus.py                          # 29 MB of text -> out/corpus
    python examples/prepare_corpus.py --input my_texts/ --output out/mine --vocab-size 8192

Two builds from the same input are equal byte for byte, and a build that is there already is
reused. The tokenizer is lossless: a document's tokens decode to its text, white space included (but
for U+2581, which SentencePiece uses for the space).
"""

import argparse
import hashlib
import io
import json
import logging
import os
import re
import shutil
import sys
import sysconfig
import tempfile
import time
import warnings
from pathlib import Path

MANIFEST = "corpus.json"
TOKENIZER = "tokenizer.model"
SPLITS = ("train", "validation")
OUTPUTS = (TOKENIZER,) + tuple(f"{s}_text_document{e}" for s in SPLITS for e in (".bin", ".idx"))
# Raise this when the same input and parameters would give other bytes: corpora are then rebuilt.
FORMAT = 1
# The merges of so small a vocabulary settle long before this much text; more only costs time.
SAMPLE_BYTES = 8_000_000
# Third-party packages, inputs of a parser's tests, character tables, and the topics, which are
# imported instead.
STDLIB_SKIPPED = {"site-packages", "dist-packages", "lib2to3", "encodings", "pydoc_data"}


class CorpusError(Exception):
    """What the user can put right; the message holds the reason and the remedy."""


def standard_library_files():
    """Yield (name, path) of the standard library's sources and plain texts."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in root.rglob("*"):
        name = path.relative_to(root)
        # Of the tests, the sources are code like any other; their text files are fixtures.
        suffixes = {".py"} if {"test", "tests"} & set(name.parts) else {".py", ".rst", ".txt"}
        if path.suffix in suffixes and not STDLIB_SKIPPED & set(name.parts) and path.is_file():
            yield name.as_posix(), path


def user_files(inputs, *, output):
    """Yield (name, path) of files given and those in folders given, without hidden and output."""
    for top in map(Path, inputs):
        if not top.exists():
            raise CorpusError(f"--input {top}: no such file or folder. Check the path.")
        for path in top.rglob("*") if top.is_dir() else [top]:
            hidden = any(part.startswith(".") for part in path.relative_to(top).parts)
            if path.is_file() and not hidden and output.resolve() not in path.resolve().parents:
                yield str(path), path


def read_text(path):
    """Return the text of a file, or None if it is empty or not UTF-8 text."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CorpusError(f"cannot read {path}: {error.strerror}. Make it readable, or leave it "
                          "out of --input.") from error
    try:
        text = data.decode("utf-8")  # line ends stay what they are
    except UnicodeDecodeError:
        return None
    return text if text.strip() and "\0" not in text else None


def read_documents(inputs, *, max_bytes, output):
    """Read the documents, each once.

    A document is known by the SHA-256 of its text. That makes every later choice (split, tokenizer
    sample, size limit) the same wherever the files lie, and keeps a copy of a training document out
    of the validation split.

    Args:
        inputs: files and folders; none for the standard library.
        max_bytes: keep about this much, chosen by hash so that it is a fair sample; 0 for all.
        output: folder of the corpus, whose files are no input.

    Returns:
        A list of (digest, name, text) in the order of the names, and how many files were left out
        as {"not_text": int, "duplicate": int}.

    Raises:
        CorpusError: fewer than two documents.
    """
    files = user_files(inputs, output=output) if inputs else standard_library_files()
    texts = [(name, read_text(path)) for name, path in sorted(set(files))]
    if not inputs:
        try:
            from pydoc_data.topics import topics
        except ImportError:  # some distributions leave it out
            topics = {}
        texts += [(f"pydoc_data/topics/{topic}", text) for topic, text in topics.items()]
    found = {}
    for name, text in texts:
        if text is not None:
            digest = hashlib.sha256(text.encode("utf-8")).hexdigest()
            found.setdefault(digest, (digest, name, text))
    not_text = sum(text is None for _, text in texts)
    skipped = {"not_text": not_text, "duplicate": len(texts) - not_text - len(found)}
    if len(found) < 2:
        raise CorpusError(
            f"{len(found)} text files in {' '.join(inputs) or sysconfig.get_path('stdlib')} "
            f"({not_text} empty or not UTF-8); at least 2 different ones are needed, one to train "
            "on and one to validate on. Give files or folders of text with --input.")
    documents, size = [], 0
    for document in sorted(found.values()):
        size += len(document[2].encode("utf-8"))
        if max_bytes and size > max_bytes and len(documents) >= 2:
            break
        documents.append(document)
    return sorted(documents, key=lambda document: document[1]), skipped


def split_documents(documents, *, fraction):
    """Return {"train": [...], "validation": [...]}, decided for each document by its hash alone.

    So a document keeps its side when others come or go. Only where that leaves a split empty (few
    documents) does the first or the last in the order of the hashes change sides.
    """
    def position(document):  # in [0, 1), from other digits than those --max-megabytes goes by
        return int(document[0][-8:], 16) / 2**32

    ordered = sorted(documents, key=position)
    count = sum(position(document) < fraction for document in ordered)
    chosen = set(ordered[:min(max(count, 1), len(ordered) - 1)])
    return {"train": [d for d in documents if d not in chosen],
            "validation": [d for d in documents if d in chosen]}


def sample_text(documents):
    """Yield pieces of whole lines, about 2,000 characters each, of SAMPLE_BYTES chosen by hash."""
    left = SAMPLE_BYTES
    for _, _, text in sorted(documents):
        piece = ""
        for line in text.splitlines(keepends=True) + [None]:
            piece += line or ""
            if piece and (line is None or len(piece) > 2000):
                yield piece
                left, piece = left - len(piece.encode("utf-8")), ""
        if left <= 0:
            return


def train_tokenizer(documents, *, vocab_size):
    """Train a lossless BPE tokenizer; return the bytes of the SentencePiece model."""
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=sample_text(documents), model_writer=model, model_type="bpe",
            vocab_size=vocab_size,
            # Nothing may change or drop a character: indentation has meaning in this text.
            normalization_rule_name="identity", remove_extra_whitespaces=False,
            add_dummy_prefix=False, allow_whitespace_only_pieces=True,
            # Rare characters become bytes instead of <unk>.
            byte_fallback=True, character_coverage=0.9995, split_digits=True,
            # Megatron appends the end-of-sentence token as its end of document: it has to exist.
            unk_id=0, bos_id=1, eos_id=2, pad_id=-1,
            max_sentence_length=1 << 24, num_threads=1, minloglevel=2)
    except RuntimeError as error:
        # Its two messages end in "set it to a value <= BOUND" and "required_chars. N vs BOUND".
        for pattern, what, bound in (
                (r"value <= (\d+)", "large", "less, or more text with --input"),
                (r"required_chars\. \d+ vs (\d+)", "small", "more")):
            match = re.search(pattern, str(error))
            if match:
                raise CorpusError(f"--vocab-size {vocab_size} is too {what} for this corpus. Give "
                                  f"--vocab-size {match[1]} or {bound}.") from error
        raise CorpusError(f"SentencePiece could not train the tokenizer: {error}") from error
    return model.getvalue()


def write_split(documents, *, prefix, processor):
    """Write one split in Megatron's indexed format, each document ended; return its token count."""
    # Remarks on missing GPUs and GPU libraries, which play no part here.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    try:
        from tqdm import tqdm
    except ImportError:
        def tqdm(iterable, **_):
            return iterable

    dtype = DType.optimal_dtype(processor.get_piece_size())
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    tokens = 0
    label = prefix.name.partition("_")[0]
    for _, _, text in tqdm(documents, desc=label, unit="doc", disable=None):  # a bar on terminals
        ids = processor.encode(text) + [processor.eos_id()]
        builder.add_document(ids, [len(ids)])
        tokens += len(ids)
    builder.finalize(f"{prefix}.idx")
    return tokens


def build(output, *, parameters, documents):
    """Build all files aside, move them to their places, the manifest last, and return the manifest.

    Whatever interrupts this, files without a manifest are not taken for a corpus. Files in `output`
    that are not the corpus's own are left alone.
    """
    import sentencepiece

    output.mkdir(parents=True, exist_ok=True)
    for old in output.glob(".partial-*"):  # of builds killed, not of one that runs beside this one
        if time.time() - old.stat().st_mtime > 3600:
            shutil.rmtree(old, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=output))
    try:
        splits = split_documents(documents, fraction=parameters["validation_fraction"])
        print(f"training a tokenizer of {parameters['vocab_size']} tokens ...", flush=True)
        model = train_tokenizer(splits["train"], vocab_size=parameters["vocab_size"])
        (partial / TOKENIZER).write_bytes(model)
        print("writing the documents as tokens ...", flush=True)
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        counts = {}
        for split, chosen in splits.items():
            tokens = write_split(
                chosen, prefix=partial / f"{split}_text_document", processor=processor)
            counts[split] = {"documents": len(chosen), "tokens": tokens}
        manifest = {"parameters": parameters, "splits": counts,
                    "sha256": {name: file_digest(partial / name) for name in OUTPUTS}}
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        for name in (MANIFEST,) + OUTPUTS:
            (output / name).unlink(missing_ok=True)
        # Megatron keeps its sample indices here, under names that do not depend on the contents.
        shutil.rmtree(output / "cache" / "GPTDataset_indices", ignore_errors=True)
        for name in OUTPUTS + (MANIFEST,):
            os.replace(partial / name, output / name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return manifest


def file_digest(path):
    """Return the SHA-256 of a file in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def finished(output, *, parameters):
    """Return the manifest if `output` holds a whole corpus of these parameters, else None."""
    try:
        manifest = json.loads((output / MANIFEST).read_text(encoding="utf-8"))
        same = manifest["parameters"] == parameters and all(
            file_digest(output / name) == manifest["sha256"][name] for name in OUTPUTS)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return manifest if same else None


def prepare(args):
    """Build or reuse the corpus; return (manifest, whether it was there already)."""
    import sentencepiece

    documents, skipped = read_documents(
        args.input, max_bytes=round(args.max_megabytes * 1_000_000), output=args.output)
    listing = "".join(f"{digest} {name}\n" for digest, name, _ in documents)
    parameters = {
        "format": FORMAT, "sentencepiece": sentencepiece.__version__, "input": args.input,
        "input_sha256": hashlib.sha256(listing.encode("utf-8")).hexdigest(), "skipped": skipped,
        "vocab_size": args.vocab_size, "validation_fraction": args.validation_fraction,
        "max_megabytes": args.max_megabytes, "sample_bytes": SAMPLE_BYTES}
    manifest = None if args.force else finished(args.output, parameters=parameters)
    if manifest:
        return manifest, True
    try:
        return build(args.output, parameters=parameters, documents=documents), False
    except OSError as error:
        raise CorpusError(f"cannot write to {args.output}: {error.strerror}. Choose another folder "
                          "with --output.") from error


def parse_arguments(argv):
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(prog="prepare_corpus.py", description=__doc__.split("\n\n")[0])
    for flag, kind, default, text in (
            ("--output", Path, Path("out/corpus"), "folder for the corpus"),
            ("--vocab-size", int, 4096, "number of tokens of the tokenizer"),
            ("--validation-fraction", float, 0.04, "share of the documents for validation"),
            ("--max-megabytes", float, 0, "use about this much text, a fair sample; 0 for all")):
        parser.add_argument(flag, type=kind, default=default, help=f"{text} (default: {default})")
    parser.add_argument("--input", nargs="+", default=[], metavar="PATH",
                        help="text files or folders, instead of Python's standard library")
    parser.add_argument("--force", action="store_true", help="build even if it is there already")
    args = parser.parse_args(argv)
    if not 0 < args.validation_fraction < 1:
        parser.error("--validation-fraction must lie between 0 and 1, for example 0.04")
    if args.max_megabytes < 0:
        parser.error("--max-megabytes must be 0 (all) or more")
    return args


def main(argv=None):
    """Build or reuse the corpus, say how to use it, and return the exit status."""
    args = parse_arguments(argv)
    try:
        manifest, reused = prepare(args)
    except CorpusError as error:
        print(f"prepare_corpus.py: error: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        print(f"prepare_corpus.py: error: {error.name} is not installed for {sys.executable}. "
              "Run `make corpus`, which installs what is needed.", file=sys.stderr)
        return 1
    skipped = manifest["parameters"]["skipped"]
    print(f"{args.output}: {'there already, reused' if reused else 'built'}")
    for split, count in manifest["splits"].items():
        print(f"  {split:10} {count['documents']:6,} documents {count['tokens']:12,} tokens")
    print(f"  left out: {skipped['not_text']} files that are empty or not UTF-8 text, "
          f"{skipped['duplicate']} copies of others")
    print("flags for pretrain_gpt.py:\n"
          "  --tokenizer-type SentencePieceTokenizer \\\n"
          f"  --tokenizer-model {args.output / TOKENIZER} \\\n"
          f"  --train-data-path {args.output / 'train_text_document'} \\\n"
          f"  --valid-data-path {args.output / 'validation_text_document'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
