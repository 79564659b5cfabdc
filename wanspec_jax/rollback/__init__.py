# SPDX-License-Identifier: Apache-2.0
"""KV-cache rollback: mechanisms behind one interface (`base.Rollback`)."""

from wanspec_jax.rollback._apply import apply_riders as apply_riders
from wanspec_jax.rollback._apply import place_rows as place_rows
from wanspec_jax.rollback._cancelled import Cancelled as Cancelled
from wanspec_jax.rollback._mask import SlotTable as SlotTable
from wanspec_jax.rollback._mask import mask_rollback as mask_rollback
