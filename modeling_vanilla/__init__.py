"""The original Transformer (Vaswani et al., 2017) as a Hugging Face model package."""

from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM

from .configuration_vanilla import VanillaConfig
from .modeling_vanilla import VanillaForConditionalGeneration, VanillaModel


__version__ = "0.1.0"
__all__ = ["VanillaConfig", "VanillaForConditionalGeneration", "VanillaModel"]

AutoConfig.register("vanilla", VanillaConfig)
AutoModel.register(VanillaConfig, VanillaModel)
AutoModelForSeq2SeqLM.register(VanillaConfig, VanillaForConditionalGeneration)
