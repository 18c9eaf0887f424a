"""From the recipe's files to token ids: load, clean, hold out, tokenise, and read the pairs of one update."""

import hashlib
from dataclasses import dataclass, field

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset, Features, Sequence, Value
from datasets.fingerprint import Hasher

from . import corpus
from .batching import collate
from .errors import InputError
from .tokenization import DropoutSegmenter


SIDES = "source", "target"
HELD_OUT = 1000  # validation pairs taken from the training data when the recipe names none, at most a tenth of it


@dataclass
class Splits:
    """The text: three data sets with the columns `source` and `target`, and what was done to the training data."""

    train: Dataset | None = None
    validation: Dataset | None = None
    test: Dataset | None = None
    dropped: dict = field(default_factory=dict)  # reason -> number of training pairs
    overlap: int = 0  # training pairs that also occur in the validation or test data


def load(recipe):
    """The recipe's data: everything it names, cleaned and cut to the sizes it asks for."""
    names = {split: getattr(recipe, f"{split}_file") for split in ("train", "validation", "test")}
    if not recipe.do_train:
        names["train"] = None
    if recipe.train_file == "demo":
        names = {split: name or "demo" for split, name in names.items()}
    if recipe.dataset_name:
        names = dict.fromkeys(names, recipe.dataset_name)
    limits = {
        "train": recipe.max_train_samples,
        "validation": recipe.max_eval_samples,
        "test": recipe.max_predict_samples,
    }
    splits = Splits()
    for split, name in names.items():
        if name is not None:
            setattr(splits, split, head(read(recipe, name, split), limits[split]))
    if splits.train is not None:
        clean(splits, recipe)
    return splits


def read(recipe, name, split):
    return corpus.load(
        name,
        recipe.source_lang,
        recipe.target_lang,
        split=split,
        references=split != "test",
        dataset_config_name=recipe.dataset_config_name,
    )


def head(pairs, limit):
    return pairs if limit is None else pairs.select(range(min(limit, len(pairs))))


def clean(splits, recipe):
    """Drop what cannot be learnt from, hold out validation data if there is none, report or remove overlap."""
    splits.train, splits.dropped = corpus.clean(
        splits.train, deduplicate=recipe.deduplicate, max_length_ratio=recipe.max_length_ratio
    )
    if splits.validation is None:
        splits.train, held = hold_out(splits.train)
        splits.validation = held and head(held, recipe.max_eval_samples)
    for held_out in filter(None, (splits.validation, splits.test)):
        if "target" not in held_out.column_names:
            continue
        shared = corpus.overlap(splits.train, held_out)
        splits.overlap += len(shared)
        if recipe.remove_overlap and len(shared):
            splits.train = splits.train.select(np.setdiff1d(np.arange(len(splits.train)), shared))
    if not len(splits.train):
        raise InputError(f"{recipe.train_file or recipe.dataset_name}: no pair is left to train on: {splits.dropped}")


def hold_out(pairs):
    """(train, validation), split by a hash of the source, so that no held-out sentence stays in the training data."""
    count = min(HELD_OUT, len(pairs) // 10)
    sources = (text for batch in pairs.select_columns("source").iter(1000) for text in batch["source"])
    keys = (int(hashlib.md5(text.encode()).hexdigest()[:15], 16) for text in sources)
    keys = np.fromiter(keys, np.int64, len(pairs))
    held = keys <= np.sort(keys)[count - 1] if count else np.zeros(len(pairs), bool)
    if held.sum() > 2 * count:  # the last source occurs too often to be held out
        held = keys < keys[held].max()
    if not held.any():
        return pairs, None
    return pairs.select(np.flatnonzero(~held)), pairs.select(np.flatnonzero(held))


def tokenise(pairs, tokenizer, workers=None):
    """Columns `input_ids` and `labels`, memory-mapped; each ends with </s>. A second identical run reads the cache."""
    sides = {"source": "input_ids", "target": "labels"}
    return pairs.map(
        lambda batch: {sides[name]: encode(texts, tokenizer) for name, texts in batch.items()},
        batched=True,
        remove_columns=pairs.column_names,
        features=Features({name: Sequence(Value("int32")) for name in sides.values()}),
        num_proc=workers,
        # The default fingerprint pickles the tokenizer, whose state changes when it is first used.
        new_fingerprint=Hasher.hash([pairs._fingerprint, tokenizer.backend_tokenizer.to_str()]),
        desc="tokenising",
    )


def encode(texts, tokenizer):
    """Token ids of the texts, each ending in </s>."""
    return [line.ids for line in tokenizer.backend_tokenizer.encode_batch_fast(texts)]


def lengths(tokens):
    """Token counts (N, 2) of source and target, read batch by batch."""
    batches = (
        [pc.list_value_length(batch[name]).to_numpy() for name in ("input_ids", "labels")]
        for batch in tokens.with_format("arrow").iter(10_000)
    )
    return np.concatenate([np.stack(batch, axis=1) for batch in batches])


class PairReader:
    """Reads the pairs of one update as batches, with the noise that the recipe asks for.

    Noise is a function of seed, epoch and pair alone: the same on any number of devices and after any interruption.
    """

    def __init__(self, tokens, text, tokenizer, config, recipe, plan, device=0, num_devices=1):
        self.tokens, self.text, self.config, self.recipe, self.plan = tokens, text, config, recipe, plan
        self.device, self.num_devices = device, num_devices
        self.unk = tokenizer.unk_token_id
        self.segmenter = DropoutSegmenter(tokenizer, recipe.bpe_dropout) if recipe.bpe_dropout else None

    def __getitem__(self, n):
        """This device's micro-batches of update n: dictionaries of tensors (see `batching.collate`)."""
        shares, epoch = self.plan.update(n, self.num_devices), n // self.plan.updates_per_epoch
        mine = [rows for rows in shares[self.device] if len(rows)]
        if not mine:  # every device takes part in the reduction of gradients, this one with zeros
            first = next(rows for share in shares for rows in share if len(rows))[:1]
            batch = self.batch(first, self.pairs(first, epoch), epoch)
            return [batch | {"labels": batch["labels"].fill_(-100)}]
        if self.segmenter is None:
            return [self.batch(rows, self.pairs(rows, epoch), epoch) for rows in mine]
        rows = np.concatenate(mine)
        pairs = self.pairs(rows, epoch)
        lengths = np.array([[len(pair["input_ids"]), len(pair["labels"])] for pair in pairs])
        return [self.batch(rows[i], [pairs[j] for j in i], epoch) for i in self.plan.regroup(lengths)]

    def batch(self, rows, pairs, epoch):
        batch = self.collate(pairs)
        if self.recipe.source_word_dropout or self.recipe.target_word_dropout:
            noisy = [self.drop_words(pair, row, epoch) for row, pair in zip(rows, pairs, strict=True)]
            batch = self.collate(noisy) | {"labels": batch["labels"]}
        return batch

    def collate(self, pairs):
        return collate(pairs, self.config.pad_token_id, self.config.decoder_start_token_id)

    def pairs(self, rows, epoch):
        """Token ids of the pairs, with BPE-dropout segmented anew in every epoch."""
        if self.segmenter is None:
            chosen = self.tokens[rows]
        else:
            text = self.text[rows]
            chosen = {
                name: [self.segment(line, row, side, epoch) for row, line in zip(rows, text[side], strict=True)]
                for name, side in zip(("input_ids", "labels"), SIDES, strict=True)
            }
        columns = chosen["input_ids"], chosen["labels"]
        return [{"input_ids": source, "labels": target} for source, target in zip(*columns, strict=True)]

    def segment(self, text, row, side, epoch):
        return self.segmenter.encode(text, int(self.noise(row, side, epoch).integers(2**63)))

    def drop_words(self, pair, row, epoch):
        """The pair with each token but the last, </s>, replaced by <unk> with the probability for its side."""
        probabilities = self.recipe.source_word_dropout, self.recipe.target_word_dropout
        noisy = {}
        for (name, ids), p, side in zip(pair.items(), probabilities, SIDES, strict=True):
            dropped = self.noise(row, side, epoch).random(len(ids)) < p
            dropped[-1] = False
            noisy[name] = np.where(dropped, self.unk, ids)
        return noisy

    def noise(self, row, side, epoch):
        return np.random.default_rng((self.recipe.seed, epoch, int(row), SIDES.index(side)))
