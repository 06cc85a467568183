"""Makes tests/fixtures/keras_saved_model.npz: what tensorflow reads from a SavedModel of the Keras example's model.

    pip install tensorflow tf_keras, then: python -m tests.make_saved_model_fixture

The published weights were saved by Keras 2, which tf_keras still is. The file holds the names and values of the
variables in tensorflow's order, an image after the model's own Normalization, and the output.
"""

import math
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import tensorflow as tf
import tf_keras as keras
from tf_keras import layers

FIXTURE = Path(__file__).parent / "fixtures" / "keras_saved_model.npz"
SIZE, PATCH, DIM, HEADS, KEY_DIM, DEPTH, CLASSES = 12, 4, 8, 2, 5, 2, 3
TOKENS = (SIZE // PATCH) ** 2


class ShiftedPatchTokenization(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.flatten_patches = layers.Reshape((TOKENS, -1))
        self.projection = layers.Dense(DIM)
        self.layer_norm = layers.LayerNormalization(epsilon=1e-6)

    def call(self, images):
        s = PATCH // 2
        padded = tf.pad(images, ((0, 0), (s, s), (s, s), (0, 0)))
        corners = ((2 * s, 2 * s), (0, 2 * s), (2 * s, 0), (0, 0))
        x = tf.concat([images, *(padded[:, i : i + SIZE, j : j + SIZE] for i, j in corners)], -1)
        window = [1, PATCH, PATCH, 1]
        x = tf.image.extract_patches(x, window, window, [1, 1, 1, 1], "VALID")
        return self.projection(self.layer_norm(self.flatten_patches(x)))


class PatchEncoder(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.position_embedding = layers.Embedding(TOKENS, DIM)

    def call(self, tokens):
        return tokens + self.position_embedding(tf.range(TOKENS))


class MultiHeadAttentionLSA(layers.MultiHeadAttention):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.tau = tf.Variable(math.sqrt(KEY_DIM), trainable=True)

    def _compute_attention(self, query, key, value, attention_mask=None, training=None):
        scores = tf.einsum(self._dot_product_equation, key, query / self.tau)
        weights = self._masked_softmax(scores, attention_mask)
        return tf.einsum(self._combine_equation, self._dropout_layer(weights, training=training), value), weights


def build(rng: np.random.Generator) -> keras.Model:
    prepare = keras.Sequential([layers.Normalization(), layers.Resizing(SIZE, SIZE), layers.RandomFlip("horizontal")])
    prepare.layers[0].adapt(2 * rng.standard_normal((20, SIZE, SIZE, 3)).astype("float32") + 1)
    images = layers.Input((SIZE, SIZE, 3))
    x = PatchEncoder()(ShiftedPatchTokenization()(prepare(images)))
    others = tf.cast(1 - tf.eye(TOKENS), tf.int8)[None]
    for _ in range(DEPTH):
        y = layers.LayerNormalization(epsilon=1e-6)(x)
        y = MultiHeadAttentionLSA(num_heads=HEADS, key_dim=KEY_DIM, dropout=0.1)(y, y, attention_mask=others)
        x = layers.Add()([y, x])
        y = layers.LayerNormalization(epsilon=1e-6)(x)
        for units in (2 * DIM, DIM):
            y = layers.Dropout(0.1)(layers.Dense(units, activation=tf.nn.gelu)(y))
        x = layers.Add()([y, x])
    x = layers.Dropout(0.5)(layers.Flatten()(layers.LayerNormalization(epsilon=1e-6)(x)))
    for units in (16, 12):
        x = layers.Dropout(0.5)(layers.Dense(units, activation=tf.nn.gelu)(x))
    return keras.Model(images, layers.Dense(CLASSES)(x))


def main() -> None:
    rng = np.random.default_rng(7)
    model = build(rng)
    for variable in model.trainable_variables:
        centre = 1.0 if len(variable.shape) < 2 else 0.0
        variable.assign(centre + 0.35 * rng.standard_normal(variable.shape).astype("float32"))
    image = rng.standard_normal((2, SIZE, SIZE, 3)).astype("float32")
    output = model(image, training=False).numpy()
    with TemporaryDirectory() as folder:
        model.save(folder)
        variables = tf.saved_model.load(folder).variables
    mean, variance = variables[0].numpy(), variables[1].numpy()
    np.savez_compressed(
        FIXTURE,
        image=((image - mean) / np.sqrt(variance)).astype("float32"),
        output=output,
        names=np.array([variable.name for variable in variables]),
        **{f"variable_{i}": variable.numpy() for i, variable in enumerate(variables)},
    )


if __name__ == "__main__":
    main()
