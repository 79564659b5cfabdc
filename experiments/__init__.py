# SPDX-License-Identifier: Apache-2.0
"""Entry points, studies and figures. Not part of the wheel."""
