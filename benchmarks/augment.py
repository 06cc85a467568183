"""Images a second of the augmentation, for each part and for whole pipelines, the best of several rounds.

.venv/bin/python -m benchmarks.augment
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import jax
import numpy as np

from smallvit.augment import Augment, augment_batch
from smallvit.augment.ops import OPS, apply_op

PAPER = dict(flip=True, crop_padding=4, erasing=0.25, mixup=0.25, cutmix=0.25, label_smoothing=0.1)
SPECS = {
    "normalise only": Augment(),
    "flip": Augment(flip=True),
    "crop_padding": Augment(crop_padding=4),
    "resized_crop": Augment(resized_crop=(0.3, 1.0)),
    "rotation": Augment(rotation=0.02),
    "zoom": Augment(zoom=0.2),
    "colour": Augment(colour=0.4),
    "erasing": Augment(erasing=0.25),
    "mixup and cutmix": Augment(mixup=0.25, cutmix=0.25),
    "AutoAugment": Augment(policy="cifar10"),
    "RandAugment": Augment(policy="randaugment"),
    "the paper's pipeline": Augment(policy="cifar10", **PAPER),
    "the paper's, with RandAugment": Augment(policy="randaugment", **PAPER),
    "Keras's pipeline": Augment(flip=True, rotation=0.02, zoom=0.2),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=10, help="batches in a round")
    args = parser.parse_args()

    rng = np.random.default_rng(0)
    images = jax.device_put(rng.integers(0, 256, (args.batch, args.size, args.size, 3), np.uint8))
    labels = jax.device_put(rng.integers(0, 10, args.batch, np.int32))
    calls = {
        name: partial(augment_batch, images=images, labels=labels, num_classes=10, spec=spec, normalise=to_unit)
        for name, spec in SPECS.items()
    }
    # The operation is data: every one costs what all cost.
    ops, pixels = jax.device_put(rng.integers(0, len(OPS), args.batch, np.int32)), images.astype(np.float32)
    calls["one step of a policy"] = lambda key: jax.vmap(apply_op)(pixels, ops, jax.random.uniform(key, ops.shape))

    print(f"jax {jax.__version__} on {jax.devices()[0].platform}, {args.size} pixels, batch {args.batch}")
    print("| | images/s | CPU time an image | compiled in |")
    print("|---|---|---|---|")
    for name, call in calls.items():
        call = jax.jit(call)
        start = time.perf_counter()
        jax.block_until_ready(call(jax.random.key(0)))
        compiled = time.perf_counter() - start
        wall, cpu = map(min, zip(*(seconds(call, args.repeats) for _ in range(args.rounds)), strict=True))
        print(f"| {name} | {args.batch / wall:,.0f} | {cpu / args.batch * 1e6:.0f} us | {compiled:.1f} s |", flush=True)


def to_unit(images: jax.Array) -> jax.Array:
    return (images.astype(np.float32) / 255 - 0.5) / 0.25


def seconds(call: Callable, repeats: int) -> tuple[float, float]:
    """Of a batch: on the clock, and of all cores together, which a busy machine changes less."""
    wall, cpu = time.perf_counter(), time.process_time()
    for i in range(repeats):
        out = call(jax.random.key(i))
    jax.block_until_ready(out)
    return (time.perf_counter() - wall) / repeats, (time.process_time() - cpu) / repeats


if __name__ == "__main__":
    main()
