# Copyright 2026 The vanilla-transformer authors. Licensed under the Apache License, Version 2.0.
"""The hyper-parameters of the original Transformer (Vaswani et al., 2017, arXiv 1706.03762)."""

from transformers import PretrainedConfig
from transformers.activations import ACT2FN


PRESETS = {
    # Wu et al. 2021 (arXiv 2105.14462): best on Multi30k's 29,000 pairs; twice the depth of tensor2tensor's `tiny`.
    "tiny": {"layers": 4, "d_model": 128, "ffn_dim": 256, "heads": 4},
    "small": {"layers": 3, "d_model": 256, "ffn_dim": 1024, "heads": 4},
    # Table 3 of the paper.
    "base": {"layers": 6, "d_model": 512, "ffn_dim": 2048, "heads": 8},
    "big": {"layers": 6, "d_model": 1024, "ffn_dim": 4096, "heads": 16, "dropout": 0.3},
}


class VanillaConfig(PretrainedConfig):
    """Configuration of a `VanillaModel`; the defaults are the paper's base model.

    Args:
        vocab_size: number of subwords, one vocabulary for both languages (37,000 in §5.1).
        d_model: width of every sub-layer's output.
        encoder_layers, decoder_layers: N.
        encoder_attention_heads, decoder_attention_heads: h; d_k = d_v = d_model / h.
        encoder_ffn_dim, decoder_ffn_dim: d_ff.
        activation_function: "relu" in the paper; any name that transformers knows.
        dropout: P_drop, on each sub-layer's output and on embedding + position (§5.4).
        attention_dropout, activation_dropout: on attention weights and inside the feed-forward net; none in the paper.
        max_position_embeddings: length of the precomputed table; longer input is computed from the formula.
        position_layout: "interleaved" (sine at even, cosine at odd dimensions: §3.5) or "concatenated" (sines, then
            cosines: tensor2tensor, Marian).
        norm_position: "post", LayerNorm(x + Sublayer(x)) as the paper, or "pre" (tensor2tensor's later default).
        tie_word_embeddings: share matrices at all; False gives three separate ones.
        share_encoder_decoder_embeddings: when tying, share the source embedding too (§3.4); False ties only the target
            embedding and the output projection.
        lm_head_bias: add a bias to the output projection, as Marian's models have.
        label_smoothing: epsilon_ls (§5.4); acts on the loss in training mode only.

    Raises:
        ValueError: a value that no Transformer can have; the message names the field and the value.

    Example:
        >>> VanillaConfig.preset("tiny", vocab_size=8000).d_model
        128
    """

    model_type = "vanilla"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]
    attribute_map = {
        "hidden_size": "d_model",
        "num_attention_heads": "encoder_attention_heads",
        "num_hidden_layers": "encoder_layers",
    }

    def __init__(
        self,
        vocab_size=37000,
        d_model=512,
        encoder_layers=6,
        decoder_layers=6,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        encoder_ffn_dim=2048,
        decoder_ffn_dim=2048,
        activation_function="relu",
        dropout=0.1,
        attention_dropout=0.0,
        activation_dropout=0.0,
        max_position_embeddings=1024,
        position_layout="interleaved",
        norm_position="post",
        tie_word_embeddings=True,
        share_encoder_decoder_embeddings=True,
        lm_head_bias=False,
        label_smoothing=0.1,
        use_cache=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        is_encoder_decoder=True,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.d_model = d_model
        self.encoder_layers = encoder_layers
        self.decoder_layers = decoder_layers
        self.encoder_attention_heads = encoder_attention_heads
        self.decoder_attention_heads = decoder_attention_heads
        self.encoder_ffn_dim = encoder_ffn_dim
        self.decoder_ffn_dim = decoder_ffn_dim
        self.activation_function = activation_function
        self.dropout = dropout
        self.attention_dropout = attention_dropout
        self.activation_dropout = activation_dropout
        self.max_position_embeddings = max_position_embeddings
        self.position_layout = position_layout
        self.norm_position = norm_position
        self.share_encoder_decoder_embeddings = share_encoder_decoder_embeddings
        self.lm_head_bias = lm_head_bias
        self.label_smoothing = label_smoothing
        # transformers 5 takes generation parameters such as this one out of **kwargs, so it is set by hand.
        self.use_cache = use_cache
        super().__init__(
            pad_token_id=pad_token_id,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            decoder_start_token_id=decoder_start_token_id,
            is_encoder_decoder=is_encoder_decoder,
            tie_word_embeddings=tie_word_embeddings,
            **kwargs,
        )
        self._check()

    @classmethod
    def preset(cls, name, **overrides):
        """The named size: "tiny", "small", "base" or "big"; keyword arguments override single fields."""
        if name not in PRESETS:
            raise ValueError(f"preset={name!r} is unknown: choose one of {', '.join(PRESETS)}")
        size = dict(PRESETS[name])
        for field in ("layers", "ffn_dim"):
            size[f"encoder_{field}"] = size[f"decoder_{field}"] = size.pop(field)
        size["encoder_attention_heads"] = size["decoder_attention_heads"] = size.pop("heads")
        return cls(**{**size, **overrides})

    @property
    def shares_all_embeddings(self):
        """Whether source embedding, target embedding and output projection are one matrix (§3.4)."""
        return self.tie_word_embeddings and self.share_encoder_decoder_embeddings

    def _check(self):
        sizes = ("vocab_size", "d_model", "encoder_ffn_dim", "decoder_ffn_dim", "max_position_embeddings")
        for field in (
            *sizes,
            "encoder_layers",
            "decoder_layers",
            "encoder_attention_heads",
            "decoder_attention_heads",
        ):
            if not isinstance(getattr(self, field), int) or getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)!r} must be a positive integer")
        if self.d_model % 2:
            raise ValueError(f"d_model={self.d_model} must be even: positions pair each sine with a cosine")
        for field in ("encoder_attention_heads", "decoder_attention_heads"):
            if self.d_model % getattr(self, field):
                raise ValueError(f"d_model={self.d_model} is not divisible by {field}={getattr(self, field)}")
        for field in ("dropout", "attention_dropout", "activation_dropout", "label_smoothing"):
            value = getattr(self, field)
            if not isinstance(value, (int, float)) or not 0 <= value < 1:
                raise ValueError(f"{field}={value!r} must be a number, at least 0 and less than 1")
        for field in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
            value = getattr(self, field)
            if isinstance(value, int) and not 0 <= value < self.vocab_size:
                raise ValueError(f"{field}={value} is not in the vocabulary of vocab_size={self.vocab_size}")
        for field, known in {
            "position_layout": ("interleaved", "concatenated"),
            "norm_position": ("post", "pre"),
            "activation_function": tuple(ACT2FN),
        }.items():
            if getattr(self, field) not in known:
                raise ValueError(f"{field}={getattr(self, field)!r} must be one of {known}")


VanillaConfig.register_for_auto_class()
