"""examples/prepare_corpus.py: what it writes is what it read, and it writes only when it has to."""

import importlib.util
import json
from pathlib import Path

import numpy
import pytest

SOURCE = Path(__file__).resolve().parents[2] / "examples" / "prepare_corpus.py"
spec = importlib.util.spec_from_file_location("paci_prepare_corpus", SOURCE)
corpus = importlib.util.module_from_spec(spec)
spec.loader.exec_module(corpus)

# White space of all kinds, no final newline, characters outside ASCII and outside the vocabulary.
TEXTS = {
    f"folder{i % 2}/text{i}.txt":
        f"def f{i}(x):\n    if x > {i}:\n\t\treturn  'a{'b' * i}'\r\n\n\n  # caf\u00e9 \u4e16 {i}"
        + "".join(f"\n        value_{j} = function_{j % 7}(argument, {i * j})" for j in range(40))
    for i in range(12)
}


@pytest.fixture
def texts(tmp_path):
    """A folder of small texts, and one file that is not text."""
    folder = tmp_path / "texts"
    for name, text in TEXTS.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("utf-8"))
    (folder / "latin1.txt").write_bytes("caf\u00e9".encode("latin-1"))
    (folder / "copy.txt").write_bytes((folder / "folder0" / "text0.txt").read_bytes())
    return folder


@pytest.fixture
def run(texts, tmp_path, capsys):
    """Run the script into tmp_path/out; return (exit status, what it printed)."""
    def run(*flags, output=tmp_path / "out", inputs=(texts,)):
        status = corpus.main(["--output", str(output), "--vocab-size", "360", *flags,
                              *(["--input", *map(str, inputs)] if inputs else [])])
        captured = capsys.readouterr()
        return status, captured.out + captured.err
    return run


def contents(folder):
    return {name: (folder / name).read_bytes() for name in corpus.OUTPUTS + (corpus.MANIFEST,)}


def decoded(folder, *, split):
    """Return the texts that Megatron and its tokenizer read back from a split."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.tokenizers import MegatronTokenizer

    tokenizer = MegatronTokenizer.from_pretrained(
        tokenizer_path=str(folder / corpus.TOKENIZER), metadata_path={"library": "sentencepiece"})
    dataset = IndexedDataset(str(folder / f"{split}_text_document"))
    assert len(dataset.document_indices) == len(dataset) + 1  # one sequence is one document
    found = []
    for ids in (dataset[i] for i in range(len(dataset))):
        assert ids.dtype == numpy.uint16
        assert ids[-1] == tokenizer.eod and tokenizer.eod not in ids[:-1]
        found.append(tokenizer.detokenize(ids[:-1].tolist()))
    return found


def test_round_trip_and_manifest(run, tmp_path):
    status, printed = run("--validation-fraction", "0.3")
    assert status == 0
    out = tmp_path / "out"
    train, validation = decoded(out, split="train"), decoded(out, split="validation")
    assert sorted(train + validation) == sorted(TEXTS.values())
    assert train and validation
    manifest = json.loads((out / corpus.MANIFEST).read_text())
    assert manifest["splits"]["train"]["documents"] == len(train)
    assert manifest["splits"]["train"]["tokens"] * 2 == (
        out / "train_text_document.bin").stat().st_size
    assert manifest["parameters"]["skipped"] == {"not_text": 1, "duplicate": 1}
    assert "left out: 1 files that are empty or not UTF-8 text, 1 copies" in printed
    assert f"--train-data-path {out}/train_text_document" in printed
    assert not list(out.glob(".partial*"))


def test_two_builds_are_equal_and_a_second_run_reuses(run, tmp_path):
    run()
    first, times = contents(tmp_path / "out"), [
        p.stat().st_mtime_ns for p in sorted((tmp_path / "out").iterdir())]
    assert "there already, reused" in run()[1]
    assert [p.stat().st_mtime_ns for p in sorted((tmp_path / "out").iterdir())] == times
    run(output=tmp_path / "other")
    assert contents(tmp_path / "other") == first
    assert "built" in run("--force")[1]
    assert contents(tmp_path / "out") == first


@pytest.mark.parametrize("flags", [
    ("--vocab-size", "350"), ("--validation-fraction", "0.5"), ("--max-megabytes", "0.012")])
def test_other_parameters_rebuild(run, flags):
    run()
    assert "built" in run(*flags)[1]
    assert "reused" in run(*flags)[1]


def test_other_text_rebuilds_and_drops_megatrons_stale_indices(run, texts, tmp_path):
    run()
    index = tmp_path / "out" / "cache" / "GPTDataset_indices" / "some.npy"
    index.parent.mkdir(parents=True)
    index.touch()
    mine = tmp_path / "out" / "mine.txt"
    mine.touch()
    (texts / "folder0" / "text0.txt").write_text("something else\n" * 9)
    assert "built" in run()[1]
    assert mine.exists() and not index.exists()


def test_damage_and_interruption_rebuild(run, tmp_path, monkeypatch):
    run()
    (tmp_path / "out" / "train_text_document.bin").write_bytes(b"short")
    assert "built" in run()[1]

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt
    before = contents(tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(corpus, "write_split", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run("--force")
        assert contents(tmp_path / "out") == before  # building touches nothing that is whole
    with monkeypatch.context() as patch:
        patch.setattr(corpus.os, "replace", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run("--force")
    assert not (tmp_path / "out" / corpus.MANIFEST).exists()
    assert "built" in run()[1]


def test_split_is_stable_when_documents_come_and_go():
    documents = [(corpus.hashlib.sha256(str(i).encode()).hexdigest(), str(i), str(i))
                 for i in range(1000)]
    whole = corpus.split_documents(documents, fraction=0.04)
    part = corpus.split_documents(documents[::2], fraction=0.04)
    assert set(part["validation"]) == set(whole["validation"]) & set(documents[::2])
    assert 20 <= len(whole["validation"]) <= 60
    # A limit on the size goes by the start of the hash: it must not favour one side.
    first = corpus.split_documents(sorted(documents)[:500], fraction=0.04)
    assert 5 <= len(first["validation"]) <= 40
    for fraction in (0.001, 0.999):
        assert [len(s) for s in corpus.split_documents(documents[:2], fraction=fraction).values()] \
            == [1, 1]


def test_output_inside_the_input_is_not_read(run, texts):
    assert "built" in run(output=texts / "out")[1]
    assert "reused" in run(output=texts / "out")[1]


@pytest.mark.parametrize("flags, inputs, message", [
    ((), ["missing"], "missing: no such file or folder"),
    ((), ["texts/latin1.txt"], "0 text files in .*latin1.txt .1 empty or not UTF-8."),
    ((), ["texts/folder0/text0.txt", "texts/copy.txt"], "1 text files .* at least 2 different"),
    (("--vocab-size", "50000"), ["texts"], r"50000 is too large .* Give --vocab-size \d+ or less"),
    (("--vocab-size", "100"), ["texts"], r"100 is too small .* Give --vocab-size \d+ or more"),
])
def test_bad_input_is_an_error_with_a_remedy(run, texts, tmp_path, flags, inputs, message):
    status, printed = run(*flags, inputs=[tmp_path / name for name in inputs])
    assert status == 1
    assert corpus.re.search(message, printed)
    assert not list(tmp_path.glob("out/*"))


def test_the_remedy_of_a_large_vocabulary_works(run):
    printed = run("--vocab-size", "50000")[1]
    largest = corpus.re.search(r"Give --vocab-size (\d+)", printed)[1]
    assert run("--vocab-size", largest)[0] == 0


def test_unwritable_output(run, texts):
    status, printed = run(output=texts / "copy.txt" / "out")
    assert status == 1
    assert "cannot write to" in printed and "--output" in printed


@pytest.mark.parametrize("flags", [("--validation-fraction", "1"), ("--max-megabytes", "-1")])
def test_flags_out_of_range(run, flags):
    with pytest.raises(SystemExit) as error:
        run(*flags)
    assert error.value.code == 2


def test_standard_library_without_other_peoples_packages():
    names = [name for name, _ in corpus.standard_library_files()]
    assert "os.py" in names and "json/decoder.py" in names
    assert not any(corpus.STDLIB_SKIPPED & set(Path(name).parts) for name in names)
