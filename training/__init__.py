# SPDX-License-Identifier: Apache-2.0
"""Prompts, target features, and what is trained on them."""

from training._prompts import Prompt as Prompt
from training._prompts import load_prompts as load_prompts
