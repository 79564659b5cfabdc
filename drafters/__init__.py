# SPDX-License-Identifier: Apache-2.0
"""Things that propose trees: records of pure functions (`Drafter`)."""

from drafters._by_request import by_request as by_request
from drafters._nested import NestedState as NestedState
from drafters._nested import nested as nested
from drafters._none import none as none
from drafters._replay import Round as Round
from drafters._replay import check_nodes as check_nodes
from drafters._replay import cumulative_log_q as cumulative_log_q
from drafters._replay import replay as replay
from drafters._suffix import suffix as suffix
from drafters._synthetic import synthetic as synthetic
