"""From text to token ids: splitting, tokenising, and the noise that a pair gets in an epoch."""

import itertools
import pickle

import numpy as np
import pytest
from datasets import Dataset, IterableDataset

from modeling_vanilla import data, demo_corpus, tokenization
from modeling_vanilla.batching import UpdatePlan
from modeling_vanilla.configuration_vanilla import VanillaConfig
from modeling_vanilla.errors import InputError
from modeling_vanilla.recipe import Recipe


PAIRS = demo_corpus.generate("validation")[:80]
CONFIG = VanillaConfig.preset("tiny", vocab_size=300)


@pytest.fixture(scope="module")
def tokenizer():
    return tokenization.train((text for pair in PAIRS for text in pair), 300)


def dataset(pairs):
    return Dataset.from_dict(dict(zip(("source", "target"), zip(*pairs, strict=True), strict=True)))


def on_disk(folder, pairs):
    """A data set with files, whose results are cached beside them."""
    dataset(pairs).save_to_disk(folder)
    return Dataset.load_from_disk(folder)


def make_reader(tokenizer, device=0, num_devices=1, **noise):
    text = dataset(PAIRS)
    tokens = data.tokenise(text, tokenizer)
    recipe = Recipe(output_dir="out", **noise)
    plan = UpdatePlan(data.lengths(tokens), 300, 200, seed=recipe.seed)
    return data.PairReader(tokens, text, tokenizer, CONFIG, recipe, plan, device, num_devices)


def rows(batches):
    """(source ids, decoder input ids, labels) of each real pair, without padding."""
    for batch in batches:
        for source, mask, inputs, labels in zip(
            batch["input_ids"], batch["attention_mask"], batch["decoder_input_ids"], batch["labels"], strict=True
        ):
            if (labels != -100).any():
                kept = labels != -100
                yield tuple(source[mask == 1].tolist()), tuple(inputs[kept].tolist()), tuple(labels[kept].tolist())


def epoch_of(reader, epoch=0):
    first = epoch * reader.plan.updates_per_epoch
    return [row for n in range(reader.plan.updates_per_epoch) for row in rows(reader[first + n])]


# -- splitting --------------------------------------------------------------------------------------------------------


def test_a_tenth_is_held_out_and_no_source_is_on_both_sides():
    pairs = [(f"source {i % 150}", f"target {i}") for i in range(300)]
    train, held = data.hold_out(dataset(pairs))
    assert len(train) + len(held) == 300 and 30 <= len(held) <= 31
    assert not set(train["source"]) & set(held["source"])
    assert list(data.hold_out(dataset(pairs))[1]["target"]) == list(held["target"])


def test_a_source_that_is_most_of_the_corpus_is_not_held_out():
    lowest = min((f"source {i}" for i in range(100)), key=lambda text: data.hashlib.md5(text.encode()).hexdigest())
    train, held = data.hold_out(
        dataset([(lowest, str(i)) for i in range(80)] + [("other", str(i)) for i in range(20)])
    )
    assert held is None or len(held) == 20
    assert data.hold_out(dataset([("same", str(i)) for i in range(50)]))[1] is None
    assert data.hold_out(dataset([("few", "wenige")] * 9))[1] is None


# -- tokens -----------------------------------------------------------------------------------------------------------


def test_pairs_become_ids_that_end_in_eos(tokenizer):
    tokens = data.tokenise(dataset(PAIRS), tokenizer)
    for (source, target), ids in zip(PAIRS, tokens, strict=True):
        assert (ids["input_ids"], ids["labels"]) == (tokenizer(source).input_ids, tokenizer(target).input_ids)
    expected = [[len(ids["input_ids"]), len(ids["labels"])] for ids in tokens]
    assert data.lengths(tokens).tolist() == expected
    assert data.lengths(tokens.select([5, 3, 3])).tolist() == [expected[i] for i in (5, 3, 3)]


def test_a_second_run_reads_the_cache_whatever_the_tokenizer_did_before(tokenizer, tmp_path, monkeypatch):
    pairs = on_disk(tmp_path / "corpus", PAIRS)
    first = {workers: data.tokenise(pairs, tokenizer, workers) for workers in (None, 2)}
    assert first[None].to_dict() == first[2].to_dict()
    tokenizer(["one", "another one"], padding=True, truncation=True, max_length=4)
    tokenizer("one")

    def fail(*args):
        raise AssertionError("tokenised again")

    monkeypatch.setattr(data, "encode", fail)
    for workers, tokens in first.items():
        again = data.tokenise(pairs, tokenizer, workers)
        assert again.cache_files == tokens.cache_files and again.to_dict() == tokens.to_dict()


# -- streams ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def stream_reader(tokenizer, monkeypatch):
    """A function that makes the reader of a stream, of which about a quarter is held at a time."""
    monkeypatch.setattr(data, "SHUFFLED", 16)
    monkeypatch.setattr(data, "CHUNK", 8)
    monkeypatch.setattr(data, "WINDOW", 1)

    def make(pairs=PAIRS, device=0, num_devices=1, **flags):
        def generate():
            yield from ({"source": source, "target": target} for source, target in pairs)

        flags = {"tokenizer_name": "t", "max_steps": 9, "tokens_per_update": 300, "max_tokens_per_device": 256} | flags
        recipe = Recipe(output_dir="out", streaming=True, **flags)
        splits = data.Splits(train=IterableDataset.from_generator(generate))
        return data.reader(recipe, splits, tokenizer, CONFIG, device, num_devices)

    return make


@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_a_stream_gives_every_pair_once_a_pass_on_any_number_of_devices(tokenizer, stream_reader, num_devices):
    readers = [stream_reader(device=device, num_devices=num_devices) for device in range(num_devices)]
    alone = stream_reader()
    seen = []
    for n in range(40):
        shares = [reader[n] for reader in readers]
        assert all(shares)  # no device is without a batch
        update = [row for share in shares for row in rows(share)]
        assert sorted(update) == sorted(rows(alone[n])) and update
        seen += update
    assert sum(len(labels) for *_, labels in seen) == pytest.approx(40 * 300, rel=0.2)
    passes = [seen[start : start + len(PAIRS)] for start in (0, len(PAIRS))]
    expected = sorted(tuple(tokenizer(list(pair)).input_ids) for pair in PAIRS)
    for each in passes:
        assert sorted(([*source], [*labels]) for source, _, labels in each) == expected
    assert passes[0] != passes[1]


def test_a_stream_is_read_no_further_than_its_buffers(stream_reader):
    def broken():
        yield from PAIRS[:48]
        raise InputError("line 49 is not UTF-8")

    class Broken:
        __iter__ = staticmethod(broken)

    reader = stream_reader(Broken())
    assert [len(list(rows(reader[n]))) > 0 for n in range(2)] == [True, True]
    with pytest.raises(InputError, match="line 49"):
        list(map(reader.__getitem__, range(2, 9)))


def test_a_stream_goes_on_where_it_was(stream_reader):
    noise = {"bpe_dropout": 0.2, "source_word_dropout": 0.2}
    reader = stream_reader(**noise)
    updates = [list(rows(reader[n])) for n in range(18)]
    assert [list(rows(stream_reader(**noise)[n])) for n in (9, 17)] == [updates[9], updates[17]]
    assert list(rows(reader[3])) == updates[3]


def test_a_stream_is_cleaned_and_counted(tokenizer, stream_reader):
    long = " ".join(["word"] * 300)
    reader = stream_reader([("", "x"), *PAIRS, (long, "x"), ("a", "b" * 90)], max_length_ratio=20.0)
    first = {n: list(rows(reader[n])) for n in range(30)}
    assert len(set(itertools.chain(*first.values()))) == len(set(PAIRS)) == reader.pairs_per_epoch
    assert reader.dropped == {"empty": 1, "ratio": 2, "too long": 0}
    assert (reader.updates_per_epoch, reader.fingerprint) == (None, "")
    with pytest.raises(InputError, match="no pair is left to train on: {'empty': 0, 'ratio': 0, 'too long': 3}"):
        stream_reader([(long, "x")] * 3)[0]


@pytest.mark.parametrize("streaming", [False, True])
def test_of_a_data_set_the_splits_that_it_has_are_taken(tmp_path, streaming):
    for split, count in ("train", 50), ("test", 3):
        lines = [f'{{"translation": {{"en": "{split} {i}", "de": "x"}}}}' for i in range(count)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))
    flags = {"dataset_name": str(tmp_path), "source_lang": "en", "target_lang": "de", "max_predict_samples": 2}
    splits = data.load(Recipe(streaming=streaming, tokenizer_name="t", max_steps=1, **flags))
    assert splits.test.to_list() == [{"source": f"test {i}", "target": "x"} for i in range(2)]
    train = list(splits.train["source"])
    if streaming:  # nothing can be held out
        assert len(train) == 50 and splits.validation is None
    else:
        assert sorted(train + list(splits.validation["source"])) == sorted(f"train {i}" for i in range(50))


def test_of_a_stream_only_the_pairs_asked_for_are_read(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"en": "one", "de": "eins"}\n' * 4 + "broken\n")
    files = {"train_file": str(path), "validation_file": str(path), "source_lang": "en", "target_lang": "de"}
    limits = {"max_train_samples": 2, "max_eval_samples": 3}
    splits = data.load(Recipe(streaming=True, tokenizer_name="t", max_steps=1, **files, **limits))
    assert list(splits.train) == [{"source": "one", "target": "eins"}] * 2
    assert len(splits.validation) == 3 and splits.validation[0]["target"] == "eins" and splits.test is None


# -- what an update gets ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_every_pair_occurs_once_an_epoch_on_any_number_of_devices(tokenizer, num_devices):
    expected = sorted((*tokenizer(list(pair)).input_ids,) for pair in PAIRS)
    readers = [make_reader(tokenizer, device, num_devices) for device in range(num_devices)]
    for epoch in range(2):
        seen = [row for reader in readers for row in epoch_of(reader, epoch)]
        assert sorted(([*source], [*labels]) for source, _, labels in seen) == [tuple(pair) for pair in expected]
    assert all(reader[n] for reader in readers for n in range(reader.plan.updates_per_epoch))


NOISE = {"bpe_dropout": 0.3, "source_word_dropout": 0.2, "target_word_dropout": 0.1}


def test_noise_is_new_every_epoch_and_else_the_same_everywhere(tokenizer):
    alone = make_reader(tokenizer, **NOISE)
    first, second = epoch_of(alone, 0), epoch_of(alone, 1)
    assert not set(first) & set(second)
    shared = [make_reader(tokenizer, device, 3, **NOISE) for device in range(3)]
    assert sorted(row for reader in shared for row in epoch_of(reader, 1)) == sorted(second)


def test_bpe_dropout_changes_the_pieces_but_not_the_text(tokenizer):
    seen = epoch_of(make_reader(tokenizer, bpe_dropout=0.3))
    texts = {tuple(tokenizer.batch_decode([source, labels], skip_special_tokens=True)) for source, _, labels in seen}
    assert texts == set(PAIRS)
    usual = sum(len(tokenizer(text).input_ids) for pair in PAIRS for text in pair)
    assert sum(len(source) + len(labels) for source, _, labels in seen) > 1.05 * usual
    assert all(inputs == (1, *labels[:-1]) for _, inputs, labels in seen)


def test_a_reader_can_be_sent_to_another_process(tokenizer):
    reader = make_reader(tokenizer, **NOISE)
    assert epoch_of(pickle.loads(pickle.dumps(reader))) == epoch_of(reader)


def padding(reader):
    batches = [batch for n in range(reader.plan.updates_per_epoch) for batch in reader[n]]
    real = sum(int(batch["attention_mask"].sum() + (batch["labels"] != -100).sum()) for batch in batches)
    assert all(batch[side].numel() <= 200 for batch in batches for side in ("input_ids", "labels"))
    return 1 - real / sum(batch["input_ids"].numel() + batch["labels"].numel() for batch in batches)


def test_bpe_dropout_does_not_spoil_the_batches(tokenizer):
    assert padding(make_reader(tokenizer, bpe_dropout=0.1)) < padding(make_reader(tokenizer)) + 0.1


def test_word_dropout_hides_input_tokens_and_never_a_label(tokenizer):
    reader = make_reader(tokenizer, source_word_dropout=0.2, target_word_dropout=0.1)
    seen = epoch_of(reader) + epoch_of(reader, 1)
    labels = sorted(tuple(tokenizer(target).input_ids) for _, target in PAIRS) * 2
    assert sorted(row[2] for row in seen) == sorted(labels)
    rates = []
    for side, kept in (0, slice(None, -1)), (1, slice(1, None)):
        tokens = np.concatenate([row[side][kept] for row in seen])
        rates.append(np.mean(tokens == 3))
    assert rates == pytest.approx([0.2, 0.1], abs=0.03)
    assert all(source[-1] == 2 and inputs[0] == 1 for source, inputs, _ in seen)
