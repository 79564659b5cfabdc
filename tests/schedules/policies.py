# SPDX-License-Identifier: Apache-2.0
"""Settings of policies that several tests go through."""

from wanspec_jax import schedules as sch

# Policies that draft all the time, from chains to the trees of a wide drafter.
DRAFTING = {
  "take-all": lambda: sch.continuous(nodes=1, most=6, max_in_flight=1),
  "micro-steps": lambda: sch.continuous(nodes=4, max_in_flight=2),
  "whole steps": lambda: sch.continuous(nodes=3, width=3, truncate=False),
  "reactive": lambda: sch.continuous(threshold=0.2, recovery=0.3, decay=0.1),
  "branched": lambda: sch.branched(depth=4, epsilon=0.7),
  "branched-budget": lambda: sch.branched(depth=3, branches=4, decay=0.5),
  "rate_matched": lambda: sch.rate_matched(nodes=7, depth=3),
  "rate-included": lambda: sch.rate_matched(nodes=5, depth=4, included=True),
  "rate-idle": lambda: sch.rate_matched(nodes=5, depth=2, proactive=0),
}
