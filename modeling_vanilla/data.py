"""From the recipe's files to token ids: load, clean, hold out, tokenise, and read the pairs of one update."""

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow.compute as pc
import torch
from datasets import (
    Dataset,
    Features,
    IterableDataset,
    Sequence,
    Value,
    concatenate_datasets,
    disable_progress_bars,
)
from datasets.fingerprint import Hasher

from . import corpus
from .batching import UpdatePlan, collate, idle
from .errors import InputError
from .tokenization import DropoutSegmenter


SIDES = "source", "target"
HELD_OUT = 1000  # validation pairs taken from the training data when the recipe names none, at most a tenth of it
LAUNCH_TOKENS = {"cpu": 128, "cuda": 4096}  # padding worth less than another batch, see UpdatePlan
# Of a stream: pairs among which the order is random, pairs that are tokenised at a time, updates that are planned
# together so that each finds enough pairs of a length.
SHUFFLED, CHUNK, WINDOW = 65_536, 8_192, 16


@dataclass
class Splits:
    """The text: three data sets with the columns `source` and `target`, and what was done to the training data."""

    train: Dataset | IterableDataset | None = None
    validation: Dataset | None = None
    test: Dataset | None = None
    dropped: dict = field(default_factory=dict)  # reason -> number of training pairs
    overlap: int | None = None  # training pairs that also occur in the validation or test data; None: not looked for


def load(recipe):
    """The recipe's data: everything it names, cleaned and cut to the sizes it asks for."""
    names = {split: getattr(recipe, f"{split}_file") for split in ("train", "validation", "test")}
    if recipe.train_file == "demo":
        names = {split: name or "demo" for split, name in names.items()}
    if recipe.dataset_name:
        there = {"train", *corpus.splits(recipe.dataset_name, recipe.dataset_config_name)}
        names = {split: name or recipe.dataset_name if split in there else name for split, name in names.items()}
    if not recipe.do_train:
        names["train"] = None
    limits = {
        "train": recipe.max_train_samples,
        "validation": recipe.max_eval_samples,
        "test": recipe.max_predict_samples,
    }
    splits = Splits()
    for split, name in names.items():
        if name is not None:
            setattr(splits, split, read(recipe, name, split, limits[split]))
    if splits.train is not None and not recipe.streaming:
        clean(splits, recipe)
    return splits


def read(recipe, name, split, limit):
    """The first pairs of a split; of a streamed data set nothing else is downloaded."""
    pairs = corpus.load(
        name,
        recipe.source_lang,
        recipe.target_lang,
        split=split,
        references=split != "test",
        dataset_config_name=recipe.dataset_config_name,
        streaming=recipe.streaming,
    )
    if not recipe.streaming:
        return head(pairs, limit)
    pairs = pairs if limit is None else pairs.take(limit)
    return pairs if split == "train" else Dataset.from_list(list(pairs), pairs.features)


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
    splits.overlap = 0
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
    return np.concatenate([np.zeros((0, 2), np.int32), *(np.stack(batch, axis=1) for batch in batches)])


def prepare(text, tokenizer, recipe, workers=None):
    """(text, token ids, lengths) of the pairs that are not too long."""
    tokens = tokenise(text, tokenizer, workers)
    counts = lengths(tokens)
    kept = np.flatnonzero((counts <= (recipe.max_source_length, recipe.max_target_length)).all(axis=1))
    return (text, tokens, counts) if len(kept) == len(text) else (text.select(kept), tokens.select(kept), counts[kept])


def update_plan(counts, recipe):
    launch_tokens = LAUNCH_TOKENS["cuda" if torch.cuda.is_available() else "cpu"]
    return UpdatePlan(counts, recipe.tokens_per_update, recipe.max_tokens_per_device, recipe.seed, launch_tokens)


def reader(recipe, splits, tokenizer, config, device=0, num_devices=1):
    """What reads the updates of one device, from pairs that are planned at once or from a stream.

    Pairs that are too long leave `splits.train`, and are counted in `splits.dropped`.
    """
    if recipe.streaming:
        return StreamReader(splits.train, tokenizer, config, recipe, device, num_devices)
    text, tokens, counts = prepare(splits.train, tokenizer, recipe, recipe.preprocessing_num_workers)
    if not len(text):
        raise InputError(
            f"all {len(splits.train)} training pairs are longer than --max_source_length {recipe.max_source_length} "
            f"or --max_target_length {recipe.max_target_length}"
        )
    splits.dropped["too long"] = len(splits.train) - len(text)
    splits.train = text
    return PairReader(tokens, text, tokenizer, config, recipe, update_plan(counts, recipe), device, num_devices)


class PairReader:
    """Reads the pairs of one update as batches, with the noise that the recipe asks for.

    Noise is a function of seed, epoch and pair alone: the same on any number of devices and after any interruption.
    """

    dropped = {}  # reason -> pairs left out while reading

    def __init__(self, tokens, text, tokenizer, config, recipe, plan, device=0, num_devices=1):
        self.tokens, self.text, self.config, self.recipe, self.plan = tokens, text, config, recipe, plan
        self.device, self.num_devices = device, num_devices
        self.unk = tokenizer.unk_token_id
        self.segmenter = DropoutSegmenter(tokenizer, recipe.bpe_dropout) if recipe.bpe_dropout else None
        self.updates_per_epoch, self.pairs_per_epoch = plan.updates_per_epoch, len(tokens)

    def __str__(self):
        return (
            f"{self.pairs_per_epoch:,} training pairs, {self.updates_per_epoch:,} updates an epoch of about "
            f"{self.recipe.tokens_per_update:,} target tokens, {self.plan.padding(num_devices=self.num_devices):.1%} "
            "padding"
        )

    @property
    def fingerprint(self):
        """What tells these training data from others."""
        return hashlib.sha256(self.plan.lengths.tobytes()).hexdigest()

    def __getitem__(self, n):
        """This device's micro-batches of update n: dictionaries of tensors (see `batching.collate`)."""
        shares, epoch = self.plan.update(n, self.num_devices), n // self.updates_per_epoch
        mine = [rows for rows in shares[self.device] if len(rows)]
        if not mine:  # every device takes part in the reduction of gradients, this one with zeros
            first = next(rows for share in shares for rows in share if len(rows))[:1]
            return [idle(self.batch(first, self.pairs(first, epoch), epoch))]
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


class StreamReader:
    """Reads the updates of a stream, of which it never holds more than two shuffled buffers; see `PairReader`.

    The pairs of about WINDOW updates are planned and read like a corpus whose epoch is the number of the window, so
    each has an order and noise of its own. Every device reads the whole stream and takes its share of each update. The
    stream has no seek: to go on at update n is to read it again up to there.
    """

    updates_per_epoch, fingerprint = None, ""  # not known before the end

    def __init__(self, pairs, tokenizer, config, recipe, device=0, num_devices=1):
        self.pairs = pairs.shuffle(seed=recipe.seed, buffer_size=SHUFFLED)
        self.tokenizer, self.config, self.recipe, self.place = tokenizer, config, recipe, (device, num_devices)
        # Counted by the process that prepares batches, read by the one that trains.
        self._counts = torch.zeros(4, dtype=torch.int64).share_memory_()
        self._updates, self._next = None, 0

    def __str__(self):
        return f"a stream of training pairs, updates of about {self.recipe.tokens_per_update:,} target tokens"

    @property
    def pairs_per_epoch(self):
        """Pairs of the first pass, as far as it has come."""
        return int(self._counts[0])

    @property
    def dropped(self):
        """Reason -> number of pairs left out of the first pass, as far as it has come."""
        return dict(zip(("empty", "ratio", "too long"), self._counts[1:].tolist(), strict=True))

    def __getitem__(self, n):
        """This device's micro-batches of update n."""
        if self._updates is None or n < self._next:
            self._updates, self._next = self._all_updates(), 0
        window, step = next(itertools.islice(self._updates, n - self._next, None))
        self._next = n + 1
        return window[step]

    def _all_updates(self):
        """(window, update in it), one after the other."""
        disable_progress_bars()
        for number, window in enumerate(self._windows()):
            for step in range(window.updates_per_epoch):
                yield window, number * window.updates_per_epoch + step

    def _windows(self) -> Iterator[PairReader]:
        """One pass over the stream after the other; no window holds pairs of two."""
        for epoch in itertools.count():
            chunks, seen = [], 0
            for chunk in self._chunks(epoch):
                chunks.append(chunk)
                seen += len(chunk[0])
                if sum(int(counts[:, 1].sum()) for *_, counts in chunks) >= WINDOW * self.recipe.tokens_per_update:
                    yield self._window(chunks)
                    chunks = []
            if chunks:
                yield self._window(chunks)
            if not seen:
                raise InputError(f"no pair is left to train on: {self.dropped}")

    def _chunks(self, epoch):
        """The pairs of one pass, cleaned: (text, token ids, lengths) of many at a time."""
        self.pairs.set_epoch(epoch)
        for batch in self.pairs.iter(CHUNK):
            text, dropped = corpus.clean(Dataset.from_dict(batch), max_length_ratio=self.recipe.max_length_ratio)
            chunk = prepare(text, self.tokenizer, self.recipe)
            if epoch == 0:
                kept = len(chunk[0])
                self._counts += torch.tensor([kept, dropped["empty"], dropped["ratio"], len(text) - kept])
            if len(chunk[0]):
                yield chunk

    def _window(self, chunks):
        text, tokens, counts = zip(*chunks, strict=True)
        plan = update_plan(np.concatenate(counts), self.recipe)
        text, tokens = concatenate_datasets(text), concatenate_datasets(tokens)
        return PairReader(tokens, text, self.tokenizer, self.config, self.recipe, plan, *self.place)
