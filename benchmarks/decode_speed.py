# Copyright 2026 The vanilla-transformer authors. Licensed under the Apache License, Version 2.0.
"""Decoding speed of `model.search` beside stock generate(), MarianMT and CTranslate2: same weights, same batches.

    python benchmarks/decode_speed.py --preset tiny                                     random weights, 20 tokens each
    python benchmarks/decode_speed.py --model FOLDER --source_file test_2016_flickr.en.gz  a trained model
    python benchmarks/decode_speed.py --preset tiny --profile                           where this project's time goes

All engines run in turn, several times over; the best time of each counts. Each has a process of its own, since two
OpenMP runtimes in one slow each other down.
"""

import argparse
import gzip
import itertools
import multiprocessing
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from unittest.mock import patch

import ctranslate2
import numpy as np
import torch
import transformers
from ctranslate2.converters.transformers import BartLoader
from transformers import AutoTokenizer, MarianConfig, MarianMTModel


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from modeling_vanilla import VanillaConfig, VanillaForConditionalGeneration, generation_vanilla  # noqa: E402
from modeling_vanilla.batching import token_batches  # noqa: E402


def main():
    args = parse_args()
    model, sources = load(args)
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, ctranslate2 {ctranslate2.__version__}, ",
        end="",
    )
    print(f"{args.threads} threads, {args.model or args.preset}, {len(sources)} sentences\n")
    if args.profile:
        return profile(model, workloads(sources, args), args)
    engines = {name: Engine(name, args) for name in ENGINES if name != "MarianMT generate" or is_marian(model.config)}
    print(f"| | {' | '.join(engines)} |\n|---|{'---|' * len(engines)}")
    for beams in (4, 1):
        for name, batches in workloads(sources, args).items():
            report(f"beam {beams}, {name}", engines, batches, beams, args)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a trained model with its tokenizer; default: random weights")
    parser.add_argument("--source_file", default=Path("../shared/data/multi30k/test_2016_flickr.en.gz"), type=Path)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--vocab_size", default=10_000, type=int)
    parser.add_argument("--sentences", default=192, type=int)
    parser.add_argument("--single", default=8, type=int, help="sentences translated one by one, for the latency")
    parser.add_argument("--batch_size", default=64, type=int)
    parser.add_argument("--batch_tokens", default=2048, type=int, help="source tokens, with padding")
    parser.add_argument("--length", default=20, type=int, help="tokens of each translation, with random weights")
    parser.add_argument("--repeats", default=5, type=int)
    parser.add_argument("--threads", default=torch.get_num_threads(), type=int)
    parser.add_argument("--profile", action="store_true", help="of this project, instead of a comparison")
    return parser.parse_args()


def load(args):
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    return trained(args) if args.model else untrained(args)


def untrained(args):
    """A random model and random sources of about 16 tokens."""
    torch.manual_seed(0)
    config = VanillaConfig.preset(args.preset, vocab_size=args.vocab_size, position_layout="concatenated")
    model = VanillaForConditionalGeneration(config).eval()
    lengths = torch.randint(8, 25, (args.sentences,)).tolist()
    return model, [[*torch.randint(4, args.vocab_size, (n,)).tolist(), config.eos_token_id] for n in lengths]


def trained(args):
    args.length = None
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    with (gzip.open if args.source_file.suffix == ".gz" else open)(args.source_file, "rt", encoding="utf-8") as lines:
        texts = [line.rstrip("\n") for line, _ in zip(lines, range(args.sentences), strict=False)]
    return VanillaForConditionalGeneration.from_pretrained(args.model).eval(), tokenizer(texts).input_ids


def workloads(sources, args):
    """Batches of like length by sentences and by tokens, and single sentences."""
    ordered = sorted(sources, key=len, reverse=True)
    by_tokens = token_batches([len(source) for source in ordered], args.batch_tokens)
    by_number = [ordered[i : i + args.batch_size] for i in range(0, len(ordered), args.batch_size)]
    return {
        f"{args.batch_size} a batch": by_number,
        f"{args.batch_tokens:,} tokens a batch": [[ordered[i] for i in rows] for rows in by_tokens],
        "one by one": [[source] for source in sources[: args.single]],
    }


def report(title, engines, batches, beams, args):
    """One row of the table: output tokens a second, ours over theirs, and how many translations are equal to ours."""
    best, outputs = dict.fromkeys(engines, float("inf")), {}
    for _ in range(args.repeats):
        for name, engine in engines.items():
            seconds, outputs[name] = engine(batches, beams, args.length)
            best[name] = min(best[name], seconds)
    rates = {name: sum(map(len, outputs[name])) / best[name] for name in engines}
    cells = []
    for name, rate in rates.items():
        agree = np.mean([a == b for a, b in zip(outputs["ours"], outputs[name], strict=True)])
        cells.append(f"{rate:,.0f}" + ("" if name == "ours" else f" ({rates['ours'] / rate:.2f}x, {agree:.0%} equal)"))
    print(f"| {title} | {' | '.join(cells)} |", flush=True)


def profile(model, workloads, args):
    """Print where our time goes: operators without those that they call, and steps of a sentence.

    Generate's rule stops as most engines do; the difference is what the certainty of the paper's costs.
    """
    for beams, (name, batches) in itertools.product((4, 1), workloads.items()):
        fewer, _, _ = observed(ours(model, length_normalization="huggingface"), batches, beams, args.length)
        steps, tokens, rows = observed(ours(model), batches, beams, args.length)
        total, largest = (sum(row.self_cpu_time_total for row in some) for some in (rows, rows[:10]))
        shares = ", ".join(f"{row.key} {row.self_cpu_time_total / total:.0%}" for row in rows[:10])
        print(f"beam {beams}, {name}: {steps:,} steps of a sentence, {fewer:,} by generate's rule")
        print(f"    {shares}; these ten alone would make {1e6 * tokens / largest:,.0f} tokens/s")


def observed(engine, batches, beams, length):
    """Steps of all sentences together, output tokens, and operators by the time spent in themselves."""
    steps, step = [], generation_vanilla.IncrementalDecoder.step

    def counted(self, tokens, parents):
        steps.append(len(tokens))
        return step(self, tokens, parents)

    with (
        patch.object(generation_vanilla.IncrementalDecoder, "step", counted),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler,
    ):
        tokens = sum(len(tokens) for batch in batches for tokens in engine(batch, beams, length))
    return sum(steps), tokens, sorted(profiler.key_averages(), key=lambda row: -row.self_cpu_time_total)


# -- The engines: (sources, beams, length or None) -> token ids up to </s> --------------------------------------------


class Engine:
    """An engine in its own process: (batches, beams, length) -> (seconds, token ids of all translations)."""

    def __init__(self, name, args):
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        context.Process(target=work, args=(name, args, other), daemon=True).start()

    def __call__(self, *work):
        self.pipe.send(work)
        return self.pipe.recv()


def work(name, args, pipe):
    """Answer an `Engine`'s calls."""
    translate = ENGINES[name](load(args)[0])
    while True:
        batches, beams, length = pipe.recv()
        start = time.perf_counter()
        outputs = [tokens for batch in batches for tokens in translate(batch, beams, length)]
        pipe.send((time.perf_counter() - start, outputs))


def padded(sources):
    """Token ids (B, S) and attention mask."""
    rows = [torch.tensor(source) for source in sources]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return ids, (torch.arange(ids.shape[1]) < torch.tensor([[len(row)] for row in rows])).long()


def ours(model, **options):
    def translate(sources, beams, length):
        ids, mask = padded(sources)
        limits = {"max_new_tokens": length or ids.shape[1] + 50, "min_new_tokens": length or 0}
        found = model.search(ids, mask, num_beams=beams, suppress_tokens=(3,), **limits, **options)
        return [
            [token for token in hypotheses[0].tokens if token != model.config.eos_token_id] for hypotheses in found
        ]

    return translate


def stock(model):
    config, suppress = (
        model.config,
        sorted({0, 1, 3, model.config.decoder_start_token_id} - {model.config.eos_token_id}),
    )

    def translate(sources, beams, length):
        ids, mask = padded(sources)
        longest = length or ids.shape[1] + 50
        found = model.generate(
            ids, attention_mask=mask, num_beams=beams, do_sample=False, suppress_tokens=suppress,
            max_new_tokens=longest, min_new_tokens=length or 0, length_penalty=0.6,
        )  # fmt: skip
        return [
            [token for token in row if token not in (config.pad_token_id, config.eos_token_id)]
            for row in found[:, 1:].tolist()
        ]

    return translate


def is_marian(config):
    """Whether MarianMT has the architecture."""
    concatenated = config.position_layout == "concatenated"
    return concatenated and config.norm_position == "post" and config.shares_all_embeddings


def marian(model):
    """transformers' MarianMT with the same weights."""
    config = model.config
    names = (
        "vocab_size d_model encoder_layers decoder_layers encoder_attention_heads decoder_attention_heads "
        "encoder_ffn_dim decoder_ffn_dim activation_function max_position_embeddings "
        "pad_token_id bos_token_id eos_token_id decoder_start_token_id"
    )
    twin = MarianMTModel(
        MarianConfig(
            **{name: getattr(config, name) for name in names.split()}, scale_embedding=True, forced_eos_token_id=None
        )
    )
    missing, _ = twin.load_state_dict(model.state_dict(), strict=False)
    if unknown := [name for name in missing if "embed_positions" not in name and name != "final_logits_bias"]:
        raise ValueError(f"MarianMT has weights that the model lacks: {unknown}")
    return stock(twin.eval())


class Loader(BartLoader):
    """CTranslate2's loader for BART, told where our scale, positions and last LayerNorm are."""

    def set_common_layers(self, spec, stack):
        config = stack.config
        spec.scale_embeddings = np.float32(config.d_model**0.5)
        spec.position_encodings.encodings = stack.embed_positions.table.numpy()
        embeddings = spec.embeddings[0] if isinstance(spec.embeddings, list) else spec.embeddings
        self.set_embeddings(embeddings, stack.embed_tokens)
        if config.norm_position == "pre":
            self.set_layer_norm(spec.layer_norm, stack.layer_norm)


def ctranslate(model, kind):
    """CTranslate2 with the same weights, in float32 or int8."""
    config, loader = model.config, Loader()
    tokens = ["<pad>", "<s>", "</s>", "<unk>", *map(str, range(4, config.vocab_size))]
    spec = ctranslate2.specs.TransformerSpec.from_config(
        (config.encoder_layers, config.decoder_layers),
        config.encoder_attention_heads,
        pre_norm=config.norm_position == "pre",
        activation=ctranslate2.specs.Activation[config.activation_function.upper()],
    )
    loader.set_encoder(spec.encoder, model.model.encoder)
    loader.set_decoder(spec.decoder, model.model.decoder)
    loader.set_linear(spec.decoder.projection, model.lm_head)
    spec.register_source_vocabulary(tokens)
    spec.register_target_vocabulary(tokens)
    spec.validate()
    with tempfile.TemporaryDirectory() as folder:
        spec.save(folder)
        translator = ctranslate2.Translator(folder, compute_type=kind, intra_threads=torch.get_num_threads())
    return ctranslate_engine(translator, tokens)


def ctranslate_engine(translator, tokens):
    ids = {token: i for i, token in enumerate(tokens)}

    def translate(sources, beams, length):
        results = translator.translate_batch(
            [[tokens[i] for i in source] for source in sources], beam_size=beams, max_batch_size=0, length_penalty=0.6,
            max_decoding_length=length or max(map(len, sources)) + 50, min_decoding_length=length or 1,
            suppress_sequences=[["<pad>"], ["<s>"], ["<unk>"]],
        )  # fmt: skip
        return [[ids[token] for token in result.hypotheses[0]] for result in results]

    return translate


ENGINES = {
    "ours": ours,
    "ours, generate's rule": partial(ours, length_normalization="huggingface"),
    "stock generate": stock,
    "MarianMT generate": marian,
    "CTranslate2 float32": partial(ctranslate, kind="float32"),
    "CTranslate2 int8": partial(ctranslate, kind="int8"),
}


if __name__ == "__main__":
    main()
