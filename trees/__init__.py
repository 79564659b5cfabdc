# SPDX-License-Identifier: Apache-2.0
"""Tree construction and sizing; every builder takes the lap time as given."""

from trees._sequoia import SequoiaPlan as SequoiaPlan
from trees._sequoia import TreeShape as TreeShape
from trees._sequoia import expected_by_size as expected_by_size
from trees._sequoia import expected_tokens as expected_tokens
from trees._sequoia import sequoia as sequoia
from trees._sequoia import sequoia_dp as sequoia_dp
from trees._sequoia import sequoia_heap as sequoia_heap
from trees._sized import Sized as Sized
from trees._sized import best_prefix as best_prefix
from trees._sized import sized as sized
from wanspec_jax._tree import DraftTree as DraftTree
from wanspec_jax._tree import Merged as Merged
from wanspec_jax._tree import Path as Path
from wanspec_jax._tree import Remapped as Remapped
from wanspec_jax._tree import accepted_path as accepted_path
from wanspec_jax._tree import ancestor_mask as ancestor_mask
from wanspec_jax._tree import cumulative_log_q as cumulative_log_q
from wanspec_jax._tree import depths as depths
from wanspec_jax._tree import from_nodes as from_nodes
from wanspec_jax._tree import merge as merge
from wanspec_jax._tree import node_mask as node_mask
from wanspec_jax._tree import path as path
from wanspec_jax._tree import prune as prune
from wanspec_jax._tree import reroot as reroot
from wanspec_jax._tree import truncate as truncate
