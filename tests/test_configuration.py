"""VanillaConfig: the paper's sizes, a ValueError for what no Transformer can be, fields that tools recognise."""

import inspect
import json

import pytest

from modeling_vanilla import VanillaConfig
from modeling_vanilla.configuration_vanilla import PRESETS


def test_defaults_are_the_base_model_of_the_paper():
    config = VanillaConfig()
    assert (config.encoder_layers, config.decoder_layers, config.d_model, config.encoder_ffn_dim) == (6, 6, 512, 2048)
    assert (config.encoder_attention_heads, config.dropout, config.label_smoothing) == (8, 0.1, 0.1)
    assert (config.attention_dropout, config.activation_dropout) == (0, 0)
    assert (config.activation_function, config.norm_position, config.position_layout) == (
        "relu",
        "post",
        "interleaved",
    )
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id, config.decoder_start_token_id) == (
        0,
        1,
        2,
        1,
    )
    assert config.tie_word_embeddings and config.share_encoder_decoder_embeddings


@pytest.mark.parametrize(
    "name, expected",
    [
        ("tiny", (4, 128, 256, 4, 0.1)),
        ("small", (3, 256, 1024, 4, 0.1)),
        ("base", (6, 512, 2048, 8, 0.1)),
        ("big", (6, 1024, 4096, 16, 0.3)),
    ],
)
def test_presets_have_the_sizes_they_are_named_for(name, expected):
    for side in ("encoder", "decoder"):
        config = VanillaConfig.preset(name).to_dict()
        fields = (f"{side}_layers", "d_model", f"{side}_ffn_dim", f"{side}_attention_heads", "dropout")
        assert tuple(config[field] for field in fields) == expected


def test_overrides_win_over_the_preset_and_leave_it_as_it_was():
    config = VanillaConfig.preset("tiny", encoder_layers=2, dropout=0.3, vocab_size=8000)
    assert (config.encoder_layers, config.decoder_layers, config.dropout, config.vocab_size) == (2, 4, 0.3, 8000)
    assert VanillaConfig.preset("tiny").encoder_layers == PRESETS["tiny"]["layers"] == 4


@pytest.mark.parametrize(
    "field, value",
    [
        ("vocab_size", 0),
        ("vocab_size", 8000.0),
        ("d_model", -512),
        ("d_model", 33),
        ("encoder_layers", 0),
        ("decoder_layers", "6"),
        ("encoder_attention_heads", 0),
        ("decoder_attention_heads", 7),
        ("encoder_ffn_dim", None),
        ("decoder_ffn_dim", 0),
        ("activation_function", "rleu"),
        ("dropout", -0.1),
        ("dropout", 1),
        ("dropout", "0.1"),
        ("attention_dropout", float("nan")),
        ("activation_dropout", None),
        ("max_position_embeddings", 0),
        ("position_layout", "sinusoidal"),
        ("norm_position", "before"),
        ("label_smoothing", 1.0),
        ("pad_token_id", 37000),
        ("decoder_start_token_id", -1),
    ],
)
def test_an_illegal_value_is_refused_by_field_and_value(field, value):
    with pytest.raises(ValueError) as error:
        VanillaConfig(**{field: value})
    assert field in str(error.value) and str(value) in str(error.value)


def test_an_unknown_preset_is_refused_by_name():
    with pytest.raises(ValueError, match="'huge'.*tiny"):
        VanillaConfig.preset("huge")


def test_every_field_survives_saving(tmp_path):
    config = VanillaConfig.preset(
        "small",
        vocab_size=123,
        decoder_layers=5,
        dropout=0.25,
        attention_dropout=0.05,
        activation_dropout=0.15,
        activation_function="gelu",
        max_position_embeddings=77,
        position_layout="concatenated",
        norm_position="pre",
        tie_word_embeddings=False,
        share_encoder_decoder_embeddings=False,
        label_smoothing=0.2,
        use_cache=False,
        eos_token_id=5,
    )
    config.save_pretrained(tmp_path)
    loaded = VanillaConfig.from_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    for field in set(inspect.signature(VanillaConfig).parameters) - {"kwargs"}:
        assert getattr(loaded, field) == getattr(config, field), field
    assert written["model_type"] == "vanilla" and not written["tie_word_embeddings"] and not written["use_cache"]


def test_decoding_settings_stay_out_of_the_configuration():
    """transformers 5 refuses to save a configuration that holds any of them."""
    assert not {"num_beams", "max_length", "length_penalty", "early_stopping"} & set(VanillaConfig().to_diff_dict())


def test_tools_find_the_names_that_every_transformers_model_has():
    config = VanillaConfig.preset("tiny", encoder_layers=2)
    assert (config.hidden_size, config.num_attention_heads, config.num_hidden_layers) == (128, 4, 2)
    assert config.get_text_config(decoder=True).num_hidden_layers == config.decoder_layers == 4
    assert config.is_encoder_decoder and config.model_type == "vanilla"
