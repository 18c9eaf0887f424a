import logging
import struct
import sys

import pytest
import torch

from modeling_vanilla.generation_vanilla import AttentionMap
from modeling_vanilla.viz import _fonts, _select, plot_attention


rcParams = pytest.importorskip("matplotlib").rcParams
fontManager = pytest.importorskip("matplotlib.font_manager").fontManager


def attention(source=("A", "▁dog", "</s>"), predicted=("Ein", "▁Hund", "▁rennt", "</s>")):
    torch.manual_seed(0)
    S, T = len(source), len(predicted)

    def weights(*size):
        return torch.randn(3, 2, *size).softmax(-1)

    return AttentionMap(
        list(source), ["<s>", *predicted[:-1]], list(predicted), weights(S, S), weights(T, T), weights(T, S)
    )


def png_size(path):
    header = path.read_bytes()[:24]
    assert header.startswith(b"\x89PNG")
    return struct.unpack(">II", header[16:])


@pytest.mark.parametrize("kind", ["encoder", "decoder", "cross"])
def test_writes_a_picture_of_every_kind(tmp_path, kind):
    plot_attention(attention(), tmp_path / "attention.png", kind)
    assert min(png_size(tmp_path / "attention.png")) > 100


def test_rows_look_at_columns():
    drawn = attention()
    weights, rows, columns, title = _select(drawn, "cross", -1, 1)
    assert torch.equal(weights, drawn.cross[2, 1])
    assert (rows, columns) == (["Ein", "▁Hund", "▁rennt", "</s>"], ["A", "▁dog", "</s>"])
    assert title == "cross-attention, layer 2, head 1"
    assert _select(drawn, "decoder", 0, None)[1:3] == (["<s>", "Ein", "▁Hund", "▁rennt"],) * 2


def test_without_a_head_the_heads_are_averaged():
    drawn = attention()
    torch.testing.assert_close(_select(drawn, "encoder", 0, None)[0], (drawn.encoder[0, 0] + drawn.encoder[0, 1]) / 2)


def test_a_cell_keeps_its_size_however_many_tokens_there_are(tmp_path):
    tokens = [f"{i:02}" for i in range(20)]
    for n in 10, 20:
        plot_attention(attention(tokens[:n], tokens[:n]), tmp_path / f"{n}.png")
    assert png_size(tmp_path / "20.png")[1] - png_size(tmp_path / "10.png")[1] == pytest.approx(10 * 0.3 * 150, abs=2)


@pytest.mark.parametrize("wrong", [{"kind": "self"}, {"layer": 3}, {"layer": -4}, {"head": 2}])
def test_names_what_does_not_exist(tmp_path, wrong):
    with pytest.raises(ValueError, match=str(*wrong.values())):
        plot_attention(attention(), tmp_path / "attention.png", **wrong)


def test_draws_formulas_line_ends_and_scripts_without_a_font_warning_once(tmp_path, caplog, recwarn, monkeypatch):
    bundled = [font for font in fontManager.ttflist if "mpl-data" in font.fname]
    monkeypatch.setattr(fontManager, "ttflist", bundled)
    tokens = ["$5", "$x$", "\n", "Жук", "القطة", "大", "大象"]
    with caplog.at_level(logging.WARNING):
        plot_attention(attention(tokens, tokens), tmp_path / "attention.png")
    assert ["大象" in record.getMessage() for record in caplog.records] == [True]
    assert not [warning for warning in recwarn if "Glyph" in str(warning.message)]
    assert _select(attention(tokens, tokens), "cross", 0, 0)[1][2] == "\\n"


def test_takes_an_installed_font_that_has_what_the_default_lacks(monkeypatch):
    monkeypatch.setitem(rcParams, "font.family", ["cmr10"])  # Latin only, comes with matplotlib like DejaVu
    assert _fonts({"a"}) == ["cmr10"]
    assert len(_fonts({"a", "Ж"})) == 2


def test_says_how_to_install_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install"):
        plot_attention(attention(), tmp_path / "attention.png")
