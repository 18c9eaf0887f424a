# Copyright 2026 The vanilla-transformer authors. Licensed under the Apache License, Version 2.0.
"""Peak memory and time of the loss of one 25,000-token update and its gradient, with and without all logits at once.

    OMP_NUM_THREADS=2 python benchmarks/loss_memory.py

Each row is a process of its own, as a peak never sinks again. It may take the memory that is free now, not more.
"""

import argparse
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from modeling_vanilla.kernels_vanilla import SmoothedCrossEntropy  # noqa: E402


SMOOTHING = 0.1


def chunks(x, weight, labels):
    return SmoothedCrossEntropy.apply(x, weight, labels, SMOOTHING)


def full(x, weight, labels):
    return F.cross_entropy(F.linear(x, weight), labels, reduction="sum", label_smoothing=SMOOTHING)


LOSSES = {"this project": chunks, "F.cross_entropy on all logits": full}


def main():
    args = parse_args()
    if args.loss:
        return measure(args)
    versions = f"torch {torch.__version__}, {torch.get_num_threads()} threads"
    print(f"{versions}, {args.tokens:,} tokens, d_model {args.d_model}\n")
    print("| vocabulary | loss | peak above the inputs | seconds | value |\n|---|---|---|---|---|")
    for vocab_size in args.vocab_size:
        for name in LOSSES:
            sizes = f"--tokens={args.tokens}", f"--d_model={args.d_model}", f"--vocab_size={vocab_size}"
            command = [sys.executable, __file__, "--loss", name, *sizes]
            child = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            print(f"| {vocab_size:,} | {name} | {child.stdout.strip() or 'failed | |'} |", flush=True)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default=25_000, type=int)
    parser.add_argument("--d_model", default=512, type=int)
    parser.add_argument("--vocab_size", default=[37_000, 100_000], type=int, nargs="+")
    parser.add_argument("--loss", choices=LOSSES, help="measure this one alone, in this process")
    return parser.parse_args()


def measure(args):
    """Print the rest of a row: what loss and gradient needed above weights, states and labels."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_DATA, (free, free))
    torch.manual_seed(0)
    (V,) = args.vocab_size
    x = torch.randn(args.tokens, args.d_model, requires_grad=True)
    weight = (torch.randn(V, args.d_model) * args.d_model**-0.5).requires_grad_()
    labels = torch.randint(V, (args.tokens,))
    before, start = peak(), time.perf_counter()
    try:
        loss = LOSSES[args.loss](x, weight, labels)
        loss.backward()
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        print(f"more than the {free / 1e9:.0f} GB that are free | | ")
        return
    seconds = time.perf_counter() - start
    print(f"{(peak() - before) / 1e9:.2f} GB | {seconds:.1f} | {loss.item() / args.tokens:.5f}")


def peak():
    """The most memory that this process has held, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # kilobytes on Linux


if __name__ == "__main__":
    main()
