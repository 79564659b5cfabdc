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
