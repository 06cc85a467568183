"""Makes tests/fixtures/keras_vit*.weights.h5 and .npz: a tiny model built as in the Keras example, with Keras 3.

    .venv-peers/bin/python -m tests.make_keras_fixture

https://keras.io/examples/vision/vit_small_ds/ is the reference for what the layers compute and for their names.
"""

import os

os.environ["KERAS_BACKEND"] = "torch"

import math

import keras
import numpy as np
from keras import layers, ops

from tests.make_fixtures import FOLDER

SIZE, PATCH, DIM, HEADS, KEY_DIM, DEPTH, CLASSES = 12, 4, 8, 2, 5, 2, 3


class ShiftedPatchTokenization(layers.Layer):
    def __init__(self, shifted: bool):
        super().__init__(name="shifted_patch_tokenization")
        self.shifted = shifted
        self.projection = layers.Dense(DIM)
        self.layer_norm = layers.LayerNormalization(epsilon=1e-6)

    def build(self, shape):
        width = PATCH * PATCH * 3 * (5 if self.shifted else 1)
        if self.shifted:
            self.layer_norm.build((None, None, width))
        self.projection.build((None, None, width))

    def call(self, images):
        if self.shifted:
            s = PATCH // 2
            padded = ops.pad(images, ((0, 0), (s, s), (s, s), (0, 0)))
            # Content goes left up, left down, right up, right down.
            corners = ((2 * s, 2 * s), (0, 2 * s), (2 * s, 0), (0, 0))
            moved = [padded[:, i : i + SIZE, j : j + SIZE] for i, j in corners]
            images = ops.concatenate([images, *moved], -1)
        flat = ops.image.extract_patches(images, PATCH)
        flat = ops.reshape(flat, (-1, (SIZE // PATCH) ** 2, flat.shape[-1]))
        return self.projection(self.layer_norm(flat) if self.shifted else flat)


class PatchEncoder(layers.Layer):
    def __init__(self):
        super().__init__(name="patch_encoder")
        self.position_embedding = layers.Embedding((SIZE // PATCH) ** 2, DIM)

    def build(self, shape):
        self.position_embedding.build(None)

    def call(self, tokens):
        return tokens + self.position_embedding(ops.arange((SIZE // PATCH) ** 2))


class MultiHeadAttentionLSA(layers.MultiHeadAttention):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.tau = self.add_weight(initializer=keras.initializers.Constant(math.sqrt(KEY_DIM)), name="tau")

    def _compute_attention(self, query, key, value, attention_mask=None, *_, **__):
        scores = ops.einsum("bnhd,bmhd->bhnm", query / self.tau, key)
        weights = self._masked_softmax(scores, attention_mask)
        return ops.einsum("bhnm,bmhd->bnhd", weights, value), weights


def build(shifted: bool) -> keras.Model:
    keras.utils.clear_session()
    images = x = layers.Input((SIZE, SIZE, 3))
    x = PatchEncoder()(ShiftedPatchTokenization(shifted)(x))
    n = (SIZE // PATCH) ** 2
    others = ~np.eye(n, dtype=bool)[None]
    for _ in range(DEPTH):
        y = layers.LayerNormalization(epsilon=1e-6)(x)
        if shifted:
            y = MultiHeadAttentionLSA(HEADS, KEY_DIM, dropout=0.1)(y, y, attention_mask=others)
        else:
            y = layers.MultiHeadAttention(HEADS, KEY_DIM, dropout=0.1)(y, y)
        x = layers.Add()([y, x])
        y = layers.LayerNormalization(epsilon=1e-6)(x)
        for units in (2 * DIM, DIM):
            y = layers.Dropout(0.1)(layers.Dense(units, activation="gelu")(y))
        x = layers.Add()([y, x])
    x = layers.Flatten()(layers.LayerNormalization(epsilon=1e-6)(x))
    for units in (16, 12):
        x = layers.Dropout(0.5)(layers.Dense(units, activation="gelu")(x))
    return keras.Model(images, layers.Dense(CLASSES)(x))


def main() -> None:
    for name, shifted in (("keras_vit", False), ("keras_sl_vit", True)):
        model, rng = build(shifted), np.random.default_rng(7)
        model.set_weights(
            [
                (1.0 if w.ndim < 2 else 0.0) + 0.35 * rng.standard_normal(w.shape).astype("float32")
                for w in model.get_weights()
            ]
        )
        image = rng.standard_normal((2, SIZE, SIZE, 3)).astype("float32")
        model.save_weights(FOLDER / f"{name}.weights.h5")
        np.savez_compressed(FOLDER / f"{name}.npz", image=image, output=keras.ops.convert_to_numpy(model(image)))


if __name__ == "__main__":
    main()
