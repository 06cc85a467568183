"""Draws docs/images/spt-lsa.png with the library's own SPT and attention.

.venv/bin/python docs/make_figures.py
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Rectangle

from smallvit.layers import SPT, Attend, PatchEmbed
from smallvit.ops import shifted_copies

IMAGES = Path(__file__).parent / "images"
SIZE, PATCH = 32, 8
INK, ACCENT = "#1f2933", "#e4572e"


def landscape() -> np.ndarray:
    """Sky, a sun, two hills."""
    y, x = np.mgrid[:SIZE, :SIZE] / SIZE
    sky = np.stack([0.55 + 0.4 * y, 0.75 + 0.15 * y, 0.95 - 0.15 * y], -1)
    sun = np.exp(-(((x - 0.72) ** 2 + (y - 0.25) ** 2) / 0.008))[..., None]
    image = sky * (1 - sun) + np.array([1.0, 0.83, 0.3]) * sun
    for height, colour in (
        (0.55 + 0.12 * np.sin(6 * x + 0.5), (0.35, 0.58, 0.45)),
        (0.75 + 0.08 * np.sin(5 * x + 2.5), (0.18, 0.4, 0.3)),
    ):
        image = np.where((y > height)[..., None], np.array(colour) * (1.25 - 0.4 * y)[..., None], image)
    return image.clip(0, 1).astype(np.float32)


def seen_by_one_token(embed: PatchEmbed | SPT, image: np.ndarray, token: int) -> np.ndarray:
    """Which pixels reach a token, by its gradient."""
    x = jnp.asarray(image)[None]
    variables = embed.init(jax.random.key(0), x)
    return np.abs(jax.grad(lambda x: embed.apply(variables, x)[0, token].sum())(x))[0].sum(-1) > 0


def attention_map(lsa: bool) -> np.ndarray:
    tokens = jax.random.normal(jax.random.key(4), (1, 1, 12, 16))
    attend = Attend(lsa=lsa)
    # Queries resemble their own keys, as they do in a trained ViT: self-attention drowns the rest.
    variables = {"params": {"temperature": jnp.full((1,), 0.45)}} if lsa else {}
    _, state = attend.apply(variables, *[tokens[:, 0]] * 3, heads=1, same_tokens=True, mutable="intermediates")
    return np.asarray(state["intermediates"]["attention"][0][0, 0])


def main() -> None:
    image = landscape()
    copies = np.asarray(shifted_copies(jnp.asarray(image)[None], PATCH // 2)[0]).reshape(SIZE, SIZE, 5, 3)
    plt.rcParams.update(
        {"font.family": "DejaVu Sans", "text.color": INK, "axes.titlecolor": INK, "axes.edgecolor": INK}
    )
    figure = plt.figure(figsize=(12, 5.4), dpi=150)
    top, bottom = figure.add_gridspec(
        2, 1, height_ratios=[1, 1.25], hspace=0.32, left=0.02, right=0.98, top=0.88, bottom=0.04
    )

    row = top.subgridspec(1, 5, wspace=0.06)
    titles = ("image", "moved down right", "moved down left", "moved up right", "moved up left")
    for i, title in enumerate(titles):
        axis = figure.add_subplot(row[i])
        axis.imshow(copies[:, :, i], extent=(0, SIZE, SIZE, 0))
        for line in range(PATCH, SIZE, PATCH):
            axis.axhline(line, color="white", linewidth=0.6, alpha=0.8)
            axis.axvline(line, color="white", linewidth=0.6, alpha=0.8)
        axis.set_title(title, fontsize=10)
        axis.set_xticks([])
        axis.set_yticks([])

    row = bottom.subgridspec(1, 4, wspace=0.18)
    token = 1 * (SIZE // PATCH) + 1
    for i, (title, embed) in enumerate(
        (("plain patch: a token sees P x P", PatchEmbed(16, PATCH)), ("SPT: it sees 2P x 2P", SPT(16, PATCH)))
    ):
        axis = figure.add_subplot(row[i])
        seen = seen_by_one_token(embed, image, token)
        axis.imshow(np.where(seen[..., None], image, image * 0.25 + 0.68), extent=(0, SIZE, SIZE, 0))
        rows, columns = np.flatnonzero(seen.any(1)), np.flatnonzero(seen.any(0))
        box = (columns[0], rows[0]), len(columns), len(rows)
        axis.add_patch(Rectangle(*box, fill=False, edgecolor=ACCENT, linewidth=2.2))
        axis.set_title(title, fontsize=10)
        axis.set_xticks([])
        axis.set_yticks([])
    for i, (title, lsa) in enumerate(
        (("plain attention: tokens read themselves", False), ("LSA: no diagonal, learned temperature", True))
    ):
        axis = figure.add_subplot(row[2 + i])
        axis.imshow(attention_map(lsa), cmap="magma_r", vmin=0)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("token that is read", fontsize=8)
        axis.set_ylabel("token that asks", fontsize=8)
        axis.set_xticks([])
        axis.set_yticks([])
    figure.suptitle("Shifted Patch Tokenization and Locality Self-Attention", fontsize=14, fontweight="bold")
    IMAGES.mkdir(exist_ok=True)
    figure.savefig(IMAGES / "spt-lsa.png")


if __name__ == "__main__":
    main()
