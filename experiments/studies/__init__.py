# SPDX-License-Identifier: Apache-2.0
"""Studies, one module each: `python -m experiments.study NAME`."""
