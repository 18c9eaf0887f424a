# Copyright 2026 The vanilla-transformer authors. Licensed under the Apache License, Version 2.0.
"""The paper's beam search (§6.1, after Wu et al., 2016, arXiv 1609.08144, §7) as an incremental decoder.

Shapes: R sentences still open, K beams of each (one at the first step), n tokens so far, S source positions,
D = d_model, h heads, d = D / h, V = vocab_size.

Nothing is copied for a beam. The beams of a sentence are K queries against one copy of its encoder's keys and values.
The target's keys and values are appended, K slots a step, and stay where they are; `ancestry` says which slots a beam
descends from, so choosing other beams changes this mask only. A finished sentence leaves the batch.
"""

import math
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice, repeat

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from .kernels_vanilla import Linear, PackedProduct, onednn_multiplies, side_by_side


@dataclass
class Hypothesis:
    """One translation: token ids (with </s>, if it came to one), log P(tokens | source), and log P over the penalty.

    `finished` is False when the length limit cut it. `alignment` names the source position of each token.
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
        length_penalty: alpha of the paper's score log P / ((5 + n) / 6)^alpha over all n tokens with </s>; or p of
            log P / n^p with length_normalization="huggingface", which also stops when stock `generate()` does.
        n_best: hypotheses to return, at most `num_beams`; with do_sample the number of samples.
        max_new_tokens: length limit with </s>; default: source tokens + 50, as the paper.
        min_new_tokens: tokens before </s>, at least.
        suppress_tokens: ids never chosen, besides padding and start.
        no_repeat_ngram_size: no n-gram of this size twice.
        do_sample, temperature, top_k, top_p, seed: draw tokens instead of searching. What is drawn depends on the seed
            and the source sentence only.
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
        least = {"num_beams": 1, "n_best": 1, "min_new_tokens": 0, "no_repeat_ngram_size": 0, "top_k": 0}
        if self.max_new_tokens is not None:
            least["max_new_tokens"] = 1
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ValueError(f"{name}={getattr(self, name)!r} must be at least {value}")
        if self.length_normalization not in ("paper", "huggingface"):
            raise ValueError(f'length_normalization={self.length_normalization!r} must be "paper" or "huggingface"')
        if self.temperature <= 0 or not 0 < self.top_p <= 1:
            raise ValueError(f"temperature={self.temperature!r} must be positive, top_p={self.top_p!r} in (0, 1]")
        if not self.do_sample and self.n_best > self.num_beams:
            raise ValueError(f"n_best={self.n_best} needs as many beams, not num_beams={self.num_beams}")

    @property
    def beams(self):
        return self.n_best if self.do_sample else self.num_beams

    @property
    def independent(self):
        """Whether each beam goes its own way: samples, and the single beam of greedy search."""
        return self.do_sample or self.num_beams == 1

    def penalty(self, n):
        return (n if self.length_normalization == "huggingface" else (5 + n) / 6) ** self.length_penalty


# -- The decoder, one token a step ------------------------------------------------------------------------------------


def plain(module, *types):
    """Whether its weights, and ordinary ones, are all there is to a module: no adapter, quantisation or hook."""
    changed = "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks
    return type(module) in types and not changed and all(type(p) is nn.Parameter for p in module.parameters(False))


def projection(*linears, heads=1):
    """One product for projections of the same input, (..., D) -> (..., sum of widths), side by side in each head."""
    biases = [m.bias for m in linears if m.bias is not None]
    if not all(plain(m, nn.Linear, Linear) for m in linears) or len(biases) not in (0, len(linears)):
        return lambda x: side_by_side([m(x) for m in linears], heads)
    return PackedProduct([m.weight for m in linears], side_by_side(biases, heads) if biases else None, heads)


def normalization(norm):
    """LayerNorm without nn.Module's work around it: a step has three in each layer."""
    if not plain(norm, nn.LayerNorm):
        return norm
    names = "normalized_shape", "weight", "bias", "eps"
    return partial(torch.layer_norm, **{name: getattr(norm, name) for name in names})


def attend(q, keys_values, mask):
    """softmax(q k^T / sqrt(d) + mask) v: (R h, K, d); q (R h, K, d), keys_values (2, R h, S, d), mask (R h, K, S)."""
    k, v = keys_values
    return torch.bmm(torch.baddbmm(mask, q, k.transpose(1, 2), alpha=q.shape[-1] ** -0.5).softmax(-1), v)


def take(x, index):
    """Entries x[r, index[r, j]] of x (R, K) or (R, K, n)."""
    return x.gather(1, index if x.dim() == 2 else index[..., None].expand(-1, -1, x.shape[2]))


def leave(x, rows, stay):
    """Drop sentences from x (R, ...): the last ones move into the places `rows` of those that leave, `stay` remain."""
    x[rows[0]] = x[rows[1]]
    return x[:stay]


class AbsorbedAttention:
    """Attention of x (K, D) to one sentence, whose keys have taken in W^Q, and whose values W^O.

    As (x W_i^Q) K_i^T = x (W_i^Q K_i^T) and (P_i V_i) W_i^O = P_i (V_i W_i^O), two matrices of h S rows take the place
    of two of D, in fewer calls. The rows of P_i sum to 1, so the values take in the output's bias too.
    """

    ROWS = 256  # beyond about that two more products are faster, with D = 512 and a few beams

    def __init__(self, attn, k, v):
        """k, v (h, S, d)"""
        self.shape, d = k.shape[:2], k.shape[2]
        q, out, scale = attn.q_proj, attn.out_proj, d**-0.5
        self.k = torch.bmm(k, q.weight.unflatten(0, (-1, d))).flatten(0, 1).mul_(scale)  # (h S, D)
        self.k_bias = torch.bmm(k, q.bias.view(-1, d, 1)).flatten().mul_(scale)
        self.v = torch.baddbmm(out.bias / len(v), v, out.weight.t().unflatten(0, (-1, d))).flatten(0, 1)

    def __call__(self, x):
        weights = F.linear(x, self.k, self.k_bias).unflatten(1, self.shape).softmax(-1).flatten(1)
        return torch.mm(weights, self.v)

    @classmethod
    def fits(cls, attn, memory):
        """Whether memory (R, S, D) is one short sentence (`search` leaves no padding in it) with plain projections.

        In float32 on CPUs only, where it was measured.
        """
        R, S, _ = memory.shape
        short = R == 1 and 0 < attn.heads * S <= cls.ROWS and onednn_multiplies(memory)
        return short and all(plain(m, nn.Linear, Linear) for m in (attn.q_proj, attn.out_proj))


class IncrementalLayer:
    """A decoder layer with the keys and values, (2, R h, S, d), of the encoder's output and of the target's slots."""

    def __init__(self, layer, memory, slots):
        attn, memory_attn = layer.self_attn, layer.encoder_attn
        self.heads, self.used = attn.heads, 0
        self.pre = layer.config.norm_position == "pre"
        norms = layer.self_attn_layer_norm, layer.encoder_attn_layer_norm, layer.final_layer_norm
        self.norms = [normalization(norm) for norm in norms]
        self.qkv = projection(attn.q_proj, attn.k_proj, attn.v_proj, heads=attn.heads)
        self.out = projection(attn.out_proj)
        self.memory_q, self.memory_out = projection(memory_attn.q_proj), projection(memory_attn.out_proj)
        self.fc1, self.fc2, self.activation = projection(layer.fc1), projection(layer.fc2), layer.activation
        self.memory = torch.stack(memory_attn.keys_values(memory)).flatten(1, 2)
        self.target = memory.new_empty(*self.memory.shape[:2], slots, self.memory.shape[3])
        fits = AbsorbedAttention.fits(memory_attn, memory)
        self.absorbed = AbsorbedAttention(memory_attn, *self.memory) if fits else None

    def __call__(self, x, ancestry, padding):
        """x (K R, D) -> (K R, D); the masks as in `attend`.

        First come the first beams of all sentences, then the second ones, ...: heads are split off without a copy.
        """
        self.ancestry, self.padding = ancestry, padding
        x = self.residual(x, self.norms[0], self.self_attention)
        x = self.residual(x, self.norms[1], self.absorbed or self.cross_attention)
        return self.residual(x, self.norms[2], self.feed_forward)

    def residual(self, x, norm, sublayer):
        """VanillaLayer.residual less its dropout: reading that setting a dozen times a token takes time."""
        return x + sublayer(norm(x)) if self.pre else norm(x + sublayer(x))

    def self_attention(self, x):
        qkv = self.split(self.qkv(x))
        before, self.used = self.used, self.used + qkv.shape[2]
        self.target[:, :, before : self.used] = qkv[1:]
        return self.out(self.merge(attend(qkv[0], self.target[:, :, : self.used], self.ancestry)))

    def cross_attention(self, x):
        (q,) = self.split(self.memory_q(x))
        return self.memory_out(self.merge(attend(q, self.memory, self.padding)))

    def feed_forward(self, x):
        return self.fc2(self.activation(self.fc1(x)))

    def split(self, x):
        """(K R, h n d) -> (n, R h, K, d)"""
        _, rows, _, d = self.memory.shape
        return x.reshape(-1, rows, x.shape[1] // (self.heads * d), d).permute(2, 1, 0, 3)

    def merge(self, y):
        """(R h, K, d) -> (K R, D)"""
        return y.transpose(0, 1).reshape(-1, self.heads * y.shape[2])

    def resize(self, kept, slots):
        """Make room for so many slots, of which the first are those numbered `kept` (R, n) until now."""
        index = kept.repeat_interleave(self.heads, 0)[None, :, :, None].expand(2, -1, -1, self.target.shape[3])
        old, self.used = self.target, kept.shape[1]
        self.target = old.new_empty(*old.shape[:2], slots, old.shape[3])
        self.target[:, :, : self.used] = old.gather(2, index)

    def leave(self, rows, stay):
        for name in ("target", "memory"):
            x = getattr(self, name).unflatten(1, (-1, self.heads)).transpose(0, 1)
            setattr(self, name, leave(x, rows, stay).transpose(0, 1).flatten(1, 2))


class IncrementalDecoder:
    """The decoder over the open sentences of a batch: memory (R, S, D), attention_mask (R, S)."""

    def __init__(self, decoder, memory, attention_mask, options, longest):
        self.decoder, self.n, self.beams = decoder, 0, options.beams
        self.scale, self.heads = math.sqrt(decoder.config.d_model), decoder.config.decoder_attention_heads
        self.slots = longest if options.beams == 1 else max(64, 32 * options.beams)
        lowest = torch.finfo(memory.dtype).min
        self.layers = [IncrementalLayer(layer, memory, self.slots) for layer in decoder.layers]
        self.positions = decoder.embed_positions(torch.arange(longest, device=memory.device), longest).to(memory.dtype)
        self.ancestry = memory.new_zeros(len(memory), 1, 0)  # (R, K, slots), 0 at the slots that a beam descends from
        self.own_slots = memory.new_full((options.beams, options.beams), lowest).fill_diagonal_(0)
        padding = memory.new_zeros(attention_mask.shape).masked_fill_(attention_mask == 0, lowest)
        self.padding = self.for_heads(padding[:, None]).contiguous()

    def for_heads(self, mask):
        return mask[:, None].expand(-1, self.heads, -1, -1)

    def step(self, tokens, parents):
        """States (R, K, D) that predict what follows the newest tokens (R, K), whose predecessors are `parents`."""
        decoder = self.decoder
        x = decoder.embed_tokens(tokens.t().flatten()) * self.scale + self.positions[self.n]
        ancestry, padding = self.look(parents), self.padding.flatten(0, 1)
        for layer in self.layers:
            x = layer(x, ancestry, padding)
        self.n += 1
        return decoder.layer_norm(x).view(*tokens.t().shape, -1).transpose(0, 1).contiguous()

    def look(self, parents):
        """The mask of the slots, (R h, K, slots); a lone beam descends from all of them: (1, 1, 1)."""
        R, K = parents.shape
        if self.beams == 1:
            return self.own_slots[None]
        self.ancestry = take(self.ancestry, parents)
        if self.ancestry.shape[2] + K > self.slots:
            self.make_room(K)
        self.ancestry = torch.cat([self.ancestry, self.own_slots[:K, :K].expand(R, K, K)], dim=2)
        return self.for_heads(self.ancestry).flatten(0, 1)

    def make_room(self, K):
        """Forget the slots that no open beam descends from, and have twice as many as are left."""
        live = (self.ancestry == 0).any(1)
        kept = live.long().argsort(dim=1, descending=True, stable=True)[:, : int(live.sum(1).max())]
        self.ancestry = self.ancestry.gather(2, kept[:, None].expand(-1, K, -1))
        self.slots = max(self.slots, 2 * (kept.shape[1] + K))
        for layer in self.layers:
            layer.resize(kept, self.slots)

    def leave(self, rows, stay):
        self.ancestry, self.padding = leave(self.ancestry, rows, stay), leave(self.padding, rows, stay)
        for layer in self.layers:
            layer.leave(rows, stay)


# -- The search -------------------------------------------------------------------------------------------------------


def top(x, k):
    """The k largest of x (..., V) and their indices.

    With V laid out in rows, they are in the k columns with the largest maxima, and maxima of columns are cheap.
    """
    if x.numel() < 2**17:
        return x.topk(min(k, x.shape[-1]))
    V = x.shape[-1]
    rows = max(n for n in range(1, 11) if V % n == 0)
    x = x.unflatten(-1, (rows, -1))
    columns = x.amax(-2).topk(min(k, V // rows)).indices
    value, place = x.gather(-1, columns[..., None, :].expand(*x.shape[:-1], -1)).flatten(-2).topk(min(k, V))
    n = columns.shape[-1]
    return value, place // n * (V // rows) + columns.gather(-1, place % n)


class Beams:
    """The hypotheses of R sentences.

    Open: tokens (R, K, 1 + n) from <s> on, log_prob (R, K), parents (R, K); best first, but for samples.
    Ended, best first: rank (R, P), -inf where there is none; log_prob (R, P), tokens (R, P, 1 + n), -1 after the end.
    """

    LOGITS = 2**22  # computed at a time, so that they are still in the CPU's cache when they are compared

    def __init__(self, config, options, limit, prefix, uniform):
        """Token limit (R,), forced tokens (R, at most limit) with -1 where the choice is free, draws (R, K, limit)."""
        self.options, self.eos, self.start = options, config.eos_token_id, config.decoder_start_token_id
        specials = {config.pad_token_id, config.bos_token_id, self.start, *options.suppress_tokens} - {self.eos, None}
        self.suppressed = torch.tensor(sorted(specials), device=limit.device)
        self.size = max(1, self.LOGITS // (config.vocab_size * options.beams))
        self.limit, self.prefix, self.uniform = limit, prefix, uniform
        self.limit_penalty, self.shortest = options.penalty(limit.float()), int(limit.min())
        self.sentence = torch.arange(len(limit), device=limit.device)
        self.tokens = limit.new_full((len(limit), 1, 1), self.start)
        self.parents = limit.new_zeros(len(limit), 1)
        self.log_prob = torch.zeros(len(limit), 1, device=limit.device)
        self.ended_rank = self.log_prob.new_full((len(limit), options.beams), -math.inf)
        self.ended_log_prob = self.ended_rank.clone()
        self.ended_tokens = limit.new_full((len(limit), options.beams, 1), self.start)

    def advance(self, states, head):
        """Extend every beam by one token, from its state (R, K, D) and the output projection."""
        choose = self.continue_each if self.options.independent else self.best_continuations
        blocks = [slice(i, i + self.size) for i in range(0, len(states), self.size)]
        found = [choose(self.log_probabilities(head(states[rows]), rows), rows) for rows in blocks]
        log_prob, parents, tokens = map(torch.cat, zip(*found, strict=True))
        is_eos = tokens == self.eos
        if self.tokens.shape[2] >= self.shortest or is_eos.any():
            log_prob = self.end(log_prob, parents, tokens, is_eos)
            if not self.options.independent:
                log_prob, best = log_prob.sort(stable=True, descending=True)
                parents, tokens = take(parents, best), take(tokens, best)
        self.log_prob, self.parents, tokens = (x[:, : self.options.beams] for x in (log_prob, parents, tokens))
        self.tokens = torch.cat([take(self.tokens, self.parents), tokens[..., None]], 2)

    def log_probabilities(self, logits, rows):
        """log P (r, K, V) of the next tokens of some sentences, -inf where a token must not be chosen."""
        logits, n = logits.float(), self.tokens.shape[2] - 1
        log_p = torch.log_softmax(logits, -1, out=logits)
        forced = self.prefix[rows, n, None, None].expand(-1, log_p.shape[1], 1) if n < self.prefix.shape[1] else None
        if forced is not None:
            kept = log_p.gather(2, forced.clamp_min(0))
        log_p.index_fill_(2, self.suppressed, -math.inf)
        if n < self.options.min_new_tokens:
            log_p[..., self.eos] = -math.inf
        if 0 < self.options.no_repeat_ngram_size <= n:
            log_p.scatter_(2, self.repeats(self.options.no_repeat_ngram_size, rows), -math.inf)
        if forced is not None:
            log_p = log_p.masked_fill_(forced >= 0, -math.inf).scatter_reduce_(
                2, forced.clamp_min(0), kept.masked_fill(forced < 0, -math.inf), "amax"
            )
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
        if self.options.do_sample:
            token = self.draw(log_p, rows)
            value = take(log_p, parents).gather(2, token[..., None])
        else:
            value, token = top(log_p, 1)
            token = token[..., 0]
        return value[..., 0] + take(self.log_prob[rows], parents), parents, token

    def draw(self, log_p, rows):
        """Invert the distribution function at the numbers in (0, 1) that belong to the sentence: (r, K)."""
        options, K, V = self.options, self.options.beams, log_p.shape[2]
        order = None
        if options.top_k or options.top_p < 1:
            log_p, order = log_p.topk(min(options.top_k or V, V))
        total = (log_p / options.temperature).softmax(-1).cumsum(-1)
        if options.top_p < 1:  # the fewest tokens whose sum reaches top_p
            last = (total < options.top_p).sum(-1, keepdim=True).clamp_max_(total.shape[2] - 1)
            total = total.clamp_max(total.gather(2, last))
        total = total.expand(-1, K, -1).contiguous()
        u = self.uniform[rows, :, self.tokens.shape[2] - 1, None] * total[..., -1:]
        choice = torch.searchsorted(total, u, right=True).clamp_max_(total.shape[2] - 1)
        return (choice if order is None else order.expand(-1, K, -1).gather(2, choice))[..., 0]

    def end(self, log_prob, parents, tokens, is_eos):
        """Put those of the candidates that end here among the ended ones; log_prob is returned with -inf for these.

        What the limit cuts ranks below all that is finished; stock generate() lets its score compete.
        """
        P, n = self.options.beams, self.tokens.shape[2]
        place = torch.arange(log_prob.shape[1], device=log_prob.device)
        over = is_eos | (n >= self.limit)[:, None]
        ends = over & (place < P) & (log_prob > -math.inf)
        tokens = torch.cat([take(self.tokens, parents), tokens[..., None]], 2)
        rank = log_prob / self.options.penalty(n)
        if self.options.length_normalization == "paper":
            rank = torch.where(is_eos, rank, -1e6 - place)
        rank = torch.cat([self.ended_rank, rank.masked_fill(~ends, -math.inf)], 1)
        self.ended_rank, best = rank.topk(P)
        self.ended_log_prob = take(torch.cat([self.ended_log_prob, log_prob], 1), best)
        before = F.pad(self.ended_tokens, (0, tokens.shape[2] - self.ended_tokens.shape[2]), value=-1)
        self.ended_tokens = take(torch.cat([before, tokens], 1), best)
        return log_prob.masked_fill(over, -math.inf)

    def done(self):
        """Which sentences are decided (R,).

        Log P of an open hypothesis can only fall, so log P over the largest penalty that is still to come bounds the
        score of all that may become of it. When no open hypothesis has a bound above the `n_best`-th score reached,
        no longer search could change the result. Stock generate() assumes instead that nothing gains by growing, but
        waits for `num_beams` hypotheses.
        """
        if self.options.independent:
            return self.log_prob.amax(1) == -math.inf
        n, best = self.tokens.shape[2] - 1, self.log_prob[:, 0]
        if self.options.length_normalization == "huggingface":
            return best / self.options.penalty(n) <= self.ended_rank[:, -1]
        largest_penalty = self.limit_penalty if self.options.length_penalty > 0 else self.options.penalty(n + 1)
        return best / largest_penalty <= self.ended_rank[:, self.options.n_best - 1]

    def results(self, rows):
        """The best ended hypotheses of each of the rows."""
        ended = (self.ended_rank[rows], self.ended_log_prob[rows], self.ended_tokens[rows])
        for entries in zip(*(x.tolist() for x in ended), strict=True):
            found = [
                self.hypothesis(log_prob, [token for token in tokens[1:] if token >= 0])
                for rank, log_prob, tokens in zip(*entries, strict=True)
                if rank > -math.inf
            ]
            yield sorted(found, key=lambda x: (x.finished, x.score), reverse=True)[: self.options.n_best]

    def hypothesis(self, log_prob, tokens):
        return Hypothesis(tokens, log_prob / self.options.penalty(len(tokens)), log_prob, tokens[-1] == self.eos)

    def leave(self, rows, stay):
        for name, x in vars(self).items():
            if isinstance(x, torch.Tensor) and x is not self.suppressed:
                setattr(self, name, leave(x, rows, stay))


def beam_search(model, input_ids, attention_mask, prefix, options):
    """Search to the end of every sentence of a batch; lists of hypotheses in the order of the batch."""
    lengths = attention_mask.sum(1)
    limit = lengths + 50 if options.max_new_tokens is None else torch.full_like(lengths, options.max_new_tokens)
    longest, uniform = int(limit.max()), None
    if options.do_sample:
        sources = [ids[mask].tolist() for ids, mask in zip(input_ids, attention_mask.bool(), strict=True)]
        uniform = uniform_draws(sources, options.beams, longest, options.seed).to(limit.device)
    memory = model.model.encoder(input_ids, attention_mask).last_hidden_state
    decoder = IncrementalDecoder(model.model.decoder, memory, attention_mask, options, longest)
    beams = Beams(model.config, options, limit, prefix, uniform)
    head = projection(model.lm_head)
    found = [None] * len(limit)
    while len(beams.sentence):
        beams.advance(decoder.step(beams.tokens[..., -1], beams.parents), head)
        done = beams.done()
        if done.any():
            for i, hypotheses in zip(beams.sentence[done].tolist(), beams.results(done), strict=True):
                found[i] = hypotheses
            stay = int((~done).sum())
            rows = done[:stay].nonzero()[:, 0], (~done[stay:]).nonzero()[:, 0] + stay
            beams.leave(rows, stay)
            decoder.leave(rows, stay)
    return found


def uniform_draws(sources, K, length, seed):
    """Numbers in (0, 1), (R, K, length), that depend on seed and sentence, not on its neighbours or the device."""
    generator, draws = torch.Generator(), []
    for source in sources:
        generator.manual_seed(zlib.crc32(f"{seed}: {source}".encode()))
        draws.append(torch.rand(length, K, generator=generator).t())
    return torch.stack(draws)


def forced_tokens(prefix, R, eos):
    """One list of token ids for all, or one for each of R sentences, as (R, longest) with -1 after each."""
    if not prefix or isinstance(prefix[0], int):
        prefix = [prefix or []] * R
    for tokens in prefix:
        if eos in tokens:
            raise ValueError(f"prefix={tokens} holds the end of sentence, {eos}")
    return pad_sequence([torch.tensor(tokens, dtype=torch.long) for tokens in prefix], True, -1)


# -- What users call --------------------------------------------------------------------------------------------------


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


@contextmanager
def inference(model):
    """No gradients and no dropout; the model is left in the mode that it was in."""
    training = model.training
    if training:  # to tell every module costs a tenth of the time of a short sentence
        model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        if training:
            model.train()
            PackedProduct.kept.clear()  # the weights are about to change


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
        prefixes = repeat(prefix) if prefix is None or isinstance(prefix, str) else prefix
        found = job.run([texts] if isinstance(texts, str) else texts, prefixes)
        if not return_dict:
            found = ([hypothesis.text for hypothesis in hypotheses] for hypotheses in found)
        if n_best is None:
            found = (hypotheses[0] for hypotheses in found)
        if isinstance(texts, Iterator):
            return found
        return list(found)[0] if isinstance(texts, str) else list(found)

    def search(self, input_ids, attention_mask=None, *, prefix=None, alignment=False, **options):
        """The best translations of a batch of sources (B, S): for each the `n_best` hypotheses, best first.

        Args:
            prefix: token ids that the hypotheses of all sources begin with, or a list of them for each source.
            alignment: also set `alignment`: the source position that each token attends to most, by the mean over the
                heads of the last layer but one (Garg et al., 2019, arXiv 1909.02074).
            options: see `SearchOptions`.

        The search ends when it is certain that going on could not change its result: see `Beams.done`.
        """
        options = SearchOptions(**options)
        prefix = forced_tokens(prefix, len(input_ids), self.config.eos_token_id).to(input_ids.device)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.long()
        used = mask.any(0)
        with inference(self):
            found = beam_search(self, input_ids[:, used], mask[:, used], prefix, options)
            for ids, hypotheses in zip(input_ids if alignment else (), found, strict=False):
                source = ids[ids != self.config.pad_token_id]
                for hypothesis in hypotheses:
                    cross = self._attend(source[None], hypothesis.tokens).cross_attentions
                    weights = cross[-2:][0][0].mean(0)[:, : max(1, len(source) - 1)]  # none to </s>
                    hypothesis.alignment = weights.argmax(-1).tolist()
        return found

    def attention_map(self, source, target=None, *, tokenizer):
        """The attention weights between the tokens of a text and of its translation, made here if not given.

        Example:
            >>> model.attention_map("A dog runs.", tokenizer=tokenizer).cross.shape  # doctest: +SKIP
            torch.Size([6, 8, 5, 5])
        """
        source = tokenizer(source, return_tensors="pt").input_ids.to(self.device)
        target = self.search(source)[0][0].tokens if target is None else tokenizer(target).input_ids
        with inference(self):
            output = self._attend(source, target)
        start = self.config.decoder_start_token_id
        source, read, said = (
            [tokenizer.decode([i]).replace(" ", "▁") for i in ids]
            for ids in (source[0].tolist(), [start, *target[:-1]], target)
        )
        weights = output.encoder_attentions, output.decoder_attentions, output.cross_attentions
        return AttentionMap(source, read, said, *(torch.cat(layers).float().cpu() for layers in weights))

    def _attend(self, source, target):
        """The model's output with all attention weights; query t predicts token t of the target, a list of ids."""
        read = torch.tensor([[self.config.decoder_start_token_id, *target[:-1]]], device=source.device)
        return self(source, decoder_input_ids=read, output_attentions=True, use_cache=False, return_dict=True)


class TranslationJob:
    """Texts in, hypotheses out: a window of texts is sorted by length and translated in batches of like length."""

    WINDOW = 1024  # texts held at a time

    def __init__(self, model, tokenizer, options, batch_tokens, limit, alignment):
        self.model, self.tokenizer, self.options, self.alignment = model, tokenizer, options, alignment
        self.batch_tokens, self.limit = batch_tokens, limit
        self.cut, self.unfinished = [], []

    def run(self, texts, prefixes):
        """Lists of hypotheses in the order of the texts."""
        pairs, first = zip(texts, prefixes, strict=False), 0
        while window := list(islice(pairs, self.WINDOW)):
            yield from self.translate(window, first)
            first += len(window)
        for what, where in (
            (f"sources cut at {self.limit} tokens", self.cut),
            ("translations cut at the length limit", self.unfinished),
        ):
            if where:
                more = f" and {len(where) - 20} more" if len(where) > 20 else ""
                warnings.warn(f"{what}: {', '.join(map(str, where[:20]))}{more}", stacklevel=3)

    def translate(self, window, first):
        sources = [self.encode(text, first + i) for i, (text, _) in enumerate(window)]
        found = [[Hypothesis([], text="")]] * len(window)
        for batch in self.batches(sources):
            prefix = [self.tokenizer(window[i][1] or "", add_special_tokens=False).input_ids for i in batch]
            for i, hypotheses in zip(batch, self.search([sources[i] for i in batch], prefix), strict=True):
                found[i] = hypotheses
        self.unfinished += [first + i for i, hypotheses in enumerate(found) if not hypotheses[0].finished]
        return found

    def encode(self, text, index):
        """Token ids that end in </s>; none for a blank text."""
        ids = self.tokenizer(text, verbose=False).input_ids
        if len(ids) > self.limit:
            self.cut.append(index)
            ids = [*ids[: self.limit - 1], ids[-1]]
        return ids if text.strip() else []

    def batches(self, sources):
        """Indices of sources of like length, longest first, blank ones left out."""
        order = sorted((i for i, ids in enumerate(sources) if len(ids) > 1), key=lambda i: -len(sources[i]))
        while order:
            size = max(1, self.batch_tokens // len(sources[order[0]]))
            yield order[:size]
            order = order[size:]

    def search(self, sources, prefix):
        ids = pad_sequence([torch.tensor(ids) for ids in sources], True, self.model.config.pad_token_id)
        mask = torch.arange(ids.shape[1]) < torch.tensor([[len(ids)] for ids in sources])
        ids, mask = ids.to(self.model.device), mask.to(self.model.device)
        found = self.model.search(ids, mask, prefix=prefix, alignment=self.alignment, **vars(self.options))
        for hypothesis in (hypothesis for hypotheses in found for hypothesis in hypotheses):
            hypothesis.text = self.tokenizer.decode(hypothesis.tokens, skip_special_tokens=True)
        return found
