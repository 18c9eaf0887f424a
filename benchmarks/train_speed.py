# Copyright 2026 The vanilla-transformer authors. Licensed under the Apache License, Version 2.0.
"""Training speed of this project beside others of the same dimensions: target tokens a second on Multi30k, in fp32.

    OMP_NUM_THREADS=2 python benchmarks/train_speed.py --size tiny
    OMP_NUM_THREADS=2 python benchmarks/train_speed.py --size tiny --profile      where this project's time goes

Updates of 4,096 target tokens with label smoothing; tokens are those that are learnt, padding is not counted. All
systems run in turn, a few updates each, and the best round of each counts. JoeyNMT needs an environment
of its own, whose Python `--joey` names: `pip install joeynmt "protobuf<3.21" importlib_metadata`.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import datasets
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import (
    DataCollatorForSeq2Seq,
    MarianConfig,
    MarianMTModel,
    PrinterCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
)


ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from modeling_vanilla import VanillaConfig, VanillaForConditionalGeneration, corpus, data, tokenization  # noqa: E402
from modeling_vanilla.kernels_vanilla import product  # noqa: E402
from modeling_vanilla.modeling_vanilla import sinusoids  # noqa: E402
from modeling_vanilla.recipe import Recipe  # noqa: E402
from modeling_vanilla.training import Training, accelerator  # noqa: E402


TOKENS = 4096  # target tokens of an update
SMOOTHING = 0.1
SIZES = {"tiny": {"dropout": 0.3}, "base": {"dropout": 0.1}}
UPDATES = {"tiny": 4, "base": 1}  # in a round


def main():
    args = parse_args()
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    pairs = corpus.load(str(args.train_file), "en", "de")
    tokenizer = tokenization.train((text for pair in pairs for text in pair.values()), args.vocab_size)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.get_num_threads()} threads\n")
    for size in SIZES if args.size == "all" else [args.size]:
        with tempfile.TemporaryDirectory(prefix="train_speed") as folder:
            config = VanillaConfig.preset(size, vocab_size=len(tokenizer), label_smoothing=SMOOTHING, **SIZES[size])
            if args.profile:
                profile(size, Loop(VanillaForConditionalGeneration(config), tokenizer, pairs, folder))
            else:
                report(size, *compare(size, config, pairs, tokenizer, folder, args))


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="tiny", choices=(*SIZES, "all"))
    parser.add_argument("--rounds", default=5, type=int)
    parser.add_argument("--profile", action="store_true", help="of this project, instead of a comparison")
    parser.add_argument("--train_file", default=ROOT.parent / "shared/data/multi30k/train", type=Path)
    parser.add_argument("--vocab_size", default=10_000, type=int)
    parser.add_argument("--joey", default=ROOT.parent / "venv/joey/bin/python", type=Path)
    return parser.parse_args()


def compare(size, config, pairs, tokenizer, folder, args):
    """({system: best target tokens a second}, floating-point operations a target token, best matrix-multiply rate)."""
    ours = Loop(VanillaForConditionalGeneration(config), tokenizer, pairs, folder)
    systems = {
        "this project": ours,
        "this project without oneDNN": WithoutOnednn(ours),
        "MarianMTModel, same loop": Loop(Learner(marian(config), config), tokenizer, pairs, folder),
        "torch.nn.Transformer, same loop": Loop(Learner(TorchTransformer(config), config), tokenizer, pairs, folder),
        "Seq2SeqTrainer with MarianMTModel": Trainer(marian(config), tokenizer, ours.run.reader.tokens, folder),
    }
    if args.joey.exists():
        systems["JoeyNMT's model, same batches"] = Joey(
            args.joey, config, ours, 1 + args.rounds * UPDATES[size], folder
        )
    else:
        print(f"without JoeyNMT: there is no {args.joey}")
    best, products = dict.fromkeys(systems, 0.0), 0.0
    for name in systems:
        systems[name](1)  # allocates memory, compiles kernels
    for _ in range(args.rounds):
        products = max(products, multiply_rate())
        rates = {name: system(UPDATES[size]) for name, system in systems.items()}
        print(*(f"{rate:,.0f}" for rate in rates.values()), file=sys.stderr)
        best = {name: max(best[name], rate) for name, rate in rates.items()}
    for system in systems.values():
        system.close()
    return best, operations(config, ours.run.reader.plan.lengths.mean(axis=0)), products


def report(size, best, operations, products):
    ours = best["this project"]
    print(
        f"{size}: {operations / 1e6:.1f} MFLOP a target token; the machine multiplies matrices at "
        f"{products / 1e9:.0f} GFLOP/s, which would allow {products / operations:,.0f} tokens/s\n"
    )
    print("| system | target tokens/s | this project is faster by | share of the matrix-multiply rate |")
    print("|---|---|---|---|")
    for name, rate in best.items():
        print(f"| {name} | {rate:,.0f} | {ours / rate:.2f} x | {rate * operations / products:.0%} |")
    print(flush=True)


def profile(size, ours):
    """Print the shares of the operators in the time of a round, without the operators that they call."""
    ours(1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        ours(UPDATES[size])
    ours.close()
    rows = sorted(profiler.key_averages(), key=lambda row: -row.self_cpu_time_total)
    total = sum(row.self_cpu_time_total for row in rows)
    print(f"{size}:\n\n| operator | calls | share |\n|---|---|---|")
    for row in rows[:16]:
        print(f"| {row.key} | {row.count:,} | {row.self_cpu_time_total / total:.1%} |")


# -- What could be done -----------------------------------------------------------------------------------------------


def operations(config, lengths):
    """Useful floating-point operations a target token: products of the forward pass, twice as many in the backward.

    A multiplication with its addition counts as two; nothing is counted for padding or for keys that a causal query
    may not look at. `lengths` are the mean source and target length.
    """
    D, V, (S, T) = config.d_model, config.vocab_size, lengths
    encoder = config.encoder_layers * (4 * D * D + 2 * D * config.encoder_ffn_dim + 2 * S * D)
    decoder = config.decoder_layers * (6 * D * D + 2 * D * config.decoder_ffn_dim + T * D + 2 * S * D)
    memory = config.decoder_layers * 2 * D * D
    return 3 * 2 * ((encoder + memory) * S / T + decoder + V * D)


def multiply_rate(size=2048):
    """Operations a second of a large fp32 matrix product, by MKL (PyTorch's default) or oneDNN, the faster one."""
    a, rates = torch.ones(size, size), []
    for multiply in (torch.mm, product):
        multiply(a, a)
        start = time.perf_counter()
        for _ in range(3):
            multiply(a, a)
        rates.append(3 * 2 * size**3 / (time.perf_counter() - start))
    return max(rates)


# -- The systems: each called with a number of updates returns target tokens a second ---------------------------------


class Loop:
    """The update path of run_translation.py: plan, collate, forward, backward, fused Adam; with anyone's model."""

    def __init__(self, model, tokenizer, pairs, folder):
        recipe = Recipe(output_dir=folder, tokens_per_update=TOKENS, do_train=True)
        self.run = Training(recipe, accelerator(recipe), model.train(), tokenizer, data.Splits(train=pairs))
        self.run.started, self.batches = time.perf_counter(), self.run.batches()

    def __call__(self, updates):
        before, start = self.run.progress.target_tokens, time.perf_counter()
        for _ in range(updates):
            self.run.update(next(self.batches))
        return (self.run.progress.target_tokens - before) / (time.perf_counter() - start)

    def close(self):
        self.batches.close()


class WithoutOnednn:
    """The same loop with PyTorch's own choice of matrix products, MKL."""

    def __init__(self, loop):
        self.loop = loop

    def __call__(self, updates):
        with torch.backends.mkldnn.flags(enabled=False):
            return self.loop(updates)

    def close(self):
        pass


class Learner(nn.Module):
    """A model that gives logits, taught as ours is: label-smoothed cross-entropy over the tokens of the update."""

    def __init__(self, model, config):
        super().__init__()
        self.model, self.config = model, config

    def forward(self, labels, num_items_in_batch, **inputs):
        logits = self.model(**inputs).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=SMOOTHING, reduction="sum")
        return SimpleNamespace(loss=loss / num_items_in_batch)


def marian(config):
    """transformers' MarianMT of the same dimensions."""
    names = (
        "vocab_size d_model encoder_layers decoder_layers encoder_attention_heads decoder_attention_heads "
        "encoder_ffn_dim decoder_ffn_dim activation_function dropout attention_dropout activation_dropout "
        "max_position_embeddings pad_token_id bos_token_id eos_token_id decoder_start_token_id"
    )
    same = {name: getattr(config, name) for name in names.split()}
    return MarianMTModel(MarianConfig(**same, scale_embedding=True, use_cache=False, forced_eos_token_id=None))


class TorchTransformer(nn.Module):
    """torch.nn.Transformer with one matrix for both embeddings and the output, and dropout where the paper has it."""

    def __init__(self, config):
        super().__init__()
        D = config.d_model
        self.embedding = nn.Embedding(config.vocab_size, D, config.pad_token_id)
        nn.init.normal_(self.embedding.weight, std=D**-0.5)
        self.register_buffer("positions", sinusoids(config.max_position_embeddings, D))
        self.dropout = nn.Dropout(config.dropout)
        layers, heads = config.encoder_layers, config.encoder_attention_heads
        self.stacks = nn.Transformer(
            D, heads, layers, layers, config.encoder_ffn_dim, config.dropout, batch_first=True
        )
        for module in self.stacks.modules():
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0
            elif isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
                module.dropout.p = 0.0

    def embed(self, ids):
        x = self.embedding(ids) * self.embedding.embedding_dim**0.5
        return self.dropout(x + self.positions[: ids.shape[1]])

    def forward(self, input_ids, attention_mask, decoder_input_ids):
        padding = torch.zeros(attention_mask.shape).masked_fill_(attention_mask == 0, -torch.inf)
        future = nn.Transformer.generate_square_subsequent_mask(decoder_input_ids.shape[1])
        x = self.stacks(
            self.embed(input_ids),
            self.embed(decoder_input_ids),
            tgt_mask=future,
            tgt_is_causal=True,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return SimpleNamespace(logits=F.linear(x, self.embedding.weight))


class Trainer:
    """Seq2SeqTrainer as a user runs it: random order, padded by the collator, as many pairs as make 4,096 tokens."""

    def __init__(self, model, tokenizer, tokens, folder):
        self.model, self.tokenizer, self.tokens, self.folder = model, tokenizer, tokens, folder
        self.pairs = round(TOKENS / data.lengths(tokens)[:, 1].mean())

    def __call__(self, updates):
        clock = Clock()
        trainer = CountingTrainer(
            self.model,
            Seq2SeqTrainingArguments(
                self.folder,
                per_device_train_batch_size=self.pairs,
                label_smoothing_factor=SMOOTHING,
                max_steps=updates + 1,
                use_cpu=True,
                disable_tqdm=True,
                report_to="none",
                logging_strategy="no",
                save_strategy="no",
            ),
            DataCollatorForSeq2Seq(self.tokenizer, self.model),
            self.tokens,
            processing_class=self.tokenizer,
            callbacks=[clock],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        # The first step pays for the start and is left out.
        return sum(trainer.counts[1:]) / (clock.ends[-1] - clock.ends[0])

    def close(self):
        pass


class CountingTrainer(Seq2SeqTrainer):
    """Counts the target tokens of each step."""

    def training_step(self, model, inputs, *args):
        self.counts = [*getattr(self, "counts", []), int((inputs["labels"] != -100).sum())]
        return super().training_step(model, inputs, *args)


class Clock(TrainerCallback):
    """When each step ended."""

    def __init__(self):
        self.ends = []

    def on_step_end(self, *args, **kwargs):
        self.ends.append(time.perf_counter())


class Joey:
    """JoeyNMT's model on the same batches, in a process with its own packages."""

    def __init__(self, python, config, loop, updates, folder):
        batches, fields = Path(folder, "batches.pt"), "d_model encoder_layers encoder_attention_heads encoder_ffn_dim"
        torch.save([loop.run.reader[n] for n in range(updates)], batches)
        numbers = [str(getattr(config, name)) for name in f"vocab_size dropout {fields}".split()]
        worker = Path(__file__).with_name("joeynmt_worker.py")
        command = [python, worker, batches, *numbers]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self, updates):
        print(updates, file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline())

    def close(self):
        self.process.communicate()


if __name__ == "__main__":
    main()
