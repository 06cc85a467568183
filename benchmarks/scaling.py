"""How a training step's time and memory grow with batch, tokens, depth and width; and how long it takes to compile.

    .venv/bin/python -m benchmarks.scaling [--rounds 3]

The model is sl_vit_small_data at 32 pixels with batches of 64, and one thing at a time is changed. Memory is what XLA
plans for a step besides weights and batch. "From cache" is a second compilation, as the next process has it.
"""

import argparse
import tempfile
import time
from typing import Any

from smallvit.common.env import restart_fast

restart_fast()

import jax
import jax.numpy as jnp
import numpy as np
import optax

import smallvit
from smallvit.ops import recompute

CHANGES: dict[str, list[dict[str, Any]]] = {
    "as it is": [{}],
    "batch": [{"batch": 16}, {"batch": 256}],
    "tokens (image size)": [{"image_size": 16}, {"image_size": 64}],
    "depth": [{"depth": 3}, {"depth": 18}],
    "parts of a batch": [{"accumulate": 2}, {"accumulate": 4}],
    "computed again": [{"remat": True}, {"remat": True, "batch": 256}],
    "width (dim)": [{"dim": 96, "mlp_dim": 192, "heads": 6}, {"dim": 384, "mlp_dim": 768, "heads": 24}],
}


def build(
    batch: int = 64, image_size: int = 32, accumulate: int = 1, remat: bool = False, **fields: Any
) -> tuple[Any, list[Any]]:
    """A jitted step, not compiled yet, and its arguments."""
    model = smallvit.create_model("sl_vit_small_data", num_classes=100, image_size=image_size, patch_size=4, **fields)
    images = np.random.default_rng(0).standard_normal((batch, image_size, image_size, 3), np.float32)
    labels = np.zeros(batch, np.int32)
    optimizer = optax.adamw(1e-3)
    params = jax.jit(model.init)(jax.random.key(0), images[:1])
    state = (params, jax.jit(optimizer.init)(params))

    def gradient(params: Any, images: Any, labels: Any) -> Any:
        def loss(params: Any) -> Any:
            with recompute(remat):
                logits = model.apply(params, images, train=True, rngs={"dropout": jax.random.key(1)})
            return optax.softmax_cross_entropy_with_integer_labels(jnp.asarray(logits), labels).mean()

        return jax.value_and_grad(loss)(params)

    def step(state: Any, images: Any, labels: Any) -> tuple[Any, Any]:
        if accumulate == 1:
            value, grads = gradient(state[0], images, labels)
        else:
            # As `smallvit train --accumulate`: one part after the other.
            def part(total: Any, inputs: Any) -> tuple[Any, Any]:
                value, grads = gradient(state[0], *inputs)
                return jax.tree.map(jnp.add, total, grads), value

            parts = [x.reshape(accumulate, -1, *x.shape[1:]) for x in (images, labels)]
            grads, values = jax.lax.scan(part, jax.tree.map(jnp.zeros_like, state[0]), parts)
            value = values.mean()
        updates, moments = optimizer.update(grads, state[1], state[0])
        return (optax.apply_updates(state[0], updates), moments), value

    return jax.jit(step, donate_argnums=0), [state, images, labels]


def compiled(step: Any, args: list[Any]) -> tuple[Any, float]:
    begun = time.perf_counter()
    program = step.lower(*args).compile()
    return program, time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    jax.config.update("jax_compilation_cache_dir", tempfile.mkdtemp())
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

    print("| | | ms a step | ms an image | memory, MiB | compiled in, s | from cache, s |")
    print("|---|---|---|---|---|---|---|")
    for what, cases in CHANGES.items():
        for case in cases:
            step, inputs = build(**case)
            program, cold = compiled(step, inputs)
            jax.clear_caches()
            _, warm = compiled(build(**case)[0], inputs)
            state, images, labels = inputs
            times = []
            for _ in range(args.rounds + 1):
                begun = time.perf_counter()
                state, value = program(state, images, labels)
                value.block_until_ready()
                times.append(time.perf_counter() - begun)
            best, memory = min(times[1:]), program.memory_analysis().temp_size_in_bytes
            changed = ", ".join(f"{name}={value}" for name, value in case.items())
            print(
                f"| {what} | {changed} | {1e3 * best:.0f} | {1e3 * best / len(images):.2f} "
                f"| {memory / 2**20:.0f} | {cold:.1f} | {warm:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
