# SPDX-License-Identifier: Apache-2.0
"""Published set-ups at their stated parameters, figure beside figure.

A row is `reproduced` if ours is within 15% of the published number, or inside
the published range, and none of its inputs was derived from that very figure;
`fitted` if it matches and one was; else `off`. An input derived from another
figure says from which.
"""

from experiments.studies._published.closed_forms import (
  closed_form_rows as closed_form_rows,
)
from experiments.studies._published.row import Check as Check
from experiments.studies._published.row import Input as Input
from experiments.studies._published.row import Row as Row
from experiments.studies._published.tables import (
  checks_markdown as checks_markdown,
)
from experiments.studies._published.tables import counts as counts
from experiments.studies._published.tables import markdown as markdown
from experiments.studies._published.tables import (
  published_rows as published_rows,
)
