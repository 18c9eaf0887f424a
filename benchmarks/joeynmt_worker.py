# Copyright 2026 The vanilla-transformer authors. Licensed under the Apache License, Version 2.0.
"""JoeyNMT's model on the batches of train_speed.py, which starts this file with the Python that has JoeyNMT.

Reads a number of updates a line, trains that many, and answers with target tokens a second.
"""

import logging
import sys
import time
from itertools import islice
from types import SimpleNamespace

import torch
from joeynmt.batch import Batch
from joeynmt.model import build_model
from joeynmt.vocabulary import Vocabulary


SPECIAL = {
    **{"unk_token": "<unk>", "pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "sep_token": None},
    **{"unk_id": 0, "pad_id": 1, "bos_id": 2, "eos_id": 3, "lang_tags": []},
}
OUR_SPECIAL = torch.tensor([1, 2, 3, 0])  # JoeyNMT's ids of our <pad>, <s>, </s>, <unk>


def main():
    logging.disable(logging.INFO)
    file, vocab_size, dropout, d_model, layers, heads, ffn_dim = sys.argv[1:]
    model = build(int(vocab_size), float(dropout), int(d_model), int(layers), int(heads), int(ffn_dim))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9, fused=True)
    updates = iter([[joey_batch(batch) for batch in batches] for batches in torch.load(file)])
    for line in sys.stdin:
        tokens, start = 0, time.perf_counter()
        for batches in islice(updates, int(line)):
            tokens += update(model, optimizer, batches)
        print(tokens / (time.perf_counter() - start), flush=True)


def build(vocab_size, dropout, d_model, layers, heads, ffn_dim):
    side = {
        **{"type": "transformer", "num_layers": layers, "num_heads": heads, "hidden_size": d_model},
        **{"ff_size": ffn_dim, "dropout": dropout, "layer_norm": "post"},
        "embeddings": {"embedding_dim": d_model, "scale": True, "dropout": dropout},
    }
    tied = {"tied_embeddings": True, "tied_softmax": True, "initializer": "xavier_uniform"}
    vocabulary = Vocabulary([str(i) for i in range(4, vocab_size)], SimpleNamespace(**SPECIAL))
    model = build_model({"encoder": side, "decoder": side, **tied}, vocabulary, vocabulary)
    model.loss_function = "crossentropy", 0.1
    return model.train()


def joey_batch(batch):
    """Our tensors as JoeyNMT's Batch."""
    source, start, labels = batch["input_ids"], batch["decoder_input_ids"][:, :1], batch["labels"]
    target = torch.cat([start, labels.clamp_min(0)], dim=1)
    source, target = (torch.where(ids < 4, OUR_SPECIAL[ids.clamp_max(3)], ids) for ids in (source, target))
    lengths, rows = batch["attention_mask"].sum(1), torch.arange(len(source))
    return Batch(source, lengths, None, target, None, rows, torch.device("cpu"), SPECIAL["pad_id"], SPECIAL["eos_id"])


def update(model, optimizer, batches):
    tokens = sum(batch.ntokens for batch in batches)
    for batch in batches:
        loss = model(return_type="loss", **vars(batch))[0]
        (loss / tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
    return tokens


if __name__ == "__main__":
    main()
