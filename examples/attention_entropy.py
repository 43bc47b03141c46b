# %% [markdown]
# # How widely does a model look back while it writes?
#
# A token's attention is a distribution over the tokens before it. Its entropy says how many of those it looks at: 0 is
# one, `log(n)` is all n alike. Here it is measured for each layer and head while a model writes greedily.
#
# `precast.models.load` gives the model as two functions. `prefill` is used as it is; `decode` is taken apart, because
# what is wanted lies inside of it, and put together again from the same pieces. Run it as a program, with the path of
# a model of the Llama type if you have one: `python examples/attention_entropy.py [path]`.

# %%
import importlib.util
import sys

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

import precast.models
from precast.models import research, rope, transformer
from precast.models.attention import attention, lay_out, project
from precast.models.checkpoint import open_checkpoint
from precast.models.layers import rms_norm
from precast.server import demo, environment

MAX_TOKENS, STEPS = 128, 48
PROMPT = "The Moon is about one-sixth the size of the Earth. It has no air, and"

path = sys.argv[1] if len(sys.argv) == 2 else str(demo.fetch(environment.cache_dir()))
config, params, prefill, decode = precast.models.load(path, max_tokens=MAX_TOKENS)
text = open_checkpoint(path).text
assert text is not None, f"{path} has no tokenizer"
tokenizer = Tokenizer.from_str(text.tokenizer_json)


# %% [markdown]
# The entropy of queries `[layers, batch, heads, dim]` over cached keys `[layers, batch, positions, kv_heads, dim]`
# up to each sequence's position: `[layers, batch, heads]`, in units of `log(n)`, so that 1 is attention to all alike.


# %%
def entropy(queries, keys, positions):
    layers, batch, heads, dim = queries.shape
    grouped = queries.reshape(layers, batch, keys.shape[3], -1, dim)
    scores = jnp.einsum("lbkgd,lbpkd->lbkgp", grouped, keys).reshape(layers, batch, heads, -1)
    is_seen = jnp.arange(keys.shape[2]) <= positions[:, None, None]
    logprobs = jax.nn.log_softmax(jnp.where(is_seen, scores * dim**-0.5, -jnp.inf))
    nats = -jnp.where(is_seen, jnp.exp(logprobs) * logprobs, 0.0).sum(axis=-1)
    return nats / jnp.log(positions + 1.0)[:, None]


# %% [markdown]
# `decode` of a Llama, layer by layer under one scan, with each layer's queries kept. The keys are in the cache then.


# %%
@jax.jit
def decode_and_look(params, cache, token_ids, positions):
    batch, placement = len(token_ids), research.PLACEMENT
    rows = research.segment(token_ids[:, None], positions, research.cache_spec(config, batch, MAX_TOKENS, "float32"))
    tokens = lay_out((rows,), jax.tree.map(jnp.asarray, rope.tables(config, MAX_TOKENS)), research.PAGE_SIZE)

    def layer(carry, numbered):
        cache, x = carry
        number, weights = numbered
        normed = rms_norm(x, weights["attn_norm"], config.norm_eps)
        queries, _, _ = project(weights, normed, tokens, config, placement, 0)
        cache, mixed = attention(weights, cache, normed, tokens, config, placement, 0, number)
        x = x + mixed
        x = x + transformer.mlp(weights, rms_norm(x, weights["mlp_norm"], config.norm_eps), config, placement)
        return (cache, x), queries

    (layers,) = params["layers"]
    numbers = jnp.arange(config.num_layers)
    (cache, x), queries = jax.lax.scan(layer, (cache, params["embed"][token_ids]), (numbers, layers))
    keys, _ = research.keys_and_values(cache, batch, config)
    logits = transformer.unembed(params, rms_norm(x, params["final_norm"], config.norm_eps), config, placement)
    return logits, cache, entropy(queries, keys, positions)


# %%
token_ids = tokenizer.encode(PROMPT).ids
logits, cache = jax.jit(prefill)(params, np.array([token_ids], np.int32))
token_id = jnp.argmax(logits[:, -1], axis=-1)
expected, _ = jax.jit(decode)(params, cache, token_id, np.array([len(token_ids)], np.int32))
measured = []
for position in range(len(token_ids), len(token_ids) + STEPS):
    token_ids.append(int(token_id[0]))
    logits, cache, entropies = decode_and_look(params, cache, token_id, np.array([position], np.int32))
    if not measured:
        # Put together right: the same model still.
        np.testing.assert_allclose(logits, expected, atol=1e-3)
    measured.append(np.asarray(entropies[:, 0]))
    token_id = jnp.argmax(logits, axis=-1)
by_head = np.mean(measured, axis=0)
print(tokenizer.decode(token_ids))

# %% [markdown]
# Mean over the steps: each layer's heads, and their mean.

# %%
print("\nlayer  mean   heads")
for number, heads in enumerate(by_head):
    print(f"{number:5}  {heads.mean():.2f}   {' '.join(f'{value:.2f}' for value in heads)}")
flat = np.argsort(by_head, axis=None)
for word, index in (("narrowest", flat[0]), ("widest", flat[-1])):
    number, head = np.unravel_index(index, by_head.shape)
    print(f"{word}: layer {number}, head {head}, {by_head[number, head]:.3f} of log(n)")

# %%
if importlib.util.find_spec("matplotlib"):
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots()
    picture = axes.imshow(by_head.T, vmin=0, vmax=1, aspect="auto")
    axes.set(xlabel="layer", ylabel="head", title="Entropy of attention while writing, of log(n)")
    figure.colorbar(picture)
    figure.savefig("attention_entropy.png")
    print("wrote attention_entropy.png")
