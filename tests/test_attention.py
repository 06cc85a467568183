"""Attention and Locality Self-Attention, against the formula and by hand."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from einops import rearrange

from smallvit.layers import Attend, Attention, HeadMix
from smallvit.ops.attention import attend_pure, readable

KEY = jax.random.key(0)


def qkv(*lead: int, n: int = 5, m: int = 5, d: int = 4, e: int = 4) -> list[jax.Array]:
    return [jax.random.normal(jax.random.key(i), (*lead, *s)) for i, s in enumerate(((n, d), (m, d), (m, e)))]


def tokens(x: jax.Array) -> jax.Array:
    """Random tokens with the heads joined, as projections return them."""
    return rearrange(x, "... h n d -> ... n (h d)")


def formula(q, k, v, bias, keep):
    logits = jnp.einsum("...nd,...md->...nm", q, k) + bias
    return jax.nn.softmax(jnp.where(keep, logits, -jnp.inf)) @ v


@pytest.mark.parametrize("lead, n, m, e", [((2, 3), 5, 5, 4), ((2, 3), 1, 6, 4), ((2, 4, 3), 3, 7, 2)])
def test_value_and_derivatives_are_autodiffs(lead, n, m, e):
    q, k, v = qkv(*lead, n=n, m=m, e=e)
    bias = jax.random.normal(jax.random.key(7), (*(1,) * (len(lead) - 1), lead[-1], n, m))
    keep = readable(n, m, None, mask_diagonal=n == m)
    keep = np.ones((1,) * len(lead) + (n, m), bool) if keep is None else keep[(None,) * len(lead)]
    with jax.numpy_rank_promotion("allow"):
        want, pull = jax.vjp(partial(formula, keep=keep), q, k, v, bias)
        got, pull_ours = jax.vjp(lambda q, k, v, bias: attend_pure(q, k, v, bias, keep), q, k, v, bias)
        d = jax.random.normal(jax.random.key(9), want.shape)
        np.testing.assert_allclose(got, want, atol=1e-5)
        for ours, theirs in zip(pull_ours(d), pull(d), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("lsa, learned, masked", [(True, 1, 1), ("temperature", 1, 0), ("mask", 0, 1), (False, 0, 0)])
def test_the_two_halves_of_lsa(lsa, learned, masked):
    q, k, v = qkv(2, 3)
    module = Attend(lsa=lsa)
    asked = partial(module.apply, heads=3, same_tokens=True)
    variables = module.init(KEY, *map(tokens, (q, k, v)), heads=3, same_tokens=True)
    assert ("params" in variables) == bool(learned)
    if learned:
        np.testing.assert_array_equal(variables["params"]["temperature"], np.full(3, 0.5, np.float32))
        variables = {"params": {"temperature": jnp.array([0.1, 1.0, 3.0])}}
    scale = jnp.array([0.1, 1.0, 3.0] if learned else [0.5] * 3)[None, :, None, None]
    keep = ~np.eye(5, dtype=bool) if masked else np.ones((5, 5), bool)
    want = tokens(formula(q * scale, k, v, 0.0, keep[None, None]))
    np.testing.assert_allclose(asked(variables, *map(tokens, (q, k, v))), want, atol=1e-5)
    packed = jnp.concatenate([tokens(x) for x in (q, k, v)], axis=-1)
    np.testing.assert_allclose(asked(variables, packed), want, atol=1e-5)


def test_attention_to_other_tokens_is_not_masked():
    q, k, v = qkv(2, 3)
    module = Attend(lsa=True)
    want = formula(q * 0.5, k, v, 0.0, np.ones((1, 1, 5, 5), bool))
    out, _ = module.init_with_output(KEY, *map(tokens, (q, k, v)), heads=3, same_tokens=False)
    np.testing.assert_allclose(out, tokens(want), atol=1e-5)


def test_queries_that_are_the_first_keys_do_not_read_themselves():
    q, k, v = qkv(1, 1)
    module = Attend(lsa="mask")
    q, k, v = map(tokens, (q, k, v))
    all_of_them = module.apply({}, q, k, v, heads=1, same_tokens=True)
    few = module.apply({}, q[:, :2], k, v, heads=1, same_tokens=True)
    np.testing.assert_allclose(few, all_of_them[:, :2], atol=1e-6)


@pytest.mark.parametrize("ask_for_maps", [False, True])
def test_a_lone_token_reads_itself(ask_for_maps: bool):
    q, k, v = qkv(2, 3, n=1, m=1)
    mutable = ["intermediates"] if ask_for_maps else []
    out, _ = Attend(lsa="mask").apply({}, *map(tokens, (q, k, v)), heads=3, same_tokens=True, mutable=mutable)
    np.testing.assert_allclose(out, tokens(v), atol=1e-6)


def test_a_token_alone_among_padding_reads_itself():
    allowed = np.zeros((4, 4), bool)
    allowed[:, :1] = True  # only the first token is real
    keep = readable(4, 4, allowed, mask_diagonal=True)
    assert keep is not None
    np.testing.assert_array_equal(keep[0], [True, False, False, False])
    assert keep.any(-1).all()


class Offsets(nn.Module):
    @nn.compact
    def __call__(self) -> jax.Array:
        return jnp.full((3, 5, 5), 1e4) * jnp.eye(5)[None]


def test_the_diagonal_is_masked_after_bias_and_mix():
    q, k, v = map(tokens, qkv(2, 3))
    for seams in ({"bias": Offsets}, {"pre": HeadMix, "post": HeadMix}, {"bias": Offsets, "pre": HeadMix}):
        module = Attend(lsa=True, **seams)
        variables = module.init(KEY, q, k, v, heads=3, same_tokens=True)
        out, state = module.apply(variables, q, k, v, heads=3, same_tokens=True, mutable="intermediates")
        (weights,) = state["intermediates"]["attention"]
        assert jnp.isfinite(out).all()
        assert jnp.abs(jnp.diagonal(weights, axis1=-2, axis2=-1)).max() == 0


def test_head_mix_is_a_dense_layer_over_the_heads():
    maps = jax.random.normal(KEY, (2, 3, 4, 5))
    variables = {"params": {"kernel": jax.random.normal(KEY, (3, 3)), "bias": jnp.array([1.0, 2.0, 3.0])}}
    want = jnp.moveaxis(jnp.moveaxis(maps, 1, -1) @ variables["params"]["kernel"], -1, 1)
    want = want + variables["params"]["bias"][None, :, None, None]
    np.testing.assert_allclose(HeadMix().apply(variables, maps), want, atol=1e-5)


def test_maps_cost_nothing_when_not_asked_for():
    x = jnp.zeros((1, 9, 8))
    module = Attention(heads=2)
    variables = module.init(KEY, x)
    assert set(variables) == {"params"}
    saved = jax.eval_shape(lambda v, x: jax.vjp(module.apply, v, x)[1], variables, x)
    assert (9, 9) not in {leaf.shape[-2:] for leaf in jax.tree.leaves(saved)}


def test_dropout_acts_on_the_map_in_training_only():
    module = Attend(dropout=0.5)
    q = k = jnp.zeros((1, 6, 8))
    v = jnp.ones((1, 6, 2))
    out = module.apply({}, q, k, v, heads=2, same_tokens=True, train=True, rngs={"dropout": KEY})
    # Each weight is 1/6; half of them are dropped and the others doubled, so each output counts those that stay.
    counts = out * 3
    np.testing.assert_allclose(counts, jnp.round(counts), atol=1e-5)
    assert counts.std() > 0.1
    np.testing.assert_allclose(module.apply({}, q, k, v, heads=2, same_tokens=True), v, atol=1e-6)


def test_softmax_is_float32_in_bfloat16():
    q, k, v = (tokens(x).astype(jnp.bfloat16) for x in qkv(1, 1, n=300, m=300))
    out, state = Attend().apply({}, q, k, v, heads=1, same_tokens=True, mutable="intermediates")
    assert out.dtype == jnp.bfloat16
    assert state["intermediates"]["attention"][0].dtype == jnp.float32


def test_cross_attention_reads_the_context():
    x, context = jax.random.normal(KEY, (2, 3, 8)), jax.random.normal(KEY, (2, 5, 6))
    module = Attention(heads=2, dim_head=4, attend=partial(Attend, lsa=True))
    variables = module.init(KEY, x, context)
    assert jax.tree.map(jnp.shape, variables["params"])["kv"] == {"kernel": (6, 16)}
    out = module.apply(variables, x, context)
    assert out.shape == x.shape
    assert jnp.abs(out - module.apply(variables, x, context * 2)).max() > 1e-3


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(heads=3), "dim=8 is not divisible by heads=3"),
        (dict(heads=0, dim_head=4), "heads=0"),
        (dict(heads=2, dim_head=0), "dim_head=0"),
        (dict(heads=2, attend=partial(Attend, lsa="both")), "unknown lsa 'both'"),
    ],
)
@pytest.mark.usefixtures("as_a_user")
def test_wrong_heads_and_options(fields, message):
    with pytest.raises(ValueError, match=message):
        Attention(**fields).init(KEY, jnp.zeros((1, 4, 8)))
