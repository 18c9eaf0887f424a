"""Train a tokenizer on parallel text and show what it does to that text.

    python train_tokenizer.py --train_file demo --output_dir tokenizer
    python train_tokenizer.py --source_file train.en --target_file train.de --vocab_size 8000 --output_dir tokenizer
    python train_tokenizer.py --train_file data/train --source_lang en --target_lang de --output_dir tokenizer
    python train_tokenizer.py --dataset_name you/corpus --source_lang en --target_lang sw --output_dir tokenizer

The text is streamed; memory grows with the number of distinct words only, about 1 GB for a million of them
(--max_train_samples bounds it, and what is downloaded of a data set).
Afterwards: AutoTokenizer.from_pretrained("tokenizer"), or run_translation.py --tokenizer_name tokenizer.
"""

import argparse
import os
import sys
from itertools import islice
from pathlib import Path

from modeling_vanilla import corpus, errors, tokenization
from modeling_vanilla.errors import InputError


TOKENIZER_FILES = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
CASES = {
    "round_trip_failures": "did not come back as they were",
    "normalised": "were changed by the normal form",
    "blank": "are blank",
    "special_token_text": "hold </s> or another special token as text",
    "spelled_in_bytes": "hold a character that is spelled in bytes",
    "too_long": "are longer than the model's limit",
}


def main(argv=None):
    args = parse(argv)
    check_output_dir(args.output_dir)
    tokenizer = tokenization.train(
        read_pairs(args), args.vocab_size, normalization=args.normalization, lowercase=args.lowercase
    )
    tokenization.save(tokenizer, args.output_dir)
    print(f"{len(tokenizer):,} pieces in {args.output_dir}")
    languages = (args.source_lang or "source", args.target_lang or "target")
    print_pieces(tokenizer, next(read_pairs(args)), languages)
    print_audit(tokenization.audit(tokenizer, read_pairs(args)), languages)


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    text = parser.add_argument_group("the text, in one of three ways").add_argument
    text("--train_file", help="a path prefix (train for train.en, train.de), .tsv, .csv, .jsonl, .tmx, ..., or demo")
    text("--dataset_name", help="a data set on the Hugging Face Hub")
    text("--source_file", help="the source sentences, one a line")
    text("--target_file", help="their translations, one a line")
    text("--source_lang", help="suffix, column or key of the source language, such as en")
    text("--target_lang", help="suffix, column or key of the target language, such as de")
    text("--dataset_config_name", help="configuration of the data set, if it has several")
    text("--max_train_samples", type=int, help="use the first so many pairs only")
    parser.add_argument(
        "--vocab_size", type=int, default=10_000, help="pieces, for both languages (default: %(default)s)"
    )
    parser.add_argument(
        "--normalization", default="NFC", choices=tokenization.NORMAL_FORMS, help="default: %(default)s"
    )
    parser.add_argument("--lowercase", action="store_true", help="lower-case all text, also what is translated later")
    parser.add_argument("--output_dir", required=True, type=Path, help="folder for the tokenizer")
    args = parser.parse_args(argv)
    ways = [args.train_file, args.dataset_name, args.source_file and args.target_file]
    if sum(map(bool, ways)) != 1 or bool(args.source_file) != bool(args.target_file):
        parser.error("give --train_file, or --dataset_name, or --source_file and --target_file")
    return args


def check_output_dir(folder):
    others = sorted({path.name for path in folder.iterdir()} - TOKENIZER_FILES) if folder.is_dir() else []
    if others:
        raise InputError(f"{folder} holds {', '.join(others[:3])}; name a new or empty folder with --output_dir")
    if folder.is_file():
        raise InputError(f"{folder} is a file; name a new or empty folder with --output_dir")


def read_pairs(args):
    """Yield (source, target), read anew on each call."""
    name, source_lang, target_lang = args.train_file or args.dataset_name, args.source_lang, args.target_lang
    if args.source_file:
        name, source_lang, target_lang = common_prefix(args.source_file, args.target_file)
    pairs = corpus.load(
        name,
        source_lang,
        target_lang,
        dataset_config_name=args.dataset_config_name,
        # A data set that is read whole is downloaded once and then read from its cache.
        streaming=not args.dataset_name or args.max_train_samples is not None,
    )
    for pair in islice(pairs, args.max_train_samples):
        yield pair["source"], pair["target"]


def common_prefix(*files):
    """Two files as the corpus module names them, a prefix and two ends: train.en and train.de are ./train, en, de.

    The dot of "./" is the common prefix of files that are not named alike.
    """
    for file in files:
        if not Path(file).is_file():
            raise InputError(f"{file}: no such file; mend --source_file or --target_file")
    paths = [os.path.join(os.curdir, os.path.relpath(file)) for file in files]
    prefix, _, _ = os.path.commonprefix(paths).rpartition(".")
    return prefix, *(path[len(prefix) + 1 :] for path in paths)


def print_pieces(tokenizer, pair, languages):
    for language, text in zip(languages, pair, strict=True):
        print(f"{language}: {' '.join(tokenization.pieces(tokenizer, text))}")


def print_audit(report, languages):
    names = dict(zip(("source", "target"), languages, strict=True))
    for key, rate in report.items():
        side, _, unit = key.partition("_tokens_per_")
        if unit:
            print(f"{names[side]}: {rate:.2f} tokens per {unit}")
    print(f"of {report['lines']:,} lines")
    for case, what in CASES.items():
        print(f"{report[case]:12,} {what}")


if __name__ == "__main__":
    sys.exit(errors.run(main))
