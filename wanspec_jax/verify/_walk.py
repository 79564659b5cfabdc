# SPDX-License-Identifier: Apache-2.0
"""The tail's walk down a draft tree, for one sequence within one run.

Sample and match: at every node the target draws its own token, and the walk
goes on where the tree happens to hold that token. What is emitted is the
target's draws and nothing else, so the tree decides how many of them are known
at once, never which they are. That needs the *same* draw to be emitted on a
mismatch: drawing anew would change the law (towards tokens that the drafter
likes). It is the rule of SpecExec (https://arxiv.org/abs/2406.02532) with draws
addressed by position, as in drafter-invariant decoding
(https://arxiv.org/abs/2408.07978).
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from wanspec_jax.verify._draw import SamplingArrays, draw


class WalkResult(NamedTuple):
  """What a walk drew; entries from `count` on are zero.

  Attributes:
    tokens: `[N]` int32 tokens in order; all but the last were found in the tree
      as one child each. The last has no node with logits in this run.
    count: `[]` int32 how many, at least 1 unless the start row is no real row.
    last_row: `[]` int32 row that the last token follows: the new tip.
    log_probs: `[N]` float32, see `Draw`.
    margins: `[N]` float32, see `Draw`.
  """

  tokens: jax.Array
  count: jax.Array
  last_row: jax.Array
  log_probs: jax.Array
  margins: jax.Array


def walk(
  logits: jax.Array,
  tokens: jax.Array,
  parent_rows: jax.Array,
  *,
  start_row: ArrayLike,
  start_position: ArrayLike,
  num_rows: ArrayLike,
  sampling: SamplingArrays,
  vocab_size: int | None = None,
  greedy: bool = False,
) -> WalkResult:
  """Returns the tokens drawn from `start_row` downwards.

  Draws the token t that follows the current row; moves to the row's child that
  bears t, the lowest one if there are several; stops if there is none. Draws
  are lazy: one for every row visited. Everything but the shapes is dynamic. A
  draw depends on its row's logits, the sampling and the position only, so it is
  the same in any row of any bucket, next to any other rows.

  Args:
    logits: `[N, V]` float logits of the run's rows; N is the row bucket.
    tokens: `[N]` int32 token of each row.
    parent_rows: `[N]` int32 row of each row's parent; its own row if the parent
      is not in this run. Parents come before their children, as in every run.
      Rows of other sequences may lie between, under parents of their own.
    start_row: `[]` int32 row of the tip. From `num_rows` on, nothing is drawn.
    start_position: `[]` int32 absolute position of the start row's own token;
      the first token drawn is that of the next position.
    num_rows: `[]` int32; rows from here on are padding and never accepted,
      whatever they hold.
    sampling: scalars of the sequence.
    vocab_size: static, see `draw`.
    greedy: static, see `draw`.
  """
  chex.assert_rank(logits, 2)
  size = logits.shape[0]
  chex.assert_shape([tokens, parent_rows], (size,))
  rows = jnp.arange(size, dtype=jnp.int32)
  start_row = jnp.asarray(start_row, jnp.int32)
  start_position = jnp.asarray(start_position, jnp.int32)
  num_rows = jnp.minimum(jnp.asarray(num_rows, jnp.int32), size)

  def cond(carry):
    going, _ = carry
    return going

  def body(carry):
    _, result = carry
    row, count = result.last_row, result.count
    drawn = draw(
      logits[row],
      sampling,
      start_position + count + 1,
      vocab_size=vocab_size,
      greedy=greedy,
    )
    # Children lie behind their parents, so every step goes forward and ends.
    children = (parent_rows == row) & (rows > row) & (rows < num_rows)
    matches = children & (tokens == drawn.token)
    found = jnp.any(matches)
    result = WalkResult(
      tokens=result.tokens.at[count].set(drawn.token),
      count=count + 1,
      last_row=jnp.where(found, jnp.argmax(matches).astype(jnp.int32), row),
      log_probs=result.log_probs.at[count].set(drawn.log_prob),
      margins=result.margins.at[count].set(drawn.margin),
    )
    return found, result

  nothing = WalkResult(
    tokens=jnp.zeros((size,), jnp.int32),
    count=jnp.int32(0),
    last_row=start_row,
    log_probs=jnp.zeros((size,), jnp.float32),
    margins=jnp.zeros((size,), jnp.float32),
  )
  _, result = jax.lax.while_loop(cond, body, (start_row < num_rows, nothing))
  return result
