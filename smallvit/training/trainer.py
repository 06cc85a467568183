"""The trainer: combines a model, its data and a mesh, and compiles the programs of the training loop."""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, PyTree, UInt

from smallvit.common.paths import by_path, nested
from smallvit.data import Dataset, Split, batch_indices
from smallvit.layers import Classifier
from smallvit.runs.prediction import make_predict
from smallvit.runs.scores import Scores, score_split
from smallvit.training.mesh import on_mesh, over_images, over_weights, replicated, spread
from smallvit.training.optimiser import optimiser
from smallvit.training.own import Own
from smallvit.training.recipe import Recipe
from smallvit.training.resizing import phases, smaller
from smallvit.training.step import STILL, Metrics, Pace, State, first_state, make_init, make_step

YOUNG, SETTLING = 200, 8  # steps


class Trainer:
    def __init__(
        self,
        model: Classifier,
        recipe: Recipe,
        data: Dataset,
        mesh: Mesh,
        batch_size: int,
        seed: int,
        accumulate: int,
        remat: bool,
        own: Own = Own(),  # noqa: B008, it is frozen
    ) -> None:
        self.recipe, self.data, self.mesh, self.seed = recipe, data, mesh, seed
        self.batch_size = batch_size
        self.eval_batch_size = _eval_batch_size(data, mesh)
        update = optimiser(recipe, own.optimiser)
        init = make_init(model, recipe, update, (*data.preprocess.size, data.preprocess.channels))
        keys = jax.jit(lambda: tuple(jax.random.split(jax.random.key(seed))), out_shardings=replicated(mesh))
        self._init_key, self._key = keys()
        shapes = jax.eval_shape(init, self._init_key)
        self._shardings = over_weights(mesh, shapes)
        self.abstract_state: State = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            shapes,
            self._shardings,
        )
        self.parameters = sum(leaf.size for leaf in jax.tree.leaves(shapes.params))

        def step_with(small: Classifier | None) -> Any:
            weights = _class_weights(recipe, data)
            step = make_step(model, recipe, update, data.preprocess, weights, accumulate, remat, own, small)
            # A CPU spends the time of a step in kernels and matrix products: better code for the rest only compiles
            # longer.
            return jax.jit(
                on_mesh(mesh, step),
                donate_argnums=0,
                out_shardings=(self._shardings, replicated(mesh)),
                compiler_options={"xla_backend_optimization_level": 1} if jax.default_backend() == "cpu" else None,
            )

        predict = make_predict(model, data.preprocess)
        self._first: Any = jax.jit(
            lambda variables: first_state(recipe, update, variables), out_shardings=self._shardings
        )
        # It runs once: optimising its many random draws would take five times as long as the rest.
        self._init: Any = jax.jit(
            init,
            out_shardings=self._shardings,
            compiler_options=_known({"xla_backend_optimization_level": 0}, {"xla_cpu_use_fusion_emitters": False}),
        )
        size, channels = data.preprocess.size, data.preprocess.channels
        self._steps = {
            phase.side: step_with(None if phase.side == 1 else smaller(model, size, channels, phase.side))
            for phase in phases(recipe.progressive)
        }
        self._predict: Any = jax.jit(
            on_mesh(mesh, lambda state, images, normalisation: predict(state.variables, images, normalisation)),
            out_shardings=replicated(mesh),
        )
        self._whole = jax.jit(lambda state: state.variables, out_shardings=replicated(mesh))

    def compile(self) -> Callable[[], float]:
        """Starts to compile all programs; returns a function that waits for them and returns the seconds.

        They only depend on the shapes of the data, whose images may still be blank.
        """
        begun = time.monotonic()
        size, channels, dtype = self.data.preprocess.size, self.data.preprocess.channels, self.data.preprocess.dtype

        def batch(rows: int, *shape: int, dtype: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((rows, *shape), dtype, sharding=over_images(self.mesh))

        images = batch(self.batch_size, *self.data.to_augment.shape[1:], dtype=dtype)
        evaluated = batch(self.eval_batch_size, *size, channels, dtype=dtype)
        labels = batch(self.batch_size, dtype=jnp.int32)
        normalisation = self.data.preprocess.normalisation
        pool = ThreadPoolExecutor(len(self._steps) + 2)  # XLA releases the GIL, tracing and lowering do not

        def begin(lowered: Any) -> Future[tuple[Any, float]]:
            return pool.submit(lambda: (lowered.compile(), time.monotonic()))

        arguments = self.abstract_state, images, labels, self._key, STILL, normalisation
        programs = [
            *(begin(step.lower(*arguments)) for step in self._steps.values()),
            begin(self._init.lower(self._init_key)),
            begin(self._predict.lower(self.abstract_state, evaluated, normalisation)),
        ]
        pool.shutdown(wait=False)

        def wait() -> float:
            compiled, ended = zip(*(program.result() for program in programs), strict=True)
            *steps, self._init, self._predict = compiled
            self._steps = dict(zip(self._steps, steps, strict=True))
            return max(ended) - begun

        return wait

    def takes(self, data: Dataset) -> bool:
        """Whether the programs also fit this data: they depend on image and batch sizes and class weights."""
        if data.names == self.data.names:
            return True
        if data.to_augment.shape[1:] != self.data.to_augment.shape[1:]:
            return False
        whole = self.recipe.batch_size == self.batch_size <= len(data.train)
        return whole and self.eval_batch_size == _eval_batch_size(data, self.mesh) and not self.recipe.balance

    def init(self, given: Mapping[str, np.ndarray] | None = None) -> State:
        """Returns the initial state: random, except for variables that are `given` by path."""
        state = self._init(self._init_key)
        if given is None:
            return state
        start = by_path(self.variables(state))
        return self._first(jax.tree.map(np.copy, nested({**start, **given})))

    def step(self, state: State, step: int, pace: Pace, side: float = 1.0) -> tuple[State, Metrics]:
        """Trains on the batch of this step, which only depends on the seed and the step; `state` is donated.

        The images have this `side`, relative to whole ones (progressive resizing).
        """
        train, pixels = self.data.train, self.data.to_augment
        rows = batch_indices(self.seed, step, self.batch_size, len(train), self.recipe.repeats)
        images = spread(self.mesh, self.batch_size, lambda part: pixels[rows[part]])
        labels = spread(self.mesh, self.batch_size, lambda part: train.labels[rows[part]])
        return self._steps[side](state, images, labels, self._key, pace, self.data.preprocess.normalisation)

    def settled(self, state: State, step: int) -> State:
        """Recomputes the BatchNorm statistics early in training, when the running averages lag behind the weights.

        The weights are held fixed over the next few batches.
        """
        if step >= YOUNG or not state.others or self.recipe.freeze != "none":
            return state
        state = jax.tree.map(jnp.copy, state)  # a step donates its state
        params = state.average["params"] if state.average else state.params
        state = state.replace(step=jnp.zeros_like(state.step), params=jax.tree.map(jnp.copy, params))
        for i in range(step, step + SETTLING):
            state, _ = self.step(state, i, STILL)
        return jax.block_until_ready(state)  # its time is measured

    def evaluate(self, state: State, split: Split) -> Scores:
        def predict(images: UInt[np.ndarray, "b H W c"]) -> Float[np.ndarray, "b k"]:
            spread_out = spread(self.mesh, len(images), lambda part: images[part])
            return self._predict(state, spread_out, self.data.preprocess.normalisation)

        return score_split(predict, split, self.eval_batch_size)

    def variables(self, state: State) -> PyTree:
        """Returns the full variables on the host, for any mesh."""
        return jax.device_get(self._whole(state))

    def finite(self, state: State) -> bool:
        return all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(state.params))


def _known(options: dict[str, Any], for_cpu: dict[str, Any]) -> dict[str, Any]:
    """Adds options for the CPU, if there are no other devices and this version of XLA knows them."""
    if jax.default_backend() != "cpu":
        return options
    try:
        jax.jit(lambda: 0, compiler_options=for_cpu).lower().compile()
    except jax.errors.JaxRuntimeError:
        return options
    return {**options, **for_cpu}


def _eval_batch_size(data: Dataset, mesh: Mesh) -> int:
    largest = max(len(data.val), len(data.test or ()))
    return mesh.size * -(-min(largest, 256) // mesh.size)


def _class_weights(recipe: Recipe, data: Dataset) -> Float[jax.Array, "k"] | None:
    if not recipe.balance:
        return None
    counts = np.bincount(data.train.labels, minlength=len(data.classes))
    if missing := [name for name, count in zip(data.classes, counts, strict=True) if not count]:
        raise ValueError(
            f"there are no images of {', '.join(map(repr, missing))} to train on, so --balance cannot weigh classes: "
            "add some, leave the class out, or train without --balance"
        )
    return jnp.asarray(len(data.train) / (len(data.classes) * counts), jnp.float32)
