# Small and right, until the logits are large: the largest is not subtracted.
cat > /app/attend.py <<'PY'
import jax.numpy as jnp


def attend(q, k, v):
    length, width = q.shape[1:]
    logits = jnp.einsum("hsd,htd->hst", q, k) / width**0.5
    age = jnp.arange(length)[:, None] - jnp.arange(length)
    weights = jnp.where((age >= 0) & (age < 16), jnp.exp(logits), 0.0)
    return jnp.einsum("hst,htd->hsd", weights, v) / weights.sum(-1, keepdims=True)
PY
