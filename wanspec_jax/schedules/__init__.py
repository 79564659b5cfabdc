# SPDX-License-Identifier: Apache-2.0
"""Schedules: the sans-IO engine and its policies; a new one is a `Policy`."""

from wanspec_jax.schedules._branched import branched as branched
from wanspec_jax.schedules._calibration import Calibration as Calibration
from wanspec_jax.schedules._closed_forms import always_rolling as always_rolling
from wanspec_jax.schedules._closed_forms import (
  expected_tokens as expected_tokens,
)
from wanspec_jax.schedules._closed_forms import lookahead as lookahead
from wanspec_jax.schedules._closed_forms import (
  overlapped_rate as overlapped_rate,
)
from wanspec_jax.schedules._closed_forms import (
  synchronous_rate as synchronous_rate,
)
from wanspec_jax.schedules._continuous import continuous as continuous
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
from wanspec_jax.schedules._fan_out import Law as Law
from wanspec_jax.schedules._fan_out import (
  geometric_fan_out as geometric_fan_out,
)
from wanspec_jax.schedules._fan_out import measured_fan_out as measured_fan_out
from wanspec_jax.schedules._fan_out import miss_probability as miss_probability
from wanspec_jax.schedules._fan_out import outcome_weights as outcome_weights
from wanspec_jax.schedules._fan_out import whole_fan_out as whole_fan_out
from wanspec_jax.schedules._floor import with_floor as with_floor
from wanspec_jax.schedules._hedged import hedged as hedged
from wanspec_jax.schedules._in_pipe import in_pipe as in_pipe
from wanspec_jax.schedules._lockstep import lockstep as lockstep
from wanspec_jax.schedules._pipe import Costs as Costs
from wanspec_jax.schedules._pipe import DraftCosts as DraftCosts
from wanspec_jax.schedules._pipe import Pipe as Pipe
from wanspec_jax.schedules._pipe_forms import in_pipe_rate as in_pipe_rate
from wanspec_jax.schedules._pipe_forms import in_pipe_speedup as in_pipe_speedup
from wanspec_jax.schedules._pipe_forms import lap_window as lap_window
from wanspec_jax.schedules._pipe_forms import (
  levels_in_flight as levels_in_flight,
)
from wanspec_jax.schedules._pipe_forms import stream_rate as stream_rate
from wanspec_jax.schedules._pipe_forms import window_rates as window_rates
from wanspec_jax.schedules._priced import Pricing as Pricing
from wanspec_jax.schedules._priced import priced as priced
from wanspec_jax.schedules._rate_matched import rate_matched as rate_matched
from wanspec_jax.schedules._segments import segments as segments
from wanspec_jax.schedules._speculation import Flight as Flight
from wanspec_jax.schedules._speculation import Node as Node
from wanspec_jax.schedules._speculation import Speculation as Speculation
from wanspec_jax.schedules._state import Answer as Answer
from wanspec_jax.schedules._state import EngineState as EngineState
from wanspec_jax.schedules._state import Grow as Grow
from wanspec_jax.schedules._state import Hold as Hold
from wanspec_jax.schedules._state import Policy as Policy
from wanspec_jax.schedules._state import Send as Send
