"""Our classes, for transformers' ModelTesterMixin and ConfigTester; `run.py` puts this file among its tests.

MarianMT runs beside ours with the same settings: what is skipped for it as well says nothing about us.
"""

import unittest

import torch
import transformers
from transformers import MarianConfig, MarianModel, MarianMTModel
from transformers.models.auto import modeling_auto

from modeling_vanilla import VanillaConfig, VanillaForConditionalGeneration, VanillaModel


# The mixins look up in these names, by class, what inputs a model takes; so they must be there before the import.
modeling_auto.MODEL_MAPPING_NAMES["vanilla"] = "VanillaModel"
modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES["vanilla"] = "VanillaForConditionalGeneration"

from ...generation.test_utils import GenerationTesterMixin  # noqa: E402
from ...test_configuration_common import ConfigTester  # noqa: E402
from ...test_modeling_common import ModelTesterMixin  # noqa: E402


class Tester:
    """Sizes, configuration and inputs of one small model of either kind."""

    batch_size, seq_length, encoder_seq_length, decoder_seq_length = 4, 7, 7, 7
    hidden_size, num_hidden_layers, num_attention_heads, vocab_size = 32, 2, 4, 99
    is_training = True

    def __init__(self, parent):
        self.parent = parent

    def get_config(self):
        fields = {
            "vocab_size": self.vocab_size,
            "d_model": self.hidden_size,
            "encoder_ffn_dim": 40,
            "decoder_ffn_dim": 40,
            "max_position_embeddings": 64,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        }
        for side in ("encoder", "decoder"):
            fields[f"{side}_layers"] = self.num_hidden_layers
            fields[f"{side}_attention_heads"] = self.num_attention_heads
        return self.parent.config_class(**fields, **self.parent.extra_fields)

    def prepare_config_and_inputs(self):
        source, target = torch.randint(3, self.vocab_size, (2, self.batch_size, self.seq_length))
        inputs = {"input_ids": source, "attention_mask": torch.ones_like(source)}
        return self.get_config(), {
            **inputs,
            "decoder_input_ids": target,
            "decoder_attention_mask": torch.ones_like(target),
        }

    prepare_config_and_inputs_for_common = prepare_config_and_inputs


class Settings(ModelTesterMixin, GenerationTesterMixin):
    is_encoder_decoder = True
    test_torch_exportable = False  # its exporter is not in the source distribution
    # What transformers 4 asks besides; both are features of its own model files.
    test_head_masking = test_pruning = fx_compatible = False

    def setUp(self):
        self.model_tester = Tester(self)

    def test_config(self):
        tester = ConfigTester(self, config_class=self.config_class)
        if self.config_class is VanillaConfig and transformers.__version__ < "5":
            # Transformers 4 sets hidden_size=0 there, which is refused: no Transformer has that size.
            tester.create_and_test_config_common_properties = lambda: None
        tester.run_common_tests()


class VanillaTest(Settings, unittest.TestCase):
    all_model_classes = (VanillaModel, VanillaForConditionalGeneration)
    config_class, extra_fields = VanillaConfig, {}

    @unittest.skip("both names of the cache are ours, as one model file serves all versions; neither is deprecated")
    def test_bc_cache_name_forward(self):
        pass


class MarianTest(Settings, unittest.TestCase):
    all_model_classes = (MarianModel, MarianMTModel)
    config_class, extra_fields = MarianConfig, {"decoder_vocab_size": 99}
