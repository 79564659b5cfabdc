# SPDX-License-Identifier: Apache-2.0
"""Schedules: the sans-IO engine and its policies; a new one is a `Policy`."""

from wanspec_jax.schedules._calibration import Calibration as Calibration
from wanspec_jax.schedules._engine import init as init
from wanspec_jax.schedules._engine import step as step
from wanspec_jax.schedules._events import Aborted as Aborted
from wanspec_jax.schedules._events import Admit as Admit
from wanspec_jax.schedules._events import Arrived as Arrived
from wanspec_jax.schedules._events import CancelRows as CancelRows
from wanspec_jax.schedules._events import Draft as Draft
from wanspec_jax.schedules._events import Drafted as Drafted
from wanspec_jax.schedules._events import Emit as Emit
from wanspec_jax.schedules._events import Event as Event
from wanspec_jax.schedules._events import Faulted as Faulted
from wanspec_jax.schedules._events import Finish as Finish
from wanspec_jax.schedules._events import Launch as Launch
from wanspec_jax.schedules._events import Observe as Observe
from wanspec_jax.schedules._events import Request as Request
from wanspec_jax.schedules._events import Stop as Stop
from wanspec_jax.schedules._events import Submitted as Submitted
from wanspec_jax.schedules._events import Wake as Wake
from wanspec_jax.schedules._events import Woke as Woke
from wanspec_jax.schedules._lockstep import lockstep as lockstep
from wanspec_jax.schedules._pipe import Costs as Costs
from wanspec_jax.schedules._pipe import DraftCosts as DraftCosts
from wanspec_jax.schedules._pipe import Pipe as Pipe
from wanspec_jax.schedules._priced import Pricing as Pricing
from wanspec_jax.schedules._priced import priced as priced
from wanspec_jax.schedules._speculation import Flight as Flight
from wanspec_jax.schedules._speculation import Node as Node
from wanspec_jax.schedules._speculation import Speculation as Speculation
from wanspec_jax.schedules._state import EngineState as EngineState
from wanspec_jax.schedules._state import Grow as Grow
from wanspec_jax.schedules._state import Hold as Hold
from wanspec_jax.schedules._state import Policy as Policy
from wanspec_jax.schedules._state import Send as Send
