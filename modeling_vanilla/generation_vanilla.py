# Copyright 2026 The vanilla-transformer authors. Licensed under the Apache License, Version 2.0.
"""The paper's beam search (§6.1, after Wu et al., 2016, arXiv 1609.08144, §7) as an incremental decoder.

Shapes: R sentences still open, K beams of each (one at the first step), n tokens so far, S source positions,
D = d_model, h heads, d = D / h, V = vocab_size.

Nothing is ever copied for a beam. The beams of a sentence are K queries against one copy of its encoder's keys and
values. The target's keys and values are appended, K slots a step, and stay where they are; `ancestry` says which slots
a beam descends from, so choosing other beams changes that mask only. A finished sentence leaves the batch.
"""

import math
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice, repeat

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode


@dataclass
class Hypothesis:
    """One translation: its token ids (with </s>, if it came to one), log P(tokens | source), and log P over the penalty.

    `finished` is False when the length limit cut it. `alignment` names the source position of each token; `text` is set
    by `translate`.
    """

    tokens: list[int]
    score: float = 0.0
    log_prob: float = 0.0
    finished: bool = True
    alignment: list[int] | None = None
    text: str | None = None


@dataclass(frozen=True)
class SearchOptions:
    """What `search` and `translate` take as keyword arguments.

    Args:
        num_beams: hypotheses kept open; 1 is greedy search, which ends with the first </s>.
        length_penalty: alpha of the paper's score log P / ((5 + n) / 6)^alpha over all n tokens, </s> included; or p of
            log P / n^p with length_normalization="huggingface", which also stops as stock `generate()` does.
        n_best: hypotheses to return, at most `num_beams`; with do_sample the number of samples.
        max_new_tokens: length limit with </s>; default: source tokens + 50, as the paper.
        min_new_tokens: tokens before </s>, at least.
        suppress_tokens: ids never chosen, besides padding and start.
        no_repeat_ngram_size: no n-gram of this size twice.
        do_sample, temperature, top_k, top_p, seed: draw tokens instead of searching. The draws depend on the seed and
            the source sentence only.
    """

    num_beams: int = 4
    length_penalty: float = 0.6
    length_normalization: str = "paper"
    n_best: int = 1
    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    suppress_tokens: tuple[int, ...] = ()
    no_repeat_ngram_size: int = 0
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        for name, least in {"num_beams": 1, "n_best": 1, "min_new_tokens": 0, "no_repeat_ngram_size": 0, "top_k": 0}.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)!r} must be at least {least}")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens!r} must be at least 1")
        if self.length_normalization not in ("paper", "huggingface"):
            raise ValueError(f'length_normalization={self.length_normalization!r} must be "paper" or "huggingface"')
        if not self.do_sample and self.n_best > self.num_beams:
            raise ValueError(f"n_best={self.n_best} needs as many beams; num_beams={self.num_beams}")
        if self.temperature <= 0 or not 0 < self.top_p <= 1:
            raise ValueError(f"temperature={self.temperature!r} must be positive and top_p={self.top_p!r} in (0, 1]")

    @property
    def beams(self):
        return self.n_best if self.do_sample else self.num_beams

    @property
    def independent(self):
        """Whether each beam goes its own way: samples, and the single beam of greedy search."""
        return self.do_sample or self.num_beams == 1

    def penalty(self, n):
        return (n if self.length_normalization == "huggingface" else (5 + n) / 6) ** self.length_penalty


# -- Matrix products ---------------------------------------------------------------------------------------------------


def product(x, weight, bias=None):
    """x W^T + b in float32 on a CPU by oneDNN, which uses AVX-512 on every vendor's; PyTorch's default, MKL, on Intel's only.

    It pays from about a millisecond's work on; below, entering and leaving oneDNN's layout costs more.
    """
    rows = x.numel() // x.shape[-1]
    if x.device.type != "cpu" or x.dtype != torch.float32 or rows * weight.numel() < 2**22 or not ONEDNN:
        return F.linear(x, weight, bias)
    return F.linear(x.to_mkldnn(), weight, bias).to_dense()


ONEDNN = torch.backends.mkldnn.is_available()


class FastProducts(TorchFunctionMode):
    """Within this context every F.linear is a `product`."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return (product if function is F.linear else function)(*args, **(kwargs or {}))


def projection(*linears):
    """One function for several projections of the same input: (..., D) -> (..., sum of their widths).

    Where a weight does not say all (adapter, quantisation, hook), the modules themselves are called.
    """
    if not all(type(m) is nn.Linear and "forward" not in vars(m) and not m._forward_hooks for m in linears):
        return lambda x: torch.cat([m(x) for m in linears], dim=-1)
    if len(linears) == 1:
        return partial(product, weight=linears[0].weight, bias=linears[0].bias)
    return partial(
        product, weight=torch.cat([m.weight for m in linears]), bias=torch.cat([m.bias for m in linears])
    )


# -- The decoder, one token a step -------------------------------------------------------------------------------------


def attend(q, k, v, mask):
    """softmax(q k^T / sqrt(d) + mask) v; q (R, h, K, d), k and v (R, h, S, d), mask (R h or 1, K or 1, S) -> (R, K, D)."""
    R, _, K, d = q.shape
    q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    weights = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=d**-0.5).softmax(-1)
    return (weights @ v).view(R, -1, K, d).transpose(1, 2).flatten(2)


def additive(may_look, x):
    """0 where `may_look` (boolean) holds, the smallest finite number of x's dtype elsewhere."""
    return torch.zeros_like(may_look, dtype=x.dtype).masked_fill_(~may_look, torch.finfo(x.dtype).min)


def take(x, index):
    """Entries x[r, index[r, j]] of x (R, K) or (R, K, n)."""
    return x.gather(1, index if x.dim() == 2 else index[..., None].expand(-1, -1, x.shape[2]))


def leave(x, rows, stay):
    """Drop sentences from x (R, ...): the last ones move into the places `rows` of those that left, `stay` remain."""
    x[rows[0]] = x[rows[1]]
    return x[:stay]


class IncrementalLayer:
    """A decoder layer with its keys and values: those of the encoder's output, and the slots of the target."""

    def __init__(self, layer, memory, slots):
        self.layer, attn, memory_attn = layer, layer.self_attn, layer.encoder_attn
        self.heads = attn.heads
        self.qkv = projection(attn.q_proj, attn.k_proj, attn.v_proj)
        self.out, self.memory_out = projection(attn.out_proj), projection(memory_attn.out_proj)
        self.memory_q = projection(memory_attn.q_proj)
        self.fc1, self.fc2 = projection(layer.fc1), projection(layer.fc2)
        memory_kv = projection(memory_attn.k_proj, memory_attn.v_proj)(memory)
        self.memory_k, self.memory_v = (x.contiguous() for x in self.split(memory_kv, 2))  # (R, h, S, d)
        self.k = self.v = self.memory_k[:, :, :0]  # (R, h, slots, d)
        self.resize(torch.empty(len(memory), 0, dtype=torch.long, device=memory.device), slots)

    def split(self, x, parts):
        return x.unflatten(-1, (parts, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (R, K, parts D) -> parts x (R, h, K, d)

    def __call__(self, x, ancestry, padding):
        """x (R, K, D) -> (R, K, D); the masks as in `attend`."""
        layer, self.ancestry, self.padding = self.layer, ancestry, padding
        x = layer.residual(x, layer.self_attn_layer_norm, self.self_attention)
        x = layer.residual(x, layer.encoder_attn_layer_norm, self.cross_attention)
        return layer.residual(x, layer.final_layer_norm, self.feed_forward)

    def self_attention(self, x):
        q, k, v = self.split(self.qkv(x), 3)
        used = self.ancestry.shape[-1]
        new = slice(used - x.shape[1], used)
        self.k[:, :, new], self.v[:, :, new] = k, v
        return self.out(attend(q, self.k[:, :, :used], self.v[:, :, :used], self.ancestry))

    def cross_attention(self, x):
        (q,) = self.split(self.memory_q(x), 1)
        return self.memory_out(attend(q, self.memory_k, self.memory_v, self.padding))

    def feed_forward(self, x):
        return self.fc2(self.layer.activation(self.fc1(x)))

    def resize(self, kept, slots):
        """Make room for so many slots, keeping those numbered `kept` (R, n)."""
        for name in ("k", "v"):
            old = getattr(self, name)
            new = old.new_empty(*old.shape[:2], slots, old.shape[3])
            new[:, :, : kept.shape[1]] = old.gather(2, kept[:, None, :, None].expand(-1, old.shape[1], -1, old.shape[3]))
            setattr(self, name, new)

    def leave(self, rows, stay):
        for name in ("k", "v", "memory_k", "memory_v"):
            setattr(self, name, leave(getattr(self, name), rows, stay))


class IncrementalDecoder:
    """The decoder over the open sentences of a batch; memory (R, S, D), attention_mask (R, S) or None."""

    SLOTS = 64

    def __init__(self, decoder, memory, attention_mask, longest):
        self.decoder, self.n = decoder, 0
        self.layers = [IncrementalLayer(layer, memory, self.SLOTS) for layer in decoder.layers]
        self.slots = self.SLOTS
        self.heads = decoder.config.decoder_attention_heads
        self.positions = decoder.embed_positions(torch.arange(longest, device=memory.device), longest).to(memory.dtype)
        self.ancestry = memory.new_zeros(len(memory), 1, 0)  # (R, K, slots), 0 at the slots that a beam descends from
        self.padding = memory.new_zeros(len(memory), 1, 1)
        if attention_mask is not None:
            self.padding = additive(attention_mask.bool(), memory)[:, None]

    def step(self, tokens, parents):
        """States (R, K, D) that predict what follows the newest tokens (R, K), which follow the last step's `parents`."""
        decoder, (R, K) = self.decoder, tokens.shape
        x = decoder.embed_tokens(tokens) * math.sqrt(decoder.config.d_model) + self.positions[self.n]
        self.ancestry = take(self.ancestry, parents)
        self.make_room(K)
        own_slot = additive(torch.eye(K, dtype=torch.bool, device=x.device), x)
        self.ancestry = torch.cat([self.ancestry, own_slot.expand(R, K, K)], dim=2)
        ancestry, padding = (mask.repeat_interleave(self.heads, dim=0) for mask in (self.ancestry, self.padding))
        for layer in self.layers:
            x = layer(x, ancestry, padding)
        self.n += 1
        return decoder.layer_norm(x)

    def make_room(self, K):
        """When the slots run out, forget those that no open beam descends from, and double what is left."""
        if self.ancestry.shape[2] + K <= self.slots:
            return
        live = (self.ancestry == 0).any(1)
        kept = live.long().argsort(dim=1, descending=True, stable=True)[:, : int(live.sum(1).max())]
        self.ancestry = self.ancestry.gather(2, kept[:, None].expand(-1, self.ancestry.shape[1], -1))
        self.slots = max(self.slots, 2 * (kept.shape[1] + K))
        for layer in self.layers:
            layer.resize(kept, self.slots)

    def leave(self, rows, stay):
        self.ancestry, self.padding = leave(self.ancestry, rows, stay), leave(self.padding, rows, stay)
        for layer in self.layers:
            layer.leave(rows, stay)


# -- The search --------------------------------------------------------------------------------------------------------


def top(x, k):
    """The k largest of x (..., V) and their indices.

    They are among the k columns with the largest maxima when V is laid out in rows, and maxima of columns are cheap.
    """
    V = x.shape[-1]
    rows = max(n for n in range(1, 33) if V % n == 0)
    x = x.unflatten(-1, (rows, V // rows))
    columns = x.amax(-2).topk(min(k, V // rows)).indices
    value, index = x.gather(-1, columns[..., None, :].expand(*x.shape[:-1], -1)).flatten(-2).topk(min(k, V))
    n = columns.shape[-1]
    return value, index // n * (V // rows) + columns.gather(-1, index % n)


class Beams:
    """Open and ended hypotheses of R sentences.

    Open: tokens (R, K, 1 + n) after <s>, log_prob (R, K), parents (R, K).
    Ended, best first: rank (R, P), -inf where there is none; log_prob, length, finished (R, P), tokens (R, P, 1 + n).
    """

    LOGITS = 2**20  # computed at a time, so that they are still in the CPU's cache when they are sorted

    def __init__(self, config, options, limit, prefix, uniform):
        """Token limit (R,), forced tokens (R, at most limit) with -1 where the choice is free, draws (R, K, limit)."""
        self.options, self.eos, self.start = options, config.eos_token_id, config.decoder_start_token_id
        self.vocab_size = config.vocab_size
        specials = {config.pad_token_id, config.bos_token_id, self.start, *options.suppress_tokens} - {self.eos, None}
        self.suppressed = torch.tensor(sorted(specials), device=limit.device)
        R, P = len(limit), options.beams
        self.limit, self.prefix, self.uniform = limit, prefix, uniform
        self.sentence = torch.arange(R, device=limit.device)
        self.tokens = limit.new_full((R, 1, 1), self.start)
        self.parents = limit.new_zeros(R, 1)
        self.log_prob = torch.zeros(R, 1, device=limit.device)
        self.ended = {
            "rank": self.log_prob.new_full((R, P), -math.inf),
            "log_prob": self.log_prob.new_zeros(R, P),
            "length": limit.new_zeros(R, P),
            "finished": torch.zeros(R, P, dtype=torch.bool, device=limit.device),
            "tokens": limit.new_zeros(R, P, 1),
        }

    def advance(self, states, head):
        """Extend every beam by one token, from its state (R, K, D) and the output projection."""
        R, K, _ = states.shape
        size = max(1, self.LOGITS // (K * self.vocab_size))
        blocks = [slice(i, i + size) for i in range(0, R, size)]
        choose = self.continue_each if self.options.independent else self.best_continuations
        found = [choose(self.log_probabilities(head(states[rows]), rows), rows) for rows in blocks]
        log_prob, parents, tokens = map(torch.cat, zip(*found, strict=True))
        is_eos = tokens == self.eos
        tokens = torch.cat([take(self.tokens, parents), tokens[..., None]], 2)
        self.end(log_prob, tokens, is_eos)
        self.log_prob, best = log_prob.masked_fill(is_eos, -math.inf).topk(min(self.options.beams, log_prob.shape[1]))
        self.parents, self.tokens = take(parents, best), take(tokens, best)

    def log_probabilities(self, logits, rows):
        """log P (r, K, V) of the next tokens of some sentences, -inf where a token must not be chosen."""
        log_p = logits.float().log_softmax(-1)
        n, minus_inf = self.tokens.shape[2] - 1, -math.inf
        forced = self.prefix[rows, n, None, None] if n < self.prefix.shape[1] else None
        if forced is not None:
            index = forced.clamp_min(0).expand(-1, log_p.shape[1], 1)
            kept = log_p.gather(2, index)
        log_p[..., self.suppressed] = minus_inf
        if n < self.options.min_new_tokens:
            log_p[..., self.eos] = minus_inf
        if 0 < self.options.no_repeat_ngram_size <= n:
            log_p.scatter_(2, self.repeats(self.options.no_repeat_ngram_size, rows), minus_inf)
        if forced is not None:
            log_p.masked_fill_(forced >= 0, minus_inf)
            log_p.scatter_(2, index, torch.where(forced >= 0, kept, log_p.gather(2, index)))
        return log_p

    def repeats(self, size, rows):
        """Tokens (r, K, ...) that would complete an n-gram a second time; the start token stands for "none"."""
        tokens = self.tokens[rows, :, 1:]
        grams, last = tokens.unfold(2, size, 1), tokens[..., None, tokens.shape[2] - size + 1 :]
        return torch.where((grams[..., :-1] == last).all(-1), grams[..., -1], self.start)

    def best_continuations(self, log_p, rows):
        """The best 2 K continuations of a sentence: K can go on after every </s> is taken out.

        The K + 1 best of each beam hold them all, since a beam ends in only one way.
        """
        K = self.options.num_beams
        value, token = top(log_p, K + 1)
        log_prob = (value + self.log_prob[rows, :, None]).flatten(1)
        log_prob, best = log_prob.topk(min(2 * K, log_prob.shape[1]))
        return log_prob, best // token.shape[2], take(token.flatten(1), best)

    def continue_each(self, log_p, rows):
        """One continuation of each beam: the most probable token, or one that is drawn."""
        parents = torch.arange(self.options.beams, device=log_p.device).clamp_max_(log_p.shape[1] - 1)
        parents = parents.expand(len(log_p), -1)
        token = self.draw(log_p, rows) if self.options.do_sample else top(log_p, 1)[1][..., 0]
        log_prob = log_p[torch.arange(len(log_p), device=log_p.device)[:, None], parents, token]
        return log_prob + take(self.log_prob[rows], parents), parents, token

    def draw(self, log_p, rows):
        """Invert the distribution function at the numbers in (0, 1) that belong to the sentence: (r, K)."""
        options, K, V = self.options, self.options.beams, log_p.shape[2]
        order = None
        if options.top_k or options.top_p < 1:
            log_p, order = log_p.topk(min(options.top_k or V, V))
        total = (log_p / options.temperature).softmax(-1).cumsum(-1)
        if options.top_p < 1:  # keep tokens until their sum reaches top_p
            kept = (total < options.top_p).sum(-1, keepdim=True).clamp_max_(total.shape[2] - 1)
            total = total.clamp_max(total.gather(2, kept))
        u = self.uniform[rows, :, self.tokens.shape[2] - 1, None]
        total = total.expand(-1, K, -1).contiguous()
        choice = torch.searchsorted(total, u * total[..., -1:], right=True).clamp_max_(total.shape[2] - 1)
        return (choice if order is None else order.expand(-1, K, -1).gather(2, choice))[..., 0]

    def end(self, log_prob, tokens, is_eos):
        """Put those of the candidates, best first, that end here among the ended ones.

        What the limit cuts ranks below all that is finished; stock generate() lets its score compete.
        """
        K, length = self.options.beams, tokens.shape[2] - 1
        place = torch.arange(log_prob.shape[1], device=log_prob.device)
        ends = (is_eos | (length >= self.limit)[:, None]) & (place < K) & (log_prob > -math.inf)
        rank = log_prob / self.options.penalty(length)
        if self.options.length_normalization == "paper":
            rank = torch.where(is_eos, rank, -1e6 - place)
        new = {
            "rank": rank.masked_fill(~ends, -math.inf),
            "log_prob": log_prob,
            "length": torch.full_like(tokens[..., 0], length),
            "finished": is_eos,
            "tokens": tokens,
        }
        self.ended["tokens"] = F.pad(self.ended["tokens"], (0, 1))
        both = {name: torch.cat([old, new[name]], 1) for name, old in self.ended.items()}
        best = both["rank"].topk(K).indices
        self.ended = {name: take(x, best) for name, x in both.items()}

    def done(self):
        """Which sentences are decided (R,).

        Log P of an open hypothesis can only fall, and the penalty that it is divided by is largest at the length limit;
        so log P / penalty(limit) bounds the score of all that may become of it. When no open hypothesis has a bound
        above the `n_best`-th score reached, no longer search could change the result. Stock generate() assumes instead
        that nothing gains by growing, but waits for `num_beams` hypotheses.
        """
        options, n = self.options, self.tokens.shape[2] - 1
        best = self.log_prob.amax(1)
        over = (n >= self.limit) | (best == -math.inf)
        if options.independent:
            return over
        if options.length_normalization == "huggingface":
            return over | (best / options.penalty(n) <= self.ended["rank"][:, -1])
        longest = self.limit if options.length_penalty > 0 else n + 1
        return over | (best / options.penalty(longest) <= self.ended["rank"][:, options.n_best - 1])

    def hypotheses(self, rows):
        """The best ended hypotheses of each of the rows."""
        ended = {name: x[rows].tolist() for name, x in self.ended.items()}
        for fields in zip(*ended.values(), strict=True):
            found = [self.hypothesis(*entry) for entry in zip(*fields, strict=True) if entry[0] > -math.inf]
            found.sort(key=lambda hypothesis: (-hypothesis.finished, -hypothesis.score))
            yield found[: self.options.n_best]

    def hypothesis(self, rank, log_prob, length, finished, tokens):
        return Hypothesis(tokens[1 : 1 + length], log_prob / self.options.penalty(length), log_prob, finished)

    def leave(self, rows, stay):
        for name in ("sentence", "tokens", "parents", "log_prob", "limit", "prefix", "uniform"):
            if getattr(self, name) is not None:
                setattr(self, name, leave(getattr(self, name), rows, stay))
        self.ended = {name: leave(x, rows, stay) for name, x in self.ended.items()}


def uniform_draws(sources, K, length, seed):
    """Numbers in (0, 1) that depend on the seed and the sentence, not on its neighbours or the device: (R, K, length)."""
    generator = torch.Generator()
    draws = []
    for source in sources:
        generator.manual_seed(zlib.crc32(f"{seed}: {source}".encode()))
        draws.append(torch.rand(length, K, generator=generator).t())
    return torch.stack(draws)


# -- What users call ---------------------------------------------------------------------------------------------------


@dataclass
class AttentionMap:
    """Attention weights (layers, heads, queries, keys) of one sentence pair, with the tokens that label them.

    Query t of `decoder` and `cross` has read `target_tokens[: t + 1]` and predicts `predicted_tokens[t]`.
    """

    source_tokens: list[str]
    target_tokens: list[str]
    predicted_tokens: list[str]
    encoder: torch.Tensor
    decoder: torch.Tensor
    cross: torch.Tensor


class TranslationMixin:
    """`translate` text, `search` token ids, look at the attention."""

    def translate(
        self,
        texts,
        tokenizer,
        num_beams=4,
        length_penalty=0.6,
        *,
        n_best=None,
        return_dict=False,
        alignment=False,
        prefix=None,
        batch_tokens=2048,
        max_source_length=None,
        **options,
    ):
        """Translate a string to a string, a list to a list, or an iterator, lazily, to an iterator in the same order.

        Args:
            n_best: return a list of the so many best translations for each text.
            return_dict: return `Hypothesis` objects (text, tokens, score, log_prob, finished) instead of strings.
            alignment: set their `alignment`.
            prefix: a text that every translation begins with, or one for each text.
            batch_tokens: padded source tokens translated at a time; changes speed and memory, never the result.
            max_source_length: tokens, with </s>, at which a source is cut; default: `max_position_embeddings`.
            options: see `SearchOptions`.

        Blank texts are blank in translation. A warning names the texts that were cut, and those whose translation hit
        the length limit.

        Example:
            >>> model.translate("A dog runs.", tokenizer)  # doctest: +SKIP
            'Ein Hund rennt.'
        """
        specials = set(tokenizer.all_special_ids) - {self.config.eos_token_id}
        options["suppress_tokens"] = tuple(specials.union(options.get("suppress_tokens", ())))
        options = SearchOptions(num_beams, length_penalty, n_best=n_best or 1, **options)
        limit = max_source_length or self.config.max_position_embeddings
        job = TranslationJob(self, tokenizer, options, batch_tokens, limit, alignment)
        many = [texts] if isinstance(texts, str) else texts
        stream = job.run(many, repeat(prefix) if prefix is None or isinstance(prefix, str) else prefix)
        if n_best is None:
            stream = (found[0] if return_dict else found[0].text for found in stream)
        elif not return_dict:
            stream = ([hypothesis.text for hypothesis in found] for found in stream)
        if isinstance(texts, str):
            return list(stream)[0]
        return stream if isinstance(texts, Iterator) else list(stream)

    @torch.inference_mode()
    def search(self, input_ids, attention_mask=None, *, prefix=None, alignment=False, **options):
        """The best translations of a batch of sources (B, S): for each the `n_best` ended hypotheses, best first.

        Args:
            prefix: token ids that the hypotheses of all sources begin with, or a list of them for each source.
            alignment: also set `alignment`: the source position that each token attends to most, by the mean over the
                heads of the last layer but one (Garg et al., 2019, arXiv 1909.02074).
            options: see `SearchOptions`.

        The search ends when it is certain that going on could not change its result: see `Beams.done`.
        """
        training = self.training
        self.eval()
        try:
            found = self._search(input_ids, attention_mask, prefix, SearchOptions(**options))
            if alignment:
                self._align(input_ids, attention_mask, found)
            return found
        finally:
            self.train(training)

    def _search(self, input_ids, attention_mask, prefix, options):
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        used = attention_mask.any(0)
        input_ids, attention_mask = input_ids[:, used], attention_mask[:, used]
        lengths = attention_mask.sum(1)
        limit = lengths + 50 if options.max_new_tokens is None else torch.full_like(lengths, options.max_new_tokens)
        sources = [ids[mask.bool()].tolist() for ids, mask in zip(input_ids, attention_mask, strict=True)]
        longest = int(limit.max())
        uniform = uniform_draws(sources, options.beams, longest, options.seed).to(limit.device) if options.do_sample else None
        attention_mask = None if attention_mask.all() else attention_mask

        with FastProducts():
            memory = self.model.encoder(input_ids, attention_mask).last_hidden_state
        decoder = IncrementalDecoder(self.model.decoder, memory, attention_mask, longest)
        beams = Beams(self.config, options, limit, self._forced(prefix, len(limit), limit), uniform)
        head = projection(self.lm_head)
        found = [None] * len(limit)
        while len(beams.limit):
            beams.advance(decoder.step(beams.tokens[..., -1], beams.parents), head)
            done = beams.done()
            if done.any():
                for i, hypotheses in zip(beams.sentence[done].tolist(), beams.hypotheses(done), strict=True):
                    found[i] = hypotheses
                stay = int((~done).sum())
                rows = done[:stay].nonzero()[:, 0], (~done[stay:]).nonzero()[:, 0] + stay
                beams.leave(rows, stay)
                decoder.leave(rows, stay)
        return found

    def _forced(self, prefix, R, limit):
        """Prefixes as a tensor (R, longest), -1 where a token is free."""
        if prefix is None:
            prefix = []
        if not prefix or isinstance(prefix[0], int):
            prefix = [list(prefix)] * R
        for tokens in prefix:
            if self.config.eos_token_id in tokens:
                raise ValueError(f"prefix={tokens} holds the end of sentence {self.config.eos_token_id}")
        rows = [torch.tensor(tokens, dtype=torch.long) for tokens in prefix]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1).to(limit.device)

    def _align(self, input_ids, attention_mask, found):
        for ids, mask, hypotheses in zip(input_ids, attention_mask if attention_mask is not None else repeat(None), found):
            source = (ids if mask is None else ids[mask.bool()])[None]
            for hypothesis in hypotheses:
                cross = self._attend(source, hypothesis.tokens).cross_attentions
                weights = cross[-2:][0][0].mean(0)[:, : max(1, source.shape[1] - 1)]
                hypothesis.alignment = weights.argmax(-1).tolist()

    def _attend(self, source, target):
        """All attention weights where the target (a list of ids) is given; query t predicts target token t."""
        start = torch.tensor([[self.config.decoder_start_token_id, *target][: max(1, len(target))]], device=self.device)
        return self(source, decoder_input_ids=start, output_attentions=True, use_cache=False, return_dict=True)

    @torch.inference_mode()
    def attention_map(self, source, target=None, *, tokenizer):
        """The attention weights between the tokens of a text and of its translation, made here if not given.

        Example:
            >>> model.attention_map("A dog runs.", tokenizer=tokenizer).cross.shape  # doctest: +SKIP
            torch.Size([6, 8, 5, 5])
        """
        training = self.training
        self.eval()
        try:
            source = torch.tensor([tokenizer(source).input_ids], device=self.device)
            target = self.search(source)[0][0].tokens if target is None else tokenizer(target).input_ids
            output = self._attend(source, target)
        finally:
            self.train(training)
        label = [tokenizer.decode([i]).replace(" ", "▁") for i in (*source[0].tolist(), self.config.decoder_start_token_id, *target)]
        S = source.shape[1]
        return AttentionMap(
            label[:S],
            label[S:-1],
            label[S + 1 :],
            *(torch.cat(w).float().cpu() for w in (output.encoder_attentions, output.decoder_attentions, output.cross_attentions)),
        )


class TranslationJob:
    """Texts in, hypotheses out: a window of texts is sorted by length and translated in batches of like length."""

    WINDOW = 1024  # texts held at a time

    def __init__(self, model, tokenizer, options, batch_tokens, limit, alignment):
        self.model, self.tokenizer, self.options, self.alignment = model, tokenizer, options, alignment
        self.batch_tokens, self.limit = batch_tokens, limit
        self.cut, self.unfinished = [], []

    def run(self, texts, prefixes):
        """Lists of hypotheses in the order of the texts."""
        pairs = zip(texts, prefixes)
        first = 0
        while window := list(islice(pairs, self.WINDOW)):
            yield from self.translate(window, first)
            first += len(window)
        if self.cut:
            warnings.warn(f"sources cut at {self.limit} tokens: {some(self.cut)}", stacklevel=3)
        if self.unfinished:
            warnings.warn(f"translations that hit the length limit: {some(self.unfinished)}", stacklevel=3)

    def translate(self, window, first):
        sources = [self.encode(text, first + i) for i, (text, _) in enumerate(window)]
        found = [[Hypothesis([], text="")] if source is None else None for source in sources]
        for batch in self.batches(sources):
            prefix = [self.prefix(window[i][1]) for i in batch]
            for i, hypotheses in zip(batch, self.search([sources[i] for i in batch], prefix), strict=True):
                found[i] = hypotheses
                if not hypotheses[0].finished:
                    self.unfinished.append(first + i)
        return found

    def encode(self, text, index):
        """Token ids that end in </s>, or None for a blank text."""
        ids = self.tokenizer(text, verbose=False).input_ids if text.strip() else []
        if len(ids) < 2:
            return None
        if len(ids) > self.limit:
            self.cut.append(index)
            ids = [*ids[: self.limit - 1], ids[-1]]
        return ids

    def prefix(self, text):
        return self.tokenizer(text, add_special_tokens=False).input_ids if text else []

    def batches(self, sources):
        """Indices of sources of like length, longest first; what is blank is in no batch."""
        order = sorted((i for i, ids in enumerate(sources) if ids is not None), key=lambda i: -len(sources[i]))
        while order:
            size = max(1, self.batch_tokens // len(sources[order[0]]))
            yield order[:size]
            order = order[size:]

    def search(self, sources, prefix):
        rows = [torch.tensor(ids) for ids in sources]
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self.model.config.pad_token_id)
        mask = torch.arange(ids.shape[1]) < torch.tensor([[len(row)] for row in rows])
        device = self.model.device
        found = self.model.search(
            ids.to(device), mask.to(device), prefix=prefix, alignment=self.alignment, **vars(self.options)
        )
        for hypotheses in found:
            for hypothesis in hypotheses:
                hypothesis.text = self.tokenizer.decode(hypothesis.tokens, skip_special_tokens=True)
        return found


def some(indices, most=20):
    """The first of a long list, for a message."""
    return ", ".join(map(str, indices[:most])) + (f" and {len(indices) - most} more" if len(indices) > most else "")
