# SPDX-License-Identifier: Apache-2.0
"""Worlds: what executes a schedule, on modelled time or on real hosts."""

from wanspec_jax.worlds._cluster import Cluster as Cluster
from wanspec_jax.worlds._cluster import StageHost as StageHost
from wanspec_jax.worlds._cluster import Standby as Standby
from wanspec_jax.worlds._driver import Driver as Driver
from wanspec_jax.worlds._driver import Outcome as Outcome
from wanspec_jax.worlds._driver import SessionResult as SessionResult
from wanspec_jax.worlds._driver import Span as Span
from wanspec_jax.worlds._local import load_stage as load_stage
from wanspec_jax.worlds._local import local_cluster as local_cluster
from wanspec_jax.worlds._local import verifier_of as verifier_of
from wanspec_jax.worlds._mirror import Mirror as Mirror
from wanspec_jax.worlds._recording import Difference as Difference
from wanspec_jax.worlds._recording import Recording as Recording
from wanspec_jax.worlds._recording import Step as Step
from wanspec_jax.worlds._recording import replay_events as replay_events
from wanspec_jax.worlds._replay import PassStage as PassStage
from wanspec_jax.worlds._replay import ReplayStage as ReplayStage
from wanspec_jax.worlds._serving import SessionFault as SessionFault
from wanspec_jax.worlds._serving import StageServer as StageServer
from wanspec_jax.worlds._sockets import SocketRing as SocketRing
from wanspec_jax.worlds._stage import Output as Output
from wanspec_jax.worlds._stage import Stage as Stage
from wanspec_jax.worlds._stage import StageShape as StageShape
from wanspec_jax.worlds._toy import ToyStage as ToyStage
from wanspec_jax.worlds._toy import toy_text as toy_text
from wanspec_jax.worlds._virtual import VirtualRing as VirtualRing
from wanspec_jax.worlds._weather import Kill as Kill
from wanspec_jax.worlds._weather import Stall as Stall
from wanspec_jax.worlds._weather import Weather as Weather
