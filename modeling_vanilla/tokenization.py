"""A byte-level BPE tokenizer, shared by both languages, that AutoTokenizer loads without this package."""

import json
import logging
import math
import random
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from .errors import InputError


logger = logging.getLogger(__name__)

SPECIAL_TOKENS = ["<pad>", "<s>", "</s>", "<unk>"]  # their ids are their places in this list
NORMAL_FORMS = {
    "NFC": normalizers.NFC,
    "NFD": normalizers.NFD,
    "NFKC": normalizers.NFKC,
    "NFKD": normalizers.NFKD,
    "none": None,
}

# Every character falls into one alternative, so nothing is lost. Unlike GPT-2's pattern a word keeps its combining
# marks, joiners and inner apostrophes: GPT-2 cuts Hindi, Burmese or Khmer at every vowel sign and needs twice the
# tokens. Letters never share a piece with "<", ">" or "/", so "</s>" in the corpus cannot become a learnt piece.
# The limit of 500 keeps the regex engine from giving up (it panics after ten million steps) on a line without spaces.
WORDS = (
    " ?\\p{L}(?:['’]?[\\p{L}\\p{M}\u200c\u200d]){0,499}| ?\\p{N}{1,500}| ?[^\\s\\p{L}\\p{N}]{1,500}"
    "|\\s{1,500}(?!\\S)|\\s{1,500}"
)

# Training keeps every distinct word in memory; no sentence of a real corpus runs this long without a space.
LONGEST_WORD = 10_000

# The config entries that 4.57 and 5.x both understand. Of the others, `backend` belongs to 5.x and
# `extra_special_tokens` is a dict in one and a list in the other; both are told by tokenizer.json already.
CONFIG_KEYS = [
    "bos_token",
    "clean_up_tokenization_spaces",
    "eos_token",
    "model_input_names",
    "model_max_length",
    "pad_token",
    "padding_side",
    "split_special_tokens",
    "unk_token",
]

# Scripts that put no space between words: Thai, Lao, Tibetan, Burmese, Khmer, kana, Han.
_UNSPACED = re.compile("[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]")

# Byte-level BPE (Radford et al., 2019) writes each byte as one printable character; this table reads it back.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_BYTES = {chr(b): b for b in _PRINTABLE}
_BYTES |= {chr(256 + n): b for n, b in enumerate(sorted(set(range(256)) - set(_PRINTABLE)))}


def train(
    lines: Iterable[str | tuple[str, ...]],
    vocab_size: int = 10_000,
    *,
    normalization: str = "NFC",
    lowercase: bool = False,
    model_max_length: int = 1024,
) -> PreTrainedTokenizerFast:
    """Learn a tokenizer from a stream of lines, each a text or a tuple of texts (a sentence pair).

    The same lines give the same tokenizer, byte for byte. When they hold too few repeated pieces for `vocab_size`,
    the vocabulary is smaller and a warning gives both numbers.
    """
    smallest = len(SPECIAL_TOKENS) + len(_BYTES)
    if vocab_size < smallest:
        raise InputError(f"vocab_size {vocab_size} is too small; the 256 bytes and special tokens need {smallest}")
    backend = _untrained(normalization, lowercase)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,  # a piece seen once teaches the model nothing
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    backend.train_from_iterator(_without_giant_words(lines), trainer)
    if backend.get_vocab_size() < vocab_size:
        logger.warning(
            "The corpus supports a vocabulary of %d pieces, not the %d asked for.",
            backend.get_vocab_size(),
            vocab_size,
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=model_max_length,
        model_input_names=["input_ids", "attention_mask"],
        padding_side="right",
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,  # "</s>" typed by a user is text
    )


def _untrained(normalization: str, lowercase: bool) -> Tokenizer:
    if normalization not in NORMAL_FORMS:
        raise InputError(f"normalization {normalization!r} is unknown; choose one of {', '.join(NORMAL_FORMS)}")
    form = NORMAL_FORMS[normalization]
    steps = [form()] if form else []
    if lowercase:  # the form again afterwards: no capital J with caron exists, but a small one does
        steps += [normalizers.Lowercase(), *steps]
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    if steps:
        backend.normalizer = normalizers.Sequence(steps)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", SPECIAL_TOKENS.index("</s>"))]
    )
    return backend


def _without_giant_words(lines: Iterable[str | tuple[str, ...]]) -> Iterator[str]:
    giant = re.compile(rf"(\S{{{LONGEST_WORD}}})\S+")
    for number, line in enumerate(lines, 1):
        for text in (line,) if isinstance(line, str) else line:
            if len(text) > LONGEST_WORD and giant.search(text):
                logger.warning(
                    "line %d has a word of more than %d characters (%s...); the tokenizer learns from its beginning",
                    number,
                    LONGEST_WORD,
                    giant.search(text)[1][:20],
                )
                text = giant.sub(r"\1", text)
            yield text


def save(tokenizer: PreTrainedTokenizerFast, folder: str | Path) -> None:
    """Write the tokenizer so that AutoTokenizer of every supported version loads it.

    `save_pretrained` alone keeps the padding and truncation of the last call in tokenizer.json, and on transformers 5
    names a class that transformers 4 does not have.
    """
    _backend(tokenizer)
    tokenizer.save_pretrained(folder)
    file = Path(folder) / "tokenizer_config.json"
    saved = json.loads(file.read_text(encoding="utf-8"))
    config = {key: saved[key] for key in CONFIG_KEYS if key in saved} | {"tokenizer_class": "PreTrainedTokenizerFast"}
    file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def load(folder: str | Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a folder, or of owner/name on the Hub; InputError when there is none a model can use."""
    remedy = "train one with train_tokenizer.py"
    local = Path(folder).parent.is_dir() or not re.fullmatch(r"[\w.-]+/[\w.-]+", str(folder))
    if local and not any((Path(folder) / name).is_file() for name in ("tokenizer.json", "source.spm")):
        raise InputError(f"{folder} holds no tokenizer.json; {remedy}")
    try:
        if get_tokenizer_config(folder).get("tokenizer_class") == "MarianTokenizer":  # see convert.py
            return AutoTokenizer.from_pretrained(folder)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    except ImportError as error:
        raise InputError(f"the tokenizer of {folder} needs SentencePiece: pip install sentencepiece") from error
    except OSError as error:
        raise InputError(f"{folder} is neither a folder here nor a tokenizer on the Hub; {remedy}") from error
    missing = {"pad_token", "bos_token", "eos_token"} - set(tokenizer.special_tokens_map)
    if missing:
        raise InputError(f"the tokenizer of {folder} has no {' and no '.join(sorted(missing))}; {remedy}")
    return tokenizer


def normalise(tokenizer: PreTrainedTokenizerFast, text: str) -> str:
    """The text in the tokenizer's normal form, which is what decoding its ids gives back."""
    normalizer = tokenizer.backend_tokenizer.normalizer
    return normalizer.normalize_str(text) if normalizer else text


def pieces(tokenizer: PreTrainedTokenizerFast, text: str) -> list[str]:
    """The text as readable pieces, a space shown as "▁" and a part of a character by its bytes.

    Example: "A dog." -> ["A", "▁dog", ".", "</s>"]
    """
    tokens = tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids)
    return [
        token if token in SPECIAL_TOKENS else _spelling(token).decode("utf-8", "backslashreplace").replace(" ", "▁")
        for token in tokens
    ]


def audit(tokenizer: PreTrainedTokenizerFast, pairs: Iterable[tuple[str, str]]) -> dict[str, int | float]:
    """Check the round trip of every line of a corpus and count what is out of the ordinary.

    Tokens are counted per word, or per character for a side whose script puts no space between words.
    """
    fragments = {number for token, number in tokenizer.get_vocab().items() if _is_fragment(token)}
    report, pairs = Counter(), iter(pairs)
    while batch := list(islice(pairs, 1000)):
        for side, texts in zip(("source", "target"), zip(*batch, strict=True), strict=True):
            report += _audit_texts(tokenizer, side, texts, fragments)
    rates = {}
    for side in ("source", "target"):
        tokens, words, characters, unspaced = (
            report.pop(f"{side}_{unit}", 0) for unit in ("tokens", "words", "characters", "unspaced")
        )
        unit, count = ("character", characters) if 2 * unspaced > characters else ("word", words)
        rates[f"{side}_tokens_per_{unit}"] = round(tokens / max(count, 1), 3)
    cases = (
        "lines",
        "round_trip_failures",
        "normalised",
        "blank",
        "special_token_text",
        "spelled_in_bytes",
        "too_long",
    )
    return {case: report[case] for case in cases} | rates


def _audit_texts(tokenizer, side: str, texts: tuple[str, ...], fragments: set[int]) -> Counter:
    backend = _backend(tokenizer)
    ids = [encoding.ids for encoding in backend.encode_batch_fast(texts)]
    normal = [normalise(tokenizer, text) for text in texts]
    decoded = backend.decode_batch(ids, skip_special_tokens=True)
    return Counter(
        {
            "lines": len(texts),
            "round_trip_failures": sum(d != n for d, n in zip(decoded, normal, strict=True)),
            "normalised": sum(n != text for n, text in zip(normal, texts, strict=True)),
            "blank": sum(not text.strip() for text in texts),
            "special_token_text": sum(any(token in text for token in SPECIAL_TOKENS) for text in texts),
            "spelled_in_bytes": sum(not fragments.isdisjoint(i) for i in ids),
            "too_long": sum(len(i) > tokenizer.model_max_length for i in ids),
            f"{side}_tokens": sum(len(i) - 1 for i in ids),  # without </s>
            f"{side}_words": sum(len(text.split()) for text in texts),
            f"{side}_characters": sum(len("".join(text.split())) for text in texts),
            f"{side}_unspaced": sum(len(_UNSPACED.findall(text)) for text in texts),
        }
    )


class DropoutSegmenter:
    """BPE-dropout (Provilkov et al., 2020): segment at random, leaving out each merge with probability p at each step.

    For training only; the tokenizer is not touched. The dropout inside `tokenizers` cannot be seeded, so a resumed run
    could not repeat it, and it tries a dropped merge again within a step. Here the segmentation is a function of text
    and seed alone.

    Example: DropoutSegmenter(tokenizer, 0.1).encode("A dog.", seed=7) -> ids ending in </s>
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, p: float):
        if not 0 < p < 1:
            raise ValueError(f"p must lie between 0 and 1, not {p}")
        model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
        self._tokenizer, self._log_keep = tokenizer, math.log1p(-p)
        self._byte_ids = {character: model["vocab"][character] for character in _BYTES}
        self._ranks, self._merged = {}, []
        for rank, (left, right) in enumerate(model["merges"]):
            self._ranks[model["vocab"][left], model["vocab"][right]] = rank
            self._merged.append(model["vocab"][left + right])
        self._undropped: dict[str, tuple[int, list[int]]] = {}

    def encode(self, text: str, seed: int) -> list[int]:
        """One random segmentation, as ids that end in </s>."""
        # The trials of the whole text are one sequence; only the gaps between dropped merges are drawn.
        draw = random.Random(seed).random
        words = self._tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(normalise(self._tokenizer, text))
        gap, ids = int(math.log(1 - draw()) / self._log_keep), []
        for word, _ in words:
            merges, undropped = self._undropped.get(word) or self._remember(word)
            if merges <= gap:
                gap -= merges
                ids += undropped
            else:
                gap, tokens = self._segment(word, gap, draw)
                ids += tokens
        return [*ids, self._tokenizer.eos_token_id]

    def _remember(self, word: str) -> tuple[int, list[int]]:
        if len(self._undropped) == 100_000:  # bounds the memory, to about 30 MB
            self._undropped.clear()
        _, tokens = self._segment(word, sys.maxsize, None)
        self._undropped[word] = len(word) - len(tokens), tokens
        return self._undropped[word]

    def _segment(self, word: str, gap: int, draw) -> tuple[int, list[int]]:
        """Merge the bytes of one word, best pair first; the next merge to be dropped is `gap` merges away."""
        never = len(self._merged)
        tokens = [self._byte_ids[byte] for byte in word]
        ranks = [self._ranks.get(pair, never) for pair in zip(tokens, tokens[1:], strict=False)]
        dropped = []
        while ranks and (best := min(ranks)) < never:
            place = ranks.index(best)
            if gap == 0:  # out for this step only
                gap = int(math.log(1 - draw()) / self._log_keep)
                dropped.append((place, best))
                ranks[place] = never
                continue
            gap -= 1
            for other, rank in dropped:
                ranks[other] = rank
            dropped.clear()
            tokens[place : place + 2] = [self._merged[best]]
            del ranks[place]
            for left in (place - 1, place):
                if 0 <= left < len(ranks):
                    ranks[left] = self._ranks.get((tokens[left], tokens[left + 1]), never)
        return gap, tokens


def _backend(tokenizer: PreTrainedTokenizerFast) -> Tokenizer:
    """The Rust tokenizer, without the padding and truncation that the last call left set in it."""
    backend = tokenizer.backend_tokenizer
    backend.no_padding()
    backend.no_truncation()
    return backend


def _spelling(token: str) -> bytes:
    return bytes(_BYTES[character] for character in token)


def _is_fragment(token: str) -> bool:
    """Whether the token holds a part of a character, so that some character is spelled in several tokens."""
    if token in SPECIAL_TOKENS:
        return False
    try:
        _spelling(token).decode("utf-8")
    except UnicodeDecodeError:
        return True
    return False
