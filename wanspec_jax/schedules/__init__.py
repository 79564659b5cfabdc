# SPDX-License-Identifier: Apache-2.0
"""Schedules: the sans-IO engine and its policies; a new one is a `Policy`."""

from wanspec_jax.schedules._engine import Costs as Costs
from wanspec_jax.schedules._engine import EngineState as EngineState
from wanspec_jax.schedules._engine import Grow as Grow
from wanspec_jax.schedules._engine import Policy as Policy
from wanspec_jax.schedules._engine import Send as Send
from wanspec_jax.schedules._engine import init as init
from wanspec_jax.schedules._engine import step as step
from wanspec_jax.schedules._events import Aborted as Aborted
from wanspec_jax.schedules._events import Admit as Admit
from wanspec_jax.schedules._events import Arrived as Arrived
from wanspec_jax.schedules._events import Draft as Draft
from wanspec_jax.schedules._events import Drafted as Drafted
from wanspec_jax.schedules._events import Emit as Emit
from wanspec_jax.schedules._events import Event as Event
from wanspec_jax.schedules._events import Finish as Finish
from wanspec_jax.schedules._events import Launch as Launch
from wanspec_jax.schedules._events import Observe as Observe
from wanspec_jax.schedules._events import Request as Request
from wanspec_jax.schedules._events import Stop as Stop
from wanspec_jax.schedules._events import Submitted as Submitted
from wanspec_jax.schedules._lockstep import lockstep as lockstep
from wanspec_jax.schedules._speculation import Node as Node
from wanspec_jax.schedules._speculation import Speculation as Speculation
