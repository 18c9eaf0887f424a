"""From text to token ids: splitting, tokenising, and the noise that a pair gets in an epoch."""

import pickle

import numpy as np
import pytest
from datasets import Dataset

from modeling_vanilla import data, demo_corpus, tokenization
from modeling_vanilla.batching import UpdatePlan
from modeling_vanilla.configuration_vanilla import VanillaConfig
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
