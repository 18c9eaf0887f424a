# Copyright 2026 The vanilla-transformer authors. Licensed under the Apache License, Version 2.0.
"""The Transformer of "Attention Is All You Need" (Vaswani et al., 2017, arXiv 1706.03762), in the paper's order.

Shapes: B sentences, S source positions, T target positions, D = d_model, h heads, d = D / h, V = vocab_size.
A mask is added to the attention scores: 0 where a query may look, the most negative finite number where it may not,
so a row with nothing to look at stays finite.

Every deviation from the paper has a field in `VanillaConfig`; with the defaults two remain: projections carry biases
(as in fairseq; tensor2tensor has none in attention), and dropout is drawn at a resolution of 1/65536 on CPUs.
"""

import dataclasses
import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache, EncoderDecoderCache, GenerationMixin, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
)

from .configuration_vanilla import VanillaConfig
from .generation_vanilla import TranslationMixin
from .kernels_vanilla import Linear, SmoothedCrossEntropy, dropout


if TYPE_CHECKING:  # for transformers, which copies the files named in relative imports into every folder that it saves
    from .pipeline_vanilla import VanillaTranslationPipeline  # noqa: F401


# transformers 5.24 renamed the field `past_key_values` of its outputs, and the argument that generate() passes.
CACHE = "cache" if "cache" in {field.name for field in dataclasses.fields(Seq2SeqLMOutput)} else "past_key_values"


# -- 3.2.1 Scaled Dot-Product Attention -------------------------------------------------------------------------------


def attention(q, k, v, mask=None, dropout=0.0):
    """softmax(q k^T / sqrt(d) + mask) v and the weights; q (B, h, T, d), k and v (B, h, S, d), mask (B or 1, 1, T, S).

    >>> q, k, v = torch.tensor([[2.0, 0, 0, 0]]), torch.tensor([[3.0, 0, 0, 0], [1, 0, 0, 0]]), torch.eye(2)
    >>> attention(q, k, v)[0]
    tensor([[0.8808, 0.1192]])
    """
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores + mask
    weights = scores.softmax(dim=-1)
    return F.dropout(weights, dropout) @ v, weights


# -- 3.2.2 Multi-Head Attention ---------------------------------------------------------------------------------------


class MultiHead(nn.Module):
    """MultiHead(Q, K, V) = Concat(head_1, ..., head_h) W^O, head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V)."""

    def __init__(self, config, heads, layer=None):
        super().__init__()
        self.config, self.heads, self.layer = config, heads, layer
        self.q_proj = Linear(config.d_model, config.d_model)
        self.k_proj = Linear(config.d_model, config.d_model)
        self.v_proj = Linear(config.d_model, config.d_model)
        self.out_proj = Linear(config.d_model, config.d_model)
        for projection in (self.q_proj, self.k_proj, self.v_proj):
            projection.init_gain = 2**-0.5  # see `_init_weights`

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, T, D) -> (B, h, T, d)

    def keys_values(self, x):
        return self.split(self.k_proj(x)), self.split(self.v_proj(x))

    def forward(self, x, memory=None, mask=None, causal=False, cache=None, cache_position=None, weights=None):
        """Attend from x (B, T, D) to memory (B, S, D), or to x itself; the list `weights` collects the weights."""
        q = self.split(self.q_proj(x))
        if cache is None:
            k, v = self.keys_values(x if memory is None else memory)
        elif memory is None:
            cache_kwargs = {"cache_position": cache_position}
            k, v = cache.self_attention_cache.update(*self.keys_values(x), self.layer, cache_kwargs)
        else:
            k, v = self.cached_memory(memory, cache)
        dropout = self.config.attention_dropout if self.training else 0.0
        if weights is None and self.config._attn_implementation != "eager":
            y = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=causal)
        else:
            mask = causal_mask(x.shape[1], x.shape[1], q) if causal else mask
            y, w = attention(q, k, v, mask, dropout)
            if weights is not None:
                weights.append(w)
        return self.out_proj(y.transpose(1, 2).flatten(2))

    def cached_memory(self, memory, cache):
        """Keys and values of the encoder output: computed at the first step, read at the later ones."""
        if not cache.is_updated.get(self.layer):
            cache.is_updated[self.layer] = True
            return cache.cross_attention_cache.update(*self.keys_values(memory), self.layer, {"cache_position": None})
        layer = cache.cross_attention_cache.layers[self.layer]
        return layer.keys, layer.values


# -- 3.2.3 Where a query may look -------------------------------------------------------------------------------------


def additive(may_look, x):
    """0 where `may_look` (boolean) holds, the smallest finite number of x's dtype elsewhere."""
    return torch.zeros_like(may_look, dtype=x.dtype).masked_fill_(~may_look, torch.finfo(x.dtype).min)


def padding_mask(attention_mask, x):
    """(B, S) of ones and zeros -> (B, 1, 1, S) to add to scores."""
    return None if attention_mask is None else additive(attention_mask[:, None, None, :].bool(), x)


def causal_mask(queries, keys, x, past=0, attention_mask=None):
    """No query looks past its own position: (B or 1, 1, T, keys); `past` positions came before the first query."""
    key = torch.arange(keys, device=x.device)
    may_look = key <= (torch.arange(queries, device=x.device) + past)[:, None]
    if attention_mask is not None:
        may_look = may_look & F.pad(attention_mask.bool(), (0, keys - attention_mask.shape[1]))[:, None, None, :]
    return additive(may_look.expand(1, 1, queries, keys) if may_look.dim() == 2 else may_look, x)


# -- 3.3 Position-wise Feed-Forward Networks --------------------------------------------------------------------------


def feed_forward(layer, x):
    """FFN(x) = max(0, x W_1 + b_1) W_2 + b_2."""
    return layer.fc2(dropout(layer.activation(layer.fc1(x)), layer.config.activation_dropout, layer.training))


# -- 3.5 Positional Encoding ------------------------------------------------------------------------------------------


def sinusoids(length, d_model, layout="interleaved"):
    """PE(pos, 2i) = sin(pos / 10000^(2i / D)), PE(pos, 2i + 1) = cos(the same): (length, D), float32.

    Computed in float64, as float32 angles are off by 1e-4 at position 1000.
    """
    with torch.device("cpu"):
        rates = 10000 ** (-torch.arange(0, d_model, 2, dtype=torch.float64) / d_model)
        angles = torch.arange(length, dtype=torch.float64)[:, None] * rates
        pair = [angles.sin(), angles.cos()]
        table = torch.stack(pair, -1).flatten(1) if layout == "interleaved" else torch.cat(pair, -1)
        return table.float()


class Positions(nn.Module):
    """The sinusoids of the positions (B or 1, T) asked for, all of them below `length`: (B or 1, T, D).

    The table is no parameter and is absent from checkpoints; `_init_weights` fills it after loading, where
    transformers 5 leaves uninitialised memory. Beyond `max_position_embeddings` the formula is evaluated anew.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        size = config.max_position_embeddings, config.d_model
        self.register_buffer("table", torch.empty(size, dtype=torch.float32), persistent=False)
        if not self.table.is_meta:
            self.fill()

    def fill(self):
        with torch.no_grad():
            self.table.copy_(sinusoids(*self.table.shape, self.config.position_layout))

    def forward(self, positions, length):
        table = self.table
        if length > len(table):
            table = sinusoids(length, self.config.d_model, self.config.position_layout).to(table)
        return table[positions]


# -- 3.1 Encoder and Decoder Stacks -----------------------------------------------------------------------------------


class VanillaLayer(GradientCheckpointingLayer):
    """What the layers of both stacks share: residual connections around their sub-layers, and the last sub-layer."""

    def __init__(self, config, ffn_dim):
        super().__init__()
        self.config = config
        self.activation = ACT2FN[config.activation_function]
        self.fc1 = Linear(config.d_model, ffn_dim)
        self.fc2 = Linear(ffn_dim, config.d_model)
        self.final_layer_norm = nn.LayerNorm(config.d_model)

    def residual(self, x, norm, sublayer):
        """LayerNorm(x + Dropout(Sublayer(x))), or x + Dropout(Sublayer(LayerNorm(x))) with norm_position="pre"."""
        if self.config.norm_position == "pre":
            return x + dropout(sublayer(norm(x)), self.config.dropout, self.training)
        return norm(x + dropout(sublayer(x), self.config.dropout, self.training))


class VanillaEncoderLayer(VanillaLayer):
    """Self-attention, then the feed-forward network; x is (B, S, D)."""

    def __init__(self, config):
        super().__init__(config, config.encoder_ffn_dim)
        self.self_attn = MultiHead(config, config.encoder_attention_heads)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model)

    def forward(self, x, mask=None, weights=None):
        x = self.residual(x, self.self_attn_layer_norm, lambda x: self.self_attn(x, mask=mask, weights=weights))
        return self.residual(x, self.final_layer_norm, lambda x: feed_forward(self, x))


class VanillaDecoderLayer(VanillaLayer):
    """Masked self-attention, attention over the encoder's output `memory` (B, S, D), then the feed-forward network."""

    def __init__(self, config, layer):
        super().__init__(config, config.decoder_ffn_dim)
        self.self_attn = MultiHead(config, config.decoder_attention_heads, layer)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model)
        self.encoder_attn = MultiHead(config, config.decoder_attention_heads, layer)
        self.encoder_attn_layer_norm = nn.LayerNorm(config.d_model)

    def forward(
        self,
        x,
        memory,
        mask=None,
        causal=False,
        memory_mask=None,
        cache=None,
        cache_position=None,
        weights=None,
        cross_weights=None,
    ):
        x = self.residual(
            x,
            self.self_attn_layer_norm,
            lambda x: self.self_attn(x, None, mask, causal, cache, cache_position, weights),
        )
        x = self.residual(
            x,
            self.encoder_attn_layer_norm,
            lambda x: self.encoder_attn(x, memory, memory_mask, cache=cache, weights=cross_weights),
        )
        return self.residual(x, self.final_layer_norm, lambda x: feed_forward(self, x))


# -- What transformers needs to know ----------------------------------------------------------------------------------


class VanillaPreTrainedModel(PreTrainedModel):
    """Initialisation and the flags that transformers reads."""

    config_class = VanillaConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True
    _supports_sdpa = True
    _no_split_modules = ["VanillaEncoderLayer", "VanillaDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values", "cache"]

    def _init_weights(self, module):
        """Glorot-uniform matrices, embeddings N(0, D^-0.5) with a zero row for padding (tensor2tensor's release).

        W^Q, W^K and W^V are drawn like the one D x 3D matrix that they were in that release, which divides their
        spread by sqrt(2); so do torch.nn.MultiheadAttention and fairseq. Training starts markedly faster.
        """
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight, gain=getattr(module, "init_gain", 1.0))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.d_model**-0.5)
            # Slicing loses the mark that transformers puts on loaded weights, so look for it before writing a row.
            if module.padding_idx is not None and not getattr(module.weight, "_is_hf_initialized", False):
                nn.init.zeros_(module.weight[module.padding_idx])
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, Positions):
            module.fill()

    def resize_token_embeddings(self, new_num_tokens=None, pad_to_multiple_of=None, mean_resizing=True):
        """Resize all vocabulary matrices: transformers by itself leaves a separate target embedding as it is."""
        size = new_num_tokens, pad_to_multiple_of, mean_resizing
        if not self.config.shares_all_embeddings:
            decoder = self.get_decoder()
            decoder.embed_tokens = self._get_resized_embeddings(decoder.embed_tokens, *size)
        return super().resize_token_embeddings(*size)

    def save_pretrained(self, *args, **kwargs):
        """Save weights, settings and code: a folder that serves every Auto class and `pipeline` by itself.

        The names are set anew, as those of a model from the Hub point to the code in its repository.
        """
        self.config.auto_map = {
            "AutoConfig": "configuration_vanilla.VanillaConfig",
            "AutoModel": "modeling_vanilla.VanillaModel",
            "AutoModelForSeq2SeqLM": "modeling_vanilla.VanillaForConditionalGeneration",
        }
        implementation = {"impl": "pipeline_vanilla.VanillaTranslationPipeline", "pt": ["AutoModelForSeq2SeqLM"]}
        self.config.custom_pipelines = {"translation": implementation}
        return super().save_pretrained(*args, **kwargs)

    def flags(self, output_attentions, output_hidden_states, return_dict):
        """The three output flags, each with its default from the configuration."""
        config = self.config
        return (
            config.output_attentions if output_attentions is None else output_attentions,
            config.output_hidden_states if output_hidden_states is None else output_hidden_states,
            config.return_dict if return_dict is None else return_dict,
        )


class VanillaStack(VanillaPreTrainedModel):
    """Embedding, layers and, with norm_position="pre", a last LayerNorm: what encoder and decoder share."""

    def __init__(self, config, layers):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model, config.pad_token_id)
        self.embed_positions = Positions(config)
        self.layers = nn.ModuleList(layers)
        self.layer_norm = nn.LayerNorm(config.d_model) if config.norm_position == "pre" else nn.Identity()
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self):
        return self.embed_tokens

    def set_input_embeddings(self, value):
        self.embed_tokens = value

    def embed(self, input_ids, inputs_embeds, positions, length):
        """Dropout(sqrt(D) Embedding(ids) + PE(positions)): (B, T, D) (§3.4, §3.5, §5.4).

        `inputs_embeds` stand for rows of the embedding matrix, so they are scaled like them.
        """
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        x = x * math.sqrt(self.config.d_model)
        x = x + self.embed_positions(positions, length).to(x.dtype)
        return dropout(x, self.config.dropout, self.training)


class VanillaEncoder(VanillaStack):
    """Source tokens (B, S) to memory (B, S, D)."""

    def __init__(self, config):
        super().__init__(config, [VanillaEncoderLayer(config) for _ in range(config.encoder_layers)])

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        inputs_embeds=None,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
    ):
        """Encode; attention_mask (B, S) has 1 at tokens and 0 at padding, on either side."""
        want_weights, want_states, want_dict = self.flags(output_attentions, output_hidden_states, return_dict)
        S = length_of(input_ids, inputs_embeds)
        x = self.embed(input_ids, inputs_embeds, token_positions(attention_mask, S, self.device), S)
        mask = padding_mask(attention_mask, x)
        states, weights = [x], [] if want_weights else None
        for layer in self.layers:
            x = layer(x, mask, weights)
            states.append(x)
        states[-1] = x = self.layer_norm(x)
        output = BaseModelOutput(
            last_hidden_state=x,
            hidden_states=tuple(states) if want_states else None,
            attentions=tuple(weights) if want_weights else None,
        )
        return output if want_dict else output.to_tuple()


def length_of(input_ids, inputs_embeds):
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("give either token ids or embeddings, not both and not neither")
    return (input_ids if inputs_embeds is None else inputs_embeds).shape[1]


def token_positions(attention_mask, length, device, past=0):
    """Positions count tokens, not padding, so that padding on the left shifts nothing: (B or 1, length)."""
    if attention_mask is None:
        return torch.arange(length, device=device)[None] + past
    return (attention_mask.long().cumsum(-1) - 1).clamp_min_(0)[:, -length:]


class VanillaDecoder(VanillaStack):
    """Target tokens (B, T) and memory (B, S, D) to the states (B, T, D) that predict the next tokens."""

    def __init__(self, config):
        super().__init__(config, [VanillaDecoderLayer(config, i) for i in range(config.decoder_layers)])

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        encoder_hidden_states=None,
        encoder_attention_mask=None,
        past_key_values=None,
        inputs_embeds=None,
        use_cache=None,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
    ):
        """Decode; attention_mask is (B, past + T), or the four-dimensional mask of a static cache, or None."""
        want_weights, want_states, want_dict = self.flags(output_attentions, output_hidden_states, return_dict)
        cache = self.open_cache(past_key_values, use_cache)
        T = length_of(input_ids, inputs_embeds)
        mask, positions, cache_position, length = self.look(attention_mask, T, cache)
        x = self.embed(input_ids, inputs_embeds, positions, length)
        mask = mask if mask is None else mask.to(x.dtype)
        memory_mask = padding_mask(encoder_attention_mask, x)
        states, weights, cross = [x], *([[], []] if want_weights else [None, None])
        for layer in self.layers:
            x = layer(x, encoder_hidden_states, mask, mask is None, memory_mask, cache, cache_position, weights, cross)
            states.append(x)
        states[-1] = x = self.layer_norm(x)
        output = BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=x,
            hidden_states=tuple(states) if want_states else None,
            attentions=tuple(weights) if want_weights else None,
            cross_attentions=tuple(cross) if want_weights else None,
            **{CACHE: cache},
        )
        return output if want_dict else output.to_tuple()

    def open_cache(self, cache, use_cache):
        """The cache to read and extend, or None: training needs none, and recomputed layers would extend it twice."""
        if self.training and torch.is_grad_enabled():
            return None if self.gradient_checkpointing else cache
        if cache is None and (self.config.use_cache if use_cache is None else use_cache):
            return EncoderDecoderCache(DynamicCache(), DynamicCache())
        return cache

    def look(self, attention_mask, T, cache):
        """The mask to add (None: causal), positions, where in the cache the new keys go, and the longest length."""
        device = self.device
        past = 0 if cache is None else cache.get_seq_length()
        cache_position = torch.arange(T, device=device) + past
        static = cache is not None and cache.is_compileable
        if attention_mask is not None and attention_mask.dim() == 4:
            may_look = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
            positions = may_look[:, 0].sum(-1).sub(1).clamp_min(0)
            return additive(may_look, self.embed_tokens.weight), positions, cache_position, may_look.shape[-1]
        if attention_mask is None and not static and isinstance(past, int) and past == 0:
            return None, cache_position[None], cache_position, T
        keys = static_length(cache) if static else int(past) + T
        if attention_mask is not None and not static and attention_mask.shape[1] != keys:
            raise ValueError(
                f"decoder_attention_mask has {attention_mask.shape[1]} columns, but there are {keys} positions with "
                "the cached ones"
            )
        positions = token_positions(attention_mask, T, device, past)
        mask = causal_mask(T, keys, self.embed_tokens.weight, past, attention_mask)
        return mask, positions, cache_position, keys


def static_length(cache):
    """Capacity of a static cache; transformers renamed the question in 5.15."""
    cache = cache.self_attention_cache
    return cache.get_max_length() if hasattr(cache, "get_max_length") else cache.get_max_cache_shape()


# -- 3 Model Architecture ---------------------------------------------------------------------------------------------


class VanillaModel(VanillaPreTrainedModel):
    """Encoder and decoder: `forward` is decode(encode(source), target)."""

    def __init__(self, config):
        super().__init__(config)
        if config.shares_all_embeddings:
            self.shared = nn.Embedding(config.vocab_size, config.d_model, config.pad_token_id)
            self._tied_weights_keys = {
                "encoder.embed_tokens.weight": "shared.weight",
                "decoder.embed_tokens.weight": "shared.weight",
            }
        self.encoder = VanillaEncoder(config)
        self.decoder = VanillaDecoder(config)
        self.post_init()

    def _tie_weights(self):
        """What transformers 4 calls to tie; transformers 5 reads `_tied_weights_keys`."""
        if self.config.shares_all_embeddings:
            self.encoder.embed_tokens.weight = self.decoder.embed_tokens.weight = self.shared.weight

    def get_encoder(self, modality=None):
        return self.encoder

    def get_decoder(self):
        return self.decoder

    def get_input_embeddings(self):
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value):
        self.encoder.embed_tokens = value
        if self.config.shares_all_embeddings:
            self.shared = self.decoder.embed_tokens = value

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        decoder_input_ids=None,
        decoder_attention_mask=None,
        encoder_outputs=None,
        past_key_values=None,
        cache=None,
        inputs_embeds=None,
        decoder_inputs_embeds=None,
        use_cache=None,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
        **kwargs,
    ):
        """Hidden states (B, T, D) of the decoder, and with the flags everything on the way.

        Args:
            input_ids, attention_mask: (B, S); or inputs_embeds (B, S, D), or `encoder_outputs` of an earlier call.
            decoder_input_ids: (B, T), beginning with `decoder_start_token_id`.
            decoder_attention_mask: (B, T), counting cached positions too; needed only for padding on the left.
            past_key_values, cache: two names of the same argument, before and from transformers 5.24.
        """
        refuse_unknown(kwargs)
        flags = self.flags(output_attentions, output_hidden_states, return_dict)
        if encoder_outputs is None:
            encoder_outputs = self.encoder(input_ids, attention_mask, inputs_embeds, *flags[:2], True)
        elif not isinstance(encoder_outputs, BaseModelOutput):
            encoder_outputs = BaseModelOutput(*encoder_outputs)
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            raise ValueError("the decoder needs decoder_input_ids (or labels, from which they are derived)")
        decoded = self.decoder(
            decoder_input_ids,
            decoder_attention_mask,
            encoder_outputs.last_hidden_state,
            attention_mask,
            cache if past_key_values is None else past_key_values,
            decoder_inputs_embeds,
            use_cache,
            *flags[:2],
            True,
        )
        output = Seq2SeqModelOutput(
            last_hidden_state=decoded.last_hidden_state,
            decoder_hidden_states=decoded.hidden_states,
            decoder_attentions=decoded.attentions,
            cross_attentions=decoded.cross_attentions,
            encoder_last_hidden_state=encoder_outputs.last_hidden_state,
            encoder_hidden_states=encoder_outputs.hidden_states,
            encoder_attentions=encoder_outputs.attentions,
            **{CACHE: decoded[CACHE] if CACHE in decoded else None},
        )
        return output if flags[2] else output.to_tuple()


def refuse_unknown(kwargs):
    """A misspelt argument must not vanish; older versions of generate() pass `cache_position`, which we compute."""
    unknown = sorted(set(kwargs) - {"cache_position"})
    if unknown:
        raise TypeError(f"forward() got unexpected keyword arguments: {', '.join(unknown)}")


# -- The translation model --------------------------------------------------------------------------------------------


class VanillaForConditionalGeneration(VanillaPreTrainedModel, TranslationMixin, GenerationMixin):
    """The Transformer with its output projection: a loss from pairs, translations from sources."""

    def __init__(self, config):
        super().__init__(config)
        self.model = VanillaModel(config)
        self.lm_head = Linear(config.d_model, config.vocab_size, bias=config.lm_head_bias)
        source = "shared" if config.shares_all_embeddings else "decoder.embed_tokens"
        self._tied_weights_keys = {"lm_head.weight": f"model.{source}.weight"}
        self.post_init()
        # Stock generate() would stop after 20 tokens.
        self.generation_config.max_length = config.max_position_embeddings

    def _tie_weights(self):
        self.model._tie_weights()
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.decoder.embed_tokens.weight

    def get_encoder(self, modality=None):
        return self.model.encoder

    def get_decoder(self):
        return self.model.decoder

    def get_input_embeddings(self):
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value):
        self.model.set_input_embeddings(value)

    def get_output_embeddings(self):
        return self.lm_head

    def set_output_embeddings(self, value):
        self.lm_head = value

    def prepare_decoder_input_ids_from_labels(self, labels):
        """Shift right: labels y_1 ... y_n </s> (padded with -100) become <s> y_1 ... y_n (padded with <pad>)."""
        start = labels.new_full((len(labels), 1), self.config.decoder_start_token_id)
        shifted = torch.cat([start, labels[:, :-1]], dim=1)
        return shifted.masked_fill(shifted == -100, self.config.pad_token_id)

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        decoder_input_ids=None,
        decoder_attention_mask=None,
        encoder_outputs=None,
        past_key_values=None,
        cache=None,
        inputs_embeds=None,
        decoder_inputs_embeds=None,
        labels=None,
        use_cache=None,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
        num_items_in_batch=None,
        skip_logits=None,
        **kwargs,
    ):
        """Loss and logits (B, T, V); the other arguments are those of `VanillaModel.forward`.

        Args:
            labels: (B, T), -100 where nothing is to be predicted; decoder_input_ids come from them if not given.
            num_items_in_batch: divide the summed loss by this number instead of by the tokens of this batch, which
                makes accumulated gradients equal to those of one large batch.
            skip_logits: return no logits, so that those of padding are not even computed and the memory stays bounded;
                default: when training with labels.

        The loss is the label-smoothed cross-entropy in training mode (§5.4), the plain negative log-likelihood else.
        """
        return_dict = self.flags(None, None, return_dict)[2]
        if labels is not None and decoder_input_ids is None and decoder_inputs_embeds is None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        output = self.model(
            input_ids,
            attention_mask,
            decoder_input_ids,
            decoder_attention_mask,
            encoder_outputs,
            past_key_values,
            cache,
            inputs_embeds,
            decoder_inputs_embeds,
            use_cache if labels is None else False,
            output_attentions,
            output_hidden_states,
            True,
            **kwargs,
        )
        if skip_logits is None:
            # An adapter in the place of lm_head has to be run: its weight alone is not what it computes.
            skip_logits = self.training and labels is not None and isinstance(self.lm_head, nn.Linear)
        x = output.last_hidden_state
        logits = None if skip_logits else self.lm_head(x)
        loss = None if labels is None else self.loss(x, logits, labels, num_items_in_batch)
        fields = {name: value for name, value in output.items() if name != "last_hidden_state"}
        result = Seq2SeqLMOutput(loss=loss, logits=logits, **fields)
        return result if return_dict else result.to_tuple()

    @torch.compiler.disable  # it works in rows, whose number would be compiled in
    def loss(self, x, logits, labels, num_items=None):
        """Cross-entropy of the labels that are not -100 (0 if none is), from x without logits: scalar float32."""
        kept = labels != -100
        divisor = kept.sum().clamp_min(1) if num_items is None else num_items
        eps = self.config.label_smoothing if self.training else 0.0
        if logits is not None:
            labels = labels[kept]
            return F.cross_entropy(logits[kept].float(), labels, reduction="sum", label_smoothing=eps) / divisor
        x, weight, bias = x[kept], self.lm_head.weight, self.lm_head.bias
        if bias is not None:  # x W^T + b is one product too
            x, weight = F.pad(x, (0, 1), value=1.0), torch.cat([weight, bias[:, None]], dim=1)
        return SmoothedCrossEntropy.apply(x, weight, labels[kept], eps) / divisor


VanillaModel.register_for_auto_class("AutoModel")
VanillaForConditionalGeneration.register_for_auto_class("AutoModelForSeq2SeqLM")
