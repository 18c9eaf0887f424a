# Copyright 2026 The vanilla-transformer authors. Licensed under the Apache License, Version 2.0.
"""The `translation` pipeline that transformers 5 dropped; config.json names it under `custom_pipelines`."""

from transformers import Pipeline


class VanillaTranslationPipeline(Pipeline):
    """Text in, `{"translation_text": ...}` out, with the text of `model.translate`, whose options it takes.

    `batch_size` has no effect: batches are made by tokens, and no translation depends on its neighbours.

    Example:
        >>> translator = pipeline("translation", model="out", trust_remote_code=True)
        >>> translator("A dog runs.", num_beams=5)
        [{'translation_text': 'Ein Hund rennt.'}]
    """

    _load_tokenizer = True
    _load_processor = _load_image_processor = _load_video_processor = _load_feature_extractor = False

    def __call__(self, texts, **options):
        """Translate a text, a list or tuple of texts, or lazily any other iterable, such as a data set's column.

        Returns one dictionary a text, in a list or an iterator; with `n_best` above 1, a list of them a text.
        """
        # Wrapped into one input, because the base class sends the texts of a list through the model one by one.
        return super().__call__({"texts": texts}, **options)

    def _sanitize_parameters(self, **options):
        return {}, options, {}

    def preprocess(self, inputs):
        return inputs

    def _forward(self, inputs, **options):
        texts = inputs["texts"]
        if not isinstance(texts, str):
            texts = list(texts) if isinstance(texts, (list, tuple)) else iter(texts)
        return self.model.translate(texts, self.tokenizer, **options)

    def postprocess(self, outputs):
        if isinstance(outputs, str):
            return [_entry(outputs)]
        if isinstance(outputs, list):
            return [_entry(text) for text in outputs]
        return map(_entry, outputs)


def _entry(text):
    """One translation, or the n best of one text, as the old pipeline presented them."""
    return {"translation_text": text} if isinstance(text, str) else [_entry(t) for t in text]
