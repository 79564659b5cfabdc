# SPDX-License-Identifier: Apache-2.0
"""Rings that others measured, simulated beside what they reported."""
