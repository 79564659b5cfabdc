# SPDX-License-Identifier: Apache-2.0
"""Configurations of `experiments.decode`, one module each."""
